"""Finds the pictures of a folder tree, and decodes pictures of all supported formats."""

import logging
import re
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageCms, PngImagePlugin, UnidentifiedImageError, features

from gputrain.data_in.containers import PICTURES, READ, hint_of_others
from gputrain.data_in.preparation import (
    Companions,
    RefusedItem,
    SourceFile,
    check_input_folder,
    format_counts,
    hole_of_zeros,
    scan,
    sorted_refusals,
    source_files,
)
from gputrain.errors import UserError
from gputrain.vae.config import PictureLimits

T = TypeVar("T")
PictureFault = Literal["broken", "unsupported", "tiny", "huge", "one colour", "dark", "duplicate", "unreadable"]
FLAT = 2  # Levels between the darkest and the brightest pixel of a picture of one colour, which JPEG may add.
HDR = {8: "linear", 16: "those of HDR (PQ)", 18: "those of HDR (HLG)"}  # Transfer functions of ITU-T H.273.
DARK = 16  # Brightest level of a picture that is nearly black: white of 12 bits in a file of 16.
Box = tuple[int, int, int, int]  # left, top, right, bottom
Crop = Callable[[int, int], Box]  # Takes width and height.

FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "DIB", "GIF")
# Pictures that Pillow does not read, or not each build of it, by the bytes from an offset on.
OTHER_FORMATS = {
    (4, rb"ftyp(avif|avis)"): "AVIF",
    (4, rb"ftyp(hei|hev|mif1|msf1)"): "HEIC",
    (0, rb"\xff\x0a|\0\0\0\x0cJXL "): "JPEG XL",
    (0, rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51"): "JPEG 2000",
    (0, rb"8BPS"): "Photoshop",
    (0, rb"\x76\x2f\x31\x01"): "OpenEXR",
    (0, rb"P[1-6]\s"): "PPM",
    (0, rb"%PDF"): "PDF",
    (0, rb"\s*(<\?xml|<svg)"): "SVG",
}
# Training reads prepared pictures of any size, but no decompression bomb.
ANY_SIZE = PictureLimits(min_size=1)
NEXT_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # Restart markers and stuffed bytes belong to a scan of JPEG.
PROGRESSIVE_FRAME, START_OF_SCAN, END_OF_IMAGE = 0xC2, 0xDA, 0xD9
LEAST_ROWS = 8  # Rows of one colour at the end of a picture that may be damage: a row of blocks.
TAIL = 96  # Bytes at the end of a scan that are looked at.
JOURNAL = "journal.jsonl"  # It exists from the start of a preparation on.

# Pillow's decoders raise these for damaged content, besides OSError; that of AVIF the last.
DAMAGE = (SyntaxError, ValueError, EOFError, IndexError, OverflowError, struct.error, RuntimeError)
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
    """Content of a folder: pictures and refused files, sorted by path, and the other files by suffix."""

    sources: list[SourceFile]
    refused: list[RefusedItem]
    ignored: dict[str, list[str]]


# What generation tools and data sets keep beside a picture: NAME-masklabel.png, masks/NAME.png.
MASKS = Companions(
    "mask",
    re.compile(
        r"(.+?)[-_. ]+(?:mask(?:s?[-_. ]?\d+)?|masklabel|cond|condlabel|conditioning|control|depth|normal|canny|hed|"
        r"scribble|lineart|(?:open)?pose|seg|segmentation|alpha|matte|trimap)s?", re.IGNORECASE,
    ),
    re.compile(r"(.+)"),
    re.compile(
        r"(?:mask|cond|conditioning|control|controlnet|depth|canny|openpose|seg|segmentation|matte|trimap|"
        r"annotation|label)s?(?:[-_ ]?(?:map|image|label|class|object)s?)?", re.IGNORECASE,
    ),
)  # fmt: skip


def scan_pictures(folder: Path, exclude: Sequence[str] | None = None) -> PictureTree:
    """Finds the pictures of a folder tree by their suffixes, as `preparation.scan` does: all, or those of a training,
    without masks and without those that `exclude` matches.

    Raises UserError if the folder is missing or holds no picture.
    """
    check_input_folder(folder, "pictures")
    tree = scan(folder, PICTURES, exclude or (), None if exclude is None else MASKS)
    if not tree.paths and not tree.refused:
        found = format_counts(tree.ignored)
        raise UserError(
            f"{folder}: " + (f"holds no picture (found {found})" if found else "the folder is empty"),
            hint=hint_of_others(tree.ignored)
            or f"pictures are files with one of the suffixes {' '.join(sorted(PICTURES))}, in any subfolder; read "
            f"are {READ}",
        )
    refused = tree.refused
    files = source_files(folder, tree.paths, refused)
    refused += [RefusedItem(file.path, "broken", "the file is empty") for file in files if not file.bytes]
    return PictureTree([file for file in files if file.bytes], sorted_refusals(refused), tree.ignored)


# ---------------------------------------------------------------------------------------------------- TIFF

# TIFF pictures that Pillow refuses or misreads have 16-bit samples in separate planes or with white as zero, floats,
# signed and wide integers, or premultiplied transparency. Tags and their values are those of TIFF 6.0 (Adobe, 1992):
# https://www.adobe.io/open/standards/TIFF.html.
STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
WHITE_IS_ZERO, BLACK_IS_ZERO, RGB, SEPARATED = 0, 1, 2, 5  # Values of PhotometricInterpretation.
SAMPLE_FORMATS = {1: "unsigned", 2: "signed", 3: "float", 5: "complex", 6: "complex"}
PREMULTIPLIED = 1  # Value of ExtraSamples.
REDUCED = 1  # Bit of NewSubfileType.
SUBSAMPLING = 530
JPEG = (6, 7)  # Values of Compression.


@dataclass(frozen=True)
class TiffLayout:
    """Layout in which a TIFF file stores its first picture that is no thumbnail; `page` is its number."""

    page: int
    bits: int
    is_compressed: bool
    pillow_reads: bool  # True if Pillow decodes it rightly; found by comparison with files of known content.
    description: str

    def refusal(self, path: Path) -> UnusablePicture:
        hint = "save it as a PNG, or as a TIFF with 8-bit samples"
        return UnusablePicture(path, "unsupported", f"a TIFF of {self.description}, which is not supported: {hint}")

    @classmethod
    def of_page(cls, page: Any, number: int) -> "TiffLayout":
        """Returns the layout of a page of tifffile."""
        facts = (page.bitspersample, page.samplesperpixel, page.sampleformat)
        bits, samples, form = (int(np.max(fact)) for fact in facts)
        photometric, extra, compression = int(page.photometric), tuple(map(int, page.extrasamples)), page.compression
        separate = int(page.planarconfig or 1) == 2  # Each sample has a plane of its own.
        is_gray = photometric in (WHITE_IS_ZERO, BLACK_IS_ZERO)
        tags = page.tags
        # Outside of JPEG, Pillow takes several pixels that share a pair of colour differences for pixels.
        subsampled = SUBSAMPLING in tags and tuple(tags[SUBSAMPLING].value) != (1, 1) and compression not in JPEG
        is_read = SAMPLE_FORMATS.get(form) == "unsigned" and bits <= 16 and not subsampled
        is_read &= not (is_gray and samples > 2)  # The bands of a satellite.
        if bits > 8:
            gray = photometric == BLACK_IS_ZERO and samples == 1
            is_read &= gray or (photometric in (RGB, SEPARATED) and not separate)
        else:
            is_read &= not (separate and extra) and not (PREMULTIPLIED in extra and photometric != RGB)
        words = [f"{bits}-bit {SAMPLE_FORMATS.get(form, 'undefined')} samples, {samples} a pixel"]
        words += [getattr(page.photometric, "name", "unknown").lower() + " colours"] * (not is_gray)
        words += ["white as zero"] * (photometric == WHITE_IS_ZERO) + ["separate planes"] * separate
        words += [f"{getattr(compression, 'name', 'unknown')} compression"] * (compression != 1)
        return cls(number, bits, compression != 1, is_read, ", ".join(words))


def read_layout(path: Path) -> TiffLayout | None:
    """Returns the layout of a TIFF file; None for a file of another format or with damaged tags."""
    with path.open("rb") as file:
        start = file.read(4)
    if start not in STARTS:
        return None
    from tifffile import TiffFile

    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # What it says of damaged tags is said by the refusal.
    try:
        with TiffFile(path) as tiff:
            pages = [tiff.pages[number] for number in range(len(tiff.pages))]
            number = next((n for n, page in enumerate(pages) if not page.subfiletype & REDUCED), 0)
            return TiffLayout.of_page(pages[number], number)
    except Exception:  # Damaged tags raise any error in it; Pillow then names the fault, or reads the file.
        return None


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
    with _opened(path, ANY_SIZE) as (image, _):
        return image.has_transparency_data


def read_header(path: Path, limits: PictureLimits = ANY_SIZE) -> Header:
    """Reads format and size without decoding. Raises UnusablePicture: broken, unsupported, unreadable, tiny or huge."""
    with _opened(path, limits) as (image, _):
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
    not multiplied by it. 16 bits are scaled to 8. Colours are converted from an
    embedded ICC profile to sRGB; a broken profile is ignored. Raises UnusablePicture: broken, unsupported, unreadable,
    tiny or huge.
    """
    with _opened(path, limits) as (opened, tiff):
        image, upright = _decoded(path, opened, tiff)
        if crop is not None:
            image = image.crop(crop(*image.size))
        image = CONVERTED[channels](image)
        if upright is not None:
            image = image.transpose(upright)
        image.info = {}
        return image


def check_colours(path: Path, image: Image.Image) -> None:
    """Raises UnusablePicture if all visible pixels of a decoded picture have one colour or are nearly black: there is
    nothing to learn."""
    ranges = [(round(low), round(high)) for low, high in np.atleast_2d(image.getextrema()).tolist()]
    if image.mode == "RGBA" and ranges[3][1] <= FLAT:
        raise UnusablePicture(path, "one colour", "it is fully transparent")
    if all(high - low <= FLAT for low, high in ranges):
        colour = ", ".join(str(low) for low, _ in ranges)
        hint = ""
        if image.mode != "RGBA" and has_transparency(path):
            hint = " over the white ground of its transparency, which prepare-data --image-channels 4 keeps"
        raise UnusablePicture(path, "one colour", f"all its pixels are {colour}{hint}")
    brightest = max(high for _, high in ranges[:3])
    if brightest <= DARK:
        raise UnusablePicture(
            path, "dark", f"its brightest level is {brightest} of 255, as of samples of 12 bits stored in 16, or where "
            "numbers of labels are stored as levels: scale the levels up to white",
        )  # fmt: skip


@contextmanager
def _opened(path: Path, limits: PictureLimits) -> Iterator[tuple[Image.Image, TiffLayout | None]]:
    """Yields a picture of which only the header has been read, and its layout if it is a TIFF. Raises UnusablePicture,
    also for what fails in the block."""
    # The limit of pixels replaces Pillow's own limit, which is fixed and also warns; it is checked before decoding.
    Image.MAX_IMAGE_PIXELS = None
    # Programs that generate pictures keep more than Pillow's 1 MB beside them; the limit of all text of a file stays.
    PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY
    try:
        with warnings.catch_warnings(), ExitStack() as open_files:
            warnings.simplefilter("ignore")  # Pillow warns about invalid tags.
            tiff = read_layout(path)
            if tiff and not tiff.pillow_reads:
                raise tiff.refusal(path)
            try:
                image = open_files.enter_context(Image.open(path, formats=_readable_formats()))
            except UnidentifiedImageError:
                raise (tiff.refusal(path) if tiff else _unidentified(path)) from None
            if tiff and tiff.page:
                image.seek(tiff.page)
            _check_size(path, limits, *image.size)
            yield image, tiff
    except MemoryError:
        raise UnusablePicture(path, "huge", "does not fit in memory") from None
    except OSError as error:
        if error.errno is not None:
            raise UnusablePicture(path, "unreadable", error.strerror or str(error)) from None
        raise UnusablePicture(path, "broken", str(error)) from None
    except DAMAGE as error:
        raise UnusablePicture(path, "broken", f"{type(error).__name__}: {error}") from None


def _check_size(path: Path, limits: PictureLimits, width: int, height: int) -> None:
    if width * height > 1e6 * limits.max_megapixels:
        raise UnusablePicture(
            path, "huge", f"{width} x {height} pixels, the limit is {limits.max_megapixels:g} million"
        )
    if min(width, height) < limits.min_size:
        raise UnusablePicture(path, "tiny", f"{width} x {height} pixels, the smaller side must have {limits.min_size}")


def _check_whole(path: Path, image: Image.Image, tiff: TiffLayout | None) -> None:
    """Raises UnusablePicture if the file has a hole of zeros, as an interrupted copy or a bad disk leaves it, or was
    cut: decoders fill what is missing with gray, black or noise and say nothing. PNG has checksums."""
    if image.format in ("PNG", "GIF"):
        return
    content, fault = path.read_bytes(), ""
    if image.format in ("BMP", "DIB") or (tiff and not tiff.is_compressed):  # Without compression zeros are black.
        hole = hole_of_zeros(content, 0, len(content), 4096, 4096)
        hole = hole if hole and (hole[1] - hole[0]) % (image.width * len(image.getbands())) else None
        # The rows of a BMP are stored from the last to the first.
        if image.mode in ("L", "RGB") and (rows := _lost_rows(np.asarray(image)[:: 1 if tiff else -1])):
            fault = f"{rows} rows and a part of the row before them are zero"
    else:
        stripped = content.rstrip(b"\0")
        # Some programs pad a complete JPEG with zeros.
        end = len(stripped) if stripped.endswith(b"\xff\xd9") else len(content)
        if content[:4] == b"RIFF":
            end = min(len(content), 8 + int.from_bytes(content[4:8], "little"))
        is_jpeg = content[:2] == b"\xff\xd8"  # Its headers and codes may hold zeros of their own, but no whole pages.
        hole = hole_of_zeros(content, 0, end, 512, 4096 if is_jpeg else 1)
        fault = _lost_in_jpeg(content, image) if is_jpeg else ""
    if hole:
        fault = f"the bytes {hole[0]} to {hole[1]} of the file are zero, as after a copy that was interrupted"
    if fault:
        raise UnusablePicture(path, "broken", f"damaged: {fault}")


def _lost_rows(levels: npt.NDArray[np.uint8]) -> int:
    """Returns the number of rows of zeros at the end of a picture that begin within a row before which nothing is
    black, as lost rows do and a border does not; 0 for none."""
    black_HW = np.atleast_3d(levels).max(axis=2) == 0
    height, width = black_HW.shape
    rows = int(np.argmin(black_HW.all(axis=1)[::-1]))
    if not max(LEAST_ROWS, height // 50) <= rows <= height - 2:
        return 0
    split_W, before_W = black_HW[height - rows - 1], black_HW[height - rows - 2]
    first = width - int(np.argmin(split_W[::-1]))
    is_step = width - first >= 4 and split_W[:first].mean() <= 0.1 and before_W[first:].mean() <= 0.1
    # Drawings of few levels have such steps.
    return rows if is_step and len(np.unique(levels)) > 64 else 0


def _lost_in_jpeg(content: bytes, image: Image.Image) -> str:
    """Returns what a JPEG lacks by its markers (ITU-T T.81, annex B), or if its end is the gray of blocks without data;
    "" if it lacks nothing."""
    is_progressive, at = False, 2
    missing: set[tuple[int, int]] = set()  # Component and whether it is the constant part (0) or the others (1).
    while (marker := NEXT_MARKER.search(content, at)) and content[marker.start() + 1] != END_OF_IMAGE:
        kind, at = content[marker.start() + 1], marker.end() + int.from_bytes(content[marker.end() :][:2], "big")
        head = content[marker.end() + 2 : at]
        if kind == PROGRESSIVE_FRAME and len(head) > 6:
            is_progressive, missing = True, {(name, part) for name in head[6::3] for part in (0, 1)}
        elif kind == START_OF_SCAN and len(head) >= 4 + 2 * head[0]:
            begin, end, precision = head[-3:]
            if not precision & 15:
                parts = {0} if not end else {0, 1} if not begin else {1}
                missing -= {(name, part) for name in head[1:-3:2] for part in parts}
            following = NEXT_MARKER.search(content, at)
            stop = following.start() if following else len(content)
            restarts = [mark[0] - 0xD0 for mark in re.findall(rb"\xff([\xd0-\xd7])", content[at:stop])]
            if restarts != [number % 8 for number in range(len(restarts))]:
                return "its restart intervals are out of order: some are missing"
            tail, rows = content[max(at, stop - TAIL) : stop], max(LEAST_ROWS, 256 * TAIL // image.width)
            # Codes of an area of one colour repeat, and fill TAIL bytes with two bits a block.
            if not is_progressive and image.height >= 2 * rows and len(zlib.compress(tail)) >= 0.75 * len(tail):
                is_gray = image.getpixel((image.width - 1, image.height - 1)) in (128, (128, 128, 128))
                # Training decodes, too: all rows of the end are looked at only if its last pixel is gray.
                if (
                    is_gray
                    and (np.asarray(image.crop((0, image.height - rows, image.width, image.height))) == 128).all()
                ):
                    return "its last rows are gray, and the file holds no data for them: it was cut short"
            at = stop
    return "it is progressive, and its last scans are missing" if missing else ""


def _decoded(path: Path, image: Image.Image, tiff: TiffLayout | None) -> tuple[Image.Image, Image.Transpose | None]:
    """Returns a picture as it is stored, in one of Pillow's modes of 8 bits, and the transposition that makes it
    upright."""
    bits = _bits_of_gray_png(image)
    if image.format == "PNG":
        _check_light(path, image)
    image.load()
    _check_whole(path, image, tiff)
    upright = UPRIGHT.get(_orientation(image))
    if image.mode == "I" or image.mode.startswith("I;16"):  # Some versions of Pillow have 16 bits in 32.
        return _in_8_bits(image, tiff.bits if tiff else 16), upright
    level = image.info.get("transparency")
    if bits and isinstance(level, int) and level < 2**bits:  # Pillow scales the levels to 8 bits, but not this one.
        gray = image.convert("L")
        gray.info = {**image.info, "transparency": level * 255 // (2**bits - 1)}
        return gray, upright
    return image, upright


def _check_light(path: Path, image: Image.Image) -> None:
    """Raises UnusablePicture for a PNG of linear or HDR levels, which as sRGB would be far too dark or too pale."""
    with path.open("rb") as file:
        _, found, coding = file.read(1024).partition(b"cICP")  # Pillow skips this chunk.
    light = HDR.get(coding[1], "") if found and len(coding) > 1 else ""
    if not light and image.info.get("gamma", 0) > 0.9 and not {"srgb", "icc_profile"} & image.info.keys():
        light = "linear"
    if light:
        raise UnusablePicture(path, "unsupported", f"its levels are {light}, as its header says: convert it to sRGB")


def _bits_of_gray_png(image: Image.Image) -> int:
    """Returns 1, 2 or 4 for a gray PNG of so many bits that has not been decoded; otherwise 0."""
    tiles = getattr(image, "tile", None)
    return {"1": 1, "L;2": 2, "L;4": 4}.get(str(tiles[0][3]), 0) if tiles and image.format == "PNG" else 0


@cache
def _readable_formats() -> tuple[str, ...]:
    return (*FORMATS, "AVIF") if "avif" in features.modules and features.check("avif") else FORMATS


def _unidentified(path: Path) -> UnusablePicture:
    with path.open("rb") as file:
        start = file.read(64)
    for (offset, pattern), name in OTHER_FORMATS.items():
        if re.match(pattern, start[offset:]):
            return UnusablePicture(
                path, "unsupported", f"a file of format {name}, which is not read: convert it to JPEG or PNG"
            )
    is_picture = start.startswith((b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF"))
    fault = "damaged: its header cannot be read" if is_picture else "not a picture, although its name says so"
    return UnusablePicture(path, "broken", fault)


def _orientation(image: Image.Image) -> int:
    """Returns the EXIF orientation, 1 to 8; 1 is upright. Pillow rotates a TIFF itself on loading and drops the tag."""
    try:
        value = image.getexif().get(0x0112)
    except (OSError, *DAMAGE):
        return 1
    return value if isinstance(value, int) else 1


def _in_8_bits(image: Image.Image, bits: int) -> Image.Image:
    """Returns a gray picture of up to 16 `bits` with 8."""
    values, key = np.asarray(image), image.info.get("transparency")
    shares = np.multiply(values, 1 / (2**bits - 1), dtype=np.float32)
    grey = Image.fromarray((255 * shares).round().clip(0, 255).astype(np.uint8))
    if isinstance(key, int):  # Pixels of this level are transparent.
        grey.putalpha(Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8)))
    grey.info = {name: value for name, value in image.info.items() if name == "icc_profile"}
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
CONVERTED: Mapping[int, Callable[[Image.Image], Image.Image]] = {
    1: lambda image: _in_srgb(image).convert("L"), 3: _in_srgb, 4: _with_alpha,
}  # fmt: skip


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
