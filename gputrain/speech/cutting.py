"""Cuts long recordings at sentence boundaries, where a recogniser hears them.

Shape suffix: T samples.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gputrain.audio.io import Samples, from_int16
from gputrain.audio.store import Wave
from gputrain.data_in.preparation import RefusedItem
from gputrain.errors import UserError
from gputrain.files import Progress, no_progress
from gputrain.speech.checker import NotRecognised, SentenceTimes, SpeechChecker
from gputrain.speech.config import SpeechPrepareConfig
from gputrain.speech.store import Recording
from gputrain.speech.text.frontend import shortened
from gputrain.speech.utterances import Utterance

BEFORE_SECONDS, AFTER_SECONDS = 0.1, 0.2  # Sound that is kept around what is heard of a sentence.
WINDOW_SECONDS = 0.03  # A cut is in the middle of the quietest window between two sentences.
EDGE_SECONDS = 0.01  # Windows by which the beginning and the end of a sentence are heard.
DEEPEST_DB = 50.0  # Pauses count as at most so much quieter than the speech beside them.
QUIET_SHARE = 0.7  # Sound is louder than this point between the speech (0) and the quietest window (1), in decibels.


def cut_utterances(
    utterances: Sequence[Utterance],
    recordings: Mapping[str, Recording],
    config: SpeechPrepareConfig,
    checker: SpeechChecker,
    sentences_of: Callable[[str], list[str]],
    wave_of: Callable[[Recording], Wave],
    progress: Progress = no_progress,
) -> tuple[list[Utterance], list[RefusedItem]]:
    """Returns the utterances, with those of recordings that exceed the maximum length cut into groups of whole
    sentences; and what was left out: recordings that cannot be aligned, and sentences that do not fit."""
    rate_hz, max_seconds = config.sampling_rate, config.speech.max_seconds
    found: list[Utterance] = []
    refused: list[RefusedItem] = []
    long = {
        utterance
        for utterance in utterances
        if utterance.span is None
        and utterance.path in recordings
        and recordings[utterance.path].samples > max_seconds * rate_hz
    }
    done, unread = 0, ""
    for utterance in utterances:
        if utterance not in long:
            found.append(utterance)
            continue
        wave_T, sentences = from_int16(wave_of(recordings[utterance.path])), sentences_of(utterance.text)
        try:
            times = checker.align(wave_T, rate_hz, sentences)
        except NotRecognised as error:
            unread = error.message
            refused.append(RefusedItem(utterance.path, "not recognised", unread))
        except UserError as error:
            refused.append(RefusedItem(utterance.path, "text differs", error.message))
        else:
            found += _groups(utterance, wave_T, rate_hz, list(zip(sentences, times, strict=True)), max_seconds, refused)
        done += 1
        progress(done, len(long))
    if unread and all(one.reason == "not recognised" for one in refused) and len(refused) == len(long):
        others = f", as for all {len(long)} that are longer than {max_seconds:g} seconds" if len(long) > 1 else ""
        raise UserError(
            f"{unread}{others}",
            hint="name a recogniser that has learnt this language with --align-with",
        )
    return found, refused


def _groups(
    utterance: Utterance,
    wave_T: Samples,
    rate_hz: int,
    sentences: Sequence[tuple[str, SentenceTimes | None]],
    max_seconds: float,
    refused: list[RefusedItem],
) -> list[Utterance]:
    """Joins neighbouring sentences as far as `max_seconds` allows."""
    groups: list[tuple[float, float, str]] = []
    follows = False  # True if the sentence before is the end of the last group.
    spans = iter(sentence_spans(wave_T, rate_hz, [times for _, times in sentences if times]))
    for sentence, times in sentences:
        if times is None:
            refused.append(RefusedItem(utterance.path, "text differs", f"{shortened(sentence)!r} is not said"))
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
    cuts = _cuts(wave_T, rate_hz, sentences)
    return [
        (max(cuts[at], begin - BEFORE_SECONDS), min(cuts[at + 1], end + AFTER_SECONDS))
        for at, (begin, end) in enumerate(sentence_edges(wave_T, rate_hz, sentences))
    ]


def sentence_edges(wave_T: Samples, rate_hz: int, sentences: Sequence[SentenceTimes]) -> list[tuple[float, float]]:
    """Returns the first second and the end of the sound of each sentence.

    Labels are at the core of letters, so that the sound begins earlier and ends later: with the first and the last
    window up to the cut that are louder than the pause.
    """
    window = max(1, round(EDGE_SECONDS * rate_hz))
    count = len(wave_T) // window
    power_W = np.square(wave_T[: count * window].astype(np.float64)).reshape(count, window).mean(axis=1)
    cuts, edges = _cuts(wave_T, rate_hz, sentences), []
    for one, low, high in zip(sentences, cuts, cuts[1:], strict=False):
        places = (round(second * rate_hz / window) for second in (low, one.begin, one.end, high))
        first, begin, end, stop = (min(place, count) for place in places)
        speech = float(power_W[begin : max(end, begin + 1)].mean()) if begin < count else 0.0
        heard_before = _louder(power_W[first:begin], speech)
        heard_after = _louder(power_W[end:stop], speech)
        edges.append(
            (
                (first + int(heard_before[0])) * window / rate_hz if len(heard_before) else one.begin,
                (end + int(heard_after[-1]) + 1) * window / rate_hz if len(heard_after) else one.end,
            )
        )
    return edges


def _louder(power_W: NDArray[np.float64], speech: float) -> NDArray[np.int64]:
    """Returns the windows that are louder than the pause, for speech of a given power beside it."""
    if not len(power_W) or not speech:
        return np.empty(0, np.int64)
    quiet = max(float(power_W.min()), speech * 10 ** (-DEEPEST_DB / 10))
    return np.flatnonzero(power_W > quiet**QUIET_SHARE * speech ** (1 - QUIET_SHARE))


def _cuts(wave_T: Samples, rate_hz: int, sentences: Sequence[SentenceTimes]) -> list[float]:
    """Returns the second at which each sentence may begin, and the end of the recording."""
    inner = [quietest(wave_T, rate_hz, before.end, after.begin) for before, after in pairwise(sentences)]
    return [0.0, *inner, len(wave_T) / rate_hz]


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
