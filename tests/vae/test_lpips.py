"""LPIPS compared with the paper's formula on random weights, its files, and crops."""

import logging
from dataclasses import replace
from pathlib import Path

import pooch
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from gputrain.errors import UserError
from gputrain.fetch.names import catalogue
from gputrain.vae.losses import PUBLISHED_FILES, Lpips, crop, crop_corners, load_lpips, named_files

# Names and shapes of the 13 convolutions in torchvision's vgg16-397923af.pth, and of all tensors in lpips' vgg.pth.
CONVOLUTIONS = {
    0: (64, 3), 2: (64, 64), 5: (128, 64), 7: (128, 128), 10: (256, 128), 12: (256, 256), 14: (256, 256),
    17: (512, 256), 19: (512, 512), 21: (512, 512), 24: (512, 512), 26: (512, 512), 28: (512, 512),
}  # fmt: skip
HEAD_SHAPES = {f"lin{n}.model.1.weight": (1, c, 1, 1) for n, c in enumerate((64, 128, 256, 512, 512))}
COMPARED = (2, 7, 14, 21, 28)  # convolutions after whose ReLU the features are compared

Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def weights() -> Weights:
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.rand(shape, generator=generator) for name, shape in HEAD_SHAPES.items()}
    for place, shape in CONVOLUTIONS.items():
        deviation = (2 / (9 * shape[1])) ** 0.5
        made[f"features.{place}.weight"] = deviation * torch.randn(*shape, 3, 3, generator=generator)
        made[f"features.{place}.bias"] = 0.1 * torch.randn(shape[0], generator=generator)
    return made


