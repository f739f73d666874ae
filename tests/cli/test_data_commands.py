"""The guide's data commands, with their underscores, on real files."""

import json
import signal
import subprocess
import sys

import numpy as np
from PIL import Image

from tests.command import gputrain_here
from tests.waiting import HANG_SECONDS, wait_until


def test_preprocess_then_validate_as_in_the_guide(photographs, tmp_path):
    (tmp_path / "raw").mkdir()
    for path in photographs.iterdir():
        (tmp_path / "raw" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "raw" / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 not much of a picture")
    words = (
        "prepare-data", "--mode", "preprocess", "--input_dir", tmp_path / "raw", "--output_dir", tmp_path / "data",
        "--target_size", 64, "--resize_mode", "cover", "--num_workers", 2,
    )  # fmt: skip
    result = gputrain_here(*words)
    assert result.returncode == 0, result.stderr
    assert "broken.jpg" in result.stderr
    assert "made      6" in result.stdout
    assert "refused   1" in result.stdout
    assert {Image.open(path).size for path in (tmp_path / "data").glob("*.png")} == {(64, 64)}
    assert "made      0" in gputrain_here(*words).stdout

    reports = []
    for number, command in enumerate((["prepare-data", "--mode", "validate"], ["validate"])):
        path = tmp_path / f"{number}.json"
        result = gputrain_here(*command, "--input_dir", tmp_path / "data", "--output_file", path)
        assert result.returncode == 0, result.stderr
        assert "agrees with the files" in result.stdout
        reports.append(json.loads(path.read_text()))
    assert reports[0] == reports[1]
    assert reports[0]["pictures"] == 6


HANGING = """
import time
from gputrain.cli import app, ui

def update(bar, done, total):
    if done == 2:
        time.sleep(1000)

if __name__ == "__main__":
    ui.TerminalBar.update = update
    app.main()
"""


def test_ctrl_c_while_preparing_loses_nothing(tmp_path):
    """The command hangs when it has the results of 2 of 16 pictures, and its processes have made at most 9 more, so
    that it never ends before it is stopped."""
    (tmp_path / "raw").mkdir()
    for seed in range(16):
        coarse = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (9, 9, 3), dtype=np.uint8))
        coarse.resize((1200, 900)).save(tmp_path / "raw" / f"{seed}.jpg")
    words = ["prepare-data", "--input-dir", tmp_path / "raw", "--output-dir", tmp_path / "data", "--num-workers", 2]
    (tmp_path / "program.py").write_text(HANGING)
    command = [sys.executable, str(tmp_path / "program.py"), *map(str, words)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    pictures = tmp_path / "data"
    wait_until(lambda: len(list(pictures.glob("*.png"))) >= 5, "5 pictures", lambda: process.poll() is not None)
    process.send_signal(signal.SIGINT)
    _, talk = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 75
    assert "run the same command again" in talk
    assert "Traceback" not in talk
    made = len(list((tmp_path / "data").glob("*.png")))
    assert 2 <= made < 16
    result = gputrain_here(*words)
    assert result.returncode == 0, result.stderr
    assert len(list((tmp_path / "data").glob("*.png"))) == 16
    assert "kept      0" not in result.stdout
