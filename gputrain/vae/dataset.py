"""Data of the image VAE: opens folders of pictures and cuts crops for training.

Shapes: B pictures, C channels (3: sRGB, 1: gray, 4: sRGB with transparency), H rows, W columns. Batches stay uint8
until they are on the device, where `to_unit` converts them to floats in [-1, 1]. torch is imported only by functions
that return tensors, because preparing pictures needs no torch.
"""

import logging
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from PIL import Image

from gputrain.data_in.preparation import GO_ON, RefusedItem, SourceFile, check_input_folder, refuse_exclude
from gputrain.data_in.sources import open_source
from gputrain.data_in.split import (
    HELD_OUT_SHARE,
    MANIFEST,
    FolderItems,
    GivenFolders,
    Mixture,
    data_folders,
    fingerprint,
    split_folders,
)
from gputrain.engine.data import DataWarning, Sample, item_rng
from gputrain.errors import UserError
from gputrain.files import read_rows
from gputrain.hw.probe import usable_cores
from gputrain.kinds import how_to_prepare, prepared_for, refuse_other_data
from gputrain.serialization import is_fingerprint, unreadable
from gputrain.vae.config import PictureLimits
from gputrain.vae.pictures import (
    JOURNAL,
    Box,
    UnusablePicture,
    read_header,
    read_picture,
    result_or_refusal,
    scan_pictures,
)

if TYPE_CHECKING:
    import torch


log = logging.getLogger(__name__)

T = TypeVar("T")


# --------------------------------------------------------------------------------------------------- folders


@dataclass(frozen=True)
class Picture:
    """A readable picture. `fingerprint` is that of the original file, so the split is the same after preparation."""

    path: Path
    width: int
    height: int
    fingerprint: str


@dataclass(frozen=True)
class Pictures:
    """The pictures of folders, sorted by path in each."""

    split: FolderItems[Picture]
    refused: list[RefusedItem]

    @property
    def train(self) -> list[Picture]:
        return self.split.parts.train

    @property
    def held_out(self) -> list[Picture]:
        return self.split.parts.held_out

    @property
    def mixture(self) -> Mixture:
        return self.split.mixture()

    @property
    def of_epoch(self) -> list[Picture]:
        """The training pictures of an epoch, which has those of a folder by its weight."""
        return self.train if self.mixture.is_plain else [self.train[item] for item in self.mixture.items]


def open_pictures(
    given: GivenFolders,
    *,
    held_out_share: float = HELD_OUT_SHARE,
    unpack_at: Path | None = None,
    exclude: Sequence[str] = (),
) -> Pictures:
    """Opens prepared folders by their manifests, or any folder trees by reading every header, and splits them. What is
    no folder of files, such as a parquet file, is unpacked under `unpack_at`; default: a temporary folder.

    Raises UserError if a folder is missing, empty, half prepared, or holds no readable picture.
    """
    folders = data_folders(given)
    found, refused = [], []
    for folder in folders:
        source = open_source(folder.path, "image", unpack_at)
        if source.unpacked and unpack_at:
            log.info(
                "%s: unpacked in %s, which the run needs; prepared pictures need no such copy: %s",
                folder.path, source.unpacked, how_to_prepare("vae", source=folder.path),
            )  # fmt: skip
        pictures, rejected = _pictures_in(source.folder, exclude)
        rejected = [*rejected, *source.refused]
        found.append(pictures)
        several = len(folders) > 1
        refused += [
            replace(refusal, path=str(folder.path / refusal.path)) if several else refusal for refusal in rejected
        ]
    keys = [attrgetter("fingerprint")] * len(folders)
    return Pictures(split_folders(folders, found, held_out_share, keys), refused)


def is_prepared(folder: Path) -> bool:
    """Returns True if a folder has the manifest of a preparation, and not one of another program by the same name."""
    return (folder / MANIFEST).is_file() and ((folder / JOURNAL).is_file() or "vae" in prepared_for(folder))


def _pictures_in(folder: Path, exclude: Sequence[str]) -> tuple[list[Picture], list[RefusedItem]]:
    """Returns the readable pictures of a folder, and those that are refused."""
    refused: list[RefusedItem] = []
    refuse_other_data(folder, "vae")
    if is_prepared(folder):
        refuse_exclude(folder, exclude)
        rows = read_rows(folder / MANIFEST, ("path", "width", "height", "bytes", "fingerprint"))
        if not all(map(_is_whole, rows)):
            raise unreadable(folder / MANIFEST, "run gputrain prepare-data again to rebuild it")
        found = _in_threads(partial(_from_manifest, folder), rows)
    elif (folder / JOURNAL).is_file():
        raise UserError(f"{folder}: its preparation was not finished", hint=GO_ON)
    else:
        check_input_folder(folder, "pictures: --data-path FOLDER")
        tree = scan_pictures(folder, exclude)
        refused += tree.refused
        found = _in_threads(partial(_from_file, folder), tree.sources)
    pictures = [picture for picture in found if isinstance(picture, Picture)]
    refused += [refusal for refusal in found if isinstance(refusal, RefusedItem)]
    if not pictures:
        first = f"; {refused[0].path}: {refused[0].detail}" if refused else ""
        raise UserError(
            f"{folder}: no readable picture among {len(refused)} files{first}",
            hint="gputrain validate names each and its fault",
        )
    return pictures, refused


def _in_threads(look: Callable[[T], Picture | RefusedItem], items: Sequence[T]) -> list[Picture | RefusedItem]:
    with warnings.catch_warnings(), ThreadPoolExecutor(min(32, 4 * usable_cores())) as pool:
        warnings.simplefilter("ignore")  # catch_warnings also undoes the threads' changes of the filters.
        return list(pool.map(look, items))


