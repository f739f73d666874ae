"""Pictures for the image VAE: opening a folder of them, and cutting crops for training.

Shapes: B pictures, 3 channels (sRGB), H rows, W columns. Batches stay uint8 until they lie on the device, where
`to_unit` makes them floats in [-1, 1]. torch is imported where a tensor is made: preparing pictures needs none.
"""

import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from PIL import Image

from gputrain.engine.data import HELD_OUT_SHARE, MANIFEST, DataWarning, Sample, fingerprint, item_rng, read_rows, split
from gputrain.errors import UserError
from gputrain.vae.pictures import (
    JOURNAL,
    MIN_SIZE,
    Box,
    Decoded,
    PictureFile,
    RejectedPicture,
    UnusablePicture,
    decode,
    read_header,
    read_rgb,
    scan_pictures,
)

if TYPE_CHECKING:
    import torch


T = TypeVar("T")


# --------------------------------------------------------------------------------------------------- folders


@dataclass(frozen=True)
class Picture:
    """A readable picture. `fingerprint` is that of the original file, so that preparing it changes no split."""

    path: Path
    width: int
    height: int
    fingerprint: str


@dataclass(frozen=True)
class Pictures:
    """A folder's pictures in order of their paths. `shared`: a single content serves as training and held-out."""

    train: list[Picture]
    held_out: list[Picture]
    shared: bool
    refused: list[RejectedPicture]


def open_pictures(folder: Path, *, held_out_share: float = HELD_OUT_SHARE) -> Pictures:
    """Open a prepared folder by its manifest, or any folder tree by reading every header, and split it.

    Raises UserError if the folder is missing, empty, half prepared, or holds no readable picture.
    """
    refused: list[RejectedPicture] = []
    if (folder / MANIFEST).is_file():
        rows = read_rows(folder / MANIFEST, ("path", "width", "height", "bytes", "fingerprint"))
        found = _in_threads(partial(_from_manifest, folder), rows)
    elif (folder / JOURNAL).is_file():
        raise UserError(f"{folder}: its preparation was not finished", hint="run gputrain prepare-data again")
    else:
        tree = scan_pictures(folder)
        refused += tree.refused
        found = _in_threads(partial(_from_file, folder), tree.sources)
    pictures = [one for one in found if isinstance(one, Picture)]
    refused += [one for one in found if isinstance(one, RejectedPicture)]
    if not pictures:
        first = f"; {refused[0].path}: {refused[0].detail}" if refused else ""
        raise UserError(
            f"{folder}: no readable picture among {len(refused)} files{first}",
            hint="gputrain validate names each and its fault",
        )
    parts = split(pictures, held_out_share, key=lambda picture: picture.fingerprint)
    return Pictures(parts.train, parts.held_out, parts.shared, refused)


def _in_threads(look: Callable[[T], Picture | RejectedPicture], items: Sequence[T]) -> list[Picture | RejectedPicture]:
    with warnings.catch_warnings(), ThreadPoolExecutor(min(32, 4 * (os.cpu_count() or 1))) as pool:
        warnings.simplefilter("ignore")  # what the threads change here is undone with it
        return list(pool.map(look, items))


def _from_manifest(folder: Path, row: dict[str, Any]) -> Picture | RejectedPicture:
    path = folder / row["path"]
    try:
        if path.stat().st_size != row["bytes"]:
            return RejectedPicture(row["path"], "broken", "not the file that the manifest describes")
    except OSError as error:
        return RejectedPicture(row["path"], "unreadable", error.strerror or str(error))
    return Picture(path, row["width"], row["height"], row["fingerprint"])


def _from_file(folder: Path, source: PictureFile) -> Picture | RejectedPicture:
    path = folder / source.path
    try:
        header = read_header(path, min_size=MIN_SIZE)
        return Picture(path, header.width, header.height, fingerprint(path))
    except UnusablePicture as refused:
        return RejectedPicture(source.path, refused.reason, refused.detail)
    except OSError as error:
        return RejectedPicture(source.path, "unreadable", error.strerror or str(error))


