"""Reconstructs pictures of any size with an autoencoder, in overlapping tiles without visible seams.

Shapes: C channels of a picture, H x W pixels, Y x X pixels of a tile. Pictures are uint8, and floats in [-1, 1] for the
autoencoder.
"""

import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from gputrain.errors import UserError
from gputrain.hw.runtime import runtime_on
from gputrain.report.media import MediaBudget
from gputrain.report.page import write_comparison
from gputrain.report.sections import PictureItem, ShownPicture
from gputrain.vae.config import Reconstruct
from gputrain.vae.dataset import image_tensor, to_u8, to_unit
from gputrain.vae.evaluate import picture_psnr_db, reconstruction_sheet, to_rgb
from gputrain.vae.model import AutoencoderKL
from gputrain.vae.pictures import UnusablePicture, read_picture, scan_pictures
from gputrain.vae.prepare import output_names
from gputrain.vae.pretrained import load_model

log = logging.getLogger(__name__)

SHEET, SHEET_PICTURES, SHEET_SIDE = "sheet.png", 8, 256
PAGE, PAGE_SIDE = "sheet.html", 1024
OVERLAP = 64  # Pixels that neighbouring tiles share, or a quarter of a smaller tile.


@torch.no_grad()
def reconstruct(
    model: AutoencoderKL,
    image_CHW: Tensor,
    device: torch.device,
    tile_size: int = 512,
    progress: Callable[[float], None] = lambda share: None,
) -> Tensor:
    """Encodes and decodes a picture (uint8, CHW, any size). Returns uint8, CHW.

    Larger pictures are processed in tiles of `tile_size`, which overlap by `OVERLAP` pixels at most. Tiles are blended
    linearly over the overlap, so neither their edges, where convolutions have no neighbouring pixels, nor the norm
    statistics, which differ between tiles, are visible as lines. Besides the picture and its reconstruction in 8 bits,
    memory holds one tile's activations and one row of tiles. `progress` receives the share that is done.
    """
    multiple = model.architecture.downsampling
    tile = max(multiple, tile_size // multiple * multiple)
    overlap = min(tile // 4, OVERLAP)
    height, width = (size + -size % multiple for size in image_CHW.shape[1:])
    rows, columns = (list(_spans(size, tile, overlap, multiple)) for size in (height, width))
    fades_X = [_fade(*span, width, overlap).to(device) for span in columns]
    weight_W = torch.zeros(width, device=device)
    for (left, right), fade_X in zip(columns, fades_X, strict=True):
        weight_W[left:right] += fade_X
    tile_height = rows[0][1] - rows[0][0]
    sums_CYW = torch.zeros(len(image_CHW), tile_height, width, device=device)  # Of one row of tiles.
    weight_Y1 = torch.zeros(tile_height, 1, device=device)
    made_CHW = torch.empty_like(image_CHW, device="cpu")
    ends = [top for top, _ in rows[1:]] + [height]  # Where the next row of tiles begins, all rows above are complete.
    for row, ((top, bottom), end) in enumerate(zip(rows, ends, strict=True)):
        fade_Y1 = _fade(top, bottom, height, overlap).to(device)[:, None]
        weight_Y1 += fade_Y1
        for column, ((left, right), fade_X) in enumerate(zip(columns, fades_X, strict=True)):
            part_CYX = to_unit(image_CHW[:, top:bottom, left:right].to(device))
            missing = (0, right - left - part_CYX.shape[2], 0, bottom - top - part_CYX.shape[1])
            part_1CYX = F.pad(part_CYX[None], missing, mode="replicate")  # Its last pixels are repeated.
            tile_CYX = model.decode(model.encode(part_1CYX).mean_BLhw)[0].float()
            sums_CYW[:, :, left:right] += tile_CYX * (fade_Y1 * fade_X)
            progress((row * len(columns) + column + 1) / (len(rows) * len(columns)))
        done = end - top
        finished_CYW = to_u8(sums_CYW[:, :done] / (weight_Y1[:done] * weight_W))
        made_CHW[:, top:end] = finished_CYW[:, : image_CHW.shape[1] - top, : image_CHW.shape[2]].cpu()
        sums_CYW, weight_Y1 = (F.pad(kept[..., done:, :], (0, 0, 0, done)) for kept in (sums_CYW, weight_Y1))
    return made_CHW


def _spans(size: int, tile: int, overlap: int, multiple: int) -> Iterator[tuple[int, int]]:
    """Yields the start and end of each tile along one side; the last tile is moved back so that it is complete."""
    stride = max(multiple, (tile - overlap) // multiple * multiple)
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


class Reconstructed(NamedTuple):
    """The written pictures, the sheet of some of them and the page, and their average PSNR."""

    written: list[Path]
    sheet: Path
    page: Path
    psnr_db: float


def reconstruct_folder(settings: Reconstruct, progress: Callable[[float, int], None]) -> Reconstructed:
    """Reconstructs a picture, or pictures of a folder tree, into `output_dir`, with a sheet.png of some of them, and a
    page with as many as a report may hold.

    `progress` receives the number of pictures that are done, parts of one included, and of all. Logs a warning for each
    unreadable picture. Raises UserError if none is readable, or if the output would lie among the sources.
    """
    folder = settings.input if settings.input.is_dir() else settings.input.parent
    names = wanted_pictures(settings)
    runtime = runtime_on(settings.device)
    model = load_model(settings.weights, runtime.device).model
    runtime.place(model)
    settings.output_dir.mkdir(parents=True, exist_ok=True)
    targets = output_names(names, ".png", taken=[SHEET])
    written: list[Path] = []
    psnrs: list[float] = []
    pairs: list[tuple[Tensor, Tensor, str]] = []
    items: list[PictureItem] = []
    budget = MediaBudget(math.inf)
    progress(0, len(names))
    for done, name in enumerate(names):

        def part_done(share: float, done: int = done) -> None:
            progress(done + share, len(names))

        try:
            image = read_picture(folder / name, channels=model.architecture.in_channels)
        except UnusablePicture as refused:
            log.warning("%s; left out", refused)
            continue
        if settings.max_side:
            image.thumbnail((settings.max_side, settings.max_side), Image.Resampling.LANCZOS)
        original_CHW = image_tensor(image)
        with runtime.autocast():
            made_CHW = reconstruct(model, original_CHW, runtime.device, settings.tile_size, part_done)
        written.append(settings.output_dir / targets[name])
        written[-1].parent.mkdir(parents=True, exist_ok=True)
        levels_HWC = made_CHW.permute(1, 2, 0).contiguous().numpy()
        Image.fromarray(levels_HWC[..., 0] if levels_HWC.shape[2] == 1 else levels_HWC).save(written[-1])
        psnrs.append(picture_psnr_db(made_CHW, original_CHW))
        if len(pairs) < SHEET_PICTURES:
            pairs.append((_centre(original_CHW, SHEET_SIDE), _centre(made_CHW, SHEET_SIDE), name))
        if not budget.left_out:
            items += _compared(f"picture {len(written)}", name, original_CHW, made_CHW, psnrs[-1], budget)
    if not written:
        raise UserError(f"{settings.input}: no readable picture", hint="the warnings name each fault")
    originals, made, shown = zip(*pairs, strict=True)
    title = f"{settings.weights}: centres of the pictures; over whole pictures"
    sheet = reconstruction_sheet(originals, made, shown, title, psnrs[: len(pairs)])
    sheet.draw().image.save(settings.output_dir / SHEET)
    mean = sum(psnrs) / len(psnrs)
    remarks = f"{settings.weights}: PSNR {mean:.1f} dB on average over {len(written)} whole pictures"
    if len(items) < len(written):
        remarks += f"; the first {len(items)} are shown, as the size of this file is limited"
    write_comparison(settings.output_dir / PAGE, f"Reconstructions of {settings.input.name}", remarks, items)
    return Reconstructed(written, settings.output_dir / SHEET, settings.output_dir / PAGE, mean)


def _compared(
    title: str, name: str, original_CHW: Tensor, made_CHW: Tensor, psnr_db: float, budget: MediaBudget
) -> list[PictureItem]:
    """Returns a picture beside its original for the page; none if they do not fit any more."""
    shown, name = [], name + ", the centre" * (max(original_CHW.shape[1:]) > PAGE_SIDE)
    for what, image_CHW, caption in ("original", original_CHW, name), ("reconstruction", made_CHW, f"{psnr_db:.1f} dB"):
        levels_HW3 = to_rgb(_centre(image_CHW, PAGE_SIDE)).contiguous().numpy()
        if picture := budget.picture(Image.fromarray(levels_HW3), f"{what} of {name}"):
            shown.append(ShownPicture(what, picture, caption))
    return [PictureItem(title, shown[0], shown[1:])] if len(shown) == 2 else []


def wanted_pictures(settings: Reconstruct) -> list[str]:
    """Returns the paths of the pictures to reconstruct, relative to their folder, and logs how many are left out.

    Earlier reconstructions in a subfolder are none of them. Raises UserError if the output is the folder itself.
    """
    is_folder = settings.input.is_dir()
    read, output = (settings.input if is_folder else settings.input.parent).resolve(), settings.output_dir.resolve()
    if output == read:
        raise UserError(
            f"{settings.output_dir}: holds the pictures that are reconstructed", hint="choose another --output-dir"
        )
    if not settings.input.exists():
        raise UserError(f"{settings.input}: no such file or folder", hint="--input takes a picture or a folder of them")
    if not is_folder:
        return [settings.input.name]
    names = [source.path for source in scan_pictures(settings.input).sources]
    if read in output.parents:
        names = [name for name in names if output not in (read / name).parents]
    count = min(settings.pictures or len(names), len(names))
    if count < len(names):
        log.info("reconstructing %d of %d pictures, evenly spaced by name", count, len(names))
    return [names[number * len(names) // count] for number in range(count)]


def _centre(image_CHW: Tensor, side: int) -> Tensor:
    """Returns the centre of a picture at full resolution, since a downsampled copy would hide lost details."""
    top, left = (max(0, (size - side) // 2) for size in image_CHW.shape[1:])
    return image_CHW[:, top : top + side, left : left + side]
