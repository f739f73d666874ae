"""Damage that decoders pass over in silence is named; whole pictures with flat areas are not."""

import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo

from gputrain.vae.pictures import UnusablePicture, read_picture
from tests.tables import check_rows, each_row


def photograph(width: int = 640, height: int = 128) -> Image.Image:
    levels = np.random.default_rng(0).normal(128, 50, (height, width, 3)).clip(1, 255).astype(np.uint8)
    return Image.fromarray(levels)


def file_of(format: str, picture: Image.Image | None = None, **how: object) -> bytes:
    made = io.BytesIO()
    (picture or photograph()).save(made, format, **how)
    return made.getvalue()


def at(content: bytes, marker: bytes, number: int) -> int:
    return [match.start() for match in re.finditer(marker, content)][number]


def cut(content: bytes, end: int = 0) -> bytes:
    return content[: end or len(content) // 2] + b"\xff\xd9"


def zeroed(content: bytes, size: int = 0, sector: int = 512) -> bytes:
    """Overwrites some bytes from the middle on with zeros, or all that follow a page."""
    first = len(content) // 2 // sector * sector if size else len(content) // 2 // 4096 * 4096
    end = first + size if size else len(content)
    return content[:first] + bytes(end - first) + content[end:]


def test_damage_is_named(tmp_path: Path) -> None:
    plain, scans = file_of("JPEG", quality=90), file_of("JPEG", progressive=True)
    large = file_of("JPEG", photograph(640, 512), quality=90)
    restarts = file_of("JPEG", restart_marker_rows=1)
    lost = [at(restarts, b"\xff[\xd0-\xd7]", number) for number in (3, 4)]
    tiff, bitmap = file_of("TIFF"), file_of("BMP")
    rows = (
        ("cut, with an end mark", cut(plain), "its last rows are gray"),
        ("the same in gray", cut(file_of("JPEG", photograph().convert("L"), optimize=True)), "its last rows are gray"),
        ("a lost interval", restarts[: lost[0]] + restarts[lost[1] :], "restart intervals are out of order"),
        ("lost scans", cut(scans, at(scans, b"\xff\xda", 4)), "its last scans are missing"),
        ("the last scan is lost", cut(scans, at(scans, b"\xff\xda", -1)), "its last scans are missing"),
        ("a page of a TIFF", zeroed(tiff, 4096, 4096), "of the file are zero"),
        ("a page of a BMP", zeroed(bitmap, 8192, 4096), "of the file are zero"),
        ("half of a TIFF", tiff[: len(tiff) // 2] + bytes(len(tiff) - len(tiff) // 2), " 6[34] rows and a part"),
        ("half of a BMP", bitmap[: len(bitmap) // 2] + bytes(len(bitmap) - len(bitmap) // 2), " 6[34] rows and a part"),
        ("a sector of zeros", zeroed(plain, 512), "of the file are zero"),
        ("a page of zeros", zeroed(scans, 4096), "of the file are zero"),
        ("half of a JPEG, from a page on", zeroed(large), "of the file are zero"),
        ("half of a WebP", zeroed(file_of("WEBP")), "of the file are zero"),
        ("half of a lossless WebP", zeroed(file_of("WEBP", lossless=True)), "of the file are zero"),
        ("half of an AVIF", zeroed(file_of("AVIF", speed=10)), ""),
    )  # fmt: skip

    def check(name: str, content: bytes, said: str) -> None:
        (tmp_path / "a.jpg").write_bytes(content)
        with pytest.raises(UnusablePicture, match=f": broken: .*{said}"):
            read_picture(tmp_path / "a.jpg")

    check_rows([row for row in rows if "AVIF" not in row[0] or ".avif" in Image.registered_extensions()], check)


@each_row("white", "black", "gray", "seagreen")
def test_flat_areas_are_no_damage(tmp_path: Path, colour: str) -> None:
    """Half of the picture has one colour, with a border of another one, or a photograph above it."""
    drawing = Image.new("RGB", (480, 240), colour)
    ImageDraw.Draw(drawing).ellipse((40, 20, 200, 120), fill="navy", outline="black", width=9)
    letterbox = drawing.copy()
    letterbox.paste(photograph(480, 110), (0, 65))
    for picture in (drawing, letterbox, letterbox.rotate(1, fillcolor="black").convert("L")):
        for format, how in (
            ("JPEG", {}), ("JPEG", {"quality": 100, "subsampling": 0, "optimize": True}),
            ("JPEG", {"progressive": True, "optimize": True}), ("JPEG", {"restart_marker_rows": 2}), ("BMP", {}),
            ("TIFF", {"compression": "tiff_adobe_deflate"}),
        ):  # fmt: skip
            (tmp_path / "a").write_bytes(file_of(format, picture, **how))  # type: ignore[arg-type]
            read_picture(tmp_path / "a")


def test_black_areas_of_drawings_are_no_damage(tmp_path: Path) -> None:
    levels = np.random.default_rng(0).integers(0, 4, (48, 48, 1)) * np.array([20, 30, 40]) + 60
    levels[38:], levels[37, 20:] = 0, 0  # A step in the ground.
    (tmp_path / "a").write_bytes(file_of("TIFF", Image.fromarray(levels.astype(np.uint8))))
    read_picture(tmp_path / "a")


def test_a_png_of_other_light_is_refused(tmp_path: Path) -> None:
    rows = (
        ((b"gAMA", 100_000), "unsupported: its levels are linear"),
        ((b"cICP", 0x09100001), r"unsupported: its levels are those of HDR \(PQ\)"),
        ((b"gAMA", 45_455), ""),
        ((b"cICP", 0x010D0001), ""),
    )

    def check(chunk: tuple[bytes, int], said: str) -> None:
        info = PngInfo()
        info.add(chunk[0], chunk[1].to_bytes(4, "big"))
        (tmp_path / "a.png").write_bytes(file_of("PNG", photograph(64, 48), pnginfo=info))
        if not said:
            read_picture(tmp_path / "a.png")
            return
        with pytest.raises(UnusablePicture, match=said):
            read_picture(tmp_path / "a.png")

    check_rows(rows, check)


def test_a_damaged_header_is_no_other_file(tmp_path: Path) -> None:
    info = PngInfo()
    info.add_text("parameters", "a cat")
    (tmp_path / "a.png").write_bytes(file_of("PNG", photograph(64, 48), pnginfo=info).replace(b"a cat", b"a car"))
    with pytest.raises(UnusablePicture, match="broken: damaged: its header cannot be read"):
        read_picture(tmp_path / "a.png")


def test_a_png_may_hold_a_long_text(tmp_path: Path) -> None:
    """Programs that generate pictures keep how they were made, compressed or not."""
    text = '{"node": 1}' * 200_000
    for add, zip in (("add_text", False), ("add_text", True), ("add_itxt", True)):
        info = PngInfo()
        getattr(info, add)("workflow", text, zip=zip)
        (tmp_path / "a.png").write_bytes(file_of("PNG", photograph(64, 48), pnginfo=info))
        assert read_picture(tmp_path / "a.png").size == (64, 48)
