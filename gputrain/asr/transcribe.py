"""Transcribes recordings of any length: text, words with times, and subtitles.

A recogniser runs on overlapping chunks. Every chunk begins at a frame of the whole recording. Of two chunks that
overlap, each gives its half of the overlap, because frames near the end of a chunk lack context. Samples are normalised
by the mean and the variance of the whole recording.

Shapes: T samples, F frames, V symbols.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from gputrain.asr.config import Transcribe, TranscriptFormat
from gputrain.asr.load import Recogniser, greedy_symbols, load_recogniser, predict, words_of
from gputrain.asr.model import NORMALIZING_EPSILON
from gputrain.audio.io import HOW_TO_CONVERT, Mixing, Samples, length_of, read_in_blocks
from gputrain.audio.prepare import scan_recordings
from gputrain.data_in.preparation import RefusedItem
from gputrain.errors import UserError
from gputrain.files import Progress, check_report, no_progress, output_names, writing
from gputrain.hw.runtime import runtime_on
from gputrain.speech import subtitles
from gputrain.speech.config import FIELD, STRIDE, encoder_frames

log = logging.getLogger(__name__)

# --------------------------------------------------------------------------------------------- recordings of any length

CHUNK_SECONDS, OVERLAP_SECONDS = 30.0, 6.0
BLOCK = 1 << 20  # samples of a wave in memory that are handed on at once
Blocks: TypeAlias = Callable[[], Iterator[Samples]]  # Reads a recording from its beginning each time it is called.


@dataclass(frozen=True)
class ChunkLengths:
    frames: int
    overlap: int  # frames

    @classmethod
    def of_seconds(cls, chunk: float, overlap: float, rate_hz: int) -> "ChunkLengths":
        """Returns the lengths in frames. Raises UserError if the overlap takes half of a chunk or more."""
        frames, shared = (max(1, round(seconds * rate_hz / STRIDE)) for seconds in (chunk, overlap))
        if 2 * shared > frames:
            raise UserError(
                f"overlap_seconds {overlap:g} is more than half of chunk_seconds {chunk:g}",
                hint=f"--overlap-seconds {chunk / 5:g} suits these chunks",
            )
        return cls(frames, shared)


@dataclass(frozen=True)
class SoundMoments:
    """Number of samples of a recording, their mean and variance."""

    samples: int
    mean: float
    variance: float


def moments_of(blocks: Iterable[NDArray[np.floating]]) -> SoundMoments:
    """Returns the moments of a recording, summed in fp64 around the mean of each block (Chan et al. 1979)."""
    count, mean, squares = 0, 0.0, 0.0
    for block in blocks:
        if len(block):
            own_mean = float(block.mean(dtype=np.float64))
            total, step = count + len(block), own_mean - mean
            squares += float(np.square(block - own_mean, dtype=np.float64).sum())
            squares += step * step * count * len(block) / total
            mean += step * len(block) / total
            count = total
    return SoundMoments(count, mean, squares / max(1, count))


def chunk_spans(frames: int, lengths: ChunkLengths) -> list[tuple[int, int, int, int]]:
    """Returns (first, end, kept from, kept to) of each chunk, in frames of the recording. All chunks have the same
    length, so that the last one overlaps more, unless the whole recording is one shorter chunk."""
    if frames <= lengths.frames:
        return [(0, frames, 0, frames)] if frames else []
    firsts = [*range(0, frames - lengths.frames, lengths.frames - lengths.overlap), frames - lengths.frames]
    middles = [(before + lengths.frames + after) // 2 for before, after in pairwise(firsts)]
    seams = [0, *middles, frames]
    return [(first, first + lengths.frames, seams[at], seams[at + 1]) for at, first in enumerate(firsts)]


def log_prob_pieces(
    recogniser: Recogniser, blocks: Blocks, sound: SoundMoments, lengths: ChunkLengths
) -> Iterator[NDArray[np.float32]]:
    """Yields the log-probabilities (F, V) of consecutive frames of a recording; one chunk is in memory at a time."""
    device = next(recogniser.model.parameters()).device
    scale = 1 / math.sqrt(sound.variance + NORMALIZING_EPSILON)
    source, begin = blocks(), 0  # `begin` is the first sample of `held_T`.
    held_T = np.empty(0, np.float32)
    for first, end, kept_from, kept_to in chunk_spans(encoder_frames(sound.samples), lengths):
        first_sample, end_sample = first * STRIDE, (end - 1) * STRIDE + FIELD
        parts = [held_T[first_sample - begin :]]
        begin = first_sample
        held = len(parts[0])
        while held < end_sample - begin and (block_T := next(source, None)) is not None:
            parts.append(block_T)
            held += len(block_T)
        held_T = np.concatenate(parts)
        wave_T = held_T[: end_sample - begin]
        if recogniser.normalizes:  # By the moments of the recording: a chunk of silence is not made loud.
            wave_T = ((wave_T - sound.mean) * scale).astype(np.float32)
        wave_1T = torch.from_numpy(np.ascontiguousarray(wave_T))[None].to(device)
        log_probs_FV = predict(recogniser.model, wave_1T, [len(wave_T)], normalizes=False)[0]
        yield log_probs_FV[kept_from - first : kept_to - first].cpu().numpy()


def blocks_of(wave_T: Samples) -> Blocks:
    """Returns a wave at the recogniser's rate as blocks."""
    return lambda: (wave_T[first : first + BLOCK] for first in range(0, len(wave_T), BLOCK))


