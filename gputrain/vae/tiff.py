"""Tells the TIFF pictures that Pillow refuses or misreads: 16-bit samples in separate planes or with white as zero,
floats of several channels, signed and wide integers, premultiplied transparency.

Tags and their values are those of TIFF 6.0 (Adobe, 1992): https://www.adobe.io/open/standards/TIFF.html.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
WHITE_IS_ZERO, BLACK_IS_ZERO, RGB, PALETTE, SEPARATED, YCBCR, CIELAB = 0, 1, 2, 3, 5, 6, 8  # PhotometricInterpretation
OTHER_COLOURS = {
    PALETTE: "a palette", YCBCR: "YCbCr colours", CIELAB: "CIELAB colours", 32803: "colours of a sensor (CFA)",
    34892: "linear raw colours", 32845: "LogLuv colours",
}  # fmt: skip
UNSIGNED, SIGNED, FLOAT = 1, 2, 3  # SampleFormat
FORMATS = {UNSIGNED: "unsigned", SIGNED: "signed", FLOAT: "float", 5: "complex", 6: "complex"}
PREMULTIPLIED = 1  # ExtraSamples
REDUCED = 1  # Bit of NewSubfileType.
SUBSAMPLING = 530
JPEG = (6, 7)  # Values of Compression.
OTHERS = "save it as a PNG, or as a TIFF with 8-bit samples"


class UnsupportedTiff(Exception):
    """Raised for a TIFF picture that cannot be decoded; the message names its sample format."""


@dataclass(frozen=True)
class TiffLayout:
    """Layout in which a TIFF file stores its first picture that is no thumbnail; `page` is its number."""

    page: int
    bits: int
    samples: int  # Samples of a pixel.
    sample_format: int
    photometric: int
    separate: bool  # Each sample has a plane of its own.
    extra: tuple[int, ...]
    compression: str  # "" is none.
    big_endian: bool
    # Several pixels share a pair of colour differences, outside of JPEG, which Pillow reads as pixels.
    subsampled: bool

    @property
    def pillow_reads(self) -> bool:
        """True if Pillow decodes this layout rightly; found by comparison with files of known content."""
        if self.subsampled:
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

    def __str__(self) -> str:
        words = [f"{self.bits}-bit {FORMATS.get(self.sample_format, 'undefined')} samples, {self.samples} a pixel"]
        words += ["white as zero"] * (self.photometric == WHITE_IS_ZERO)
        if self.photometric not in (WHITE_IS_ZERO, BLACK_IS_ZERO, RGB, SEPARATED):
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
            return TiffLayout(
                number, int(np.max(page.bitspersample)), int(page.samplesperpixel), int(np.max(page.sampleformat)),
                int(page.photometric), int(page.planarconfig or 1) == 2, tuple(map(int, page.extrasamples)),
                "" if compression == 1 else getattr(compression, "name", "unknown"), tiff.byteorder == ">",
                SUBSAMPLING in tags and tuple(tags[SUBSAMPLING].value) != (1, 1) and compression not in JPEG,
            )  # fmt: skip
    except Exception:  # Damaged tags raise any error in it; Pillow then names the fault, or reads the file.
        return None


def first_picture(tiff: Any) -> int:
    """Returns the number of the first page that is no thumbnail; 0 if all are."""
    if not tiff.pages[0].subfiletype & REDUCED:
        return 0
    return next((n for n in range(1, len(tiff.pages)) if not tiff.pages[n].subfiletype & REDUCED), 0)


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
