"""The voice's commands as typed: from recordings to a tiny voice that is evaluated, exported and speaks; errors
with their messages and exit codes."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from gputrain.cli.app import main
from gputrain.fetch.names import kind_of
from tests.speech.speech import RATE_HZ, hum, rest, speak
from tests.tables import each_row
from tests.tts.test_train import QUIET, TINY, small_presets, train
from tests.vocoder.conftest import flags

TEXTS = ("So it is said.", "An owl!", "Two words, and more", "It is late", "We go on", "All is well")


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with small_presets():
        yield


@pytest.fixture(scope="module")
def recordings(tmp_path_factory) -> Path:
    """Hums with silence around them, and a transcript of each."""
    folder = tmp_path_factory.mktemp("recordings")
    for number, text in enumerate(TEXTS):
        sound = hum(0.07 * len(text) + 0.3, hz=110 + 25 * number)
        speak(folder / f"wavs/{number}.wav", rest(0.3), sound, rest(0.3))
    lines = [f"{number}|{'ann' if number % 2 else 'bob'}|{text}" for number, text in enumerate(TEXTS)]
    (folder / "metadata.csv").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def prepared(recordings, tmp_path_factory) -> Path:
    from gputrain.speech.config import SpeechOptions, SpeechPrepareConfig
    from gputrain.speech.prepare import prepare_speech

    folder = tmp_path_factory.mktemp("prepared") / "speech"
    prepare_speech(recordings, folder, SpeechPrepareConfig(SpeechOptions(language="en"), sampling_rate=RATE_HZ))
    return folder


@pytest.fixture(scope="module")
def voice_run(prepared, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("voice") / "run"
    train(folder, prepared, **QUIET, max_steps=1)
    return folder


def training(store: Path, **changes: object) -> list[str]:
    """Return the words of a training of one step; None leaves a setting out."""
    values: dict[str, Any] = {"data_path": str(store), **TINY, **QUIET, "max_steps": 1, "output_dir": "run", **changes}
    return ["train-tts", *flags({name: value for name, value in values.items() if value is not None})]


def refused(typed, words: list[object], *said: str) -> None:
    code, printed = typed(*words)
    assert code == 2, printed
    for part in said:
        assert part in printed
    assert not Path("run", "checkpoint_last.pt").exists()


# --------------------------------------------------------------------------------------------------- as it is meant


@pytest.mark.slow
def test_from_recordings_to_a_voice(typed, recordings):
    words = ["--kind", "tts", "--language", "en", "--audio-sample-rate", RATE_HZ, "--num-workers", 1]
    code, printed = typed("prepare-data", *words, "--input-dir", recordings, "--output-dir", "prepared")
    assert code == 0, printed
    assert Path("prepared", "manifest.jsonl").is_file()
    code, printed = typed(*training("prepared"))
    assert code == 0, printed
    assert "The run is in run" in printed
    assert "gputrain speak --model run --text TEXT --output-file out.wav" in printed
    assert kind_of(Path("run")).name == "tts"
    code, printed = typed("validate", "--kind", "tts", "--language", "en", "--input-dir", recordings)
    assert code == 0, printed
    assert "high" in printed


def test_it_is_measured_speaks_into_files_and_is_exported(typed, voice_run, prepared):
    words = ["--model", voice_run, "--data-path", prepared, "--device", "cpu"]
    code, printed = typed("evaluate", *words, "--json", "figures.json", "--held-out-share", 0.2)
    assert code == 0, printed
    figures = json.loads(Path("figures.json").read_text())
    assert figures["clips"] >= 1
    assert figures["mcd_db"] > 0
    assert "mcd_db" in printed
    Path("text.txt").write_text("One. Two.\nAnd three.\n")
    code, printed = typed("speak", "--model", voice_run, "--input-file", "text.txt", "--output-dir", "spoken")
    assert code == 0, printed
    assert sorted(path.name for path in Path("spoken").iterdir()) == ["0001.wav", "0002.wav"]
    wave_T, rate_hz = soundfile.read("spoken/0001.wav")
    assert rate_hz == RATE_HZ
    assert len(wave_T) > 0.2 * RATE_HZ  # The silence between sentences is included.
    pytest.importorskip("onnxruntime")
    named = ["--name", "en_GB-tiny", "--language-code", "en_GB"]
    code, printed = typed("export", "--model", voice_run, "--output-dir", "out", *named)
    assert code == 0, printed
    assert sorted(path.name for path in Path("out").iterdir()) == ["en_GB-tiny.onnx", "en_GB-tiny.onnx.json"]
    settings = json.loads(Path("out", "en_GB-tiny.onnx.json").read_text())
    assert settings["language"]["code"] == "en_GB"
    assert settings["audio"]["sample_rate"] == RATE_HZ
    assert settings["speaker_id_map"] == {"ann": 0, "bob": 1}


def test_standard_output_is_raw_samples(voice_run, monkeypatch, capfdbinary, tmp_path):
    def said(*words: object) -> bytes:
        monkeypatch.setattr(sys, "argv", ["gputrain", "speak", *map(str, words), "--model", str(voice_run)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capfdbinary.readouterr()
        assert not ended.value.code, printed.err
        return printed.out

    words = ["--text", "So it is. And so on.", "--speaker", "bob", "--device", "cpu"]
    raw = said(*words, "--output-file", "-")
    said(*words, "--output-file", tmp_path / "out.wav")
    wave_T, rate_hz = soundfile.read(tmp_path / "out.wav", dtype="int16")
    assert rate_hz == RATE_HZ
    # A stream is synthesised in other chunks, whose rounding may differ where a sample lies between two integers.
    streamed_T = np.frombuffer(raw, np.int16)
    assert streamed_T.shape == wave_T.shape
    assert np.abs(streamed_T.astype(int) - wave_T).max() <= 1
    assert len(streamed_T) > 0.2 * RATE_HZ


def test_normalize_prints_what_a_voice_sees(typed):
    assert typed("normalize", "--language", "en", "--text", "It is 5 o'clock.") == (0, "it is five o'clock.")
    Path("lines.txt").write_text("21\n\nSaLom", encoding="utf-8")
    code, printed = typed("normalize", "--input-file", "lines.txt")
    assert (code, printed) == (0, "yigirma bir salom")


def test_a_file_of_the_users_keys_is_followed(typed, prepared):
    Path("c.yaml").write_text(
        "training:\n  batch_size: 2\n  pin_memory: true\noutput:\n  save_step: 1\nlogging:\n  save_interval: 1\n"
        "optimizer:\n  name: AdamW\n  lr: 0.0003\n"
    )
    words = training(prepared, checkpoint_every_steps=None, batch_size=None, learning_rate=None)
    code, printed = typed(*words, "--config", "c.yaml")
    assert code == 0, printed
    assert "pin_memory has no effect" in printed
    assert Path("run", "checkpoint_step_1.pt").is_file()
    row = json.loads(Path("run", "metrics.jsonl").read_text().splitlines()[0])
    assert row["learning_rate"] == 0.0003


# ---------------------------------------------------------------------------------------------------- what is refused


@each_row(
    ("evaluate", ["--data-path", ".", "--image-size", 64], "image_size does nothing with", "drop --image-size"),
    ("evaluate", ["--data-path", ".", "--clip-seconds", 2], "clip_seconds does nothing", "drop --clip-seconds"),
    ("evaluate", ["--data-path", "gone"], "gone", "prepare-data"),
    ("export", ["--output-dir", "out", "--format", "openvpi"], "a voice, which has no format openvpi", "piper"),
    ("export", ["--output-dir", "out", "--data-path", "."], "data_path does nothing with a voice", "--data-path"),
    ("export", ["--output-dir", "out", "--language-code", "british"], "'british'", "such as kk_KZ"),
    ("export", ["--output-dir", "out", "--name", "a/b"], "'a/b' is not a file name", "without folders"),
    ("speak", ["--text", "so"], "no output_file is given", "--output-file out.wav"),
    ("speak", ["--text", "so", "--output-file", "a.wav", "--speaker", "zoe"], "zoe", "ann"),
    ("speak", ["--text", "中文", "--output-file", "a.wav"], "nothing to say", "gputrain normalize"),
    ("speak", ["--text", "", "--output-file", "a.wav"], "nothing to say", ""),
    ("speak", ["--text", "so", "--output-file", "a.wav", "--length-scale", 0], "--length-scale", ""),
    ("speak", ["--input-file", "gone.txt", "--output-file", "a.wav"], "gone.txt", ""),
    ("speak", ["--text", "so", "--output-file", "gone/there/a.wav", "--output-dir", "b"], "both given", ""),
)
def test_uses_that_cannot_be(typed, voice_run, command, options, said, hint):
    refused(typed, [command, "--model", voice_run, *options], said, hint)
    assert not Path("out").exists()