def long_log_probs(recogniser: Recogniser, wave_T: Samples, lengths: ChunkLengths) -> NDArray[np.float32]:
    """Returns the log-probabilities (F, V) of a whole wave at the recogniser's rate."""
    blocks = blocks_of(wave_T)
    pieces = log_prob_pieces(recogniser, blocks, moments_of(blocks()), lengths)
    return np.concatenate([np.empty((0, recogniser.model.config.vocab_size), np.float32), *pieces])


# ---------------------------------------------------------------------------------------------------------- transcripts


@dataclass(frozen=True)
class Transcript:
    path: str
    text: str
    words: list[subtitles.TimedWord]
    seconds: float  # length of the recording

    def to_json(self) -> dict[str, object]:
        rounded = [{"word": word.word, "start": round(word.start, 3), "end": round(word.end, 3)} for word in self.words]
        return {"path": self.path, "text": self.text, "words": rounded}


@dataclass
class Transcribed:
    """Result of `transcribe_files`."""

    files: list[Path] = field(default_factory=list)
    recordings: int = 0
    words: int = 0
    refused: list[RefusedItem] = field(default_factory=list)
    sound_seconds: float = 0.0
    computing_seconds: float = 0.0

    @property
    def real_time_factor(self) -> float:
        """Computing time per second of audio."""
        return self.computing_seconds / self.sound_seconds


WRITERS: dict[TranscriptFormat, Callable[[Transcript], str]] = {
    "txt": lambda transcript: f"{transcript.text}\n",
    "srt": lambda transcript: subtitles.srt(transcript.words),
    "vtt": lambda transcript: subtitles.vtt(transcript.words),
}


def transcribe_files(
    settings: Transcribe,
    *,
    show: Callable[[Transcript], None] = lambda transcript: None,
    progress: Progress = no_progress,
) -> Transcribed:
    """Transcribes every recording of a file or folder tree. `show` receives each transcript as soon as it is made, and
    `progress` the seconds of sound, also within a recording.

    What was made before an interruption is in the files. Raises UserError if there is no such model or no recording,
    or none could be transcribed.
    """
    paths = recordings_of(settings.input)
    runtime = runtime_on(settings.device)
    recogniser = load_recogniser(settings.weights, runtime.device)
    lengths = ChunkLengths.of_seconds(settings.chunk_seconds, settings.overlap_seconds, recogniser.sampling_rate)
    done, began = Transcribed(), time.perf_counter()
    targets = _targets(settings, paths)
    *begins, end = accumulate((length_of(path) or 0.0 for path in paths), initial=0.0)
    total = math.ceil(end)
    with _json_list(settings.json) as rows, runtime.autocast():
        for path, begin in zip(paths, begins, strict=True):
            try:
                advance = partial(_advance, progress, begin, total)
                transcript = transcribe_sound(recogniser, path, lengths, advance)
            except UserError as error:
                if not settings.input.is_dir():
                    raise
                log.warning("%s; left out", error.message)
                done.refused.append(RefusedItem(str(path), "unreadable", error.message.removeprefix(f"{path}: ")))
            else:
                done.recordings += 1
                done.words += len(transcript.words)
                done.sound_seconds += transcript.seconds
                show(transcript)
                rows.append(transcript.to_json())
                done.files += _write(transcript, targets.get(path, {}))
    progress(total, total)
    done.computing_seconds = time.perf_counter() - began
    if not done.recordings:
        first = done.refused[0]
        more = f", and {len(done.refused) - 1} more" if len(done.refused) > 1 else ""
        raise UserError(
            f"{settings.input}: no usable recording: {first.path}: {first.detail}{more}", hint=HOW_TO_CONVERT
        )
    if not done.words:
        log.warning("no word was recognised: the recogniser has not learnt to write yet, or not this language")
    return done


