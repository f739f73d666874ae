"""Reports on a folder, without writing, and on its prepared store."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from gputrain.data_in.split import MANIFEST
from gputrain.errors import UserError
from gputrain.speech.config import SpeechOptions, SpeechPrepareConfig
from gputrain.speech.prepare import prepare_speech
from gputrain.speech.store import SOUNDS
from gputrain.speech.validate import validate_speech
from tests.speech.speech import hum, rest, speak

RECIPE = SpeechPrepareConfig(SpeechOptions(language="en", max_seconds=10), sampling_rate=22050, trim_db=0.0)
TEXTS = {"a": ("ann", "So it is!"), "b": ("bob", "so be it"), "c": ("bob", "it was so"), "d": ("bob", "nothing")}


@pytest.fixture
def folder(tmp_path):
    seconds = {"a": 0.8, "b": 1.5, "c": 3.0}
    for number, (name, length) in enumerate(seconds.items()):
        speak(tmp_path / f"in/wavs/{name}.wav", hum(length, hz=150 + number))
    speak(tmp_path / "in/wavs/d.wav", rest(1.0))
    (tmp_path / "in/readme.md").touch()
    lines = [f"{name}|{speaker}|{text}" for name, (speaker, text) in TEXTS.items()]
    (tmp_path / "in/metadata.csv").write_text("\n".join(["id|speaker|text", *lines, "e|bob|not there"]))
    return tmp_path / "in"


def test_what_a_folder_holds(folder, tmp_path):
    before = sorted(folder.rglob("*"))
    report = validate_speech(folder, RECIPE)
    assert sorted(folder.rglob("*")) == before
    assert (report.prepared, report.clips) == (False, 3)
    assert report.hours == pytest.approx(5.3 / 3600, rel=1e-3)
    assert (report.seconds.min, report.seconds.median, report.seconds.max) == pytest.approx((0.8, 1.5, 3.0), abs=1e-3)
    spoken = Counter("so it is!" + "so be it" + "it was so")
    assert {symbol: count for symbol, count in report.symbols.items() if count} == spoken
    assert next(iter(report.symbols)) == " "
    assert {report.symbols[symbol] for symbol in "xyz?"} == {0}
    assert report.rare == spoken
    assert {name: summary.clips for name, summary in report.speakers.items()} == {"ann": 1, "bob": 2}
    assert report.speakers["bob"].hours == pytest.approx(4.5 / 3600, rel=1e-3)
    assert (report.symbols_a_second.min, report.symbols_a_second.max) == pytest.approx((9 / 3.0, 9 / 0.8), rel=1e-3)
    assert report.source_rates == {16000: 3}
    assert report.ignored == {".md": ["readme.md"]}
    assert report.reasons == {"no sound": 1, "silent": 1}
    words = "\n".join(report.findings)
    for phrase in (
        "3 recordings have less than 22050 Hz",
        "enough to fine-tune (--init-from)",
        "2 of 5 items",
        "of ann, bob",
    ):
        assert phrase in words
    json.dumps(report.to_json())


def test_a_store_tells_the_same(folder, tmp_path):
    report = validate_speech(folder, RECIPE).to_json()
    prepare_speech(folder, tmp_path / "out", RECIPE)
    again = validate_speech(tmp_path / "out", SpeechPrepareConfig(SpeechOptions())).to_json()
    for name in set(report) - {"input_dir", "prepared", "transcripts", "ignored", "columns"}:
        assert again[name] == report[name], name
    assert again["prepared"] is True


def test_nothing_of_use(folder):
    report = validate_speech(folder, replace(RECIPE, speech=replace(RECIPE.speech, min_seconds=9)))
    assert (report.clips, report.hours, report.seconds, report.symbols_a_second) == (0, 0, None, None)
    assert report.reasons == {"too short": 3, "no sound": 1, "silent": 1}
    assert report.findings == ["no clip can be used for training"]


def test_folders_that_are_none(tmp_path, folder):
    with pytest.raises(UserError, match="no such folder"):
        validate_speech(tmp_path / "nowhere", RECIPE)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / SOUNDS).write_text("{}\n")
    with pytest.raises(UserError, match="not finished"):
        validate_speech(tmp_path / "cut", RECIPE)
    prepare_speech(folder, tmp_path / "out", RECIPE)
    (tmp_path / "out" / MANIFEST).write_text("{\n")
    with pytest.raises(UserError, match="line 1: damaged"):
        validate_speech(tmp_path / "out", RECIPE)
