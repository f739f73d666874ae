"""Transcription of recordings of any length: chunks against the whole, files in and out, and malformed input."""

import json
import logging
import sys
from collections import Counter
from pathlib import Path

import jiwer
import numpy as np
import pytest
import soundfile
import torch

from gputrain.asr.config import Transcribe
from gputrain.asr.load import Recogniser, greedy_text, load_recogniser
from gputrain.asr.transcribe import (
    ChunkLengths,
    Transcript,
    _targets,
    blocks_of,
    chunk_spans,
    log_prob_pieces,
    long_log_probs,
    moments_of,
    transcribe_files,
    transcribe_sound,
)
from gputrain.audio.io import resample
from gputrain.errors import UserError
from tests.asr.models import transformers_folder
from tests.tables import each_row

RATE = 16000


def babble(seconds: float, seed: int = 0) -> np.ndarray:
    """Returns noise whose colour and loudness change ten times a second."""
    random = np.random.default_rng(seed)
    wave = random.normal(size=round(seconds * RATE)).astype(np.float32)
    for first in range(0, len(wave), RATE // 10):
        part = wave[first : first + RATE // 10]
        taps = random.normal(size=random.integers(2, 9))
        part[:] = np.convolve(part, taps, "same")[: len(part)] * random.uniform(0.01, 0.1)
    return wave


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return transformers_folder(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def recogniser(folder: Path) -> Recogniser:
    return load_recogniser(folder, torch.device("cpu"))


def local(recogniser: Recogniser) -> Recogniser:
    """Returns a recogniser whose attention changes nothing, so that a frame depends on frames near it only."""
    for name, parameter in recogniser.model.named_parameters():
        if "out_proj" in name:
            torch.nn.init.zeros_(parameter)
    return recogniser


@each_row(1, 49, 50, 51, 89, 90, 91, 130, 1000)
def test_chunks_cover_every_frame_once(frames: int) -> None:
    spans = chunk_spans(frames, ChunkLengths(50, 10))
    assert [frame for _, _, begin, end in spans for frame in range(begin, end)] == list(range(frames))
    for first, end, kept_from, kept_to in spans:
        assert end - first == min(50, frames)
        assert kept_from == 0 or kept_from - first >= 5
        assert kept_to == frames or end - kept_to >= 5


def test_chunks_of_a_local_model_equal_the_whole(tmp_path: Path) -> None:
    """Also if blocks have other lengths than chunks, and the last frame is heard in the mean alone."""
    recogniser = local(load_recogniser(transformers_folder(tmp_path / "model"), torch.device("cpu")))
    for seconds in (0.5, 2.0, 2.01, 7.3):
        wave = babble(seconds)
        (whole,) = recogniser.log_probs([wave])
        sound = moments_of(blocks_of(wave)())
        parts = np.array_split(wave, 7)
        pieces = log_prob_pieces(recogniser, parts.__iter__, sound, ChunkLengths(100, 40))
        chunked = np.concatenate(list(pieces))
        assert chunked.shape == whole.shape
        np.testing.assert_allclose(chunked, whole.numpy(), atol=2e-4)
        np.testing.assert_array_equal(chunked, long_log_probs(recogniser, wave, ChunkLengths(100, 40)))


def test_the_text_in_chunks_is_that_of_the_whole(recogniser: Recogniser, tmp_path: Path) -> None:
    soundfile.write(tmp_path / "long.wav", babble(40), RATE, subtype="FLOAT")
    whole = transcribe_sound(recogniser, tmp_path / "long.wav", ChunkLengths(10_000, 100))
    chunked = transcribe_sound(recogniser, tmp_path / "long.wav", ChunkLengths(500, 200))
    assert len(whole.text) > 100
    # Random weights may leave two symbols of one frame as likely as each other: then rounding decides.
    assert jiwer.cer(whole.text, chunked.text) <= 2 / len(whole.text)
    assert sum(word not in whole.words for word in chunked.words) <= 2


def test_a_model_without_normalisation_reads_samples_as_they_are(tmp_path: Path) -> None:
    recogniser = load_recogniser(transformers_folder(tmp_path / "model", normalizes=False), torch.device("cpu"))
    wave = babble(1.0)
    chunked = long_log_probs(recogniser, wave, ChunkLengths(1500, 300))
    np.testing.assert_allclose(chunked, recogniser.log_probs([wave])[0].numpy(), atol=1e-5)


def test_moments_of_blocks() -> None:
    wave = babble(3) * np.linspace(0.1, 3, 3 * RATE, dtype=np.float32) + 0.25
    found = moments_of(iter(np.array_split(wave, [1, 1, 700, 20000])))
    assert found.samples == len(wave)
    assert found.mean == pytest.approx(wave.mean(dtype=np.float64), rel=1e-9)
    assert found.variance == pytest.approx(wave.var(dtype=np.float64), rel=1e-6)


def test_only_a_chunk_is_in_memory(recogniser: Recogniser) -> None:
    """Blocks are asked for when they are needed."""
    wave, asked = babble(20), []

    def blocks():
        for number in range(20):
            asked.append(number)
            yield wave[number * RATE : (number + 1) * RATE]

    pieces = log_prob_pieces(recogniser, blocks, moments_of(blocks_of(wave)()), ChunkLengths(100, 40))
    next(pieces)
    assert len(asked) <= 3
    assert 1 + sum(1 for _ in pieces) == len(chunk_spans(999, ChunkLengths(100, 40)))


def test_a_folder_to_json_and_subtitles(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Stereo and other sampling rates are converted; malformed files are reported and left out."""
    sounds = tmp_path / "sounds"
    (sounds / "inner").mkdir(parents=True)
    wave = babble(3)
    soundfile.write(sounds / "a.wav", wave, RATE)
    soundfile.write(sounds / "inner" / "stereo.flac", np.stack([wave, wave], axis=1), 44100)
    soundfile.write(sounds / "empty.wav", np.empty(0), RATE)
    soundfile.write(sounds / "short.wav", wave[:80], RATE)
    (sounds / "text.mp3").write_text("no sound")
    shown = []
    settings = Transcribe(
        model=folder, input=sounds, json=tmp_path / "out" / "all.json", output_dir=tmp_path / "subtitles",
        formats=("txt", "srt", "vtt"), device="cpu",
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, logger="gputrain"):
        done = transcribe_files(settings, show=shown.append)
    rows = json.loads((tmp_path / "out" / "all.json").read_text())
    assert [row["path"] for row in rows] == [str(sounds / "a.wav"), str(sounds / "inner" / "stereo.flac")]
    assert done.recordings == len(shown) == 2
    assert {Path(one.path).name: one.detail for one in done.refused} == {
        "empty.wav": "holds no sound",
        "short.wav": "lasts 5 ms, less than a frame, 25 ms",
        "text.mp3": done.refused[-1].detail,
    }
    assert "text.mp3: cannot be decoded" in caplog.text
    for row in rows:
        assert row["text"] == " ".join(word["word"] for word in row["words"])
        times = [time for word in row["words"] for time in (word["start"], word["end"])]
        assert times == sorted(times)
        assert times[-1] <= 3.0
    for name in ("a", "inner/stereo"):
        assert [(tmp_path / "subtitles" / f"{name}.{format}").is_file() for format in ("txt", "srt", "vtt")] == [
            True
        ] * 3
    assert (tmp_path / "subtitles" / "a.txt").read_text().strip() == rows[0]["text"]


def test_a_resampled_recording_has_the_same_text(folder: Path, tmp_path: Path) -> None:
    texts = []
    wave = resample(babble(3)[: RATE * 3 // 2], 8000, RATE)
    for rate in (RATE, 48000, 22050):
        soundfile.write(tmp_path / "sound.wav", resample(wave, RATE, rate), rate, subtype="FLOAT")
        settings = Transcribe(model=folder, input=tmp_path / "sound.wav", device="cpu")
        transcribe_files(settings, show=lambda transcript: texts.append(transcript.text))
    assert len(texts[0]) > 20
    assert jiwer.cer([texts[0], texts[0]], texts[1:]) < 0.1


def test_progress_counts_seconds_within_a_recording(folder: Path, tmp_path: Path) -> None:
    for name, seconds in (("a", 9), ("b", 4)):
        soundfile.write(tmp_path / f"{name}.wav", babble(seconds), RATE)
    (tmp_path / "c.wav").write_text("no sound")
    told: list[tuple[int, int]] = []
    settings = Transcribe(model=folder, input=tmp_path, chunk_seconds=4, overlap_seconds=1, device="cpu")
    transcribe_files(settings, progress=lambda *done: told.append(done))
    assert {total for _, total in told} == {13}
    counts = [count for count, _ in told]
    assert counts == sorted(counts)
    assert counts[-1] == 13
    assert len(counts) >= 5


def test_an_interruption_keeps_what_was_made(folder: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        soundfile.write(tmp_path / f"{name}.wav", babble(1), RATE)

    def interrupt(transcript: Transcript) -> None:
        if transcript.path.endswith("b.wav"):
            raise KeyboardInterrupt

    settings = Transcribe(model=folder, input=tmp_path, json=tmp_path / "out.json", device="cpu")
    with pytest.raises(KeyboardInterrupt):
        transcribe_files(settings, show=interrupt)
    assert len(json.loads((tmp_path / "out.json").read_text())) == 1


@each_row(
    (["a.wav", "b.wav"], ["a", "b"]),
    (["a.wav", "a.flac", "d/a.wav"], ["a.wav", "a.flac", "d/a"]),
    (["a.wav", "a.flac", "a.wav.mp3"], ["a.wav", "a.flac", "a.wav.mp3"]),  # The stem of the last is the first's name.
    (["A.wav", "a.flac", "x.y.wav"], ["A.wav", "a.flac", "x.y"]),  # Other systems do not tell A from a.
)
def test_no_two_recordings_have_one_output(folder, tmp_path, names, expected) -> None:
    settings = Transcribe(model=folder, input=tmp_path, output_dir=tmp_path / "out")
    found = _targets(settings, [tmp_path / name for name in names])
    assert [one["srt"].relative_to(tmp_path / "out") for one in found.values()] == [
        Path(f"{name}.srt") for name in expected
    ]


def test_texts_beside_recordings_stay(folder, tmp_path) -> None:
    settings = Transcribe(model=folder, input=tmp_path / "a.wav", output_dir=tmp_path, formats=("txt",))
    assert _targets(settings, [tmp_path / "a.wav"])
    (tmp_path / "a.txt").write_text("what was said")
    with pytest.raises(UserError, match=r"a\.txt stands beside its recording already"):
        _targets(settings, [tmp_path / "a.wav"])


def test_names_of_outputs_take_a_time_that_grows_with_their_number(folder: Path, tmp_path: Path) -> None:
    """Counted in calls: twice as many files take twice as many."""
    settings = Transcribe(model=folder, input=tmp_path, output_dir=tmp_path / "out")

    def calls(count: int) -> int:
        paths, seen = [tmp_path / f"{number}.wav" for number in range(count)], Counter[str]()
        sys.setprofile(lambda frame, event, argument: seen.update([event]))
        try:
            _targets(settings, paths)
        finally:
            sys.setprofile(None)
        return seen["call"]

    assert calls(200) < 2.2 * calls(100)


def test_greedy_decoding_agrees_with_transformers(folder: Path, recogniser: Recogniser) -> None:
    """The stock tokenizer decodes the same ids to the same text."""
    from transformers import Wav2Vec2CTCTokenizer

    log_probs = long_log_probs(recogniser, babble(3), ChunkLengths(1500, 300))
    ours = greedy_text(log_probs, recogniser.vocabulary)
    tokenizer = Wav2Vec2CTCTokenizer.from_pretrained(folder)
    theirs = tokenizer.decode(log_probs.argmax(axis=1).tolist())
    assert ours == " ".join(theirs.split())