def _is_whole(row: dict[str, Any]) -> bool:
    """Returns True if all values of a row of the manifest are of the right kind."""
    sizes = [row[name] for name in ("width", "height", "bytes")]
    is_path = isinstance(row["path"], str) and "\0" not in row["path"]
    return is_path and is_fingerprint(row["fingerprint"]) and all(type(size) is int and size > 0 for size in sizes)


def _from_manifest(folder: Path, row: dict[str, Any]) -> Picture | RefusedItem:
    path = folder / row["path"]
    status = result_or_refusal(row["path"], path.stat)
    if isinstance(status, RefusedItem):
        return status
    if status.st_size != row["bytes"]:
        return RefusedItem(row["path"], "broken", "not the file that the manifest describes")
    return Picture(path, row["width"], row["height"], row["fingerprint"])


def _from_file(folder: Path, source: SourceFile) -> Picture | RefusedItem:
    def look() -> Picture:
        path = folder / source.path
        header = read_header(path, PictureLimits())
        return Picture(path, header.width, header.height, fingerprint(path))

    return result_or_refusal(source.path, look)


# ------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class CropDataset:
    """Random square crops at native resolution: a data set for `gputrain.engine.data.loader`.

    Position and mirroring of a crop are functions of (seed, epoch, item). If the smaller side of a picture is below
    `image_size`, a crop of that side is enlarged.
    """

    pictures: Sequence[Picture]
    image_size: int
    seed: int
    horizontal_flip: bool
    channels: int = 3

    @property
    def item_bytes(self) -> int:
        return self.channels * self.image_size**2

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, sample: Sample) -> "torch.Tensor":
        """Returns the crop of a sample: uint8, CHW, H = W = image_size.

        A picture that has become unreadable is replaced by the next readable one, with a DataWarning. Raises
        UserError if none is readable.
        """
        epoch, item = sample
        x, y, coin = item_rng(self.seed, epoch, item).random(3).tolist()
        for step in range(len(self.pictures)):
            path = self.pictures[(item + step) % len(self.pictures)].path
            try:
                image = _square_crop(path, self.channels, self.image_size, x, y)
            except UnusablePicture as refused:
                warnings.warn(f"{refused}; replaced by the next picture", DataWarning, stacklevel=2)
                continue
            if self.horizontal_flip and coin < 0.5:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            return image_tensor(image)
        raise UserError(
            f"none of the {len(self.pictures)} training pictures can be read any more",
            hint="see whether their folder is still in place; gputrain validate names each fault",
        )


def decoding_seconds(dataset: CropDataset, samples: int = 5) -> float:
    """Returns the decoding time of a crop: the median over `samples` pictures."""
    took = []
    for place in range(samples):
        began = time.perf_counter()
        dataset[Sample(0, round(place * (len(dataset) - 1) / (samples - 1)))]
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def centre_crop(path: Path, image_size: int, channels: int = 3) -> "torch.Tensor":
    """Returns the centre crop of a picture for evaluation: uint8, CHW, H = W = image_size. Raises UserError."""
    return image_tensor(_square_crop(path, channels, image_size, 0.5, 0.5))


def _square_crop(path: Path, channels: int, size: int, x: float, y: float) -> Image.Image:
    """Returns a crop of size x size pixels; x and y in [0, 1) are its relative positions from the left and the top."""

    def box(width: int, height: int) -> Box:
        side = min(size, width, height)
        left, top = int(x * (width - side + 1)), int(y * (height - side + 1))
        return left, top, left + side, top + side

    image = read_picture(path, crop=box, channels=channels)
    return image if image.width == size else image.resize((size, size), Image.Resampling.LANCZOS)


def image_tensor(image: Image.Image) -> "torch.Tensor":
    """Returns a picture as uint8, CHW. Where it is fully transparent, its colour becomes white: the colours that files
    hide there are meaningless, and a model would spend its latents on them."""
    import torch

    levels = np.asarray(image)
    if levels.ndim == 2:
        return torch.from_numpy(levels[None].copy())
    levels_CHW = levels.transpose(2, 0, 1).copy()
    if len(levels_CHW) == 4:
        levels_CHW[:3, levels_CHW[3] == 0] = 255
    return torch.from_numpy(levels_CHW)


def as_rgb(images_BCHW: "torch.Tensor") -> "torch.Tensor":
    """Returns pictures in [-1, 1] with three channels, for networks that know no others: gray is repeated, colours with
    transparency are composited over white. Differentiable."""
    if images_BCHW.shape[1] == 1:
        return images_BCHW.expand(-1, 3, -1, -1)
    if images_BCHW.shape[1] == 4:
        opacity_B1HW = 0.5 * images_BCHW[:, 3:] + 0.5
        return images_BCHW[:, :3] * opacity_B1HW + (1 - opacity_B1HW)
    return images_BCHW


def to_unit(images_BCHW: "torch.Tensor") -> "torch.Tensor":
    """Converts uint8 levels of any shape to float32 in [-1, 1], on their device."""
    return images_BCHW.float() / 127.5 - 1.0


def to_u8(images_BCHW: "torch.Tensor") -> "torch.Tensor":
    """Converts floats in [-1, 1] to uint8 levels, clamped and rounded to nearest (half to even): inverts `to_unit`."""
    return ((images_BCHW.float().clamp(-1.0, 1.0) + 1.0) * 127.5).round().byte()
