"""Cutting long recordings between sentences, and checking transcripts, with speech of tones that is recognised
exactly."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gputrain.asr.checking import align_ctc
from gputrain.data_in.preparation import read_quarantine
from gputrain.errors import UserError
from gputrain.speech.checker import (
    SentenceTimes,
    TranscriptCheck,
    check_clips,
    doubt_of,
    mismatches,
    other_texts,
    quietest,
    sentence_edges,
    sentence_spans,
)
from gputrain.speech.config import SpeechOptions, SpeechPrepareConfig
from gputrain.speech.prepare import prepare_speech
from gputrain.speech.store import SpeechClip, SpeechStore
from gputrain.speech.validate import validate_speech
from tests.speech.tones import RATE, VOCABULARY, ToneChecker, rest, said, write_said
from tests.tables import each_row

WORDS = ("zebra", "quick", "fox", "lazy", "dog", "jump", "vex", "my", "sphinx", "of", "black", "quartz", "jar", "five")


def sentences(count: int, seed: int = 0) -> list[str]:
    draws = random.Random(seed)
    return [" ".join(draws.choices(WORDS, k=draws.randint(2, 5))).capitalize() + "." for _ in range(count)]


def spoken(texts: list[str], rate_hz: int = RATE, seed: int = 0) -> tuple[np.ndarray, list[tuple[float, float]]]:
    """Returns a recording of the texts with pauses of 0.2 to 0.7 seconds around them, and their times in seconds."""
    draws, parts, times, at = random.Random(seed), [], [], 0
    for text in [*texts, None]:
        pause = rest(draws.uniform(0.2, 0.7), rate_hz)
        parts.append(pause)
        at += len(pause)
        if text is not None:
            parts.append(said(text, rate_hz))
            times.append((at / rate_hz, (at + len(parts[-1])) / rate_hz))
            at += len(parts[-1])
    return np.concatenate(parts), times


def config(**options: object) -> SpeechPrepareConfig:
    speech = SpeechOptions(**{"language": "en", "max_seconds": 6.0, "max_rate_deviation": 0.0, **options})
    return SpeechPrepareConfig(speech, sampling_rate=RATE, trim_db=0.0)


@pytest.mark.parametrize("rate_hz", [RATE, 22050])
def test_sentences_are_found_within_a_frame(rate_hz: int) -> None:
    texts = sentences(8)
    wave, times = spoken(texts, rate_hz)
    found = ToneChecker().align(wave, rate_hz, texts)
    for sentence, (begin, end) in zip(found, times, strict=True):
        assert sentence is not None
        assert abs(sentence.begin - begin) < 0.025
        assert abs(sentence.end - end) < 0.025
        assert sentence.loss < 0.5
    for (low, high), (begin, end) in zip(sentence_spans(wave, rate_hz, found), times, strict=True):
        assert begin - 0.3 < low < begin
        assert end < high < end + 0.65


def test_a_text_that_cannot_be_in_a_recording_is_refused() -> None:
    with pytest.raises(UserError, match=r"letters in 0\.3 seconds"):
        ToneChecker().align(said("box")[: RATE // 2], RATE, ["this is far too long for half of a second of sound"])
    silence, fox = ToneChecker().align(said("fox"), RATE, ["...", "fox"])
    assert silence is None
    assert fox.end == pytest.approx(len(said("fox")) / RATE, abs=0.03)


def test_the_quietest_place_is_the_middle_of_a_pause() -> None:
    wave = np.concatenate([said("ab"), rest(0.4), said("cd")])
    middle = (len(said("ab")) + 0.2 * RATE) / RATE
    assert quietest(wave, RATE, middle - 0.25, middle + 0.22) == pytest.approx(middle, abs=0.03)
    assert quietest(wave, RATE, 1.0, 1.01) == pytest.approx(1.005)


def test_long_recordings_become_clips_of_whole_sentences(tmp_path: Path) -> None:
    """Each clip holds its own sentences, by the recogniser and by the known times; a sentence that is not spoken is
    left out, and no clip reaches over its place."""
    texts, wrong = sentences(12), "Nobody says any of this here."
    wave, _ = spoken(texts)
    write_said(tmp_path / "in" / "long.wav", wave)
    write_said(tmp_path / "in" / "short.wav", rest(0.3), said("a fox"), rest(0.3))
    write_said(tmp_path / "in" / "other.wav", spoken(sentences(12, seed=3))[0])
    written = " ".join([*texts[:5], wrong, *texts[5:]])
    lines = [f"long|{written}\n", "short|A fox.\n", f"other|{'A completely different text, wrong. ' * 6}\n"]
    (tmp_path / "in" / "metadata.csv").write_text("".join(lines))
    report = prepare_speech(tmp_path / "in", tmp_path / "out", config(), checker=ToneChecker())
    store = SpeechStore.open(tmp_path / "out")
    own = [clip for clip in store.clips if clip.path == "long.wav"]
    assert " ".join(clip.text for clip in own) == " ".join(texts)
    assert max(clip.samples for clip in own) <= 6 * RATE
    assert len(own) < len(texts)
    checker = ToneChecker()
    for clip in store.clips:
        assert checker.read(store.wave(clip) / np.float32(32768), RATE) == VOCABULARY.normalize(clip.text)
    joined = [clip for clip in own if texts[4] in clip.text and texts[5] in clip.text]
    assert not joined
    reasons = {refusal.reason for refusal in read_quarantine(tmp_path / "out")}
    assert reasons == {"text differs"}
    assert report.reasons["text differs"] >= 7


def test_without_a_recogniser_long_recordings_are_too_long(tmp_path: Path) -> None:
    write_said(tmp_path / "in" / "long.wav", spoken(sentences(12))[0])
    write_said(tmp_path / "in" / "short.wav", said("a fox in the box"))
    (tmp_path / "in" / "metadata.csv").write_text(f"long|{' '.join(sentences(12))}\nshort|A fox in the box.\n")
    assert prepare_speech(tmp_path / "in", tmp_path / "out", config()).reasons == {"too long": 1}


def test_validation_lists_texts_that_belong_to_other_recordings(tmp_path: Path) -> None:
    texts = sentences(30, seed=1)
    swapped = [*texts]
    swapped[4], swapped[17] = texts[17], texts[4]
    for number, text in enumerate(texts):
        write_said(tmp_path / "in" / f"{number:02}.wav", rest(0.2), said(text), rest(0.2))
    lines = "".join(f"{number:02}|{text}\n" for number, text in enumerate(swapped))
    (tmp_path / "in" / "metadata.csv").write_text(lines)
    with pytest.raises(UserError, match="a recogniser checks prepared speech"):
        validate_speech(tmp_path / "in", config(min_seconds=0.1), checker=ToneChecker())
    prepare_speech(tmp_path / "in", tmp_path / "out", config(min_seconds=0.1))
    report = validate_speech(tmp_path / "out", config(min_seconds=0.1), checker=ToneChecker())
    assert [one.path for one in report.differing] in (
        ["04.wav", "17.wav"], ["17.wav", "04.wav"]
    )  # fmt: skip
    assert [one.differs for one in report.checked] == [True] * 2 + [False] * 28
    assert {one.read for one in report.checked if one.path == "04.wav"} == {VOCABULARY.normalize(texts[4])}
    assert all(one.cer == 0 for one in report.checked[2:])


def test_only_outliers_are_mismatches() -> None:
    """A poor recogniser reads everything badly, which is no reason to suspect all texts. The limit is 0.6 of the way
    from the median loss, 3, to that of texts of other clips, 13."""
    draws = random.Random(0)
    poor = [TranscriptCheck(draws.gauss(3, 0.4), draws.uniform(0.55, 0.9), "", draws.gauss(13, 1)) for _ in range(200)]
    assert mismatches(poor) == []
    poor[3], poor[7] = TranscriptCheck(float("inf"), 1.0, ""), TranscriptCheck(9.3, 1.0, "")
    poor[5] = TranscriptCheck(8.7, 1.0, "")
    poor[9] = TranscriptCheck(9.3, 0.2, "")  # What is recognised is nearly the text.
    assert mismatches(poor) == [3, 7]
    assert mismatches([]) == []


def test_a_recogniser_that_has_learnt_nothing_suspects_nothing() -> None:
    """Right and wrong texts cost the same, so that only a loss far above the median tells anything."""
    draws = random.Random(0)
    nothing = [TranscriptCheck(draws.gauss(9, 1), 1.0, "", draws.gauss(9, 1)) for _ in range(200)]
    assert mismatches(nothing) == []
    assert mismatches([*nothing, TranscriptCheck(14.0, 1.0, "", 9.0)]) == [200]


class DeafChecker(ToneChecker):
    """Writes nothing but blanks."""

    def log_probs(self, wave, rate_hz):
        found = np.full_like(super().log_probs(wave, rate_hz), -9.0)
        found[:, VOCABULARY.blank] = -0.01
        return found


class ForeignChecker(ToneChecker):
    """Has symbols for none of the letters of the texts."""

    def labels(self, text):
        return []


@each_row((DeafChecker(), "wrote nothing for 24 of 24 clips"), (ForeignChecker(), "cannot write 24 of 24 texts"))
def test_a_recogniser_that_cannot_read_is_accused_and_not_the_texts(tmp_path, checker, doubt):
    texts, folder = sentences(24, seed=2), tmp_path / type(checker).__name__
    for number, text in enumerate(texts):
        write_said(folder / f"{number:02}.wav", said(text))
    (folder / "metadata.csv").write_text("".join(f"{number:02}|{text}\n" for number, text in enumerate(texts)))
    prepare_speech(folder, tmp_path / "out" / folder.name, config(min_seconds=0.1))
    report = validate_speech(tmp_path / "out" / folder.name, config(min_seconds=0.1), checker=checker)
    assert doubt in report.findings[0]
    assert not report.differing
    assert len(report.checked) == 24


def test_texts_that_all_belong_to_other_clips_are_no_outliers() -> None:
    """As in a table whose texts are shifted by a line: the other texts fit as often as the own."""
    draws = random.Random(0)
    shifted = [TranscriptCheck(draws.gauss(13, 1), 0.9, "x", draws.gauss(13, 1)) for _ in range(40)]
    assert "most texts belong to other recordings" in doubt_of(shifted)
    right = [TranscriptCheck(draws.gauss(3, 0.4), 0.7, "x", draws.gauss(13, 1)) for _ in range(20)]
    assert doubt_of([*shifted[:15], *right]) == ""
    assert doubt_of(shifted[:19]) == ""  # Too few to tell.
    silent = [TranscriptCheck(3.0, 1.0, "", 13.0)]
    assert "wrote nothing for 21 of 41 clips" in doubt_of([*silent * 21, *right])
    assert doubt_of([*silent * 20, *right]) == ""


@each_row((DeafChecker(), "writes nothing for a recording of"), (ForeignChecker(), "no symbol for a letter"))
def test_long_recordings_are_not_cut_by_a_recogniser_that_cannot_read(tmp_path, checker, message):
    folder = tmp_path / type(checker).__name__
    for seed, name in enumerate("ab"):
        write_said(folder / f"{name}.wav", spoken(sentences(12, seed))[0])
    write_said(folder / "short.wav", said("a fox in the box"))
    rows = [f"{name}|{' '.join(sentences(12))}\n" for name in ("a", "b")]
    (folder / "metadata.csv").write_text("".join([*rows, "short|A fox in the box.\n"]))
    with pytest.raises(UserError, match=rf"{message}.*, as for all 2 that are longer than 6 seconds"):
        prepare_speech(folder, tmp_path / "out", config(), checker=checker)


def test_a_recording_that_is_not_recognised_says_nothing_about_its_text(tmp_path: Path) -> None:
    """Noise of 8 seconds, beside a long recording that is cut."""

    class Checker(ToneChecker):
        def log_probs(self, wave, rate_hz):
            checker = DeafChecker() if len(wave) == 8 * rate_hz else ToneChecker()
            return checker.log_probs(wave, rate_hz)

    noise = np.random.default_rng(0).normal(0, 0.1, 8 * RATE).astype(np.float32)
    write_said(tmp_path / "in" / "noise.wav", noise)
    write_said(tmp_path / "in" / "long.wav", spoken(sentences(12))[0])
    rows = f"noise|{sentences(1)[0]}\nlong|{' '.join(sentences(12))}\n"
    (tmp_path / "in" / "metadata.csv").write_text(rows)
    report = prepare_speech(tmp_path / "in", tmp_path / "out", config(), checker=Checker())
    assert report.reasons == {"not recognised": 1}


def test_a_text_is_compared_with_one_of_another_clip() -> None:
    assert other_texts(["a", "b", "c", "d", "e"]) == ["c", "d", "e", "a", "b"]
    assert other_texts(["a", "b", "a", "b"]) == ["b", "a", "b", "a"]
    assert other_texts(["a", "a"]) == ["", ""]
    assert other_texts([]) == []
    assert other_texts(["a", "b", "b", "b"]) == ["b", "a", "a", "a"]
    checker = ToneChecker()
    one = checker.check(said("quick fox"), RATE, "Quick fox.", "Lazy dog.")
    assert one == replace(checker.check(said("quick fox"), RATE, "Quick fox."), other_loss=one.other_loss)
    assert one.other_loss == checker.check(said("quick fox"), RATE, "Lazy dog.").loss > 3 > 0.5 > one.loss
    log_probs, labels = checker.log_probs(said("quick fox"), RATE), checker.labels("Lazy dog.")
    lost = log_probs.max(axis=1).sum(dtype=np.float64) - align_ctc(log_probs, labels).log_prob
    assert one.other_loss == pytest.approx(lost / len("lazy dog"))


def test_sound_that_is_kept_ends_at_the_cut() -> None:
    """Sentences that follow one another closely share no sound."""
    wave = np.concatenate([said("zebra"), rest(0.08), said("fox")])
    first, second = (len(said(text)) / RATE for text in ("zebra", "fox"))
    labels = [SentenceTimes(0.02, first - 0.02, 0.0), SentenceTimes(first + 0.1, first + 0.06 + second, 0.0)]
    (low, end), (begin, high) = sentence_spans(wave, RATE, labels)
    assert first < end <= begin < first + 0.08
    assert (low, high) == (0.0, pytest.approx(len(wave) / RATE))


def test_a_sentence_begins_and_ends_where_its_sound_does() -> None:
    """Its labels lie within; the pause beside it has noise, 20 dB below it."""
    wave = np.concatenate([rest(0.5), said("zebra"), rest(0.7), said("quick fox"), rest(0.4)])
    level = np.sqrt(np.square(said("zebra")).mean()) / 10
    wave = wave + (level * np.random.default_rng(0).standard_normal(len(wave))).astype(np.float32)
    first, second = (len(said(text)) / RATE for text in ("zebra", "quick fox"))
    known = [(0.5, 0.5 + first), (1.2 + first, 1.2 + first + second)]
    labels = [SentenceTimes(begin + 0.1, end - 0.15, 0.0) for begin, end in known]
    for found, (begin, end) in zip(sentence_edges(wave, RATE, labels), known, strict=True):
        assert found[0] == pytest.approx(begin, abs=0.02)
        assert found[1] == pytest.approx(end, abs=0.02)
    silence = sentence_edges(rest(2.0), RATE, [SentenceTimes(0.5, 1.0, 0.0)])
    assert silence == [(0.5, 1.0)]


def test_a_text_longer_than_its_recording_is_the_worst() -> None:
    clips = [
        SpeechClip("a.wav", "0" * 32, 0, RATE, "fox", "fox", 0),
        SpeechClip("b.wav", "1" * 32, 0, RATE, "x " * 99, "", 0),
    ]
    wave = (said("fox")[: RATE // 4] * 32767).astype(np.int16)
    checked, _ = check_clips(clips, ["a", "b"], RATE, ToneChecker(), lambda clip: wave)
    assert [(one.path, one.loss is None) for one in checked] == [("b", True), ("a", False)]
