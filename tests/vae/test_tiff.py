"""TIFF pictures of every sample format, written by tifffile: decoded rightly, or refused by the name of the format."""

import itertools
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from gputrain.vae.pictures import UnusablePicture, read_header, read_picture
from tests.tables import check_rows, each_row

RGB = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
RGB[0, :3] = [[0, 0, 0], [255, 255, 255], [255, 0, 0]]
GRAY = np.ascontiguousarray(RGB[..., 1])
OPACITY = np.tile(np.linspace(0, 255, 64).round().astype(np.uint8), (48, 1))
# The same levels as other samples.
SAMPLES = {
    "u1": 1, "u2": 257, "u4": 16843009, "f2": 1 / 255, "f4": 1 / 255, "f8": 1 / 255, "i1": 0.5, "i2": 128,
}  # fmt: skip


def levels(path: Path, channels: int = 3) -> np.ndarray:
    return np.asarray(read_picture(path, channels=channels)).astype(int)


def sampled(picture: np.ndarray, dtype: str) -> np.ndarray:
    return (picture * np.float64(SAMPLES[dtype])).astype(dtype)


def planes(picture: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.moveaxis(picture, -1, 0))


def written(path: Path, picture: np.ndarray, **how: Any) -> Path:
    tifffile.imwrite(path, picture, **how)
    return path


STORED = [
    {"byteorder": order, "compression": compression, "tile": tile, "predictor": predictor}
    for order, (compression, predictor), tile in itertools.product(
        "<>", ((None, None), ("zlib", None), ("zlib", True)), (None, (16, 16))
    )
]


# Layouts that Pillow decodes, besides those of 8 bits.
DECODED = {("u2", "rgb"), ("u2", "minisblack")}


@each_row(*[(dtype, how) for dtype in SAMPLES for how in STORED if not (dtype[0] == "f" and how["predictor"])])
def test_every_sample_format_in_every_order(tmp_path: Path, dtype: str, how: dict[str, Any]) -> None:
    rgb, gray = sampled(RGB, dtype), sampled(GRAY, dtype)

    def check(picture: np.ndarray, expected: np.ndarray, layout: dict[str, str]) -> None:
        path = written(tmp_path / "a.tif", picture, **layout, **how)
        is_whole = layout.get("planarconfig") != "separate"
        if dtype == "u1" or ((dtype, layout["photometric"]) in DECODED and is_whole):
            assert np.abs(levels(path) - expected).max() <= 1
            header = read_header(path)
            assert (header.format, header.width, header.height) == ("TIFF", 64, 48)
        else:
            with pytest.raises(
                UnusablePicture, match=r"a TIFF of .* which is not supported: save it as a PNG"
            ) as caught:
                levels(path)
            assert caught.value.reason == "unsupported"

    three = [GRAY.astype(int)[..., None], 255 - GRAY.astype(int)[..., None]]
    check_rows(
        [
            (rgb, RGB, {"photometric": "rgb", "planarconfig": "contig"}),
            (planes(rgb), RGB, {"photometric": "rgb", "planarconfig": "separate"}),
            (gray, three[0], {"photometric": "minisblack"}),
            (gray, three[1], {"photometric": "miniswhite"}),
        ],
        check,
    )


@each_row(*itertools.product(("u1", "u2"), ("unassalpha", "assocalpha"), (3, 4)))
def test_transparency(tmp_path: Path, dtype: str, kind: str, channels: int) -> None:
    opacity = OPACITY[..., None] / 255
    colours = RGB * (opacity if kind == "assocalpha" else 1)
    picture = sampled(np.dstack([colours, OPACITY]).round(), dtype)
    path = written(tmp_path / "a.tif", picture, photometric="rgb", extrasamples=[kind])
    made = levels(path, channels)
    if channels == 4:
        assert np.abs(made[..., 3] - OPACITY).max() <= 1
        made = np.round(made[..., :3] * (made[..., 3:] / 255) + 255 * (1 - made[..., 3:] / 255))
    assert np.abs(made - (RGB * opacity + 255 * (1 - opacity))).max() <= 3


@each_row(*itertools.product(("u1", "u2"), "<>", (None, (16, 16))))
def test_ink_colours(tmp_path: Path, dtype: str, order: str, tile: tuple[int, int] | None) -> None:
    ink = Image.fromarray(RGB).convert("CMYK")
    path = written(
        tmp_path / "a.tif", sampled(np.asarray(ink), dtype), photometric="separated", byteorder=order, tile=tile
    )
    assert np.abs(levels(path) - np.asarray(ink.convert("RGB"))).max() <= 1


