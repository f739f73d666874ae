"""`gputrain prepare-data` and `validate` with `--kind asr`, as typed, and options that have no effect there."""

import json

import pytest

from gputrain.speech.store import SpeechStore
from tests.command import gputrain_here
from tests.speech.speech import hum, speak

TEXTS = ("So it is said.", "An owl at 9!", "первoe", "It is late", "It is late", "It's late", "[laughs] it is late")


@pytest.fixture
def recordings(tmp_path):
    for number, text in enumerate(TEXTS):
        speak(tmp_path / f"in/{number}.wav", hum(0.07 * len(text) + 0.3, hz=110 + 25 * number))
    speak(tmp_path / "in/short.wav", hum(0.2))
    lines = [f"{number}|{'ann' if number % 2 else 'bob'}|{text}" for number, text in enumerate(TEXTS)]
    (tmp_path / "in/metadata.csv").write_text("\n".join([*lines, "short|bob|a"]), encoding="utf-8")
    return tmp_path / "in"


def test_from_recordings_to_a_checked_store(recordings, tmp_path):
    store, report = tmp_path / "out", tmp_path / "report.json"
    words = ("--kind", "asr", "--num-workers", 1, "--output-file", report)
    digits = ("--language", "sr")
    done = gputrain_here("prepare-data", *words, *digits, "--input-dir", recordings, "--output-dir", store)
    assert done.returncode == 0, done.stderr
    shown = dict(line.strip().split("  ", 1) for line in done.stdout.splitlines() if "  " in line.strip())
    shown = {name: value.strip() for name, value in shown.items()}
    assert (shown["clips"], shown["speakers"], shown["too short"]) == ("7", "ann, bob", "1")
    assert shown["vocabulary"].startswith("23 symbols: | ' 9 a d e g h i l n o ")
    assert "too short: short.wav: 0.20 seconds" in done.stderr
    assert "letters of other scripts than Latin" in done.stderr
    assert "--language sr keeps digits" in done.stderr
    assert json.loads(report.read_text())["vocabulary"][:4] == ["<pad>", "<unk>", "|", "'"]
    done = gputrain_here("validate", *words, "--input-dir", store)
    assert done.returncode == 0, done.stderr
    assert "note: 1 text has what may be no speech, such as '[laughs] it is late'" in done.stderr
    assert "memory" not in done.stdout
    assert "letters of other scripts than Latin, which may only look alike: е в о п р (Cyrillic)" in done.stderr
    content = json.loads(report.read_text())
    assert content["speakers"]["ann"]["clips"] == 3
    assert SpeechStore.open(store).format.kind == "asr"
    done = gputrain_here("train-tts", "--data-path", store, "--output-dir", tmp_path / "run")
    assert done.returncode == 2
    assert f"error: {store}: prepared for a recogniser (--kind asr), not for a voice" in done.stderr
