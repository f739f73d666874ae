"""Preparation and validation of picture folders: results, files left out, and repeated runs."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pooch
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageCms

from gputrain.config import leaves
from gputrain.data_in.preparation import QUARANTINE
from gputrain.data_in.split import MANIFEST, fingerprint
from gputrain.errors import UserError
from gputrain.files import read_rows
from gputrain.vae.config import PictureLimits, VaePrepareConfig
from gputrain.vae.dataset import open_pictures
from gputrain.vae.kind import KIND
from gputrain.vae.pictures import JOURNAL
from gputrain.vae.prepare import Disagreement, VaePrepareReport, output_names, prepare_images, validate_images
from tests.waiting import HANG_SECONDS, wait_until


def noise(width, height, seed=0):
    rows = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(rows).resize((width, height), Image.Resampling.BICUBIC)


def stripes(*colours, width=30, height=60):
    """Returns a picture of vertical stripes."""
    pixels = np.repeat(np.array([colours], dtype=np.uint8), height, axis=0)
    return Image.fromarray(np.repeat(pixels, width, axis=1))


def fill(folder, *names):
    """Writes different pictures with these names."""
    for seed, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        noise(70 + seed, 50, seed).save(path)
    return folder


def state(folder):
    """Returns every file of a folder with its content, time and inode."""
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino)
        for path in folder.rglob("*")
        if path.is_file()
    }


def contents(folder, without=()):
    return {name: content for name, (content, _, _) in state(folder).items() if name not in without}


def rows(folder, name=MANIFEST):
    return read_rows(folder / name, ("path",))


@pytest.fixture
def raw(tmp_path):
    folder = tmp_path / "raw"
    folder.mkdir()
    return folder


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


# ------------------------------------------------------------------------------------------------ pictures

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # 90 x 60 pixels of three stripes on a square of 48: what lies at 4, 14, 24, 34 and 43 of the middle row
        ("cover", [RED, GREEN, GREEN, GREEN, BLUE]),
        ("stretch", [RED, RED, GREEN, BLUE, BLUE]),
    ],
)
def test_resize_modes(raw, out, mode, expected):
    stripes(RED, GREEN, BLUE).save(raw / "a.png")
    prepare(raw, out, target_size=48, resize_mode=mode)
    with Image.open(out / "a.png") as image:
        assert (image.size, image.mode) == ((48, 48), "RGB")
        middle = np.asarray(image)[24].astype(int)
    for x, colour in zip((4, 14, 24, 34, 43), expected, strict=True):
        assert np.abs(middle[x] - colour).max() <= 60


def test_downsizing_averages_what_it_drops(raw, out):
    """A fine chequerboard becomes grey, without moire."""
    board = (np.indices((512, 512)).sum(axis=0) % 2 * 255).astype(np.uint8)
    Image.fromarray(board).save(raw / "a.png")
    prepare(raw, out, target_size=64)
    assert np.abs(np.asarray(Image.open(out / "a.png")).astype(int) - 127).max() <= 2


def test_pictures_of_one_colour_are_refused(raw, out):
    """White on transparency is one colour over white, and a picture with four channels."""
    white = np.full((64, 64, 4), 255, dtype=np.uint8)
    white[:32, :, 3] = 0
    Image.fromarray(white).save(raw / "logo.png")
    Image.new("L", (64, 64), 128).save(raw / "grey.jpg")
    Image.new("RGBA", (64, 64), (9, 9, 9, 0)).save(raw / "nothing.png")
    halves = noise(128, 64)
    halves.paste((7, 8, 9), (32, 0, 96, 64))
    halves.save(raw / "middle.png")
    noise(64, 64).save(raw / "a.png")
    prepare(raw, out, target_size=64)
    faults = {row["path"]: row["detail"] for row in rows(out, QUARANTINE) if row["reason"] == "one colour"}
    assert list(faults) == ["grey.jpg", "logo.png", "middle.png", "nothing.png"]
    assert faults["middle.png"] == "all its pixels are 7, 8, 9"
    assert faults["logo.png"].endswith("which prepare-data --image-channels 4 keeps")
    assert {one.path for one in validate_images(raw).refused} == {"grey.jpg", "logo.png", "nothing.png"}
    four = out.with_name("four")
    prepare(raw, four, target_size=64, image_channels=4)
    assert [row["path"] for row in rows(four)] == ["a.png", "logo.png"]
    assert not validate_images(four).refused


def test_pictures_that_are_nearly_black_are_refused(raw, out):
    """12 bits in 16, as cameras of microscopes write them, and a map of 16 labels; a picture at dusk is kept."""
    levels = np.random.default_rng(0).integers(0, 4096, (64, 64)).astype(np.uint16)
    Image.fromarray(levels).save(raw / "camera.png")
    Image.fromarray(levels).save(raw / "camera.tif")
    Image.fromarray((levels >> 8).astype(np.uint8)).save(raw / "labels.png")
    Image.fromarray((levels >> 7).astype(np.uint8)).save(raw / "dusk.png")
    prepare(raw, out, target_size=64)
    assert [row["path"] for row in rows(out)] == ["dusk.png"]
    faults = {row["path"]: row["detail"] for row in rows(out, QUARANTINE) if row["reason"] == "dark"}
    assert list(faults) == ["camera.png", "camera.tif", "labels.png"]
    assert faults["camera.png"].startswith("its brightest level is 16 of 255")
    assert [one.reason for one in validate_images(raw).refused] == ["dark", "dark", "dark"]


@pytest.mark.parametrize(("format", "suffix", "error"), [("png", ".png", 0), ("webp", ".webp", 0), ("jpeg", ".jpg", 6)])
def test_formats_keep_the_pixels(raw, out, format, suffix, error):
    image = noise(64, 64)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    image.save(raw / "a.bmp")
    image.save(raw / "b.png", icc_profile=profile)
    image.transpose(Image.Transpose.ROTATE_90).save(raw / "c.png")
    prepare(raw, out, target_size=64, format=format)
    assert sorted(path.name for path in out.glob("*" + suffix)) == [f"a{suffix}", f"c{suffix}"]
    with Image.open(out / f"a{suffix}") as prepared:
        assert np.abs(np.asarray(prepared).astype(int) - np.asarray(image)).max() <= error
        assert not {"icc_profile", "exif", "transparency"} & prepared.info.keys()


def test_manifest_describes_every_picture(raw, out):
    fill(raw, "a.jpg", "deep/er/b.webp")
    report = prepare(raw, out, target_size=64)
    assert (report.made, report.kept, report.held_out, report.refused) == (2, 0, 1, [])
    manifest = rows(out)
    assert [row["path"] for row in manifest] == ["a.png", "deep/er/b.png"]
    for row in manifest:
        path = out / row["path"]
        assert (row["width"], row["height"], row["bytes"]) == (64, 64, path.stat().st_size)
        assert row["sha256"] == pooch.file_hash(path)
        assert row["fingerprint"] == fingerprint(raw / row["source"])
    assert sorted(row["split"] for row in manifest) == ["held_out", "train"]
    assert json.loads(json.dumps(report.to_json()))["made"] == 2


# -------------------------------------------------------------------------------------------------- names


def test_names_keep_the_tree_and_never_clash():
    sources = ["a.gif", "a.jpg", "a.jpg.bmp", "d/a.jpg", "x.gif", "x.png/y.jpg", "n" * 251 + ".jpg", "B.jpg", "b.png"]
    names = output_names(sources, ".png")
    assert names["a.gif"] == "a.png"
    assert names["a.jpg"] == "a.jpg.png"
    assert names["a.jpg.bmp"] == "a.jpg.bmp.png"
    assert names["d/a.jpg"] == "d/a.png"
    assert names["x.gif"] == "x.gif.png"
    assert names["x.png/y.jpg"] == "x.png/y.png"
    assert (names["B.jpg"], names["b.png"]) == ("B.png", "b.png.png")
    assert names["n" * 251 + ".jpg"] == "n" * 251 + ".png"
    longer = output_names(["n" * 251 + ".jpg", "n" * 250 + ".jpeg"], ".webp")
    assert len(set(longer.values())) == 2
    assert max(map(len, longer.values())) <= 255


@given(st.lists(st.text("aAäÄßs.é\u0301", min_size=1, max_size=6), max_size=12))
def test_no_file_system_takes_two_names_for_one(stems):
    sources = {f"{stem}.{suffix}" for stem in stems for suffix in ("png", "jpg") if not stem.startswith(".")}
    names = output_names(sources, ".png")
    assert names.keys() == sources
    for fold in (str, str.lower, str.upper, str.casefold):
        assert len({fold(name) for name in names.values()}) == len(sources)


# --------------------------------------------------------------------------------------------- quarantine


@pytest.fixture
def troubled(raw):
    """Writes a picture of every fault, and six good ones."""
    fill(raw, *(f"good/{number}.jpg" for number in range(6)))
    shutil.copy(raw / "good/2.jpg", raw / "again.jpg")
    (raw / "good/2.bmp").write_bytes(b"")
    noise(64, 64, 7).save(raw / "twin1.png")
    noise(64, 64, 7).save(raw / "twin2.bmp")
    seed = 0
    while seed == 0 or not fingerprint(raw / "tiny.png").startswith("00"):  # It would be the first held-out picture.
        seed += 1
        noise(31, 64, seed).save(raw / "tiny.png")
    noise(300, 300, 9).save(raw / "huge.png")
    (raw / "cut.jpg").write_bytes((raw / "good/0.jpg").read_bytes()[:900])
    (raw / "text.png").write_text("dear diary")
    (raw / "dead.png").symlink_to("nowhere")
    (raw / "notes.txt").touch()
    return raw


REASONS = {
    "cut.jpg": "broken",
    "dead.png": "unreadable",
    "good/2.bmp": "broken",
    "good/2.jpg": "duplicate",
    "huge.png": "huge",
    "text.png": "broken",
    "tiny.png": "tiny",
    "twin2.bmp": "duplicate",
}


def test_faulty_files_are_listed_and_left_where_they_are(troubled, out):
    before = state(troubled)
    report = prepare(troubled, out, target_size=64, max_megapixels=0.08)
    assert {refusal.path: refusal.reason for refusal in report.refused} == REASONS
    quarantine = rows(out, QUARANTINE)
    assert {row["path"]: row["reason"] for row in quarantine} == REASONS
    assert all(row["detail"] for row in quarantine)
    assert {row["path"]: row["repeats"] for row in quarantine if row["repeats"]} == {
        "good/2.jpg": "again.jpg",
        "twin2.bmp": "twin1.png",
    }
    assert list(report.ignored) == [".txt"]
    assert report.made == len(rows(out)) == 7
    assert {path.relative_to(out).as_posix() for path in out.rglob("*.png")} == {row["path"] for row in rows(out)}
    assert state(troubled) == before


def test_split_is_the_same_before_and_after_preparation(troubled, out):
    for share in (0.0, 0.3, 0.6, 1.0):
        prepare(troubled, out, target_size=64, max_megapixels=0.08, held_out_share=share)
        prepared, plain = (open_pictures(folder, held_out_share=share) for folder in (out, troubled))
        held_out = {picture.fingerprint for picture in prepared.held_out}
        assert held_out == {row["fingerprint"] for row in rows(out) if row["split"] == "held_out"}
        shared = {p.fingerprint for p in prepared.train + prepared.held_out} & {
            p.fingerprint for p in plain.train + plain.held_out
        }
        assert len(shared) == 7
        assert {p.fingerprint for p in plain.held_out} & shared == held_out


def test_nothing_usable_is_a_user_error_that_names_the_list(raw, out):
    (raw / "a.jpg").write_text("dear diary")
    with pytest.raises(UserError, match="none of 1 files") as caught:
        prepare(raw, out, target_size=64)
    assert QUARANTINE in caught.value.hint
    assert rows(out, QUARANTINE)[0]["reason"] == "broken"
    with pytest.raises(UserError):
        open_pictures(out)


# ------------------------------------------------------------------------------------------------- again


def test_second_run_touches_nothing(troubled, out):
    options = {"target_size": 64, "max_megapixels": 0.08}
    first = prepare(troubled, out, **options)
    before = state(out)
    calls = []
    second = prepare(troubled, out, **options, progress=lambda done, total: calls.append((done, total)))
    assert state(out) == before
    assert (second.made, second.kept) == (0, first.made)
    assert second.refused == first.refused
    assert calls == [(12, 12)]


def test_run_does_only_what_changed(raw, out):
    fill(raw, *(f"{number}.jpg" for number in range(6)))
    prepare(raw, out, target_size=64)
    before = state(out)
    noise(90, 90, 77).save(raw / "1.jpg")  # changed
    (raw / "2.jpg").unlink()
    noise(90, 90, 78).save(raw / "new.png")
    (out / "3.png").unlink()
    (out / "4.png").write_bytes(b"cut short")
    report = prepare(raw, out, target_size=64)
    after = state(out)
    assert (report.made, report.kept) == (4, 2)
    assert {name for name in after if after[name] == before.get(name)} == {"0.png", "5.png", QUARANTINE}
    assert {name for name in before if before[name][0] == after.get(name, [b""])[0]} >= {"3.png", "4.png"}
    assert before["1.png"][0] != after["1.png"][0]
    assert "2.png" not in after
    assert [row["path"] for row in rows(out)] == ["0.png", "1.png", "3.png", "4.png", "5.png", "new.png"]


@pytest.mark.parametrize(
    "change", [{"target_size": 72}, {"resize_mode": "stretch"}, {"format": "webp"}, {"min_size": 40}]
)
def test_other_settings_are_refused_or_leave_out_more(raw, out, change):
    fill(raw, "a.jpg", "b.jpg")
    options = {"target_size": 64}
    prepare(raw, out, **options)
    if "min_size" not in change:  # It leaves out pictures, and changes none.
        before = contents(out)
        with pytest.raises(UserError, match="its pictures were prepared with other settings: "):
            prepare(raw, out, **options | change)
        assert contents(out) == before
        return
    report = prepare(raw, out, **options | change)
    assert (report.made, report.kept) == (2, 0)
    fresh = out.with_name("fresh")
    prepare(raw, fresh, **options | change)
    assert contents(out, [JOURNAL]) == contents(fresh, [JOURNAL])


def test_result_depends_on_neither_processes_nor_history(troubled, out):
    """A duplicate replaces its deleted original, and is replaced by a new one with an earlier name."""
    options = {"target_size": 64, "max_megapixels": 0.08}
    prepare(troubled, out, **options)
    for change in (
        lambda: (troubled / "twin1.png").unlink(),
        lambda: noise(64, 64, 7).save(troubled / "early.png"),
        lambda: shutil.copy(troubled / "good/3.jpg", troubled / "0.jpg"),
        lambda: noise(64, 64, 55).save(troubled / "good/4.gif"),  # It gets the name 4.png, which 4.jpg had.
        lambda: (troubled / "again.jpg").unlink(),
    ):
        change()
        prepare(troubled, out, **options)
        fresh = out.with_name("fresh")
        prepare(troubled, fresh, **options)
        assert contents(out, [JOURNAL]) == contents(fresh, [JOURNAL])
        shutil.rmtree(fresh)
    prepare(troubled, fresh, **options, num_workers=2)
    assert contents(out) == contents(fresh)


def test_folder_is_not_taken_for_prepared_while_it_is_changed(raw, out):
    fill(raw, "a.jpg", "b.jpg")
    prepare(raw, out, target_size=64)
    noise(64, 64, 9).save(raw / "c.jpg")
    (out / "c.png").mkdir()  # A folder has the name of the picture.
    with pytest.raises(UserError, match="cannot be written"):
        prepare(raw, out, target_size=64)
    with pytest.raises(UserError, match="not finished"):
        open_pictures(out)
    (out / "c.png").rmdir()
    prepare(raw, out, target_size=64)
    assert len(rows(out)) == 3


SCRIPT = """
    import sys, time
    from pathlib import Path
    from gputrain.errors import UserError
    from gputrain.vae.config import VaePrepareConfig
    from gputrain.vae.prepare import prepare_images

    def progress(done, total):
        if done == int(sys.argv[2]):
            time.sleep(1000)

    if __name__ == "__main__":
        config, workers = VaePrepareConfig(target_size=256), int(sys.argv[1])
        try:
            prepare_images(Path("raw"), Path("out"), config, num_workers=workers, progress=progress)
        except UserError as error:
            sys.exit(error.message)
