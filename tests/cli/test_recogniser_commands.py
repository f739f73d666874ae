"""The recogniser's commands as typed: transcripts, figures, exports, and what they refuse."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

from gputrain.errors import UserError
from gputrain.speech.store import SpeechStore
from gputrain.speech.text.frontend import frontend
from gputrain.tts.evaluate import open_recogniser
from gputrain.tts.measures import plain
from tests.asr.models import run_folder, transformers_folder
from tests.asr.stores import spelled_clips, write_store
from tests.command import gputrain_here
from tests.speech.test_checker import sentences, spoken
from tests.speech.tones import ToneChecker, rest, said, write_said
from tests.tables import each_row


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
    (root / "broken").mkdir()
    (root / "broken" / "a.wav").write_text("no sound")
    return root


def transcribing(folder: Path, input: object, *more: object) -> list[object]:
    return ["transcribe", "--model", folder / "model", "--input", input, "--device", "cpu", *more]


def test_transcripts_are_on_standard_output(folder: Path) -> None:
    """Transcripts are data, all else are messages; a file that cannot be read is a warning beside others."""
    done = gputrain_here(*transcribing(folder, folder / "sounds"))
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
    assert "1 recording, " in alone.stderr


def test_json_and_subtitles(folder: Path, tmp_path: Path) -> None:
    outputs = ["--json", tmp_path / "out.json", "--output-dir", tmp_path / "out", "--formats", "vtt,srt"]
    done = gputrain_here(*transcribing(folder, folder / "sounds", *outputs))
    assert (done.returncode, done.stdout) == (0, "")
    assert [set(row) for row in json.loads((tmp_path / "out.json").read_text())] == [{"path", "text", "words"}] * 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["0.srt", "0.vtt", "1.srt", "1.vtt"]


@each_row(
    ("sounds/broken.wav", [], "error: sounds/broken.wav: cannot be decoded"),
    ("broken", [], "broken: no usable recording: broken/a.wav: cannot be decoded"),
    ("missing", [], "missing: no such file or folder"),
    ("sounds/0.wav", ["--overlap-seconds", 20], "overlap_seconds 20 is more than half of chunk_seconds 30"),
    ("sounds/0.wav", ["--formats", "vtt"], "formats does nothing"),
    ("sounds/0.wav", ["--model", "sounds"], "holds no checkpoint"),
    ("sounds/0.wav", ["--model", "missing"], "no such file or folder"),
)
def test_wrong_input_exits_with_2(
    folder: Path, monkeypatch: pytest.MonkeyPatch, input: str, more: list[object], message: str
) -> None:
    monkeypatch.chdir(folder)
    done = gputrain_here(*transcribing(folder, input, *more))
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("speech") / "store", spelled_clips(12))


def test_evaluate(folder: Path, store: Path, tmp_path: Path) -> None:
    words = ["evaluate", "--model", folder / "model", "--data-path", store, "--held-out-share", 1, "--device", "cpu"]
    done = gputrain_here(*words, "--json", tmp_path / "figures.json")
    assert done.returncode == 0, done.stderr
    assert "on 12 clips" in " ".join(done.stdout.split())
    assert "WER" in done.stdout
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["clips"] == 12
    assert f"{100 * figures['cer']:.2f} %" in done.stdout
    wrong = gputrain_here(*words, "--clip-seconds", 3)
    assert (wrong.returncode, "clip_seconds does nothing with" in " ".join(wrong.stderr.split())) == (2, True)


@each_row(
    ("auto", ["config.json", "model.safetensors"]),
    ("onnx", ["recogniser.onnx", "tokens.txt"]),
    ("sherpa", ["model.int8.onnx", "model.onnx", "tokens.txt"]),
)
def test_export(folder: Path, store: Path, tmp_path: Path, format: str, files: list[str]) -> None:
    words = ["export", "--model", folder / "model", "--output-dir", tmp_path / "out", "--format", format]
    done = gputrain_here(*words, "--data-path", store)
    assert done.returncode == 0, done.stderr
    assert set(files) <= {path.name for path in (tmp_path / "out").iterdir()}
    assert all(name in done.stdout for name in files)


def test_every_command_takes_the_checkpoint_that_is_named(tmp_path: Path, store: Path) -> None:
    run = run_folder(tmp_path / "run")
    write_said(tmp_path / "in.wav", rest(0.2))
    for words in (
        ["evaluate", "--data-path", store],
        ["export", "--output-dir", tmp_path / "out"],
        ["transcribe", "--input", tmp_path / "in.wav"],
    ):
        done = gputrain_here(*words, "--model", run, "--checkpoint", "best")
        assert done.returncode == 2
        assert f"{run}: holds no checkpoint_best.pt" in done.stderr


def test_wrong_exports(folder: Path, tmp_path: Path) -> None:
    words = ["export", "--model", folder / "model", "--output-dir", tmp_path / "out"]
    for more, message in (
        (["--format", "piper"], "is a recogniser, which has no format piper"),
        (["--format", "sherpa", "--name", "x"], "name does nothing with a recogniser, format sherpa"),
        (["--data-path", tmp_path], "not prepared for"),
        (["--device", "cuda"], "device does nothing with a recogniser, format transformers"),
    ):
        done = gputrain_here(*words, *more)
        assert done.returncode == 2
        assert message in " ".join(done.stderr.split())


def test_long_recordings_are_cut_and_texts_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Speech of tones, with the recogniser that knows them in place of the one that is named."""
    monkeypatch.setattr("gputrain.asr.checking.load_checker", lambda model, device="auto": ToneChecker())
    texts = sentences(6)
    write_said(tmp_path / "in" / "long.wav", spoken(texts)[0])
    for number, text in enumerate(sentences(6, seed=5)):
        write_said(tmp_path / "in" / f"{number}.wav", rest(0.2), said(text), rest(0.2))
    lines = [f"long|{' '.join(texts)}", *(f"{number}|{text}" for number, text in enumerate(sentences(6, seed=5)))]
    (tmp_path / "in" / "metadata.csv").write_text("\n".join(lines))
    speech = ["--language", "en", "--max-seconds", 5, "--num-workers", 0]
    done = gputrain_here(
        "prepare-data", "--kind", "tts", *speech, "--input-dir", tmp_path / "in", "--output-dir", tmp_path / "out",
        "--align-with", "recogniser",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    own = [clip for clip in SpeechStore.open(tmp_path / "out").clips if clip.path == "long.wav"]
    assert " ".join(clip.text for clip in own) == " ".join(texts)
    (tmp_path / "in" / "metadata.csv").write_text("\n".join([*lines[:3], f"2|{texts[0]}", *lines[4:]]))
    done = gputrain_here(
        "prepare-data", "--kind", "asr", *speech, "--input-dir", tmp_path / "in", "--output-dir", tmp_path / "asr"
    )
    assert done.returncode == 0, done.stderr
    done = gputrain_here(
        "validate", "--kind", "asr", *speech, "--input-dir", tmp_path / "asr", "--check-with", "recogniser",
        "--output-file", tmp_path / "report.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "text differs: 2.wav" in " ".join(done.stderr.split())
    assert "1 text differs" in done.stdout
    assert json.loads((tmp_path / "report.json").read_text())["checked"][0]["path"] == "2.wav"


def test_a_voice_is_read_by_a_recogniser(folder: Path, tmp_path: Path) -> None:
    rules = frontend("en")
    wave, rate = soundfile.read(folder / "sounds" / "0.wav", dtype="float32")
    reader = open_recogniser(folder / "model", rules, rate, "cpu")
    assert reader is not None
    text = gputrain_here(*transcribing(folder, folder / "sounds" / "0.wav")).stdout.strip()
    assert reader(wave) == plain(rules.normalize(text)) != ""
    assert open_recogniser(None, rules, rate, "cpu") is None
    with pytest.raises(UserError, match="no such file or folder"):
        open_recogniser(tmp_path / "missing", rules, rate, "cpu")
