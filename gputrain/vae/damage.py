"""Finds damage that decoders pass over in silence: they fill what is missing with gray, black or noise.

The markers of JPEG are those of ITU-T T.81, annex B: https://www.w3.org/Graphics/JPEG/itu-t81.pdf.
Shape suffixes: H rows, W columns, C channels.
"""

import re
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

from gputrain.data_in.preparation import hole_of_zeros

NEXT_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # Restart markers and stuffed bytes belong to a scan.
RESTARTS = re.compile(rb"\xff([\xd0-\xd7])")
PROGRESSIVE_FRAME, START_OF_SCAN, END_OF_IMAGE = 0xC2, 0xDA, 0xD9
GRAY = 128  # The level that libjpeg gives to blocks without data.
LEAST_ROWS = 8  # Rows of one colour at the end of a picture that may be damage: a row of blocks.
TAIL = 96  # Bytes at the end of a scan that are looked at.


def damage_of(path: Path, image: Image.Image, is_compressed: bool = True) -> str:
    """Returns what is missing in the file of a decoded picture as text; "" if nothing is known to be.

    PNG is not looked at, as it has checksums, and neither are files of other formats with damage that looks like a
    picture, such as changed bits.
    """
    if image.format in ("PNG", "GIF"):
        return ""
    content = path.read_bytes()
    if content[:2] == b"\xff\xd8":
        return _damage_of_jpeg(content, image)
    end = min(len(content), 8 + int.from_bytes(content[4:8], "little")) if content[:4] == b"RIFF" else len(content)
    hole = hole_of_zeros(content, 0, end, *((512, 1) if is_compressed else (4096, 4096)))
    # Whole rows of zeros are a black area of a file whose rows are aligned.
    if hole and (is_compressed or (hole[1] - hole[0]) % (image.width * len(image.getbands()))):
        return f"the bytes {hole[0]} to {hole[1]} of the file are zero"
    if is_compressed or image.mode not in ("L", "RGB"):
        return ""
    # The rows of a BMP are stored from the last to the first.
    return _black_rows(image, last=0 if image.format in ("BMP", "DIB") else image.height - 1)


def _has_levels(image: Image.Image, level: int, top: int, bottom: int) -> bool:
    """Returns True if all samples of these rows have one level."""
    ends = np.array(image.crop((0, top, image.width, bottom)).getextrema())
    return bool((ends == level).all())


def _black_rows(image: Image.Image, last: int) -> str:
    """Tells lost rows from a black border: they begin within a row, and nothing before that is black."""
    if not _has_levels(image, 0, last, last + 1):
        return ""
    black_HW = np.atleast_3d(np.asarray(image)).max(axis=2) == 0
    black_HW = black_HW if last else black_HW[::-1]
    height, width = black_HW.shape
    rows = int(np.argmin(black_HW.all(axis=1)[::-1]))
    if rows < max(LEAST_ROWS, height // 50) or rows > height - 2:
        return ""
    split_W, before_W = black_HW[height - rows - 1], black_HW[height - rows - 2]
    first = width - int(np.argmin(split_W[::-1]))
    if width - first < 4 or split_W[:first].mean() > 0.1 or before_W[first:].mean() > 0.1:
        return ""
    if image.mode == "RGB" and image.getcolors():  # Drawings of few colours have such steps.
        return ""
    return f"its last {rows} rows and a part of the row before them are zero"


def _damage_of_jpeg(content: bytes, image: Image.Image) -> str:
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
            if hole := hole_of_zeros(content, at, stop, 512, 4096):
                return f"the bytes {hole[0]} to {hole[1]} of the file are zero"
            restarts = [mark[0] - 0xD0 for mark in RESTARTS.findall(content, at, stop)]
            if restarts != [number % 8 for number in range(len(restarts))]:
                return "its restart intervals are out of order: some are missing"
            if not is_progressive and _ends_in_gray(image) and not _is_periodic(content[max(at, stop - TAIL) : stop]):
                return "its last rows are gray, and the file holds no data for them: it was cut short"
            at = stop
    return "it is progressive, and its last scans are missing" if missing else ""


def _ends_in_gray(image: Image.Image) -> bool:
    """Returns True if the end of a picture is gray in an area whose codes fill TAIL bytes, with two bits a block."""
    rows = max(LEAST_ROWS, 256 * TAIL // image.width)
    if image.mode not in ("L", "RGB") or image.height < 2 * rows:
        return False
    return _has_levels(image, GRAY, image.height - rows, image.height)


def _is_periodic(tail: bytes) -> bool:
    """Returns True for codes that repeat, as those of an area of one colour do."""
    return len(zlib.compress(tail)) < 0.75 * len(tail)
