"""Finds the pictures of a folder tree, and decodes pictures of all supported formats."""

import struct
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from PIL import Image, ImageCms, UnidentifiedImageError

from gputrain.engine.preparation import (
    RefusedItem,
    SourceFile,
    check_input_folder,
    scan,
    sorted_refusals,
    source_files,
)
from gputrain.errors import UserError
from gputrain.vae.config import PictureLimits

T = TypeVar("T")
PictureFault = Literal["broken", "tiny", "huge", "duplicate", "unreadable"]
Box = tuple[int, int, int, int]  # left, top, right, bottom
Crop = Callable[[int, int], Box]  # Takes width and height.

SUFFIXES = {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".tif", ".tiff", ".bmp", ".dib", ".gif"}
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "DIB", "GIF")
# Training reads prepared pictures of any size, but no decompression bomb.
ANY_SIZE = PictureLimits(min_size=1)
JOURNAL = "journal.jsonl"  # It exists from the start of a preparation on.

# Pillow's decoders raise these for damaged content, besides OSError.
DAMAGE = (SyntaxError, ValueError, EOFError, IndexError, OverflowError, struct.error)
# Transposition that makes a picture upright, by its EXIF orientation.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class UnusablePicture(UserError):
    """Raised for a picture that cannot be used."""

    def __init__(self, path: Path, reason: PictureFault, detail: str) -> None:
        super().__init__(f"{path}: {reason}: {detail}", hint="gputrain validate lists every such file of a folder")
        self.path, self.reason, self.detail = path, reason, detail

    def __reduce__(self) -> tuple[type["UnusablePicture"], tuple[Path, PictureFault, str]]:
        return UnusablePicture, (self.path, self.reason, self.detail)


def result_or_refusal(path: str, look: Callable[[], T]) -> T | RefusedItem:
    """Returns the result of `look`, or why it cannot read the picture at the relative `path`."""
    try:
        return look()
    except UnusablePicture as refused:
        return RefusedItem(path, refused.reason, refused.detail)
    except OSError as error:
        return RefusedItem(path, "unreadable", error.strerror or str(error))


# ------------------------------------------------------------------------------------------------- finding


@dataclass(frozen=True)
class PictureTree:
    """Content of a folder: pictures and refused files, sorted by path, and the number of other files by suffix."""

    sources: list[SourceFile]
    refused: list[RefusedItem]
    ignored: dict[str, int]


def scan_pictures(folder: Path) -> PictureTree:
    """Finds the pictures of a folder tree by their suffixes, as `preparation.scan` does.

    Raises UserError if the folder is missing or holds no picture.
    """
    check_input_folder(folder, "pictures: --data-path FOLDER")
    tree = scan(folder, SUFFIXES)
    if not tree.paths and not tree.refused:
        found = ", ".join(f"{count} {suffix}" for suffix, count in Counter(tree.ignored).most_common(5))
        raise UserError(
            f"{folder}: " + (f"holds no picture (found {found})" if found else "the folder is empty"),
            hint=f"pictures are files with one of the suffixes {' '.join(sorted(SUFFIXES))}, in any subfolder",
        )
    refused = tree.refused
    files = source_files(folder, tree.paths, refused)
    refused += [RefusedItem(one.path, "broken", "the file is empty") for one in files if not one.bytes]
    return PictureTree([one for one in files if one.bytes], sorted_refusals(refused), tree.ignored)


# ------------------------------------------------------------------------------------------------ decoding


@dataclass(frozen=True)
class Header:
    """Format and size of a picture, read without decoding; width and height are those of the upright picture."""

    format: str
    mode: str
    width: int
    height: int


def has_transparency(path: Path) -> bool:
    """Returns True if a picture has a channel or a colour of transparency. Raises UnusablePicture."""
    with _opened(path, ANY_SIZE) as image:
        return image.has_transparency_data


def read_header(path: Path, limits: PictureLimits = ANY_SIZE) -> Header:
    """Reads format and size without decoding. Raises UnusablePicture: broken, unreadable, tiny or huge."""
    with _opened(path, limits) as image:
        width, height = image.size
        # For PNG, Pillow would decode the whole file to search for a tag after the pixels.
        known = image.format != "PNG" or "exif" in image.info
        if known and image.format != "TIFF" and _orientation(image) >= 5:
            width, height = height, width
        return Header(image.format or "", image.mode, width, height)


