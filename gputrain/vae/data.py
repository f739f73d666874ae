"""Pictures for the image VAE: finding them, decoding them, cutting training crops.

Shapes: B pictures, 3 channels (sRGB), H rows, W columns. Batches stay uint8 until they lie on the device, where
`to_unit` makes them floats in [-1, 1]. torch is imported where a tensor is made: preparing pictures needs none.
"""

import os
import stat
import struct
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from PIL import Image, ImageCms, UnidentifiedImageError

from gputrain.data import HELD_OUT_SHARE, MANIFEST, DataWarning, Sample, fingerprint, item_rng, read_rows, split
from gputrain.errors import UserError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Reason = Literal["broken", "tiny", "huge", "duplicate", "unreadable"]
Box = tuple[int, int, int, int]  # left, top, right, bottom

SUFFIXES = {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".tif", ".tiff", ".bmp", ".dib", ".gif"}
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "DIB", "GIF")
MIN_SIZE = 32  # pixels of the smaller side; below, a picture is tiny
MAX_PIXELS = 200_000_000  # above, a picture is huge: taken for a decompression bomb
JOURNAL = "journal.jsonl"  # of a preparation that may still be under way

# What Pillow's decoders raise on damaged content, beside OSError.
DAMAGE = (SyntaxError, ValueError, EOFError, IndexError, OverflowError, struct.error)
# EXIF orientation -> what makes the picture upright.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True)
class Refusal:
    """A file that is left out, and why; `path` is relative to the folder that was read."""

    path: str
    reason: Reason
    detail: str
    repeats: str | None = None  # the first file with the content of this duplicate


class Refused(UserError):
    """A picture that cannot be used."""

    def __init__(self, path: Path, reason: Reason, detail: str) -> None:
        super().__init__(f"{path}: {reason}: {detail}", hint="gputrain validate lists every such file of a folder")
        self.path, self.reason, self.detail = path, reason, detail

    def __reduce__(self) -> tuple[type["Refused"], tuple[Path, Reason, str]]:
        return Refused, (self.path, self.reason, self.detail)


# ------------------------------------------------------------------------------------------------- finding


@dataclass(frozen=True)
class Source:
    """A file that looks like a picture; `path` is relative, with forward slashes."""

    path: str
    bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class Tree:
    """What a folder holds: sources and refusals by path, and other files counted by suffix."""

    sources: list[Source]
    refused: list[Refusal]
    ignored: dict[str, int]


def scan(folder: Path) -> Tree:
    """Find the pictures of a folder tree by their suffixes, following each folder once, links and loops included.

    Hidden files and folders are passed over. Raises UserError if the folder is missing or holds no picture.
    """
    if not folder.is_dir():
        fault = "is a file, expected a folder" if folder.exists() else "no such folder"
        raise UserError(f"{folder}: {fault}", hint="name the folder that holds the pictures")
    sources: list[Source] = []
    refused: list[Refusal] = []
    ignored: Counter[str] = Counter()
    for path in _walk(folder, refused):
        relative = path.relative_to(folder).as_posix()
        if path.name.startswith("."):
            ignored["hidden"] += 1
            continue
        if path.suffix.lower() not in SUFFIXES:
            ignored[path.suffix.lower() or "without suffix"] += 1
            continue
        try:
            status = path.stat()
        except OSError as error:
            refused.append(Refusal(relative, "unreadable", error.strerror or str(error)))
            continue
        if not stat.S_ISREG(status.st_mode):
            refused.append(Refusal(relative, "unreadable", "not a regular file"))
        elif status.st_size == 0:
            refused.append(Refusal(relative, "broken", "the file is empty"))
        else:
            sources.append(Source(relative, status.st_size, status.st_mtime_ns))
    if not sources and not refused:
        found = ", ".join(f"{count} {suffix}" for suffix, count in ignored.most_common(5))
        raise UserError(
            f"{folder}: " + (f"holds no picture (found {found})" if found else "the folder is empty"),
            hint=f"pictures are files that end in {' '.join(sorted(SUFFIXES))}, in any subfolder",
        )
    return Tree(sorted(sources, key=lambda s: s.path), sorted(refused, key=lambda r: r.path), dict(ignored))


def _walk(folder: Path, refused: list[Refusal]) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        name = Path(error.filename).relative_to(folder).as_posix()
        refused.append(Refusal(name, "unreadable", error.strerror or str(error)))

    seen: set[tuple[int, int]] = set()
    for root, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        status = os.stat(root)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__MACOSX")
        yield from (Path(root, name) for name in names)


# ------------------------------------------------------------------------------------------------ decoding


