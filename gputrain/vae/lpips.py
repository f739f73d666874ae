"""LPIPS: perceptual distance of two pictures in the features of VGG16 (Zhang et al. 2018, arXiv:1801.03924).

This is version 0.1 of the published distance: features after the last ReLU of each of five stages are scaled to
unit length at every pixel; the squared differences are weighted by channel with heads that were fitted to human
ratings, averaged over the pixels, and summed over the stages.

Shapes: B items, C channels or colours, H x W pixels, S the side of a crop. Pictures are in [-1, 1].
"""

import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gputrain.engine.checkpoint import load_weights
from gputrain.vae.weights import how_to_fetch, read_tensors, verify_files

# Stages of VGG16 (Simonyan and Zisserman 2014, table 1, column D) up to its last convolution: the indices of the
# convolutions in torchvision's list of layers, and their channels. There is a 2x2 max-pooling between stages.
STAGES = (((0, 2), 64), ((5, 7), 128), ((10, 12, 14), 256), ((17, 19, 21), 512), ((24, 26, 28), 512))
# Normalisation of inputs in [-1, 1] with ImageNet's mean and deviation by colour, as version 0.1 rounds them.
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
EPS = 1e-10  # added to the length of a feature vector

# The short names of torchvision's VGG16, and of lpips/weights/v0.1/vgg.pth of the Python package lpips.
PUBLISHED_FILES = ("lpips-vgg16", "lpips-heads")


class Lpips(nn.Module):
    """The distance, with frozen weights. `load_lpips` loads them; until then they take no memory."""

    shift: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        width_in = 3
        self.features = nn.ModuleDict()  # The names are those of torchvision's file.
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
        """Returns LPIPS with uninitialised weights, for fake tensors."""
        made = cls()
        weights = {name: torch.empty(t.shape, dtype=t.dtype, device="cpu") for name, t in made.state_dict().items()}
        made.load_state_dict(weights, assign=True)  # to_empty does not work with fake tensors.
        return made.requires_grad_(False)

    def forward(self, made_BCHW: Tensor, target_BCHW: Tensor) -> Tensor:
        """Returns the distance of each pair, (B,), in the dtype of the weights (fp32), also under autocast.

        Only `made_BCHW` gets a gradient. H and W are 16 or more. Each stage is compared as soon as it is computed, so
        only the outputs of made's convolutions and one difference for each stage are kept for the backward pass.
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
                    # The in-place ReLU avoids a second tensor of the size of a convolution's output.
                    made_BCHW, target_BCHW = F.relu_(convolution(made_BCHW)), F.relu_(convolution(target_BCHW))
                difference_BCHW = _unit(made_BCHW) - _unit(target_BCHW)
                total_B += (difference_BCHW.square() * head_1C11).sum(dim=1).mean(dim=(1, 2))
        return total_B

    def _normalise(self, images_BCHW: Tensor) -> Tensor:
        return (images_BCHW.to(self.shift.dtype) - self.shift) / self.scale


def _unit(features_BCHW: Tensor) -> Tensor:
    """Scales the feature vector of every pixel to length 1."""
    length_B1HW: Tensor = torch.linalg.vector_norm(features_BCHW, dim=1, keepdim=True)
    return features_BCHW / (length_B1HW + EPS)


def load_lpips(files: tuple[Path, ...], sha256: tuple[str, ...] = ()) -> Lpips:
    """Loads LPIPS on the CPU from `files`: torchvision's VGG16 and the heads, in either order or in one file.

    Files are .pth or .safetensors, with tensors named as in the two published files or in the state of the lpips
    package's own network. `sha256` has the hashes of files that are not the published ones. Raises UserError if a
    hash is wrong, a file is damaged, or a tensor is missing or has another shape.
    """
    verify_files(files, PUBLISHED_FILES, sha256)
    found: dict[str, Tensor] = {}
    for path in files:
        found.update({_name(name): tensor for name, tensor in read_tensors(path).items()})
    model = Lpips()
    where = " and ".join(map(str, files)) or "no file"
    hint = f"name two files: --lpips-weights {','.join(PUBLISHED_FILES)}; {how_to_fetch(PUBLISHED_FILES)}"
    given = {name: found[name].float() for name in model.state_dict() if name in found}
    load_weights(model, given, f"{where}: LPIPS with VGG16", hint=hint, assign=True)
    return model.eval()


def _name(name: str) -> str:
    """Maps the name of a tensor in the published files, or in the lpips package's network (net.slice2.5.weight), to
    the name in `Lpips`."""
    name = re.sub(r"^net\.slice\d\.", "features.", name)
    return re.sub(r"^lin(\d)\.model\.1\.weight$", r"heads.\1", name)


def crop_corners(count: int, height: int, width: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws the top and left, (B,) each, of `count` crops with `size` pixels a side in pictures of height x width, on
    the generator's device. They are drawn for the whole batch, so that they can be split with it."""
    places = [
        torch.randint(side - size + 1, (count,), generator=generator, device=generator.device)
        for side in (height, width)
    ]
    return places[0], places[1]


def crop(images_BCHW: Tensor, top_B: Tensor, left_B: Tensor, size: int) -> Tensor:
    """Crops a square of each picture at its own position: (B, C, S, S). Differentiable, and without a device sync.

    The crops must lie within the pictures: 0 <= top <= H - size, 0 <= left <= W - size.
    """
    steps_S = torch.arange(size, device=images_BCHW.device)
    rows_B1S1 = (top_B[:, None] + steps_S)[:, None, :, None]
    columns_B11S = (left_B[:, None] + steps_S)[:, None, None, :]
    return images_BCHW.take_along_dim(rows_B1S1, dim=2).take_along_dim(columns_B11S, dim=3)
