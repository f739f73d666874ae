"""The autoencoder compared with stock diffusers: names, weights, losses, gradients, memory."""

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gputrain.vae.architecture import PRESETS, VaeArchitecture, VaePreset
from gputrain.vae.model import Attention, AutoencoderKL, Downsample, Head, ResnetBlock, Upsample, blocks, compile_layers
from tests.tables import each_row, slow
from tests.toy import cpu_runtime

SMALL = VaeArchitecture((8, 16), 2, norm_num_groups=4, use_quant_conv=True, use_post_quant_conv=True)
presets = pytest.mark.parametrize("preset", PRESETS)


SMALL_FLUX2 = VaeArchitecture(
    (8, 16), 2, norm_num_groups=4, use_quant_conv=True, use_post_quant_conv=True, decoder_block_out_channels=(12, 8)
)


def stock_autoencoder(architecture: VaeArchitecture) -> diffusers.AutoencoderKL:
    """Returns an AutoencoderKL or AutoencoderKLFlux2 of diffusers."""
    levels, keys = len(architecture.block_out_channels), dataclasses.asdict(architecture)
    decoder, patched = keys.pop("decoder_block_out_channels"), keys.pop("patch_statistics")
    if decoder:
        keys["decoder_block_out_channels"] = decoder
    return (diffusers.AutoencoderKLFlux2 if patched else diffusers.AutoencoderKL)(
        **keys, down_block_types=["DownEncoderBlock2D"] * levels, up_block_types=["UpDecoderBlock2D"] * levels
    ).eval()


def layers_of(stock: diffusers.AutoencoderKL) -> dict[str, Tensor]:
    """Returns the weights, without the statistics of patches, which are no part of our module."""
    return {name: tensor for name, tensor in stock.state_dict().items() if not name.startswith("bn.")}


def loss_of_stock(model: diffusers.AutoencoderKL, images: Tensor, noise: Tensor) -> Tensor:
    latents = model.encode(images).latent_dist
    made = model.decode(latents.mean + latents.std * noise).sample
    return (made - images).abs().mean() + 1e-4 * latents.kl().mean()


def loss_of_ours(model: AutoencoderKL, images: Tensor, noise: Tensor) -> Tensor:
    mean, logvar = model.encode(images)
    made = model.decode(mean + (logvar / 2).exp() * noise)
    kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).sum(dim=(1, 2, 3))
    return (made - images).abs().mean() + 1e-4 * kl.mean()


