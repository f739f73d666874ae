"""What the commands on data print: refusals by reason, odd names of files, files that are not read."""

import numpy as np
import pytest
from PIL import Image

from gputrain.cli import tables, ui
from gputrain.cli.settings import PrepareSettings
from gputrain.config import assemble
from gputrain.engine.preparation import RefusedItem
from gputrain.errors import UserError
from gputrain.kinds import other_files
from tests.command import gputrain_here


def test_refusals_are_counted_by_reason_after_the_first_few(capsys):
    items = [RefusedItem(f"{number}.wav", "no transcript", "it has no text") for number in range(446)]
    items[100:100] = [RefusedItem("a.wav", "silent", "its peak is 0"), RefusedItem("b.wav", "silent", "so")]
    tables.print_refusals(items)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        *(f"no transcript: {number}.wav: it has no text" for number in range(5)),
        "no transcript: and 441 more, 446 in all",
        "silent: a.wav: its peak is 0",
        "silent: b.wav: so",
    ]
    tables.print_refusals(items[:6])
    assert len(capsys.readouterr().err.splitlines()) == 6


def test_a_line_break_in_a_name_stays_on_its_line(capsys):
    tables.print_refusals([RefusedItem("a\n  two.wav", "silent", "like b\nc.wav")])
    ui.print_figures("in\n  put", {"files": "a\n  b"})
    told = capsys.readouterr()
    assert told.err == "silent: a\\n  two.wav: like b\\nc.wav\n"
    assert told.out == "in\\n  put\n  files  a\\n  b\n"


def test_files_that_are_not_read_are_counted_by_suffix():
    assert other_files({}) == ""
    assert other_files({".txt": 2, "hidden": 1}) == "2 .txt, 1 hidden"
    assert other_files({".svg": 3}) == "3 .svg; 3 drawings or camera files are not read: convert them to png"


def test_drawings_are_told_and_another_size_asks_first(tmp_path):
    raw, out = tmp_path / "raw", tmp_path / "out"
    raw.mkdir()
    for seed in range(3):
        noise = np.random.default_rng(seed).integers(0, 256, (70, 70, 3), dtype=np.uint8)
        Image.fromarray(noise).save(raw / f"{seed}\n.png")
    (raw / "logo.svg").write_text("<svg/>")
    words = ("prepare-data", "--input-dir", raw, "--output-dir", out, "--num-workers", 1, "--target-size")
    done = gputrain_here(*words, 64)
    assert done.returncode == 0, done.stderr
    assert "other files  1 .svg; 1 drawings or camera files are not read" in done.stdout
    done = gputrain_here(*words, 32)
    assert done.returncode == 2
    assert "its pictures were prepared with other settings: target_size 64, not 32" in done.stderr
    assert "--overwrite replaces these pictures" in done.stderr
    assert {Image.open(path).size for path in out.glob("*.png")} == {(64, 64)}
    assert gputrain_here(*words, 32, "--overwrite").returncode == 0
    assert {Image.open(path).size for path in out.glob("*.png")} == {(32, 32)}


def test_overwrite_is_for_pictures():
    with pytest.raises(UserError, match="overwrite does nothing with --kind vocoder"):
        assemble(PrepareSettings, {"input_dir": "in", "output_dir": "out", "kind": "vocoder", "overwrite": True})


def test_help_of_the_folder_names_every_kind():
    done = gputrain_here("prepare-data", "--help")
    assert "Folder tree of pictures or recordings" in " ".join(done.stdout.split())
