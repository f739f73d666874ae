"""LPIPS: how far two pictures are apart in what a network for recognition sees (Zhang et al. 2018, arXiv:1801.03924).

Version 0.1 of the published distance with VGG16: features after the last ReLU of each of its five stages are scaled to
unit length at every pixel, the squared differences are weighted by channel with heads that were fitted to people's
judgements, averaged over the pixels, and summed over the stages.

Shapes: B items, C channels or colours, H x W pixels, S the side of a crop. Pictures are in [-1, 1].
"""

import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gputrain.errors import UserError
from gputrain.vae.weights import Published, read_tensors, verify_files

# VGG16 (Simonyan and Zisserman 2014, table 1, column D) up to its last convolution: by stage, the places that its
# convolutions have in torchvision's list of layers, and their channels. A 2x2 max-pooling stands between stages.
STAGES = (((0, 2), 64), ((5, 7), 128), ((10, 12, 14), 256), ((17, 19, 21), 512), ((24, 26, 28), 512))
# From [-1, 1] to what VGG16 was trained on: ImageNet's mean and deviation by colour, as version 0.1 rounds them.
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
EPS = 1e-10  # beside the length of a feature vector

TRUNK = Published(
    "vgg16-397923af.pth",
    "397923af8e79cdbb6a7127f12361acd7a2f83e06b05044ddf496e83de57a5bf0",
    "torchvision's VGG16: download.pytorch.org/models/vgg16-397923af.pth",
)
HEADS = Published(
    "vgg.pth",
    "a78928a0af1e5f0fcb1f3b9e8f8c3a2a5a3de244d830ad5c1feddc79b8432868",
    "lpips/weights/v0.1/vgg.pth of the Python package lpips 0.1.4",
)


class Lpips(nn.Module):
    """The distance, frozen: no part of it learns. `load_lpips` brings its weights; until then they take no memory."""

    shift: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        width_in = 3
        self.features = nn.ModuleDict()  # named as in torchvision's file
        self.heads = nn.ParameterList()
        for places, width in STAGES:
            for place in places:
                self.features[str(place)] = nn.Conv2d(width_in, width, 3, padding=1, device="meta")
                width_in = width
            self.heads.append(nn.Parameter(torch.empty(1, width, 1, 1, device="meta")))
        self.register_buffer("shift", torch.tensor(SHIFT).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("scale", torch.tensor(SCALE).view(1, 3, 1, 1), persistent=False)
        self.requires_grad_(False)

    @classmethod
    def without_values(cls) -> "Lpips":
        """With weights that were never set, for counting on shapes."""
        made = cls()
        weights = {name: torch.empty(t.shape, dtype=t.dtype, device="cpu") for name, t in made.state_dict().items()}
        made.load_state_dict(weights, assign=True)  # what to_empty does is refused on shapes
        return made.requires_grad_(False)

    def forward(self, made_BCHW: Tensor, target_BCHW: Tensor) -> Tensor:
        """B: the distance of each pair, in fp32 (or the weights' own precision), also under autocast.

        Only `made_BCHW` gets a gradient. H and W are 16 or more. Each stage is compared as soon as it is computed:
        what stays for the backward pass is the outputs of made's convolutions and one difference a stage.
        """
        with torch.autocast(made_BCHW.device.type, enabled=False):
            made_BCHW = self._normalise(made_BCHW)
            target_BCHW = self._normalise(target_BCHW.detach())
            total_B: Tensor = made_BCHW.new_zeros(len(made_BCHW))
            for number, ((places, _), head_1C11) in enumerate(zip(STAGES, self.heads, strict=True)):
                if number:
                    made_BCHW, target_BCHW = F.max_pool2d(made_BCHW, 2), F.max_pool2d(target_BCHW, 2)
                for place in places:
                    convolution = self.features[str(place)]
                    # In place, so that no second tensor of this size stands beside a convolution's output.
                    made_BCHW, target_BCHW = F.relu_(convolution(made_BCHW)), F.relu_(convolution(target_BCHW))
                difference_BCHW = _unit(made_BCHW) - _unit(target_BCHW)
                total_B += (difference_BCHW.square() * head_1C11).sum(dim=1).mean(dim=(1, 2))
        return total_B

    def _normalise(self, images_BCHW: Tensor) -> Tensor:
        return (images_BCHW.to(self.shift.dtype) - self.shift) / self.scale


def _unit(features_BCHW: Tensor) -> Tensor:
    """Feature vectors of length 1 at every pixel."""
    length_B1HW: Tensor = torch.linalg.vector_norm(features_BCHW, dim=1, keepdim=True)
    return features_BCHW / (length_B1HW + EPS)


def load_lpips(files: tuple[Path, ...], sha256: tuple[str, ...] = ()) -> Lpips:
    """LPIPS with the weights in `files`, on the CPU: torchvision's VGG16 and the heads, in either order or merged.

    Takes .pth and .safetensors, with tensors named as in the two published files or in the state of the lpips
    package's own network. `sha256` states the hashes of files that are none of the published ones. Raises UserError if
    a hash is wrong, a file is damaged, or a tensor is missing or of another shape.
    """
    verify_files(files, (TRUNK, HEADS), sha256)
    found: dict[str, Tensor] = {}
    for path in files:
        found.update({_name(name): tensor for name, tensor in read_tensors(path).items()})
    model = Lpips()
    where = " and ".join(map(str, files)) or "no file"
    hint = f"name two files: {TRUNK.origin}, and {HEADS.origin}"
    for name, tensor in model.state_dict().items():
        if name not in found:
            part = "heads" if name.startswith("heads") else "VGG16"
            raise UserError(f"{where}: the tensors of LPIPS's {part} are not there ({name})", hint=hint)
        if found[name].shape != tensor.shape:
            shapes = f"{list(found[name].shape)}, expected {list(tensor.shape)}"
            raise UserError(f"{where}: {name} is {shapes}: not of LPIPS with VGG16", hint=hint)
    model.load_state_dict({name: found[name].float() for name in model.state_dict()}, assign=True)
    return model.eval()


def _name(name: str) -> str:
    """Our name for a tensor of the published files, or of the lpips package's network (net.slice2.5.weight)."""
    name = re.sub(r"^net\.slice\d\.", "features.", name)
    return re.sub(r"^lin(\d)\.model\.1\.weight$", r"heads.\1", name)


def crop_corners(count: int, height: int, width: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """B, B: top and left of `count` crops of `size` pixels a side in pictures of height x width, on the generator's
    device. Drawn for a whole batch, they can be split with it."""
    places = [
        torch.randint(side - size + 1, (count,), generator=generator, device=generator.device)
        for side in (height, width)
    ]
    return places[0], places[1]


def crop(images_BCHW: Tensor, top_B: Tensor, left_B: Tensor, size: int) -> Tensor:
    """BCSS: a square of each picture, at a place of its own. Differentiable, and without a wait for the device.

    Places lie within the pictures: 0 <= top <= H - size, 0 <= left <= W - size.
    """
    steps_S = torch.arange(size, device=images_BCHW.device)
    rows_B1S1 = (top_B[:, None] + steps_S)[:, None, :, None]
    columns_B11S = (left_B[:, None] + steps_S)[:, None, None, :]
    return images_BCHW.take_along_dim(rows_B1S1, dim=2).take_along_dim(columns_B11S, dim=3)