@dataclass(frozen=True)
class Header:
    """What a file says of its picture before it is decoded; width and height are those of the upright picture."""

    format: str
    mode: str
    width: int
    height: int


def read_header(path: Path, *, min_size: int = 1, max_pixels: int = MAX_PIXELS) -> Header:
    """Read format and size without decoding. Raises Refused: broken, unreadable, tiny or huge."""
    with _opened(path, min_size, max_pixels) as image:
        width, height = image.size
        # Pillow would decode a whole PNG to look for a tag behind its pixels.
        known = image.format != "PNG" or "exif" in image.info
        if known and image.format != "TIFF" and _orientation(image) >= 5:
            width, height = height, width
        return Header(image.format or "", image.mode, width, height)


def read_rgb(
    path: Path,
    *,
    crop: Callable[[int, int], Box] | None = None,
    min_size: int = 1,
    max_pixels: int = MAX_PIXELS,
) -> Image.Image:
    """Decode a picture of any kind into upright 8-bit sRGB, without metadata: the one decoder of gputrain.

    `crop(width, height)` chooses the part to keep before it is converted; it sees the picture as stored, before the
    EXIF rotation. Of an animation the first frame counts. Transparency is laid on white, the paper for which most
    cut-outs are drawn; what lies hidden under it is rubbish. 16 bits are scaled to 8; for 32-bit integers and
    floats, white is the smallest of 1, 255, 65535 and the maximum that holds every value. An embedded ICC profile
    is converted to sRGB, a broken one ignored. Raises Refused: broken, unreadable, tiny or huge.
    """
    with _opened(path, min_size, max_pixels) as opened:
        opened.load()
        image: Image.Image = opened
        upright = UPRIGHT.get(_orientation(image))
        if image.mode in ("I", "F") or image.mode.startswith("I;16"):
            image = _in_8_bits(image)
        if crop is not None:
            image = image.crop(crop(*image.size))
        image = _in_srgb(image)
        if upright is not None:
            image = image.transpose(upright)
        image.info = {}
        return image