@pytest.fixture(scope="module")
def files(weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Returns weights in the published form, where the trunk has layers that LPIPS does not use."""
    folder = tmp_path_factory.mktemp("weights")
    trunk = {name: tensor for name, tensor in weights.items() if name.startswith("features")}
    torch.save(trunk | {"classifier.0.bias": torch.zeros(7)}, folder / "vgg16.pth")
    torch.save({name: weights[name] for name in HEAD_SHAPES}, folder / "vgg.pth")
    return folder / "vgg16.pth", folder / "vgg.pth"


@pytest.fixture(scope="module")
def model(files: tuple[Path, Path]) -> Lpips:
    return load_lpips(files).double()


def pictures(items: int = 2, height: int = 24, width: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    made, target = torch.rand(2, items, 3, height, width, generator=generator, dtype=torch.float64) * 2 - 1
    return made.requires_grad_(), target


def reference(weights: Weights, made: Tensor, target: Tensor) -> Tensor:
    """Computes equation 1 of the paper with the scaling of version 0.1 of the code, without in-place operations."""
    shift = torch.tensor([-0.030, -0.088, -0.188], dtype=torch.float32).double()[:, None, None]
    scale = torch.tensor([0.458, 0.448, 0.450], dtype=torch.float32).double()[:, None, None]
    features = []
    for picture in (made, target):
        x, layers = (picture - shift) / scale, []
        for place in CONVOLUTIONS:
            if place in (5, 10, 17, 24):
                x = F.max_pool2d(x, kernel_size=2, stride=2)
            kernel, bias = (weights[f"features.{place}.{part}"].double() for part in ("weight", "bias"))
            x = F.relu(F.conv2d(x, kernel, bias, padding=1))
            if place in COMPARED:
                layers.append(x / (x.pow(2).sum(dim=1, keepdim=True).sqrt() + 1e-10))
        features.append(layers)
    total = torch.zeros(len(made), dtype=torch.float64)
    for head, a, b in zip(HEAD_SHAPES, *features, strict=True):
        total = total + F.conv2d((a - b) ** 2, weights[head].double()).mean(dim=(1, 2, 3))
    return total


def test_value_and_gradient_are_the_papers(model: Lpips, weights: Weights) -> None:
    made, target = pictures()
    ours, theirs = model(made, target), reference(weights, made, target)
    (gradient,) = torch.autograd.grad(ours.sum(), made)
    (expected,) = torch.autograd.grad(theirs.sum(), made)
    assert theirs.min() > 0.05
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=0)
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-10 * float(expected.abs().max()))


def test_target_gets_no_gradient_and_nothing_learns(model: Lpips) -> None:
    made, target = pictures(items=1)
    distance = model(made, target.requires_grad_())
    assert torch.autograd.grad(distance.sum(), target, allow_unused=True) == (None,)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_features_of_nothing_give_no_nan(files: tuple[Path, Path], weights: Weights, tmp_path: Path) -> None:
    """If all ReLU outputs of a pixel are 0, its feature vector has length 0."""
    closed = {name: tensor.clone() for name, tensor in weights.items()}
    closed["features.2.bias"].fill_(-1e3)
    save_file(closed, tmp_path / "closed.safetensors")
    model = load_lpips((tmp_path / "closed.safetensors",))
    made, target = (picture.float() for picture in pictures(items=1))
    distance = model(made, target)
    (gradient,) = torch.autograd.grad(distance.sum(), made)
    assert distance.tolist() == [0]
    assert float(gradient.abs().max()) == 0


def test_items_do_not_depend_on_their_batch(model: Lpips) -> None:
    made, target = pictures(items=3)
    together = model(made, target)
    alone = torch.cat([model(*pair) for pair in zip(made.split(1), target.split(1), strict=True)])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=0)


def test_precision_stays_under_autocast(files: tuple[Path, Path], model: Lpips) -> None:
    single = load_lpips(files)
    made, target = pictures()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        distance = single(made.detach().bfloat16(), target.bfloat16())
    assert distance.dtype == torch.float32
    rounded = model(made.bfloat16().double(), target.bfloat16().double())
    torch.testing.assert_close(distance.double(), rounded, rtol=1e-5, atol=0)


def test_kept_for_backward(files: tuple[Path, Path]) -> None:
    """Besides the weights: the output of each convolution, pooled ones with indices, one difference per stage."""
    single = load_lpips(files)
    made, target = (picture.float() for picture in pictures(items=1, height=64, width=64))
    kept: dict[int, int] = {}

    def remember(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        distance = single(made.detach().requires_grad_(), target)
    ours = {p.untyped_storage().data_ptr() for p in single.parameters()}
    activations = sum(size for pointer, size in kept.items() if pointer not in ours)
    pixels = [64 * 64 // 4**stage for stage in range(5)]
    outputs = sum(4 * c * p * n for c, p, n in zip((64, 128, 256, 512, 512), pixels, (3, 3, 4, 4, 4), strict=True))
    pooled = sum((4 + 8) * c * p for c, p in zip((64, 128, 256, 512), pixels[1:], strict=True))
    lengths = sum(4 * p * 3 for p in pixels)
    assert float(distance.detach()) > 0
    assert outputs + pooled < activations <= outputs + pooled + lengths + 2 * 4 * 3 * pixels[0]


# ---------------------------------------------------------------------------------------------------------- files


def test_files_in_any_form(files: tuple[Path, Path], weights: Weights, model: Lpips, tmp_path: Path) -> None:
    """Weights in one file, and as the state of the lpips package's own network, in half precision."""
    save_file(weights, tmp_path / "merged.safetensors")
    merged = load_lpips((tmp_path / "merged.safetensors",))
    swapped = load_lpips(files[::-1])
    network = {}
    for name, tensor in weights.items():
        place = int(name.split(".")[1]) if name.startswith("features") else None
        slice_ = None if place is None else 1 + sum(place > last for last in COMPARED)
        network[name.replace("features.", f"net.slice{slice_}.")] = tensor.half()
    torch.save(network | {"scaling_layer.shift": torch.zeros(1, 3, 1, 1)}, tmp_path / "network.pth")
    halved = load_lpips((tmp_path / "network.pth",))
    for name, tensor in model.state_dict().items():
        assert torch.equal(merged.state_dict()[name].double(), tensor)
        assert torch.equal(swapped.state_dict()[name].double(), tensor)
        assert torch.equal(halved.state_dict()[name], tensor.half().float())
        assert halved.state_dict()[name].dtype == torch.float32


def test_other_weights_than_the_published_ones_are_named(
    files: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        load_lpips(files)
    for path, said in zip(files, caplog.messages, strict=True):
        assert said.startswith(f"{path}: not the published weights (its SHA-256 is {pooch.file_hash(path)}, ")
        assert all(digest in said for name in PUBLISHED_FILES for digest in catalogue()[name].sha256.values())
        assert said.endswith("; gputrain fetch lpips-vgg16 lpips-heads loads vgg16-397923af.pth and vgg.pth")
    caplog.clear()
    published = {name: replace(catalogue()[name], sha256={"file": pooch.file_hash(path)})
                 for name, path in zip(PUBLISHED_FILES, files, strict=True)}  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gputrain.vae.losses.catalogue", lambda: published)
        load_lpips(files)
    assert not caplog.messages


def test_broken_files(files: tuple[Path, Path], weights: Weights, tmp_path: Path) -> None:
    trunk, heads = files
    with pytest.raises(UserError, match=r"LPIPS with VGG16 differs in 5 tensors: heads.0 is missing"):
        load_lpips((trunk,))
    with pytest.raises(UserError, match=r"differs in 26 tensors: features.0.weight is missing"):
        load_lpips((heads,))
    with pytest.raises(UserError, match=r"nowhere.pth: no such file"):
        load_lpips((tmp_path / "nowhere.pth",))
    other = tmp_path / "other.safetensors"
    save_file(weights | {"lin2.model.1.weight": torch.zeros(1, 384, 1, 1)}, other)
    with pytest.raises(UserError, match=r"heads.2 is \(1, 384, 1, 1\), expected \(1, 256, 1, 1\)"):
        load_lpips((other,))
    other.write_bytes(other.read_bytes()[:9999])
    with pytest.raises(UserError, match="truncated or damaged"):
        load_lpips((other,))
    cut = tmp_path / "cut.pth"
    cut.write_bytes(trunk.read_bytes()[:99_999])
    with pytest.raises(UserError, match="truncated or damaged"):
        load_lpips((cut,))


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"features.0.weight": Trap()}, tmp_path / "trap.pth")
    with pytest.raises(UserError, match="contains more than tensors"):
        load_lpips((tmp_path / "trap.pth",))
    assert not (tmp_path / "ran").exists()


