"""Reconstructs pictures of any size with an autoencoder, in overlapping tiles without visible seams.

Shapes: C channels of a picture, H x W pixels. Pictures are uint8, and floats in [-1, 1] for the autoencoder.
"""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from gputrain.errors import UserError
from gputrain.hw.runtime import runtime_on
from gputrain.vae.config import Reconstruct
from gputrain.vae.data import image_tensor, to_u8, to_unit
from gputrain.vae.evaluate import reconstruction_sheet
from gputrain.vae.load import load_model
from gputrain.vae.model import AutoencoderKL
from gputrain.vae.pictures import UnusablePicture, read_picture, scan_pictures

log = logging.getLogger(__name__)

SHEET_PICTURES, SHEET_SIDE = 8, 256


@torch.no_grad()
def reconstruct(model: AutoencoderKL, image_CHW: Tensor, device: torch.device, tile_size: int = 512) -> Tensor:
    """Encodes and decodes a picture (uint8, CHW, any size). Returns uint8, CHW.

    Larger pictures are processed in tiles of `tile_size`, a quarter of which overlaps its neighbour. Tiles are blended
    linearly over the overlap, so neither their edges, where convolutions have no neighbouring pixels, nor the norm
    statistics, which differ between tiles, are visible as lines.
    """
    multiple = model.architecture.downsampling
    tile = max(multiple, tile_size // multiple * multiple)
    height, width = image_CHW.shape[1:]
    image_1CHW = to_unit(image_CHW.to(device)).unsqueeze(0)
    image_1CHW = F.pad(image_1CHW, (0, -width % multiple, 0, -height % multiple), mode="replicate")
    total = torch.zeros_like(image_1CHW)
    weights = torch.zeros_like(image_1CHW[:, :1])
    for top, bottom in _spans(image_1CHW.shape[2], tile, multiple):
        for left, right in _spans(image_1CHW.shape[3], tile, multiple):
            part = image_1CHW[:, :, top:bottom, left:right]
            made = model.decode(model.encode(part).mean_BLhw).float()
            weight = torch.outer(
                _fade(top, bottom, image_1CHW.shape[2], tile // 4), _fade(left, right, image_1CHW.shape[3], tile // 4)
            ).to(device)
            total[:, :, top:bottom, left:right] += made * weight
            weights[:, :, top:bottom, left:right] += weight
    return to_u8(total / weights)[0, :, :height, :width].cpu()


def _spans(size: int, tile: int, multiple: int) -> Iterator[tuple[int, int]]:
    """Yields the start and end of each tile along one side; the last tile is moved back so that it is complete."""
    stride = max(multiple, tile * 3 // 4 // multiple * multiple)
    start = 0
    while start + tile < size:
        yield start, start + tile
        start += stride
    yield max(0, size - tile), size


def _fade(start: int, stop: int, size: int, overlap: int) -> Tensor:
    """Returns blending weights along a tile's side: linear ramps over the overlaps, and 1 at the picture's edges."""
    at = torch.arange(stop - start) + 0.5
    rising = at / overlap if start else torch.ones_like(at)
    falling = at.flip(0) / overlap if stop < size else torch.ones_like(at)
    return torch.minimum(rising, falling).clamp(max=1.0)


def reconstruct_folder(settings: Reconstruct, progress: Callable[[int, int], None]) -> list[Path]:
    """Reconstructs a picture, or every picture of a folder tree, into `output_dir`, with a sheet.png of some of them.

    Returns the written files. Logs a warning for each unreadable picture. Raises UserError if none is readable.
    """
    runtime = runtime_on(settings.device)
    model = load_model(settings.model, runtime.device).model
    folder = settings.input if settings.input.is_dir() else settings.input.parent
    names = (
        [source.path for source in scan_pictures(folder).sources] if settings.input.is_dir() else [settings.input.name]
    )
    settings.output_dir.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    pairs: list[tuple[Tensor, Tensor, str]] = []
    for done, name in enumerate(names, start=1):
        try:
            original_CHW = image_tensor(read_picture(folder / name, channels=model.architecture.in_channels))
        except UnusablePicture as refused:
            log.warning("%s; left out", refused)
            continue
        with runtime.autocast():
            made_CHW = reconstruct(model, original_CHW, runtime.device, settings.tile_size)
        written.append(_save(made_CHW, settings.output_dir / f"{name}.png"))
        if len(pairs) < SHEET_PICTURES:
            pairs.append((_thumbnail(original_CHW), _thumbnail(made_CHW), name))
        progress(done, len(names))
    if not written:
        raise UserError(f"{settings.input}: no readable picture", hint="gputrain validate names each fault")
    originals, made, shown = zip(*pairs, strict=True)
    sheet = settings.output_dir / "sheet.png"
    reconstruction_sheet(originals, made, shown, title=str(settings.model)).draw().image.save(sheet)
    return [*written, sheet]


def _save(image_CHW: Tensor, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    levels_HWC = image_CHW.permute(1, 2, 0).contiguous().numpy()
    Image.fromarray(levels_HWC[..., 0] if levels_HWC.shape[2] == 1 else levels_HWC).save(path)
    return path


def _thumbnail(image_CHW: Tensor, side: int = SHEET_SIDE) -> Tensor:
    """Returns the centre of a picture at full resolution, since a downsampled copy would hide lost details."""
    top, left = (max(0, (size - side) // 2) for size in image_CHW.shape[1:])
    return image_CHW[:, top : top + side, left : left + side]
