"""Decodes the TIFF pictures that Pillow refuses or misreads: 16-bit samples in separate planes or with white as zero,
floats of several channels, signed and wide integers, premultiplied transparency.

Tags and their values are those of TIFF 6.0 (Adobe, 1992): https://www.adobe.io/open/standards/TIFF.html.
Shape suffixes: H rows, W columns, S samples of a pixel.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
WHITE_IS_ZERO, BLACK_IS_ZERO, RGB, PALETTE, SEPARATED, YCBCR, CIELAB = 0, 1, 2, 3, 5, 6, 8  # PhotometricInterpretation
COLOURS = {WHITE_IS_ZERO: 1, BLACK_IS_ZERO: 1, RGB: 3, SEPARATED: 4}  # Samples of a colour.
OTHER_COLOURS = {
    PALETTE: "a palette", YCBCR: "YCbCr colours", CIELAB: "CIELAB colours", 32803: "colours of a sensor (CFA)",
    34892: "linear raw colours", 32845: "LogLuv colours",
}  # fmt: skip
UNSIGNED, SIGNED, FLOAT = 1, 2, 3  # SampleFormat
FORMATS = {UNSIGNED: "unsigned", SIGNED: "signed", FLOAT: "float", 5: "complex", 6: "complex"}
PREMULTIPLIED, TRANSPARENCY = 1, 2  # ExtraSamples
REDUCED = 1  # Bit of NewSubfileType.
ORIENTATION, SUBSAMPLING, ICC_PROFILE = 274, 530, 34675
JPEG = (6, 7)  # Values of Compression.
OTHERS = "save it as a PNG, or as a TIFF with 8-bit samples"


class UnsupportedTiff(Exception):
    """Raised for a TIFF picture that cannot be decoded; the message names its sample format."""


@dataclass(frozen=True)
class TiffLayout:
    """Layout in which a TIFF file stores its first picture that is no thumbnail; `page` is its number."""

    page: int
    width: int
    height: int
    bits: int
    samples: int  # Samples of a pixel.
    sample_format: int
    photometric: int
    separate: bool  # Each sample has a plane of its own.
    extra: tuple[int, ...]
    compression: str  # "" is none.
    big_endian: bool
    orientation: int
    icc_profile: bytes | None
    subsampled: (
        bool  # Several pixels share a pair of colour differences, outside of JPEG, which Pillow reads as pixels.
    )

    @property
    def pillow_reads(self) -> bool:
        """True if Pillow decodes this layout rightly; found by comparison with files of known content."""
        if self.page or self.subsampled:
            return False
        if self.sample_format in (SIGNED, FLOAT):
            native = not (self.big_endian and self.compression)
            return (self.bits, self.samples, self.photometric) == (32, 1, BLACK_IS_ZERO) and native
        if self.sample_format != UNSIGNED or self.bits > 16 or self.is_bands:
            return False
        if self.bits > 8:
            gray = self.photometric == BLACK_IS_ZERO and self.samples == 1
            return gray or (self.photometric in (RGB, SEPARATED) and not self.separate)
        planes_of_alpha = self.separate and bool(self.extra)
        return not planes_of_alpha and not (PREMULTIPLIED in self.extra and self.photometric != RGB)

    @property
    def is_bands(self) -> bool:
        """True if a gray picture has several other samples, such as the bands of a satellite."""
        return self.photometric in (WHITE_IS_ZERO, BLACK_IS_ZERO) and self.samples > 2

    @cached_property
    def alpha(self) -> int | None:
        """Index of the sample that is the opacity."""
        first = self.samples - len(self.extra)
        found = [number for number, kind in enumerate(self.extra) if kind in (PREMULTIPLIED, TRANSPARENCY)]
        return first + found[0] if found else None

    @property
    def mode(self) -> str:
        return {1: "L", 3: "RGB", 4: "CMYK"}[COLOURS[self.photometric]] + ("A" if self.alpha is not None else "")

    def __str__(self) -> str:
        words = [f"{self.bits}-bit {FORMATS.get(self.sample_format, 'undefined')} samples, {self.samples} a pixel"]
        words += ["white as zero"] * (self.photometric == WHITE_IS_ZERO)
        if self.photometric not in COLOURS:
            words.append(OTHER_COLOURS.get(self.photometric, f"colours of kind {self.photometric}"))
        words += ["separate planes"] * self.separate
        words += [f"{self.compression} compression"] * bool(self.compression)
        return ", ".join(words)


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
            number = first_picture(tiff)
            page: Any = tiff.pages[number]
            tags = page.tags
            compression = page.compression
            profile = tags[ICC_PROFILE].value if ICC_PROFILE in tags else None
            return TiffLayout(
                number, int(page.imagewidth), int(page.imagelength), int(np.max(page.bitspersample)),
                int(page.samplesperpixel), int(np.max(page.sampleformat)), int(page.photometric),
                int(page.planarconfig or 1) == 2, tuple(map(int, page.extrasamples)),
                "" if compression == 1 else getattr(compression, "name", "unknown"), tiff.byteorder == ">",
                int(tags[ORIENTATION].value) if ORIENTATION in tags else 1,
                profile if isinstance(profile, bytes) else None,
                SUBSAMPLING in tags and tuple(tags[SUBSAMPLING].value) != (1, 1) and compression not in JPEG,
            )  # fmt: skip
    except Exception:  # Damaged tags raise any error in it; Pillow then names the fault, or reads the file.
        return None


def first_picture(tiff: Any) -> int:
    """Returns the number of the first page that is no thumbnail; 0 if all are."""
    if not tiff.pages[0].subfiletype & REDUCED:
        return 0
    return next((n for n in range(1, len(tiff.pages)) if not tiff.pages[n].subfiletype & REDUCED), 0)


def check_layout(layout: TiffLayout) -> None:
    """Raises UnsupportedTiff for samples whose meaning is not known."""
    known = layout.photometric in COLOURS and layout.sample_format in (UNSIGNED, SIGNED, FLOAT)
    if not known or layout.is_bands or layout.samples - len(layout.extra) != COLOURS[layout.photometric]:
        raise UnsupportedTiff(f"a TIFF of {layout}, which is not supported: {OTHERS}")
    if layout.photometric == SEPARATED and layout.alpha is not None:
        raise UnsupportedTiff(f"a TIFF of {layout}, with transparency, which is not supported: {OTHERS}")


def decode_tiff(path: Path, layout: TiffLayout) -> Image.Image:
    """Decodes the picture of a TIFF file as it is stored, with 8 bits: L, LA, RGB, RGBA or CMYK.

    Raises UnsupportedTiff if its layout or its compression is not supported, OSError if it is damaged.
    """
    from tifffile import TiffFile

    check_layout(layout)
    try:
        with TiffFile(path) as tiff:
            page: Any = tiff.pages[layout.page]
            pieces, end = math.prod(page.chunked), path.stat().st_size
            stored = list(zip(page.dataoffsets, page.databytecounts, strict=True))
            whole = len(stored) == pieces or page.is_contiguous
            if not whole or any(size <= 0 or offset + size > end for offset, size in stored):
                raise OSError("truncated: parts of the picture are missing")
            values: NDArray[Any] = page.asarray()
    except OSError:
        raise
    except Exception as error:
        if "imagecodecs" in str(error):
            raise UnsupportedTiff(f"a TIFF of {layout}, which is not supported: {OTHERS}") from None
        raise OSError(f"{type(error).__name__}: {error}") from None
    if layout.separate and layout.samples > 1:
        values = np.moveaxis(values, 0, -1)
    values_HWS = values.reshape(layout.height, layout.width, layout.samples)
    colours = COLOURS[layout.photometric]
    shares_HWS: NDArray[Any] = shares(values_HWS[..., :colours], layout)
    if layout.photometric == WHITE_IS_ZERO:
        shares_HWS = 1 - shares_HWS
    if layout.alpha is not None:
        opacity_HW1 = shares(values_HWS[..., layout.alpha, None], layout)
        if PREMULTIPLIED in layout.extra:
            shares_HWS = shares_HWS / np.maximum(opacity_HW1, 1e-6)
        shares_HWS = np.concatenate([shares_HWS, opacity_HW1], axis=2)
    levels = (255 * shares_HWS).round().clip(0, 255).astype(np.uint8)
    made = Image.frombytes(layout.mode, (layout.width, layout.height), levels.tobytes())
    if layout.icc_profile:
        made.info["icc_profile"] = layout.icc_profile
    return made


def shares(values: NDArray[Any], layout: TiffLayout) -> NDArray[np.float32]:
    """Returns samples as shares of white."""
    if layout.sample_format == UNSIGNED and layout.bits <= 16:
        made: NDArray[np.float32] = np.multiply(values, 1 / (2**layout.bits - 1), dtype=np.float32)
        return made
    if layout.sample_format != FLOAT and layout.bits <= 16:
        limits: Sequence[float] = (127.0,) if layout.bits <= 8 else (255.0, 32767.0)
    else:
        limits = (1.0, 255.0, 65535.0, 2.0**32 - 1)
    if layout.sample_format == SIGNED and int(values.min()) < 0:
        raise UnsupportedTiff(f"a TIFF of {layout}, some below zero, which is no picture: {OTHERS}")
    return shares_of_white(values, limits)


def shares_of_white(values: NDArray[Any], limits: Sequence[float] = (1.0, 255.0, 65535.0)) -> NDArray[np.float32]:
    """Returns values of no stated range as shares of white, which is the smallest of the limits, or the maximum, that
    no value exceeds.

    Of floats up to 1, highlights may exceed it: white is 1 if at most one value in a hundred is brighter. Raises
    UnsupportedTiff for floats that reach a little beyond that, whose white cannot be told, and if more than one in a
    hundred is below zero, as of pictures between -1 and 1.
    """
    values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    largest = float(values.max())
    white = next((limit for limit in limits if largest <= limit), largest)
    if values.dtype.kind == "f" and float(values.min()) < 0 and float(np.quantile(values, 0.01)) < 0:
        raise UnsupportedTiff(
            f"its float samples reach from {float(values.min()):.3g} to {largest:.3g}, and black is not known: {OTHERS}"
        )
    if values.dtype.kind == "f" and 1 < largest < 32:
        if float(np.quantile(values, 0.99)) > 1:
            raise UnsupportedTiff(
                f"its float samples reach {largest:.3g}, neither 1 nor 255, so that white is not known: {OTHERS}"
            )
        white = 1.0
    made: NDArray[np.float32] = np.multiply(values, 1 / white, dtype=np.float32)
    return made
