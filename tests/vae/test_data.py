"""Decoding, finding and cropping of pictures, with files of many formats."""

import itertools
import os
import struct
import warnings

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms, features
from PIL.ImageFile import ImageFile

from gputrain.data_in.split import is_held_out
from gputrain.engine.data import DataWarning, Sample, Stream, loader
from gputrain.errors import UserError
from gputrain.files import write_rows
from gputrain.vae.config import PictureLimits
from gputrain.vae.dataset import CropDataset, Picture, centre_crop, open_pictures, to_u8, to_unit
from gputrain.vae.pictures import (
    JOURNAL,
    UnusablePicture,
    has_transparency,
    read_header,
    read_picture,
    scan_pictures,
)
from tests.png import png
from tests.tables import check_rows, each_row

EXACT = {".jpg": {"quality": 100, "subsampling": 0}, ".webp": {"lossless": True}}
RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def noise(width, height, seed=0):
    """Returns a picture without equal regions, smooth enough that JPEG changes it by a few levels only."""
    rows = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(rows).resize((width, height), Image.Resampling.BICUBIC)


def coordinates(width, height):
    """Returns a picture whose colours encode positions: red and green are x and y modulo 256, blue the quotients."""
    y, x = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([x % 256, y % 256, x // 256 + 16 * (y // 256)], axis=-1).astype(np.uint8))


def place(crop_3HW):
    """Returns the position of a crop in `coordinates`; asserts that its pixels are unchanged, mirrored or not."""
    red, green, blue = crop_3HW.numpy().astype(int)
    x, y = red + 256 * (blue % 16), green + 256 * (blue // 16)
    mirrored = bool(x[0, 0] > x[0, -1])
    x = x[:, ::-1] if mirrored else x
    left, top = int(x[0, 0]), int(y[0, 0])
    rows, columns = np.mgrid[: len(x), : len(x)]
    assert (x == left + columns).all()
    assert (y == top + rows).all()
    return left, top, mirrored


def levels(path, **options):
    return np.asarray(read_picture(path, **options)).astype(int)


def saved(path, image, **options):
    image.save(path, **EXACT.get(path.suffix, {}), **options)
    return path


# ---------------------------------------------------------------------------------------------- decoding


@each_row(".jpg", ".png", ".webp", ".tif", ".bmp", ".gif", ".JPG", ".TiFF")
def test_formats_decode_to_their_pixels(tmp_path, suffix):
    image = noise(50, 40)
    path = tmp_path / f"picture{suffix}"
    if suffix == ".gif":
        image = image.quantize(64)
    image.save(path, **EXACT.get(suffix.lower(), {}))
    expected = np.asarray(image.convert("RGB")).astype(int)
    assert np.abs(levels(path) - expected).max() <= (5 if suffix.lower() == ".jpg" else 0)
    assert read_picture(path).info == {}


@each_row(*itertools.product([".jpg", ".png", ".webp", ".tif"], range(1, 9)))
def test_exif_orientation_is_applied_once(tmp_path, suffix, orientation):
    """The corners of an upright picture are red, green, blue (clockwise) and white, for every orientation."""
    stored = {  # EXIF 2.3, tag 0x0112: which corners of the upright picture the stored rows and columns begin with
        1: (RED, GREEN, WHITE, BLUE),
        2: (GREEN, RED, BLUE, WHITE),
        3: (BLUE, WHITE, GREEN, RED),
        4: (WHITE, BLUE, RED, GREEN),
        5: (RED, WHITE, GREEN, BLUE),
        6: (GREEN, BLUE, RED, WHITE),
        7: (BLUE, GREEN, WHITE, RED),
        8: (WHITE, RED, BLUE, GREEN),
    }[orientation]
    turned = orientation >= 5
    corners = Image.fromarray(np.array(stored, dtype=np.uint8).reshape(2, 2, 3))
    image = corners.resize((32, 48) if turned else (48, 32), Image.Resampling.NEAREST)
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = saved(tmp_path / f"picture{suffix}", image, exif=exif)
    upright = levels(path)
    assert upright.shape == (32, 48, 3)
    header = read_header(path)
    assert (header.width, header.height) == (48, 32)
    for (x, y), colour in zip([(4, 4), (43, 4), (43, 27), (4, 27)], (RED, GREEN, BLUE, WHITE), strict=True):
        assert np.abs(upright[y, x] - colour).max() <= 3


@pytest.mark.parametrize("orientation", [1, 6])
def test_crop_is_a_piece_of_the_whole(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = saved(tmp_path / "picture.jpg", noise(60, 40), exif=exif)
    crop = levels(path, crop=lambda width, height: (10, 5, 42, 37))
    whole = levels(path)
    assert whole.shape == ((60, 40, 3) if orientation == 6 else (40, 60, 3))
    piece = whole[10:42, 3:35] if orientation == 6 else whole[5:37, 10:42]
    assert (crop == piece).all()


@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_16_bit_grey_is_scaled(tmp_path, suffix):
    values = np.arange(0, 65536, 16, dtype=np.uint16).reshape(64, 64)
    values[-1, -1] = 65535
    path = saved(tmp_path / f"grey{suffix}", Image.fromarray(values))
    assert read_header(path).mode.startswith("I;16")
    expected = np.round(values / 65535 * 255).astype(int)
    assert (levels(path) == expected[..., None]).all()


def cut_out(mode):
    """Returns a picture in a mode with transparency: left half red and opaque, right half green and transparent."""
    if mode == "P":
        image = Image.new("P", (40, 40), 1)
        image.putpalette([*GREEN, *RED])
        image.paste(0, (20, 0, 40, 40))
        image.info["transparency"] = 0
        return image
    image = Image.new("RGBA", (40, 40), (*RED, 255))
    image.paste((*GREEN, 0), (20, 0, 40, 40))
    return image.convert(mode)


@each_row(("RGBA", ".png"), ("RGBA", ".webp"), ("RGBA", ".tif"), ("P", ".png"), ("P", ".gif"), ("LA", ".png"))
def test_transparency_lies_on_white(tmp_path, mode, suffix):
    pixels = levels(saved(tmp_path / f"picture{suffix}", cut_out(mode)))
    grey = np.asarray(Image.new("RGB", (1, 1), RED).convert("L")).item()
    assert (pixels[:, :20] == ((grey,) * 3 if mode == "LA" else RED)).all()
    assert (pixels[:, 20:] == WHITE).all()


def test_half_transparency_is_mixed_with_white(tmp_path):
    path = saved(tmp_path / "picture.png", Image.new("RGBA", (40, 40), (100, 0, 200, 51)))
    assert levels(path)[0, 0].tolist() == [round(0.2 * level + 0.8 * 255) for level in (100, 0, 200)]


def test_palette_grey_and_bits(tmp_path):
    image = noise(40, 40)
    for mode in ("P", "L", "1"):
        converted = image.convert(mode)
        path = saved(tmp_path / f"{mode}.png", converted)
        assert read_header(path).mode == mode
        assert (levels(path) == np.asarray(converted.convert("RGB"))).all()


@pytest.mark.parametrize("suffix", [".jpg", ".tif"])
def test_cmyk(tmp_path, suffix):
    image = Image.new("CMYK", (40, 40), (0, 255, 255, 0))
    image.paste((255, 0, 255, 0), (20, 0, 40, 40))
    path = saved(tmp_path / f"picture{suffix}", image)
    assert read_header(path).mode == "CMYK"
    pixels = levels(path)
    assert np.abs(pixels[:, :18] - RED).max() <= 3
    assert np.abs(pixels[:, 22:] - GREEN).max() <= 3


@each_row(".gif", ".webp", ".png", ".tif")
def test_first_frame_of_an_animation(tmp_path, suffix):
    frames = [Image.new("RGB", (40, 40), colour) for colour in (RED, GREEN, BLUE)]
    path = saved(tmp_path / f"moving{suffix}", frames[0], save_all=True, append_images=frames[1:])
    with Image.open(path) as image:
        assert image.n_frames == 3
    assert (levels(path) == RED).all()


def profile(swap_red_and_blue=False):
    data = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    if swap_red_and_blue:
        red, blue = data.index(b"rXYZ"), data.index(b"bXYZ")
        data[red : red + 4], data[blue : blue + 4] = b"bXYZ", b"rXYZ"
    return bytes(data)


@each_row(".jpg", ".png", ".webp", ".tif")
def test_embedded_profile_is_converted_to_srgb(tmp_path, suffix):
    path = saved(
        tmp_path / f"picture{suffix}", Image.new("RGB", (40, 40), RED), icc_profile=profile(swap_red_and_blue=True)
    )
    assert np.abs(levels(path) - BLUE).max() <= 3


def test_srgb_profile_changes_nothing(tmp_path):
    image = noise(40, 40)
    path = saved(tmp_path / "picture.png", image, icc_profile=profile())
    assert (levels(path) == np.asarray(image)).all()


@each_row(*itertools.product([b"", b"rubbish", profile()[:200], profile()[:128] + bytes(400)], ["RGB", "L", "CMYK"]))
def test_broken_profile_or_one_for_another_mode_is_ignored(tmp_path, broken, mode):
    image = noise(40, 40).convert(mode)
    path = saved(tmp_path / "picture.tif", image, icc_profile=broken or (profile() if mode != "RGB" else b"x"))
    assert (levels(path) == np.asarray(image.convert("RGB"))).all()


@each_row(1, 2, 4, 8, 16)
def test_transparent_level_of_gray_pngs(tmp_path, bits):
    values = np.arange(64 * 64).reshape(64, 64) % 2**bits
    shifts = np.arange(8 - bits, -1, -bits)
    packed = values.astype(">u2") if bits == 16 else (values.reshape(64, -1, 8 // bits) << shifts).sum(-1).astype("u1")
    rows = b"".join(b"\0" + row.tobytes() for row in packed)
    content = png(64, 64, color=0, bits=bits, rows=rows, transparent=struct.pack(">H", 1))
    (tmp_path / "a.png").write_bytes(content)
    opaque = np.round(values * 255 / (2**bits - 1))
    assert (levels(tmp_path / "a.png")[..., 0] == np.where(values == 1, 255, opaque)).all()
    assert has_transparency(tmp_path / "a.png")
    assert (np.asarray(read_picture(tmp_path / "a.png", channels=4))[..., 3] == np.where(values == 1, 0, 255)).all()


@pytest.mark.skipif("avif" not in features.modules or not features.check("avif"), reason="this Pillow reads no AVIF")
def test_avif(tmp_path):
    image = Image.new("RGB", (64, 40), RED)
    image.paste(GREEN, (0, 0, 32, 40))
    exif = Image.Exif()
    exif[0x0112] = 6
    path = saved(tmp_path / "a.avif", image, quality=95, exif=exif)
    assert [source.path for source in scan_pictures(tmp_path).sources] == ["a.avif"]
    header = read_header(path)
    assert (header.format, header.width, header.height) == ("AVIF", 40, 64)
    assert np.abs(levels(path)[:28] - GREEN).max() <= 6
    assert np.abs(levels(path)[36:] - RED).max() <= 6


@each_row(
    (b"\0\0\0\x18ftypheic", "HEIC"), (b"\0\0\0\x18ftypmif1", "HEIC"), (b"\xff\x0a\xfa", "JPEG XL"),
    (b"\0\0\0\x0cjP  \r\n", "JPEG 2000"), (b"8BPS\0\1", "Photoshop"), (b"%PDF-1.7", "PDF"), (b"<svg xmlns=", "SVG"),
)  # fmt: skip
def test_pictures_of_other_formats_are_named(tmp_path, start, name):
    (tmp_path / "photo.jpg").write_bytes(start + bytes(100))
    with pytest.raises(UnusablePicture, match=f"unsupported: a file of format {name}, .* convert it to JPEG or PNG"):
        read_picture(tmp_path / "photo.jpg")


# ------------------------------------------------------------------------------------------------ damage


def reason(path, *limits):
    with pytest.raises(UnusablePicture) as caught:
        read_picture(path, *limits)
    assert str(path) in caught.value.message
    return caught.value.reason


def test_huge_and_tiny_are_refused_from_the_header(tmp_path):
    path = tmp_path / "bomb.png"
    path.write_bytes(png(60_000, 60_000))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reason(path) == "huge"
    path.write_bytes(png(15_000, 13_000))  # 195 megapixels, over Pillow's own limit of 179 and under ours
    assert reason(path) == "broken"
    path.write_bytes(png(31, 4000))
    assert reason(path, PictureLimits()) == "tiny"
    path.write_bytes(png(100, 100))
    assert reason(path, PictureLimits(max_megapixels=0.0099)) == "huge"


# ----------------------------------------------------------------------------------------------- finding


def test_scan_finds_pictures_and_counts_the_rest(tmp_path):
    long_name = "n" * 251 + ".jpg"
    for name in ("b.PNG", "deep/er/a.jpeg", "ä 日本.webp", long_name, "not utf-8 \udcff.gif"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        saved(tmp_path / name, noise(40, 40), format="PNG")
    for name in ("notes.txt", "Thumbs.db", ".DS_Store", "._b.PNG", "README", ".hidden/x.png", "__MACOSX/x.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    tree = scan_pictures(tmp_path)
    expected = sorted(["b.PNG", "deep/er/a.jpeg", "ä 日本.webp", long_name, "not utf-8 \udcff.gif"])
    assert [source.path for source in tree.sources] == expected
    ignored = {suffix: len(names) for suffix, names in tree.ignored.items()}
    assert ignored == {".txt": 1, ".db": 1, "hidden": 2, "without suffix": 1, "hidden/": 1, "__MACOSX/": 1}
    assert tree.refused == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="nothing is forbidden to root")
def test_forbidden_files_and_folders_are_unreadable(tmp_path):
    for name in ("a/x.png", "b/y.png", "z.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        saved(tmp_path / name, noise(40, 40))
    (tmp_path / "a").chmod(0)
    (tmp_path / "b/y.png").chmod(0)
    pictures = open_pictures(tmp_path)
    (tmp_path / "a").chmod(0o700)
    assert [(refusal.path, refusal.reason) for refusal in pictures.refused] == [
        ("a", "unreadable"),
        ("b/y.png", "unreadable"),
    ]
    assert [picture.path.name for picture in pictures.train] == ["z.png"]


def test_folder_without_pictures_is_a_user_error(tmp_path):
    rows = [
        ("missing", "no such folder"),
        ("empty", "the folder is empty"),
        ("file.png", "expected a folder"),
        ("texts", r"no picture \(found 2 \.txt\)"),
    ]

    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    for text in ("a.txt", "b.TXT"):
        (tmp_path / "texts" / text).touch()
    saved(tmp_path / "file.png", noise(40, 40))

    def check(name, fault):
        with pytest.raises(UserError, match=f"{name}: .*{fault}") as caught:
            open_pictures(tmp_path / name)
        assert caught.value.hint

    check_rows(rows, check)


# ------------------------------------------------------------------------------------------------ folders


def test_open_pictures_reads_sizes_and_names_what_it_refuses(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    saved(tmp_path / "a.jpg", noise(60, 40), exif=exif)
    saved(tmp_path / "b.png", noise(50, 40))
    saved(tmp_path / "small.png", noise(50, 31))
    (tmp_path / "broken.jpg").write_bytes(b"x")
    (tmp_path / "bomb.png").write_bytes(png(60_000, 60_000))
    pictures = open_pictures(tmp_path, held_out_share=0.5)
    found = sorted(pictures.train + pictures.held_out, key=lambda picture: picture.path)
    assert [(p.path.name, p.width, p.height) for p in found] == [("a.jpg", 40, 60), ("b.png", 50, 40)]
    assert {r.path: r.reason for r in pictures.refused} == {
        "small.png": "tiny",
        "broken.jpg": "broken",
        "bomb.png": "huge",
    }
    assert not pictures.split.parts.shared


def test_single_picture_serves_as_both_and_says_so(tmp_path):
    saved(tmp_path / "a.png", noise(40, 40))
    pictures = open_pictures(tmp_path)
    assert pictures.split.parts.shared
    assert pictures.train == pictures.held_out
    assert len(pictures.train) == 1


def test_equal_content_never_parts(tmp_path):
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
        for number in range(12):
            saved(tmp_path / folder / f"{folder}{number}.png", noise(40, 40, seed=number))
    pictures = open_pictures(tmp_path, held_out_share=0.4)
    numbers = [{picture.path.stem[1:] for picture in side} for side in (pictures.train, pictures.held_out)]
    assert not numbers[0] & numbers[1]
    assert len(pictures.train) == 3 * len(numbers[0])
    assert all(is_held_out(picture.fingerprint, 0.4) for picture in pictures.held_out)


def test_half_prepared_folder_is_a_user_error(tmp_path):
    saved(tmp_path / "a.png", noise(40, 40))
    write_rows(tmp_path / JOURNAL, [{"input_dir": "elsewhere"}])
    with pytest.raises(UserError, match="not finished") as caught:
        open_pictures(tmp_path)
    assert "prepare-data" in caught.value.hint


# ----------------------------------------------------------------------------------------------- training


def dataset(*paths, image_size=32, seed=0, horizontal_flip=True):
    return CropDataset([Picture(path, 0, 0, "") for path in paths], image_size, seed, horizontal_flip)


def test_crops_are_native_pixels_from_everywhere(tmp_path):
    path = saved(tmp_path / "a.png", coordinates(300, 40))
    crops = dataset(path)
    places = [place(crops[Sample(epoch, 0)]) for epoch in range(400)]
    left, top, mirrored = (np.array(values) for values in zip(*places, strict=True))
    assert (left.min(), top.min()) == (0, 0)
    assert left.min() <= 3
    assert left.max() >= 268 - 3
    assert top.max() == 40 - 32
    assert abs(left.mean() - 134) < 15
    assert abs(mirrored.mean() - 0.5) < 0.1
    assert not any(place(dataset(path, horizontal_flip=False)[Sample(epoch, 0)])[2] for epoch in range(50))


def test_jpeg_crop_is_a_piece_of_the_full_decoding(tmp_path):
    """Decoding only a part must not change any pixel."""
    path = saved(tmp_path / "a.jpg", noise(700, 500))
    whole = np.asarray(Image.open(path))
    crop = dataset(path, horizontal_flip=False)[Sample(0, 0)].permute(1, 2, 0).numpy()
    windows = np.lib.stride_tricks.sliding_window_view(whole, (32, 32), axis=(0, 1))
    matches = (windows[..., 0, 0] == crop[0, 0]).all(axis=-1)
    assert any((whole[y : y + 32, x : x + 32] == crop).all() for y, x in np.argwhere(matches))


def test_small_picture_is_enlarged_just_enough(tmp_path):
    path = saved(tmp_path / "a.png", noise(40, 90))
    crop = dataset(path, image_size=64, horizontal_flip=False)[Sample(0, 0)]
    assert crop.shape == (3, 64, 64)
    whole = levels(path)
    enlarged = [
        np.asarray(Image.fromarray(whole[y : y + 40].astype(np.uint8)).resize((64, 64), Image.Resampling.LANCZOS))
        for y in range(51)
    ]
    assert any((piece == crop.permute(1, 2, 0).numpy()).all() for piece in enlarged)


def test_centre_crop_is_the_middle(tmp_path):
    path = saved(tmp_path / "a.png", coordinates(101, 60))
    assert place(centre_crop(path, 40)) == (31, 10, False)
    assert centre_crop(path, 80).shape == (3, 80, 80)
    with pytest.raises(UserError, match="missing"):
        centre_crop(tmp_path / "missing.png", 40)


def test_unreadable_picture_is_replaced_by_the_next(tmp_path):
    paths = [saved(tmp_path / f"{number}.png", noise(40, 40, seed=number)) for number in range(4)]
    crops = dataset(*paths)
    whole = {item: crops[Sample(0, item)] for item in range(4)}
    paths[1].unlink()
    paths[2].write_bytes(paths[2].read_bytes()[:300])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        replaced = crops[Sample(0, 1)]
    assert [str(warning.message).split(": ")[1] for warning in caught] == ["unreadable", "broken"]
    assert {warning.category for warning in caught} == {DataWarning}
    alone = dataset(paths[3], paths[3])[Sample(0, 1)]
    assert torch.equal(replaced, alone)
    assert torch.equal(crops[Sample(0, 3)], whole[3])


def test_missing_pictures_are_reported_once_and_the_end_is_a_user_error(tmp_path, caplog):
    paths = [saved(tmp_path / f"{number}.png", noise(40, 40, seed=number)) for number in range(2)]
    paths[0].unlink()
    stream = Stream(2, 0, 2, 0, 8)
    batches = list(loader(dataset(*paths), stream, num_workers=0))
    assert [batch.shape for batch in batches] == [(2, 3, 32, 32)] * 4
    assert len(caplog.messages) == 1
    paths[1].unlink()
    with pytest.raises(UserError, match="none of the 2 training pictures"):
        list(loader(dataset(*paths), stream, num_workers=0))


def test_batches_are_uint8_and_the_same_from_any_worker(tmp_path):
    paths = [saved(tmp_path / f"{number}.png", noise(90, 70, seed=number)) for number in range(5)]
    stream = Stream(5, 0, 3, 6, 15)
    alone = list(loader(dataset(*paths), stream, num_workers=0))
    shared = list(loader(dataset(*paths), stream, num_workers=2))
    assert [(batch.dtype, tuple(batch.shape)) for batch in alone] == [(torch.uint8, (3, 3, 32, 32))] * 3
    assert alone[0].nbytes == 3 * dataset(*paths).item_bytes
    assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))


def test_levels_survive_the_way_to_floats_and_back():
    every = torch.arange(256, dtype=torch.uint8)
    unit = to_unit(every)
    assert unit.dtype == torch.float32
    assert (unit[0], unit[255]) == (-1, 1)
    assert torch.equal(to_u8(unit), every)
    assert torch.equal(to_u8(unit.double()), every)


def test_a_picture_is_decoded_once_and_only_its_crop_is_worked_on(tmp_path, monkeypatch):
    """Nothing but the decoding takes time that grows with the picture."""
    crops = dataset(saved(tmp_path / "a.jpg", noise(600, 500)), image_size=64)
    worked_on = []

    def watch(owner: type, name: str) -> None:
        inner = getattr(owner, name)

        def watched(image, *given, **named):
            worked_on.append((name, image.size))
            return inner(image, *given, **named)

        monkeypatch.setattr(owner, name, watched)

    watch(ImageFile, "load_end")  # A file has been decoded.
    for name in ("convert", "copy", "point", "reduce", "resize", "tobytes", "transpose"):
        watch(Image.Image, name)
    crops[Sample(0, 0)]
    assert worked_on.count(("load_end", (600, 500))) == 1
    others = {size for name, size in worked_on if name != "load_end"}
    assert others == {(64, 64)}, worked_on
