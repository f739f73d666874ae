"""`transcribe` as a command, in a process of its own where the exit code counts."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests.asr.models import transformers_folder
from tests.command import gputrain, gputrain_here


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a model, two recordings and a file that is none."""
    root = tmp_path_factory.mktemp("recogniser")
    transformers_folder(root / "model")
    (root / "sounds").mkdir()
    for number in range(2):
        noise = np.random.default_rng(number).normal(size=16000) * 0.1
        soundfile.write(root / "sounds" / f"{number}.wav", noise, 16000)
    (root / "sounds" / "broken.wav").write_text("no sound")
    return root


def transcribing(folder: Path, input: object, *more: object) -> list[object]:
    return ["transcribe", "--model", folder / "model", "--input", input, "--device", "cpu", *more]


def test_transcripts_are_on_standard_output(folder: Path) -> None:
    """Transcripts are data, all else are messages; a file that cannot be read is a warning beside others."""
    done = gputrain(*transcribing(folder, folder / "sounds"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [
        str(folder / "sounds" / f"{number}.wav") for number in (0, 1)
    ]
    assert "2 recordings" in done.stderr
    assert "1 left out; 2.0 s of sound" in done.stderr
    assert "broken.wav: cannot be decoded" in done.stderr
    assert "Loading weights" not in done.stderr
    alone = gputrain_here(*transcribing(folder, folder / "sounds" / "0.wav"))
    assert f"{folder / 'sounds' / '0.wav'}: {alone.stdout.strip()}" == lines[0]


def test_json_and_subtitles(folder: Path, tmp_path: Path) -> None:
    outputs = ["--json", tmp_path / "out.json", "--output-dir", tmp_path / "out", "--formats", "vtt,srt"]
    done = gputrain_here(*transcribing(folder, folder / "sounds", *outputs))
    assert (done.returncode, done.stdout) == (0, "")
    assert [set(row) for row in json.loads((tmp_path / "out.json").read_text())] == [{"path", "text", "words"}] * 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["0.srt", "0.vtt", "1.srt", "1.vtt"]


@pytest.mark.parametrize(
    ("input", "more", "message"),
    [
        ("sounds/broken.wav", [], "broken.wav: cannot be decoded"),
        ("missing", [], "missing: no such file or folder"),
        ("sounds/0.wav", ["--overlap-seconds", 20], "overlap_seconds 20 is more than half of chunk_seconds 30"),
        ("sounds/0.wav", ["--beam-width", 9], "beam_width does nothing without lm"),
        ("sounds/0.wav", ["--lm", "missing.txt"], "missing.txt: No such file"),
        ("sounds/0.wav", ["--model", "sounds"], "holds no checkpoint"),
        ("sounds/0.wav", ["--model", "missing"], "no such checkpoint"),
    ],
)
def test_wrong_input_exits_with_2(
    folder: Path, monkeypatch: pytest.MonkeyPatch, input: str, more: list[object], message: str
) -> None:
    monkeypatch.chdir(folder)
    done = gputrain_here(*transcribing(folder, input, *more))
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