def pictures(
    architecture: VaeArchitecture, size: int, items: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Returns pictures, and noise for their latents."""
    latent_size = size // architecture.downsampling
    images = torch.rand(items, 3, size, size, dtype=dtype) * 2 - 1
    return images, torch.randn(items, architecture.latent_channels, latent_size, latent_size, dtype=dtype)


@pytest.mark.parametrize("preset", [slow(p) if p in ("sd", "flux", "flux2") else p for p in PRESETS])
def test_equal_to_stock(preset: VaePreset) -> None:
    """The same seed gives the same weights, loss and gradients."""
    architecture = PRESETS[preset]
    torch.manual_seed(0)
    stock = stock_autoencoder(architecture)
    torch.manual_seed(0)
    ours = AutoencoderKL(architecture)
    weights = layers_of(stock)
    assert ours.state_dict().keys() == weights.keys()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, weights[name]), name

    batch = pictures(architecture, 32, items=1)
    expected, loss = loss_of_stock(stock, *batch), loss_of_ours(ours, *batch)
    expected.backward()
    loss.backward()
    assert abs(loss.item() - expected.item()) < 1e-6
    found = dict(ours.named_parameters())
    for name, parameter in stock.named_parameters():
        torch.testing.assert_close(found[name].grad, parameter.grad, rtol=1e-6, atol=1e-6, msg=name)


@each_row(
    (SMALL, torch.contiguous_format, True), (SMALL, torch.channels_last, True),
    (SMALL_FLUX2, torch.contiguous_format, True), (SMALL_FLUX2, torch.contiguous_format, False),
)  # fmt: skip
def test_equal_to_stock_in_fp64(
    architecture: VaeArchitecture, layout: torch.memory_format, recompute_norms: bool
) -> None:
    """Compares every gradient in fp64, since small ones are inaccurate in fp32."""
    stock = stock_autoencoder(architecture).double().to(memory_format=layout)
    ours = AutoencoderKL(architecture, recompute_norms=recompute_norms).double().to(memory_format=layout)
    ours.load_state_dict(layers_of(stock))
    images, noise = pictures(architecture, 8, dtype=torch.float64)
    images = images.contiguous(memory_format=layout)
    expected, loss = loss_of_stock(stock, images, noise), loss_of_ours(ours, images, noise)
    assert abs(loss.item() - expected.item()) < 1e-12
    expected.backward()
    loss.backward()
    found = dict(ours.named_parameters())
    for name, parameter in stock.named_parameters():
        # A constant added to all scores does not change a softmax, so the keys' bias has a gradient of rounding noise.
        least = 1e-12 if name.endswith("to_k.bias") else 0
        bound = least + 1e-10 * parameter.grad.abs().max()
        assert (found[name].grad - parameter.grad).abs().max() < bound, name


def test_parameters_of_flux() -> None:
    with torch.device("meta"):
        model = AutoencoderKL(PRESETS["flux"])
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(83.8, abs=0.1)


def saved_bytes(model: nn.Module, step: Callable[[Tensor], Tensor], images: Tensor) -> tuple[int, Tensor]:
    """Returns the bytes of distinct storages that a bf16 step keeps for backward, except parameters; and its output."""
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16),
    ):
        out = step(images)
    assert out.requires_grad
    return sum(kept.values()), out


def activation_bytes(model: nn.Module, step: Callable[[Tensor], Tensor]) -> int:
    """Returns the bytes kept for each additional picture of 256 px, which exclude the weights' bf16 copies."""
    one, two = (saved_bytes(model, step, torch.empty(items, 3, 256, 256))[0] for items in (1, 2))
    return two - one


@pytest.mark.slow
def test_flux_keeps_a_quarter_of_what_stock_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses fake tensors. Autocast on CUDA runs group_norm in fp32; here autocast on the CPU is made to do the same."""
    group_norm = F.group_norm
    with FakeTensorMode():
        ours, stock = AutoencoderKL(PRESETS["flux"]), stock_autoencoder(PRESETS["flux"])
        monkeypatch.setattr(F, "group_norm", lambda x, *args: group_norm(x.float(), *args))
        recomputed = activation_bytes(ours, lambda images: ours.decode(ours.encode(images).mean_BLhw))
        ours.checkpointing = True
        checkpointed = activation_bytes(ours, lambda images: ours.decode(ours.encode(images).mean_BLhw))
        full = activation_bytes(stock, lambda images: stock.decode(stock.encode(images).latent_dist.mean).sample)
    assert full / 1e6 == pytest.approx(1906, abs=1)
    assert recomputed <= full / 4
    assert recomputed / 1e6 == pytest.approx(416, abs=1)
    assert checkpointed / 1e6 == pytest.approx(260, abs=1)


def test_checkpointing_changes_no_gradient() -> None:
    model, batch = AutoencoderKL(SMALL), pictures(SMALL, 16)
    found = []
    for model.checkpointing in (False, True):
        runs = [0]
        hooks = [
            block.register_forward_pre_hook(lambda *_, runs=runs: runs.__setitem__(0, runs[0] + 1))
            for block in model.modules()
            if isinstance(block, ResnetBlock)
        ]
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss_of_ours(model, *batch).backward()
        found.append(([p.grad for p in model.parameters()], runs[0]))
        for hook in hooks:
            hook.remove()
    (plain, plain_runs), (checkpointed, checkpointed_runs) = found
    assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True))
    assert checkpointed_runs == 2 * plain_runs == 2 * 14


def test_moments() -> None:
    """Moments are in fp32 even under autocast, with the log-variance in [-30, 20]."""
    model = AutoencoderKL(SMALL)
    nn.init.zeros_(model.quant_conv.weight)
    with torch.no_grad():
        model.quant_conv.bias.copy_(torch.tensor([0.1, -0.2, -1000.0, 1000.0]))
    images, _ = pictures(SMALL, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        mean, logvar = model.encode(images)
    assert mean.shape == logvar.shape == (2, 2, 8, 8)
    assert mean.dtype == logvar.dtype == torch.float32
    assert mean[0, :, 3, 3].tolist() == pytest.approx([0.1, -0.2], abs=1e-3)
    assert logvar[0, :, 3, 3].tolist() == [-30, 20]


def test_blocks_are_all_that_is_worth_compiling() -> None:
    """Blocks are in order of execution, and every norm is in one of them."""
    model = AutoencoderKL(PRESETS["flux"])
    down, last = [ResnetBlock, ResnetBlock, Downsample], [ResnetBlock, ResnetBlock]
    middle = [ResnetBlock, Attention, ResnetBlock]
    up, first = [ResnetBlock, ResnetBlock, ResnetBlock, Upsample], [ResnetBlock, ResnetBlock, ResnetBlock]
    expected = [*down * 3, *last, *middle, Head, *middle, *up * 3, *first, Head]
    assert [type(block) for block in blocks(model)] == expected
    ran: list[nn.Module] = []
    for block in blocks(model):
        block.register_forward_hook(lambda module, *_: ran.append(module))
    with torch.no_grad():
        model.decode(model.encode(torch.zeros(1, 3, 8, 8)).mean_BLhw)
    assert ran == blocks(model)


@pytest.mark.slow
@pytest.mark.parametrize("recompute_norms", [True, False])
@torch._inductor.config.patch({"cpp.simdlen": 256})  # g++ 12.2 miscompiles transposed 16-bit values for AVX-512.
def test_compiled_layers_equal_eager_ones(
    recompute_norms: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Output, gradients and strides are equal, and layers that recompute norms keep no more than uncompiled ones."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    runtime = cpu_runtime(precision="bf16", compiled=True)
    eager = AutoencoderKL(VaeArchitecture((32, 64), latent_channels=4), recompute_norms=recompute_norms)
    compiled = copy.deepcopy(eager)
    compile_layers(compiled, runtime)
    for size, layout in ((16, torch.contiguous_format), (24, torch.channels_last)):
        images_BCHW = torch.rand(2, 3, size, size).contiguous(memory_format=layout)
        found, kept = [], []
        for model in (eager, compiled):
            leaf_BCHW = images_BCHW.clone().requires_grad_()
            bytes_, made_BCHW = saved_bytes(
                model, lambda images, m=model: m.decode(m.encode(images).mean_BLhw), leaf_BCHW
            )
            kept.append(bytes_)
            weights_BCHW = torch.linspace(-1, 1, made_BCHW.numel()).view(made_BCHW.shape)
            gradients = torch.autograd.grad(
                made_BCHW, [leaf_BCHW, *model.parameters()], weights_BCHW.to(made_BCHW.dtype)
            )
            found.append((made_BCHW, torch.cat([gradient.flatten() for gradient in gradients])))
        for expected, made in zip(*found, strict=True):
            assert made.stride() == expected.stride()
            assert (made - expected).norm() < 0.08 * expected.norm()  # bf16
        if recompute_norms:
            assert kept[1] < 1.1 * kept[0]