"""


def run_until(tmp_path, done, **options):
    """Starts a real preparation in its own process group. Returns it when the journal has `done` pictures. It hangs
    when it has 20, so that it never ends before it is stopped."""
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    process = subprocess.Popen(
        [sys.executable, "script.py", "2", "20"],
        cwd=tmp_path,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    journal = tmp_path / "out" / JOURNAL
    wait_until(
        lambda: journal.exists() and journal.read_text().count('"sha256"') >= done,
        f"{done} pictures", lambda: process.poll() is not None,
    )  # fmt: skip
    return process


@pytest.fixture
def many(raw):
    for number in range(40):
        noise(200, 150, number).save(raw / f"{number:02}.png", compress_level=1)
    return raw


def test_killed_run_goes_on_where_it_was(tmp_path, many, out):
    process = run_until(tmp_path, done=4)
    process.kill()
    process.communicate(timeout=HANG_SECONDS)  # Wait until the workers have ended, too.
    done = (out / JOURNAL).read_text().count('"sha256"')
    with pytest.raises(UserError, match="not finished"):
        open_pictures(out)
    report = prepare(many, out, target_size=256)
    assert report.kept >= done - 1  # The last row may be incomplete.
    assert report.made + report.kept == 40
    prepare(many, tmp_path / "fresh", target_size=256)
    assert contents(out) == contents(tmp_path / "fresh")


@pytest.mark.skipif(sys.platform == "win32", reason="needs process groups")
@pytest.mark.parametrize("done", [0, 4])
def test_ctrl_c_stops_all_processes_quietly(tmp_path, many, out, done):
    """Interrupts while the processes start, and while they work."""
    process = run_until(tmp_path, done)
    time.sleep(0 if done else 0.1)  # Some of the processes have started by then, as a rule.
    os.killpg(process.pid, signal.SIGINT)
    _, talk = process.communicate(timeout=HANG_SECONDS)
    # Python ends itself by the signal, or with 130 if another of its threads gets the signal later than the exit.
    assert process.returncode in (-signal.SIGINT, 128 + signal.SIGINT)
    assert talk.count("Traceback") == 1  # It is the main process's, which the command line catches.
    with pytest.raises(UserError, match="not finished"):
        open_pictures(out)


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
def test_full_disk_is_a_user_error_and_nothing_is_lost(tmp_path, raw, out):
    import resource

    fill(raw, "a.png", "b.png")
    noise_everywhere = np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8)
    Image.fromarray(noise_everywhere).save(raw / "c.png")
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    limit = 150_000
    process = subprocess.run(
        [sys.executable, "script.py", "0", "-1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert process.returncode == 1
    assert "c.png: cannot be written" in process.stderr
    assert "Traceback" not in process.stderr
    assert not (out / "c.png").exists()
    assert prepare(raw, out, target_size=256).kept == 2


# ------------------------------------------------------------------------------------------------- errors


def test_folders_that_hold_one_another_are_refused(raw, tmp_path):
    fill(raw, "a.jpg", "b/c.jpg")
    before = state(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(raw)
    for output in (raw, raw / "out", tmp_path, link, raw / "b/../out"):
        with pytest.raises(UserError, match="one contains the other"):
            prepare(raw, output, target_size=64)
    link.unlink()
    assert state(tmp_path) == before


def test_output_folder_of_others_is_left_alone(raw, out, tmp_path):
    fill(raw, "a.jpg")
    fill(out, "a.png")
    before = state(out)
    with pytest.raises(UserError, match="not prepared here"):
        prepare(raw, out, target_size=64)
    assert state(out) == before
    prepare(raw, tmp_path / "other", target_size=64)
    with pytest.raises(UserError, match="was prepared from"):
        prepare(fill(tmp_path / "raw2", "b.jpg"), tmp_path / "other", target_size=64)


# --------------------------------------------------------------------------------------------- validation


@pytest.mark.parametrize("num_workers", [0, 2])
def test_validation_counts_and_names(troubled, num_workers):
    report = validate_images(troubled, PictureLimits(max_megapixels=0.08), num_workers=num_workers, held_out_share=0.5)
    expected = {name: reason for name, reason in REASONS.items() if name != "twin2.bmp"}
    assert {refusal.path: refusal.reason for refusal in report.refused} == expected
    assert (report.pictures, report.formats) == (8, {"JPEG": 6, "PNG": 1, "BMP": 1})
    assert (report.width.min, report.width.median, report.width.max) == (64, 71.5, 75)
    assert (report.height.min, report.height.median, report.height.max) == (50, 50, 64)
    assert report.bytes == sum(
        (troubled / name).stat().st_size for name in (*(f"good/{n}.jpg" for n in range(6)), "twin1.png", "twin2.bmp")
    )
    assert 0 < report.held_out < 8
    assert report.manifest is None
    assert json.loads(json.dumps(report.to_json()))["width"] == {"min": 64, "median": 71.5, "max": 75}


def test_prepared_folder_is_sound_until_it_is_touched(troubled, out):
    prepare(troubled, out, target_size=64, max_megapixels=0.08)
    report = validate_images(out)
    assert not report.refused
    assert report.manifest == Disagreement([], [], [])
    assert not report.ignored  # The files of the preparation belong to it.
    assert report.pictures == 7
    for share in (0.2, 0.4, 0.6, 0.8):
        held_out = open_pictures(out, held_out_share=share).held_out
        assert validate_images(out, held_out_share=share).held_out == len(held_out)
    (out / "good/0.png").unlink()
    noise(64, 64, 99).save(out / "good/1.png")
    (out / "good/3.png").write_bytes(b"x")
    noise(64, 64, 98).save(out / "extra.png")
    report = validate_images(out)
    assert report.manifest.missing == ["good/0.png"]
    assert report.manifest.changed == ["good/1.png", "good/3.png"]
    assert report.manifest.extra == ["extra.png"]
    pictures = open_pictures(out)
    assert {refusal.path for refusal in pictures.refused} == {"good/0.png", "good/1.png", "good/3.png"}


def prepare(raw: Path, out: Path, **options: Any) -> VaePrepareReport:
    """Calls `prepare_images` with the options of pictures and its own."""
    pictures = {name: options.pop(name) for name in leaves(VaePrepareConfig) if name in options}
    return prepare_images(raw, out, VaePrepareConfig(**pictures), **options)


@pytest.mark.parametrize(("size", "options"), [(64, ("--image-size", "64")), (1024, ())])
def test_a_training_on_small_pictures_is_given_their_size(size, options):
    given = SimpleNamespace(pictures=VaePrepareConfig(target_size=size), input_dir=Path("in"))
    assert KIND.prepare.work(given).train_options == options


def test_masks_and_excluded_pictures_are_left_out_and_named(tmp_path):
    """Masks are left out where their pictures are, and not in a folder of masks alone."""
    pictures = ("0.png", "1.jpg", "sub/7.png", "alone_mask.png", "night-view.png", "normal/0.png")
    masks = (
        "0-masklabel.png",
        "0-condlabel.png",
        "masks/1.png",
        "sub/7_depth.png",
        "conditioning/7.png",
        "Mask/0_mask.png",
        "0_mask_1.png",
        "0_mask02.png",
        "masks/1.jpg.png",
        "SegmentationClass/1.png",
        "annotations/1.png",
    )
    folder = fill(tmp_path / "in", *pictures, *masks)
    report = prepare_images(folder, tmp_path / "all", VaePrepareConfig(target_size=32))
    assert {one.path: one.reason for one in report.refused} == dict.fromkeys(masks, "mask")
    assert {one.detail for one in report.refused if "7" in one.path} == {"belongs to sub/7.png"}
    assert report.made == len(pictures)
    exclude = ("n*", "sub")
    report = prepare_images(folder, tmp_path / "some", VaePrepareConfig(target_size=32), exclude=exclude)
    assert report.ignored == {
        "excluded by n*": ["night-view.png", "normal/0.png"],
        "excluded by sub": ["sub/7.png", "sub/7_depth.png"],
    }
    assert report.made == 4  # The picture of conditioning/7.png is excluded.
    assert len([*open_pictures(folder, exclude=exclude).train, *open_pictures(folder, exclude=exclude).held_out]) == 4
    assert validate_images(folder, exclude=exclude).pictures == 4
    assert validate_images(folder / "masks").pictures == 2
    for read in (validate_images, open_pictures):
        with pytest.raises(UserError, match=r"in: no file matches --exclude \*\.gif"):
            read(folder, exclude=("*.gif",))
    with pytest.raises(UserError, match="exclude does nothing with prepared data"):
        open_pictures(tmp_path / "all", exclude=exclude)