# ---------------------------------------------------------------------------------------------------------- crops


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_crop(layout: torch.memory_format) -> None:
    images = torch.randn(3, 3, 9, 7, dtype=torch.float64).contiguous(memory_format=layout).requires_grad_()
    top, left = torch.tensor([0, 5, 2]), torch.tensor([3, 0, 1])
    made = crop(images, top, left, 4)
    places = list(enumerate(zip(top.tolist(), left.tolist(), strict=True)))
    expected = torch.stack([images[i, :, t : t + 4, w : w + 4] for i, (t, w) in places])
    assert torch.equal(made, expected)
    weight = torch.randn(made.shape, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((made * weight).sum(), images)
    (reference,) = torch.autograd.grad((expected * weight).sum(), images)
    assert torch.equal(gradient, reference)
    assert torch.autograd.gradcheck(lambda x: crop(x, top, left, 4), images)
    parts = [crop(*part, 4) for part in zip(images.split(2), top.split(2), left.split(2), strict=True)]
    assert torch.equal(torch.cat(parts), made)


def test_crop_corners_reach_every_place() -> None:
    top, left = crop_corners(4000, 9, 7, 4, torch.Generator().manual_seed(0))
    assert torch.bincount(top).tolist() == pytest.approx([4000 / 6] * 6, rel=0.15)
    assert torch.bincount(left).tolist() == pytest.approx([4000 / 4] * 4, rel=0.15)
    again = crop_corners(4000, 9, 7, 4, torch.Generator().manual_seed(0))
    assert torch.equal(top, again[0])
    assert torch.equal(left, again[1])


def test_names_and_paths(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths stay. A misspelt name is refused before another one is downloaded."""
    assert named_files(files, PUBLISHED_FILES) == files
    monkeypatch.setattr("gputrain.fetch.names.fetch_listed", lambda entry: Path(entry.file_name))
    assert named_files(PUBLISHED_FILES, PUBLISHED_FILES) == (Path("vgg16-397923af.pth"), Path("vgg.pth"))
    monkeypatch.setattr("gputrain.fetch.names.fetch_listed", lambda entry: pytest.fail("downloaded"))
    for wrong, hint in (("lpips-haeds", "lpips-heads"), ("nowhere.pth", "gputrain fetch lpips-vgg16 lpips-heads")):
        with pytest.raises(UserError, match=f"{wrong}: no such file") as caught:
            named_files(("lpips-vgg16", wrong), PUBLISHED_FILES)
        assert hint in caught.value.hint
