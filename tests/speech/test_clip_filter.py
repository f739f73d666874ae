"""Checks of the texts of a recogniser."""

import json

import pytest

from gputrain.audio.config import Sound
from gputrain.errors import UserError
from gputrain.speech.clip_filter import script_findings, symbol_counts, vocabulary_findings
from gputrain.speech.config import SpeechOptions
from gputrain.speech.prepare import prepare_speech, speech_prepare_config
from gputrain.speech.store import SpeechClip
from gputrain.speech.text.vocabulary import plain_words, vocabulary_of
from gputrain.speech.validate import validate_speech
from tests.speech.speech import hum, speak


def clips_of(*texts, language="ru"):
    return [
        SpeechClip(f"{place}.wav", f"{place:x}", 0, 32000, text, plain_words(text, language), 0)
        for place, text in enumerate(texts)
    ]


def test_letters_of_other_scripts_are_named():
    (said,) = script_findings({"a": 9, "и": 2, "1": 9})
    assert said == "letters of other scripts than Latin, which may only look alike: и (Cyrillic)"
    assert not [*script_findings({"カ": 9, "本": 2})]


def test_the_vocabulary_is_checked():
    clips = clips_of(*["қала maktab о'қу оʻқу"] * 20, "ъуы", language="kk")
    vocabulary = vocabulary_of("kk", (clip.normalized for clip in clips))
    counts = symbol_counts(clips, vocabulary)
    rare, scripts, apostrophes = vocabulary_findings(clips, counts)
    assert rare == "symbols that occur less than 20 times, too rarely to be learnt: ъ (1: 'ъуы'), ы (1: 'ъуы')"
    assert scripts.startswith("letters of other scripts than Cyrillic, which may only look alike: a ")
    assert scripts.endswith("(Latin)")
    assert apostrophes == "several signs for an apostrophe: ' (U+0027), ʻ (U+02BB)"
    assert (counts["|"], counts["қ"], counts["ъ"]) == (60, 60, 1)
    assert "<pad>" not in counts
    fine = clips_of(*["oʻzbekning maʼnosi"] * 20, language="uz")
    assert list(vocabulary_findings(fine, symbol_counts(fine, vocabulary_of("uz", [fine[0].normalized])))) == []


def test_a_report_on_a_recognisers_data(tmp_path):
    """A folder and its store have the same report, and a part of a recording is named by its time."""
    speak(tmp_path / "in/talk.wav", *(hum(2.0, hz=100 + 10 * number) for number in range(3)))
    cues = [f"00:0{2 * n}.000 --> 00:0{2 * n + 2}.000\n{text}" for n, text in enumerate(("Bir.", "Ikki 2.", "Uч."))]
    (tmp_path / "in/talk.vtt").write_text("WEBVTT\n\n" + "\n\n".join(cues))
    config = speech_prepare_config("asr", SpeechOptions(language="uz"), Sound())
    report = validate_speech(tmp_path / "in", config)
    assert (report.clips, report.sampling_rate, report.differing) == (3, 16000, [])
    assert report.symbols == {"i": 5, "k": 4, "|": 1, "b": 1, "r": 1, "c": 1, "h": 1, "u": 1}
    words = " ".join(report.findings)
    for phrase in (
        "of speech is little",
        "one speaker",
        "symbols that occur less than 20",
        "1 text has digits, which rules read and may be said otherwise, such as 'Ikki 2.' as 'ikki ikki'",
        "letters of other scripts than Latin, which may only look alike: ч (Cyrillic)",
    ):
        assert phrase in words
    prepare_speech(tmp_path / "in", tmp_path / "out", config)
    stored = validate_speech(tmp_path / "out", config)
    for name in ("symbols", "hours", "findings", "symbols_a_second", "source_rates"):
        assert getattr(stored, name) == getattr(report, name), name
    json.dumps(report.to_json())
    with pytest.raises(UserError, match="not for a voice"):
        validate_speech(tmp_path / "out", speech_prepare_config("tts", SpeechOptions(), Sound()))
