"""Runs a recogniser on recordings of any length, in overlapping chunks.

Every chunk begins at a frame of the whole recording. Of two chunks that overlap, each gives its half of the overlap,
because frames near the end of a chunk lack context. Samples, or the features of w2v-BERT, are normalised by the mean
and the variance of the whole recording.

Shapes: T samples, F frames, V symbols, C channels.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from gputrain.asr.features import bank_blocks, filter_banks, stacked
from gputrain.asr.load import Recogniser, predict_sound
from gputrain.asr.model import NORMALIZING_EPSILON, has_features
from gputrain.audio.io import Mixing, Samples, read_in_blocks
from gputrain.errors import UserError
from gputrain.speech.frames import STRIDE, encoder_frames

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
    """Number of samples of a recording, mean and variance. Of features, these are those of each channel."""

    samples: int
    mean: Any  # A number, or an array (C,)
    variance: Any


def moments_of(blocks: Iterable[NDArray[np.floating]]) -> SoundMoments:
    """Returns the moments of a recording, summed in fp64 around the mean of each block (Chan et al. 1979)."""
    count, mean, squares = 0, np.float64(0), np.float64(0)
    for block in blocks:
        if len(block):
            own_mean = block.mean(axis=0, dtype=np.float64)
            total, step = count + len(block), own_mean - mean
            squares = squares + np.square(block - own_mean, dtype=np.float64).sum(axis=0)
            squares = squares + step * step * count * len(block) / total
            mean = mean + step * len(block) / total
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
    device, field = next(recogniser.model.parameters()).device, recogniser.field
    scale = 1 / math.sqrt(sound.variance + NORMALIZING_EPSILON)
    moments = []
    if has_features(recogniser.model):
        banks = moments_of(bank_blocks(blocks()))
        unbiased = banks.variance * banks.samples / max(1, banks.samples - 1)  # As the features of a clip are.
        moments = [torch.as_tensor(each, device=device) for each in (banks.mean, unbiased)]
    source, begin = blocks(), 0  # `begin` is the first sample of `held_T`.
    held_T = np.empty(0, np.float32)
    spans = chunk_spans(encoder_frames(sound.samples, field), lengths)
    for first, end, kept_from, kept_to in spans:
        first_sample, end_sample = first * STRIDE, (end - 1) * STRIDE + field
        parts = [held_T[first_sample - begin :]]
        begin = first_sample
        held = len(parts[0])
        while held < end_sample - begin and (block_T := next(source, None)) is not None:
            parts.append(block_T)
            held += len(block_T)
        held_T = np.concatenate(parts)
        wave_T = held_T[: end_sample - begin]
        if recogniser.normalizes and not moments:
            wave_T = ((wave_T - sound.mean) * scale).astype(np.float32)
        sound_1X = torch.from_numpy(np.ascontiguousarray(wave_T))[None].to(device)
        if moments:
            sound_1X = stacked(filter_banks(sound_1X), *moments)
        log_probs_FV = predict_sound(recogniser.model, sound_1X)[0]
        yield log_probs_FV[kept_from - first : kept_to - first].cpu().numpy()


def blocks_of(wave_T: Samples) -> Blocks:
    """Returns a wave at the recogniser's rate as blocks."""
    return lambda: (wave_T[first : first + BLOCK] for first in range(0, len(wave_T), BLOCK))


def blocks_of_file(path: Path, rate_hz: int) -> Blocks:
    """Returns a recording of any rate and number of channels as blocks at the recogniser's rate."""
    known: list[Mixing] = []
    return lambda: read_in_blocks(path, rate_hz, known)


def long_log_probs(recogniser: Recogniser, wave_T: Samples, lengths: ChunkLengths) -> NDArray[np.float32]:
    """Returns the log-probabilities (F, V) of a whole wave at the recogniser's rate."""
    blocks = blocks_of(wave_T)
    pieces = log_prob_pieces(recogniser, blocks, moments_of(blocks()), lengths)
    return np.concatenate([np.empty((0, recogniser.model.config.vocab_size), np.float32), *pieces])
