"""Evaluation of recognisers: rates against jiwer, groups, confusions, and the whole on a store."""

import random
from dataclasses import replace
from pathlib import Path

import jiwer
import numpy as np
import pytest
import torch

from gputrain.asr import evaluate
from gputrain.asr.evaluate import (
    RecognisedClip,
    confusions,
    evaluate_recogniser,
    held_out_share_of,
    recognise_clips,
    report_of,
)
from gputrain.asr.load import Recogniser, comparable, greedy_text, load_recogniser
from gputrain.audio.io import from_int16
from gputrain.data_in.split import HELD_OUT_SHARE
from gputrain.errors import UserError
from gputrain.speech.store import SpeechStore
from gputrain.speech.text.vocabulary import Vocabulary
from tests.asr.models import run_folder, tiny_model, transformers_folder
from tests.asr.stores import spelled_clips, write_store
from tests.command import ProgressSeen

WORDS = ("a", "good", "morning", "to", "everyone", "is", "it", "late")


def clips(count: int = 60) -> list[RecognisedClip]:
    """Returns clips of two speakers; the second is recognised badly."""
    draws, made = random.Random(0), []
    for number in range(count):
        words = draws.choices(WORDS, k=draws.randint(1, 9))
        bad = number % 3 == 0
        read = [draws.choice(WORDS) if bad and draws.random() < 0.5 else word for word in words]
        if bad and draws.random() < 0.5:
            read = read[1:]
        seconds = 0.5 + 1.7 * len(words)
        made.append(
            RecognisedClip(f"{number}.wav", "bad" if bad else "good", seconds, " ".join(words), " ".join(read), 0.5)
        )
    return made


def test_rates_are_jiwers() -> None:
    found = clips()
    report = report_of(found, computing_seconds=60.0)
    references, read = [clip.reference for clip in found], [clip.read for clip in found]
    assert report.scalars["wer"] == pytest.approx(jiwer.wer(references, read), abs=1e-12)
    assert report.scalars["cer"] == pytest.approx(jiwer.cer(references, read), abs=1e-12)
    assert report.scalars["wer_low"] < report.scalars["wer"] < report.scalars["wer_high"]
    assert report.scalars["correct"] == sum(one == other for one, other in zip(references, read, strict=True)) / 60
    for name, group in report.by_speaker.items():
        own = [clip for clip in found if clip.speaker == name]
        assert group.clips == len(own)
        assert group.wer == pytest.approx(jiwer.wer([one.reference for one in own], [one.read for one in own]))
    assert report.by_speaker["good"].cer == 0 < report.by_speaker["bad"].cer
    assert sum(group.clips for group in report.by_seconds.values()) == 60
    assert list(report.by_seconds) == ["2-4", "4-8", "8-16"]
    assert report.worst[0].cer == max(clip.cer for clip in found)


def test_confusions_of_letters_and_words() -> None:
    pairs = [("cat", "bat"), ("cats", "bat"), ("a b", "ab"), ("at", "xat")]
    assert confusions(pairs) == {("c", "b"): 2, ("", "x"): 1, (" ", ""): 1, ("s", ""): 1}
    assert confusions([(["the", "cat", "sat"], ["the", "bat"])]) == {("cat", "bat"): 1, ("sat", ""): 1}


def test_figures_for_the_terminal_are_short_lines() -> None:
    report = report_of(clips(), computing_seconds=60.0)
    shown = report.shown
    assert str(shown["WER"]).startswith(f"{100 * report.scalars['wer']:.2f} % (")
    assert list(shown).index("speaker bad") < list(shown).index("speaker good")
    width = max(map(len, shown))
    assert all(width + 4 + len(str(value)) <= 80 for name, value in shown.items() if not name.startswith("confused"))
    content = report.to_json()
    assert {"cer", "wer", "by_speaker", "by_seconds", "worst", "confused_letters", "confused_words"} <= content.keys()


def test_batches_hold_clips_of_similar_length_and_all_of_them() -> None:
    from gputrain.speech.store import SpeechClip

    made = [SpeechClip(f"{n}", "0" * 32, 0, 1000 * (n % 7 + 1), "", "", 0) for n in range(30)]
    batches = list(evaluate._batches(made, 20000, None))
    assert sorted(clip.path for batch in batches for clip in batch) == sorted(clip.path for clip in made)
    assert all(len(batch) * max(clip.samples for clip in batch) <= 20000 for batch in batches)
    assert len(list(evaluate._batches(made, 10, None))) == 30


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("speech") / "store", spelled_clips(20))