def read_picture(
    path: Path, limits: PictureLimits = ANY_SIZE, *, crop: Crop | None = None, channels: int = 3
) -> Image.Image:
    """Decodes a picture of any supported format into upright 8-bit sRGB without metadata, or with `channels` 1 into
    grayscale (Rec. 601 luma of the sRGB colours), with 4 into sRGB with transparency.

    `crop(width, height)` returns the box to keep, for the size of the stored picture before the EXIF rotation. Only
    the first frame of an animation is read. With 1 and 3 channels, transparency is composited over white, the
    background for which most cut-outs are drawn, as hidden colours are meaningless; with 4 it is kept, and colours are
    not multiplied by it. 16 bits are scaled to 8; for 32-bit integers and floats, white is the smallest of 1, 255,
    65535 and the maximum that is not exceeded by any value. Colours are converted from an embedded ICC profile to sRGB;
    a broken profile is ignored. Raises UnusablePicture: broken, unreadable, tiny or huge.
    """
    return decode(path, limits, crop=crop, channels=channels).part()


@dataclass(frozen=True)
class Decoded:
    """A picture with 8 bits as stored, and the transposition that makes it upright."""

    image: Image.Image
    upright: Image.Transpose | None

    def part(self, crop: Crop | None = None) -> Image.Image:
        """Returns the part that `crop` chooses, upright, as `read_picture` would return it."""
        image = self.image if crop is None else self.image.crop(crop(*self.image.size))
        if self.upright is not None:
            image = image.transpose(self.upright)
        image.info = {}
        return image


def decode(path: Path, limits: PictureLimits = ANY_SIZE, *, crop: Crop | None = None, channels: int = 3) -> Decoded:
    """Decodes a picture, or the part that `crop` chooses, as `read_picture` does, with the same errors."""
    with _opened(path, limits) as opened:
        opened.load()
        image: Image.Image = opened
        upright = UPRIGHT.get(_orientation(image))
        if image.mode in ("I", "F") or image.mode.startswith("I;16"):
            image = _in_8_bits(image)
        if crop is not None:
            image = image.crop(crop(*image.size))
        return Decoded(CONVERTED[channels](image), upright)


@contextmanager
def _opened(path: Path, limits: PictureLimits) -> Iterator[Image.Image]:
    # The limit of pixels replaces Pillow's own limit, which is fixed and also warns; it is checked before decoding.
    Image.MAX_IMAGE_PIXELS = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about invalid tags.
            with Image.open(path, formats=FORMATS) as image:
                width, height = image.size
                if width * height > limits.max_pixels:
                    raise UnusablePicture(
                        path, "huge", f"{width} x {height} pixels, the limit is {limits.max_megapixels:g} million"
                    )
                if min(width, height) < limits.min_size:
                    raise UnusablePicture(
                        path, "tiny", f"{width} x {height} pixels, the smaller side must have {limits.min_size}"
                    )
                yield image
    except UnidentifiedImageError:
        raise UnusablePicture(path, "broken", "not a picture, although its name says so") from None
    except MemoryError:
        raise UnusablePicture(path, "huge", "does not fit in memory") from None
    except OSError as error:
        if error.errno is not None:
            raise UnusablePicture(path, "unreadable", error.strerror or str(error)) from None
        raise UnusablePicture(path, "broken", str(error)) from None
    except DAMAGE as error:
        raise UnusablePicture(path, "broken", f"{type(error).__name__}: {error}") from None


def _orientation(image: Image.Image) -> int:
    """Returns the EXIF orientation, 1 to 8; 1 is upright. Pillow rotates a TIFF itself on loading and drops the tag."""
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


def _in_gray(image: Image.Image) -> Image.Image:
    return _in_srgb(image).convert("L")


def _with_alpha(image: Image.Image) -> Image.Image:
    """Returns a picture with its transparency. Its profile applies to the colours alone."""
    profile = image.info.get("icc_profile")
    if not image.has_transparency_data:
        return _in_srgb(image).convert("RGBA")
    made = image.convert("RGBA")
    alpha = made.getchannel("A")
    colours = made.convert("L" if image.mode in ("L", "LA", "La") else "RGB")
    transform = _to_srgb(profile, colours.mode) if isinstance(profile, bytes) else None
    if transform is not None:
        made = transform.apply(colours).convert("RGBA")
        made.putalpha(alpha)
    return made


# How a picture becomes one of so many channels.
CONVERTED: Mapping[int, Callable[[Image.Image], Image.Image]] = {1: _in_gray, 3: _in_srgb, 4: _with_alpha}


@lru_cache(maxsize=16)
def _to_srgb(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Returns the transform from an embedded profile to sRGB; None if the profile is unusable or is sRGB itself."""
    try:
        source = ImageCms.ImageCmsProfile(BytesIO(profile))
        srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))
        transform = ImageCms.ImageCmsTransform(source, srgb, mode, "RGB")
    except (ImportError, OSError, *DAMAGE):  # Pillow built without LittleCMS raises ImportError.
        return None
    if mode == "RGB":
        levels = np.arange(0, 256, 15, dtype=np.uint8)
        colours = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(len(levels), -1, 3)
        changed = np.asarray(transform.apply(Image.fromarray(colours)))
        if np.abs(changed.astype(np.int16) - colours).max() <= 1:
            return None
    return transform