@contextmanager
def _opened(path: Path, min_size: int, max_pixels: int) -> Iterator[Image.Image]:
    # Pillow's own limit is fixed and warns on the way; `max_pixels` takes its place, before anything is decoded.
    Image.MAX_IMAGE_PIXELS = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, on odd tags
            with Image.open(path, formats=FORMATS) as image:
                width, height = image.size
                if width * height > max_pixels:
                    raise Refused(path, "huge", f"{width} x {height} pixels, the limit is {max_pixels / 1e6:g} million")
                if min(width, height) < min_size:
                    raise Refused(path, "tiny", f"{width} x {height} pixels, the smaller side must have {min_size}")
                yield image
    except UnidentifiedImageError:
        raise Refused(path, "broken", "not a picture, whatever its name says") from None
    except MemoryError:
        raise Refused(path, "huge", "does not fit in memory") from None
    except OSError as error:
        if error.errno is not None:
            raise Refused(path, "unreadable", error.strerror or str(error)) from None
        raise Refused(path, "broken", str(error)) from None
    except DAMAGE as error:
        raise Refused(path, "broken", f"{type(error).__name__}: {error}") from None


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 to 8; 1 is upright. Pillow turns a TIFF itself while it loads, and drops the tag."""
    try:
        value = image.getexif().get(0x0112)
    except (OSError, *DAMAGE):
        return 1
    return value if isinstance(value, int) else 1


def _in_8_bits(image: Image.Image) -> Image.Image:
    values = np.asarray(image)
    white = 65535.0
    if not image.mode.startswith("I;16"):
        values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
        largest = float(values.max())
        white = next((limit for limit in (1.0, 255.0, 65535.0) if largest <= limit), largest)
    levels = np.multiply(values, 255.0 / white, dtype=np.float32).round().clip(0, 255)
    grey = Image.fromarray(levels.astype(np.uint8))
    grey.info = {key: value for key, value in image.info.items() if key == "icc_profile"}
    return grey


def _in_srgb(image: Image.Image) -> Image.Image:
    profile = image.info.get("icc_profile")
    if image.has_transparency_data:
        cut_out = image.convert("RGBA")
        image = Image.new("RGB", cut_out.size, "white")
        image.paste(cut_out, mask=cut_out)
    elif image.mode == "P":
        image = image.convert("RGB")
    transform = _to_srgb(profile, image.mode) if isinstance(profile, bytes) else None
    if transform is not None:
        return transform.apply(image)
    return image if image.mode == "RGB" else image.convert("RGB")


@lru_cache(maxsize=16)
def _to_srgb(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """The way from an embedded profile to sRGB; None if the profile is unusable or is sRGB itself."""
    try:
        source = ImageCms.ImageCmsProfile(BytesIO(profile))
        srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))
        transform = ImageCms.ImageCmsTransform(source, srgb, mode, "RGB")
    except (ImportError, OSError, *DAMAGE):  # ImportError: a Pillow built without LittleCMS
        return None
    if mode == "RGB":
        levels = np.arange(0, 256, 15, dtype=np.uint8)
        colours = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(len(levels), -1, 3)
        changed = np.asarray(transform.apply(Image.fromarray(colours)))
        if np.abs(changed.astype(np.int16) - colours).max() <= 1:
            return None
    return transform


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
    refused: list[Refusal]


def open_pictures(folder: Path, *, held_out_share: float = HELD_OUT_SHARE) -> Pictures:
    """Open a prepared folder by its manifest, or any folder tree by reading every header, and split it.

    Raises UserError if the folder is missing, empty, half prepared, or holds no readable picture.
    """
    refused: list[Refusal] = []
    if (folder / MANIFEST).is_file():
        rows = read_rows(folder / MANIFEST, ("path", "width", "height", "bytes", "fingerprint"))
        found = _in_threads(partial(_from_manifest, folder), rows)
    elif (folder / JOURNAL).is_file():
        raise UserError(f"{folder}: its preparation was not finished", hint="run gputrain prepare-data again")
    else:
        tree = scan(folder)
        refused += tree.refused
        found = _in_threads(partial(_from_file, folder), tree.sources)
    pictures = [one for one in found if isinstance(one, Picture)]
    refused += [one for one in found if isinstance(one, Refusal)]
    if not pictures:
        first = f"; {refused[0].path}: {refused[0].detail}" if refused else ""
        raise UserError(
            f"{folder}: no readable picture among {len(refused)} files{first}",
            hint="gputrain validate names each and its fault",
        )
    parts = split(pictures, held_out_share, key=lambda picture: picture.fingerprint)
    return Pictures(parts.train, parts.held_out, parts.shared, refused)


def _in_threads(look: Callable[[T], Picture | Refusal], items: Sequence[T]) -> list[Picture | Refusal]:
    with warnings.catch_warnings(), ThreadPoolExecutor(min(32, 4 * (os.cpu_count() or 1))) as pool:
        warnings.simplefilter("ignore")  # what the threads change here is undone with it
        return list(pool.map(look, items))


def _from_manifest(folder: Path, row: dict[str, Any]) -> Picture | Refusal:
    path = folder / row["path"]
    try:
        if path.stat().st_size != row["bytes"]:
            return Refusal(row["path"], "broken", "not the file that the manifest describes")
    except OSError as error:
        return Refusal(row["path"], "unreadable", error.strerror or str(error))
    return Picture(path, row["width"], row["height"], row["fingerprint"])


def _from_file(folder: Path, source: Source) -> Picture | Refusal:
    path = folder / source.path
    try:
        header = read_header(path, min_size=MIN_SIZE)
        return Picture(path, header.width, header.height, fingerprint(path))
    except Refused as refused:
        return Refusal(source.path, refused.reason, refused.detail)
    except OSError as error:
        return Refusal(source.path, "unreadable", error.strerror or str(error))


# ------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class CropDataset:
    """Random square crops at native resolution, the data set of `gputrain.data.loader`.

    Place and mirroring of a crop are functions of (seed, epoch, item). Of a picture whose smaller side is below
    `image_size`, a crop of that side is enlarged.
    """

    pictures: Sequence[Picture]
    image_size: int
    seed: int
    horizontal_flip: bool

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
                image = _square(path, self.image_size, x, y)
            except Refused as refused:
                warnings.warn(f"{refused}; the next picture stands in for it", DataWarning, stacklevel=2)
                continue
            if self.horizontal_flip and coin < 0.5:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            return image_tensor(image)
        raise UserError(
            f"none of the {len(self.pictures)} training pictures can be read any more",
            hint="see whether their folder is still in place; gputrain validate names each fault",
        )


def centre_crop(path: Path, image_size: int) -> "torch.Tensor":
    """The middle of a picture, for evaluation and sample sheets: uint8, 3HW, H = W = image_size. Raises UserError."""
    return image_tensor(_square(path, image_size, 0.5, 0.5))


def _square(path: Path, size: int, x: float, y: float) -> Image.Image:
    """A crop of size x size; x and y in [0, 1) say how far from the left and the top it lies."""

    def box(width: int, height: int) -> Box:
        side = min(size, width, height)
        left, top = int(x * (width - side + 1)), int(y * (height - side + 1))
        return left, top, left + side, top + side

    image = read_rgb(path, crop=box)
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