def test_12_bits_have_a_white_of_their_own(tmp_path: Path) -> None:
    """Pairs of 12-bit samples in three bytes; the tags of a TIFF with 8-bit samples are changed."""
    values = np.linspace(0, 4095, 32 * 32).round().astype(np.uint16)
    first, second = values[::2], values[1::2]
    packed = np.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], axis=-1).astype(np.uint8)
    path = written(tmp_path / "a.tif", packed.reshape(32, 48), photometric="minisblack")
    with tifffile.TiffFile(path, mode="r+") as tiff:
        tags = tiff.pages[0].tags
        tags["BitsPerSample"].overwrite(12)
        tags["ImageWidth"].overwrite(32)
    assert np.abs(levels(path)[..., 0] - (values / 4095 * 255).reshape(32, 32)).max() <= 1


COMPLEX = GRAY.astype(np.complex64)
REFUSED = {
    "complex": (COMPLEX, {"photometric": "minisblack"}, "64-bit complex samples"),
    "below zero": (GRAY.astype("i2") - 100, {"photometric": "minisblack"}, "16-bit signed samples, 1 a pixel, which"),
    "bands": (np.dstack([GRAY] * 10), {"photometric": "minisblack", "planarconfig": "contig"}, "8-bit unsigned.* 10 a"),
    "raw": (
        sampled(GRAY, "u2"),
        {"photometric": "cfa"},
        r"16-bit unsigned samples, 1 a pixel, cfa colours",
    ),
}


@each_row(*REFUSED)
def test_what_no_picture_is_refused_by_its_format(tmp_path: Path, name: str) -> None:
    picture, how, message = REFUSED[name]
    with pytest.raises(UnusablePicture, match=message) as caught:
        levels(written(tmp_path / "a.tif", picture, **how))
    assert caught.value.reason == "unsupported"


def test_a_compression_that_needs_another_package_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tif", planes(sampled(RGB, "u2")), photometric="rgb", planarconfig="separate")
    with tifffile.TiffFile(path, mode="r+") as tiff:
        tiff.pages[0].tags["Compression"].overwrite(50001)  # WebP
    with pytest.raises(UnusablePicture, match="3 a pixel, rgb colours, separate planes, WEBP compression"):
        levels(path)


def test_colour_differences_of_several_pixels_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tif", np.asarray(Image.fromarray(RGB).convert("YCbCr")), photometric="ycbcr")
    assert np.abs(levels(path) - RGB).max() <= 3
    with tifffile.TiffFile(path, mode="r+") as tiff:
        tiff.pages[0].tags["YCbCrSubSampling"].overwrite((2, 2))
    with pytest.raises(UnusablePicture, match="8-bit unsigned samples, 3 a pixel, ycbcr colours"):
        levels(path)


@each_row("u1", "u2")
def test_a_thumbnail_before_the_picture_is_passed_over(tmp_path: Path, dtype: str) -> None:
    with tifffile.TiffWriter(tmp_path / "a.tif") as writer:
        for _ in range(2):
            writer.write(np.zeros((24, 32, 3), np.uint8), photometric="rgb", subfiletype=1)
        writer.write(sampled(RGB, dtype), photometric="rgb", planarconfig="contig", subfiletype=0)
    assert (levels(tmp_path / "a.tif") == RGB).all()
    header = read_header(tmp_path / "a.tif")
    assert (header.width, header.height) == (64, 48)


@each_row(*itertools.product((None, "zlib"), (None, (16, 16))))
def test_damage_is_found(tmp_path: Path, compression: str | None, tile: tuple[int, int] | None) -> None:
    how: dict[str, Any] = {"photometric": "rgb", "compression": compression, "tile": tile}
    path = written(tmp_path / "a.tif", sampled(RGB, "u2"), rowsperstrip=None if tile else 8, **how)
    content = path.read_bytes()
    cut, changed = content[:-300], bytearray(content)
    changed[-700] ^= 0xFF
    for damaged in (cut, bytes(changed)) if compression else (cut,):
        path.write_bytes(damaged)
        with pytest.raises(UnusablePicture) as caught:
            levels(path)
        assert caught.value.reason == "broken"
    for place in range(0, 400, 7):  # Any fault in the tags is one of the picture.
        changed = bytearray(content)
        changed[place] ^= 0x41
        path.write_bytes(changed)
        with suppress(UnusablePicture):
            levels(path)