def recordings_of(input: Path) -> list[Path]:
    """Returns a file, or the recordings of a folder tree. Raises UserError if there are none."""
    if not input.is_dir():
        if not input.exists():
            raise UserError(f"{input}: no such file or folder", hint="--input takes a recording or a folder of them")
        return [input]
    return [input / path for path in scan_recordings(input).paths]


def _advance(progress: Progress, begin: float, total: int, seconds: float) -> None:
    progress(min(total, round(begin + seconds)), total)


def transcribe_sound(
    recogniser: Recogniser,
    path: Path,
    lengths: ChunkLengths,
    advance: Callable[[float], None] = lambda seconds: None,
) -> Transcript:
    """Transcribes a recording of any length in bounded memory; `advance` receives the seconds that are done. Raises
    UserError if it cannot be read, or is shorter than a frame of the recogniser."""
    rate_hz = recogniser.sampling_rate
    known: list[Mixing] = []  # How channels are mixed is found in the first reading, and holds for the second.
    blocks = partial(read_in_blocks, path, rate_hz, known)
    sound = moments_of(blocks())
    if sound.samples < FIELD:
        raise UserError(
            f"{path}: lasts {1000 * sound.samples / rate_hz:.3g} ms, less than a frame, {1000 * FIELD / rate_hz:g} ms",
            hint="leave it out, or record it again",
        )
    best, frames = [], 0  # A symbol a frame is all that a long recording leaves in memory.
    for log_probs_FV in log_prob_pieces(recogniser, blocks, sound, lengths):
        best.append(log_probs_FV.argmax(axis=1))
        frames += len(log_probs_FV)
        advance(frames * STRIDE / rate_hz)
    symbols = greedy_symbols(np.concatenate(best), recogniser.vocabulary.blank)
    words = words_of(symbols, recogniser.vocabulary, STRIDE / rate_hz)
    return Transcript(str(path), " ".join(word.word for word in words), words, sound.samples / rate_hz)


def _targets(settings: Transcribe, paths: list[Path]) -> dict[Path, dict[TranscriptFormat, Path]]:
    """Returns the files to write for each recording. Those that differ in the suffix alone keep it in the name."""
    if settings.output_dir is None:
        return {}
    root = settings.input if settings.input.is_dir() else settings.input.parent
    names = output_names([path.relative_to(root) for path in paths], lambda name: name.with_suffix(""))
    targets = {
        path: {format: settings.output_dir / f"{name}.{format}" for format in settings.formats}
        for path, name in zip(paths, names, strict=True)
    }
    if settings.output_dir.resolve() == root.resolve():  # What stands there may be the user's own texts.
        for target in (target for formats in targets.values() for target in formats.values() if target.exists()):
            raise UserError(f"{target} stands beside its recording already", hint="name another --output-dir")
    return targets


def _write(transcript: Transcript, targets: dict[TranscriptFormat, Path]) -> list[Path]:
    for format, target in targets.items():
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(WRITERS[format](transcript), encoding="utf-8")
    return list(targets.values())


@contextmanager
def _json_list(path: Path | None) -> Iterator[list[dict[str, object]]]:
    """Yields a list that becomes a JSON file at the end of the block, also if an error ends it."""
    rows: list[dict[str, object]] = []
    if path is None:
        yield rows
        return
    check_report(path, ["words"])
    with writing(path):  # So early, that hours of work are not done for a file that cannot be written.
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("[]\n", encoding="utf-8")
    try:
        yield rows
    finally:
        listed = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        with writing(path):
            path.write_text(f"[\n{listed}\n]\n" if rows else "[]\n", encoding="utf-8")
