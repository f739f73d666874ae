"""Cuts long recordings at sentence boundaries, where a recogniser hears them.

Shape suffix: T samples.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from gputrain.audio.io import Samples, from_int16
from gputrain.audio.prepare import RefusedRecording
from gputrain.audio.store import Wave
from gputrain.engine.dataset_report import Progress, silent
from gputrain.errors import UserError
from gputrain.speech.checker import SentenceTimes, SpeechChecker
from gputrain.speech.prepare_config import SpeechPrepareConfig
from gputrain.speech.store import Recording
from gputrain.speech.text.frontend import shortened
from gputrain.speech.transcripts import Utterance

BEFORE_SECONDS, AFTER_SECONDS = 0.25, 0.6  # Sound that is kept around a sentence; labels are at the core of letters.
WINDOW_SECONDS = 0.03  # A cut is in the middle of the quietest window between two sentences.


def cut_utterances(
    utterances: Sequence[Utterance],
    recordings: Mapping[str, Recording],
    config: SpeechPrepareConfig,
    checker: SpeechChecker,
    sentences_of: Callable[[str], list[str]],
    wave_of: Callable[[Recording], Wave],
    progress: Progress = silent,
) -> tuple[list[Utterance], list[RefusedRecording]]:
    """Returns the utterances, with those of recordings that exceed the maximum length cut into groups of whole
    sentences; and what was left out: recordings that cannot be aligned, and sentences that do not fit."""
    rate_hz, max_seconds = config.sampling_rate, config.speech.max_seconds
    found: list[Utterance] = []
    refused: list[RefusedRecording] = []
    long = {
        utterance
        for utterance in utterances
        if utterance.span is None
        and utterance.path in recordings
        and recordings[utterance.path].samples > max_seconds * rate_hz
    }
    done = 0
    for utterance in utterances:
        if utterance not in long:
            found.append(utterance)
            continue
        wave_T, sentences = from_int16(wave_of(recordings[utterance.path])), sentences_of(utterance.text)
        try:
            times = checker.align(wave_T, rate_hz, sentences)
        except UserError as error:
            refused.append(RefusedRecording(utterance.path, "text differs", error.message))
        else:
            found += _groups(utterance, wave_T, rate_hz, list(zip(sentences, times, strict=True)), max_seconds, refused)
        done += 1
        progress(done, len(long))
    return found, refused


def _groups(
    utterance: Utterance,
    wave_T: Samples,
    rate_hz: int,
    sentences: Sequence[tuple[str, SentenceTimes | None]],
    max_seconds: float,
    refused: list[RefusedRecording],
) -> list[Utterance]:
    """Joins neighbouring sentences as far as `max_seconds` allows."""
    groups: list[tuple[float, float, str]] = []
    follows = False  # True if the sentence before is the end of the last group.
    spans = iter(sentence_spans(wave_T, rate_hz, [times for _, times in sentences if times]))
    for sentence, times in sentences:
        if times is None:
            refused.append(RefusedRecording(utterance.path, "text differs", f"{shortened(sentence)!r} is not said"))
            follows = False
            continue
        begin, end = next(spans)
        if follows and end - groups[-1][0] <= max_seconds:
            groups[-1] = (groups[-1][0], end, f"{groups[-1][2]} {sentence}")
        else:
            groups.append((begin, end, sentence))
        follows = True
    return [
        replace(utterance, text=text, span=(begin, end), where=f"{utterance.path} at {begin:.2f} s")
        for begin, end, text in groups
    ]


def sentence_spans(wave_T: Samples, rate_hz: int, sentences: Sequence[SentenceTimes]) -> list[tuple[float, float]]:
    """Returns the first second and the end of the sound to keep for each sentence: with a little silence around it, at
    most up to the cut, the quietest place between two sentences."""
    inner = [quietest(wave_T, rate_hz, before.end, after.begin) for before, after in pairwise(sentences)]
    cuts = [0.0, *inner, len(wave_T) / rate_hz]
    return [
        (max(cuts[at], one.begin - BEFORE_SECONDS), min(cuts[at + 1], one.end + AFTER_SECONDS))
        for at, one in enumerate(sentences)
    ]


def quietest(wave_T: Samples, rate_hz: int, begin: float, end: float) -> float:
    """Returns the middle of the quietest windows between two times, or of the times if they are closer."""
    window = max(1, round(WINDOW_SECONDS * rate_hz))
    part_T = wave_T[max(0, round(begin * rate_hz)) : round(end * rate_hz)].astype(np.float64)
    if len(part_T) < 2 * window:
        return (begin + end) / 2
    sums_T = np.concatenate([[0.0], np.cumsum(np.square(part_T))])
    power_T = sums_T[window:] - sums_T[:-window]
    # Of equally quiet places, such as zeros, the one in the middle.
    quiet = np.flatnonzero(power_T <= power_T.min() * 1.0001 + 1e-12)
    return begin + (float(quiet[len(quiet) // 2]) + window / 2) / rate_hz
