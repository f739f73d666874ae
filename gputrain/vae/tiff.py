"""Tells the TIFF pictures that Pillow refuses or misreads: 16-bit samples in separate planes or with white as zero,
floats, signed and wide integers, premultiplied transparency.

Tags and their values are those of TIFF 6.0 (Adobe, 1992): https://www.adobe.io/open/standards/TIFF.html.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
WHITE_IS_ZERO, BLACK_IS_ZERO, RGB, SEPARATED = 0, 1, 2, 5  # Values of PhotometricInterpretation.
FORMATS = {1: "unsigned", 2: "signed", 3: "float", 5: "complex", 6: "complex"}  # Values of SampleFormat.
PREMULTIPLIED = 1  # Value of ExtraSamples.
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
    is_compressed: bool
    pillow_reads: bool  # True if Pillow decodes it rightly; found by comparison with files of known content.
    description: str

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
        is_read = FORMATS.get(form) == "unsigned" and bits <= 16 and not subsampled
        is_read &= not (is_gray and samples > 2)  # The bands of a satellite.
        if bits > 8:
            gray = photometric == BLACK_IS_ZERO and samples == 1
            is_read &= gray or (photometric in (RGB, SEPARATED) and not separate)
        else:
            is_read &= not (separate and extra) and not (PREMULTIPLIED in extra and photometric != RGB)
        words = [f"{bits}-bit {FORMATS.get(form, 'undefined')} samples, {samples} a pixel"]
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