def test_a_recogniser_on_prepared_speech(store: Path, tmp_path: Path) -> None:
    """Transcripts are those of each clip alone."""
    run, progress = run_folder(tmp_path / "run"), ProgressSeen()
    report = evaluate_recogniser(run, store, device="cpu", held_out_share=1, progress=progress)
    assert report.clips == 20
    assert progress.leads_to(20)
    recogniser, opened = load_recogniser(run, torch.device("cpu")), SpeechStore.open(store)
    waves = {clip.path: from_int16(opened.wave(clip)) for clip in opened.clips}
    for clip in report.worst:
        assert clip.read == greedy_text(recogniser.log_probs([waves[clip.path]])[0].numpy(), recogniser.vocabulary)
    references, read = [clip.reference for clip in report.worst], [clip.read for clip in report.worst]
    assert report.scalars["cer"] == pytest.approx(jiwer.cer(references, read))
    held_out = evaluate_recogniser(run, store, device="cpu", held_out_share=0.2, max_clips=2)
    assert held_out.clips == 2


def test_clips_that_the_training_held_out(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    (run / "config.yaml").write_text("kind: asr\nheld_out_share: 3e-1\n")
    assert held_out_share_of(run) == held_out_share_of(run / "checkpoint_last.pt") == 0.3
    assert held_out_share_of(transformers_folder(tmp_path / "model")) == HELD_OUT_SHARE


def test_capitals_and_punctuation_of_another_program_are_no_errors(store: Path, tmp_path: Path) -> None:
    vocabulary = Vocabulary("und", ("<pad>", "<unk>", "|", *"ABCDEabcde.,"))
    folder = transformers_folder(tmp_path / "cased", vocabulary)
    recogniser = load_recogniser(folder, torch.device("cpu"))
    written = {
        greedy_text(log_probs.numpy(), recogniser.vocabulary)
        for clip in SpeechStore.open(store).clips
        for log_probs in recogniser.log_probs([from_int16(SpeechStore.open(store).wave(clip))])
    }
    assert any(set(text) & set("ABCDE.,") for text in written)
    report = evaluate_recogniser(folder, (store,), device="cpu", held_out_share=1.0)
    assert report.worst
    assert not set("".join(clip.read for clip in report.worst)) & set("ABCDE.,")
    assert comparable("A, b. C", vocabulary) == "a b c"
    assert comparable("A, b. C", replace(vocabulary, language="en")) == "A, b. C"


def test_speech_of_another_script_is_refused(store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    vocabulary = Vocabulary("en", ("<pad>", "<unk>", "|", *"xyz"))
    noise = np.random.default_rng(0).integers(-999, 999, 9000).astype(np.int16)
    fitting = write_store(tmp_path / "fitting", [("one", noise, "xyz"), ("two", noise + 1, "zy")])
    with pytest.raises(UserError, match=r"most of its letters are none of .*: a b c d e") as raised:
        evaluate_recogniser(run_folder(tmp_path / "run", vocabulary), [fitting, store], device="cpu", held_out_share=1)
    assert raised.value.message.startswith(f"{store}: ")  # Not the first folder, whose letters are known.
    cyrillic = replace(vocabulary, symbols=("<pad>", "<unk>", "|", *"xyzа"))  # The last one is a Cyrillic letter.
    latin = write_store(tmp_path / "latin", [("one", noise, "xyza"), ("two", noise + 1, "zy")])
    evaluate_recogniser(run_folder(tmp_path / "alike", cyrillic), [latin], device="cpu", held_out_share=1)
    assert f"{latin}: the recogniser has no symbol for 'a', which count as errors" in caplog.messages
    with pytest.raises(UserError, match="not prepared for asr"):
        evaluate_recogniser(run_folder(tmp_path / "other"), tmp_path, device="cpu")


def test_padding_is_not_read(tmp_path):
    """Clips of a batch are read as each alone, with the blanks of their own frames."""
    store = SpeechStore.open(write_store(tmp_path / "store", spelled_clips(6)))

    def read(model, batch_size):
        recogniser = Recogniser(model.eval(), store.format.vocabulary, 16000, normalizes=True, source="test")
        return list(recognise_clips(recogniser, store, store.clips, batch_size=batch_size))

    # The random weights of one seed depend on the version of transformers: this is the first that hears blanks too.
    for seed in range(1, 50):
        model = tiny_model(store.format.vocabulary, seed)
        alone = read(model, 1)
        if any(0 < clip.blank_share < 1 for clip in alone):
            break
    else:
        pytest.fail("no seed gives a model that hears blanks too")
    together = read(model, 6)
    assert len({clip.samples for clip in store.clips}) > 3
    assert together == alone