# ------------------------------------------------------------------------------------------------- training


Part = Callable[..., Image.Image]  # takes `crop`, as `read_rgb` does


@dataclass(frozen=True)
class CropDataset:
    """Random square crops at native resolution, the data set of `gputrain.engine.data.loader`.

    Place and mirroring of a crop are functions of (seed, epoch, item). Of a picture whose smaller side is below
    `image_size`, a crop of that side is enlarged.
    """

    pictures: Sequence[Picture]
    image_size: int
    seed: int
    horizontal_flip: bool
    in_memory: bool = False  # each process keeps what it has decoded, the crops are the same
    _decoded: dict[Path, Decoded] = field(default_factory=dict, repr=False, compare=False)

    @property
    def item_bytes(self) -> int:
        """Bytes of a crop."""
        return 3 * self.image_size**2

    @property
    def decoded_gb(self) -> float:
        """Of all pictures, kept."""
        return sum(3 * picture.width * picture.height for picture in self.pictures) / 1e9

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, sample: Sample) -> "torch.Tensor":
        """The crop of one sample: uint8, 3HW, H = W = image_size.

        A picture that can no longer be read is replaced by the next one that can, with a DataWarning. Raises
        UserError if none can.
        """
        epoch, item = sample
        x, y, coin = item_rng(self.seed, epoch, item).random(3).tolist()
        for step in range(len(self.pictures)):
            path = self.pictures[(item + step) % len(self.pictures)].path
            try:
                image = _square(self._part(path), self.image_size, x, y)
            except UnusablePicture as refused:
                warnings.warn(f"{refused}; the next picture stands in for it", DataWarning, stacklevel=2)
                continue
            if self.horizontal_flip and coin < 0.5:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            return image_tensor(image)
        raise UserError(
            f"none of the {len(self.pictures)} training pictures can be read any more",
            hint="see whether their folder is still in place; gputrain validate names each fault",
        )

    def _part(self, path: Path) -> Part:
        """What gives parts of a picture: its file, or what has been kept of it."""
        if not self.in_memory:
            return partial(read_rgb, path)
        if path not in self._decoded:
            self._decoded[path] = decode(path)
        return self._decoded[path].part


def decoding_seconds(dataset: CropDataset, samples: int = 5) -> float:
    """Time that a crop takes to decode, the median of some."""
    items = sorted({round(i * (len(dataset) - 1) / max(1, samples - 1)) for i in range(samples)})
    took = []
    for item in items:
        began = time.perf_counter()
        dataset[Sample(0, item)]
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def centre_crop(path: Path, image_size: int) -> "torch.Tensor":
    """The middle of a picture, for evaluation and sample sheets: uint8, 3HW, H = W = image_size. Raises UserError."""
    return image_tensor(_square(partial(read_rgb, path), image_size, 0.5, 0.5))


def _square(part: Part, size: int, x: float, y: float) -> Image.Image:
    """A crop of size x size; x and y in [0, 1) say how far from the left and the top it lies."""

    def box(width: int, height: int) -> Box:
        side = min(size, width, height)
        left, top = int(x * (width - side + 1)), int(y * (height - side + 1))
        return left, top, left + side, top + side

    image = part(crop=box)
    return image if image.width == size else image.resize((size, size), Image.Resampling.LANCZOS)


def image_tensor(image: Image.Image) -> "torch.Tensor":
    import torch

    return torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy())


def to_unit(images_B3HW: "torch.Tensor") -> "torch.Tensor":
    """uint8 levels to float32 in [-1, 1], on the device where they lie; any shape."""
    return images_B3HW.float() / 127.5 - 1.0


def to_u8(images_B3HW: "torch.Tensor") -> "torch.Tensor":
    """Floats in [-1, 1] to uint8 levels, clamped and rounded to the nearest (half to even): undoes `to_unit`."""
    return ((images_B3HW.float().clamp(-1.0, 1.0) + 1.0) * 127.5).round().byte()
