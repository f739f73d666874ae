"""Prepares speech with a recogniser: long recordings are cut at sentence boundaries, where it hears them, and
transcripts are compared with what it reads.

This package is below that of the recognisers, so that callers give a `SpeechChecker`. Shape suffix: T samples.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from gputrain.audio.io import Samples, from_int16
from gputrain.audio.store import Wave
from gputrain.data_in.preparation import RefusedItem
from gputrain.errors import UserError
from gputrain.files import Progress, no_progress
from gputrain.speech.config import SpeechPrepareConfig
from gputrain.speech.store import Recording, SpeechClip
from gputrain.speech.text.frontend import shortened
from gputrain.speech.utterances import Utterance

# A transcript is a mismatch if its loss is this far on the way from the median to that of texts of other clips,
NEARER_TO_OTHERS = 0.6
LEAST_LOSS = 4.0  # at least this much higher than the median, in nats per letter,
LEAST_CER = 0.5  # and this share of the text is not what was recognised.
# Of so many clips and more, a recogniser that knows the language finds the own text of nearly all more probable than
# that of another clip, and one that knows nothing that of half of them.
ENOUGH_CLIPS, LEAST_PREFERRED = 20, 0.7
BEFORE_SECONDS, AFTER_SECONDS = 0.1, 0.2  # Sound that is kept around what is heard of a sentence.
WINDOW_SECONDS = 0.03  # A cut is in the middle of the quietest window between two sentences.
EDGE_SECONDS = 0.01  # Windows by which the beginning and the end of a sentence are heard.
DEEPEST_DB = 50.0  # Pauses count as at most so much quieter than the speech beside them.
QUIET_SHARE = 0.7  # Sound is louder than this point between the speech (0) and the quietest window (1), in decibels.


class NotRecognised(UserError):
    """The recogniser cannot read a recording, which tells nothing about its text."""


class SentenceTimes(NamedTuple):
    """Place of a sentence in a recording, in seconds, and the log-probability that a path loses there by being bound to
    the sentence, in nats per letter."""

    begin: float
    end: float
    loss: float


@dataclass(frozen=True)
class TranscriptCheck:
    """Tells how well a text fits a recording. `loss` is the log-probability that the best path loses by being bound to
    the text, in nats per letter, and infinite if the recording is too short for it; `other_loss` is the same of a text
    that belongs to another clip, and infinite if there is none."""

    loss: float
    cer: float  # character error rate of the recognised text
    read: str
    other_loss: float = math.inf


class SpeechChecker(Protocol):
    def align(self, wave_T: Samples, rate_hz: int, sentences: Sequence[str]) -> list[SentenceTimes | None]:
        """Returns the place of each sentence, None for one that is not said. Raises UserError if the recording is too
        short for them, and NotRecognised if the recogniser reads nothing there."""

    def check(self, wave_T: Samples, rate_hz: int, text: str, other: str = "") -> TranscriptCheck:
        """Compares a text with a recording, and the text of another clip to see what a wrong one would give."""


@dataclass(frozen=True)
class CheckedText:
    """A clip's text and what a recogniser reads. `path` names the clip, `loss` is None if it is infinite."""

    path: str
    text: str
    read: str
    cer: float
    loss: float | None
    differs: bool  # True if the text is not what is said


def check_clips(
    clips: Sequence[SpeechClip],
    names: Sequence[str],
    rate_hz: int,
    checker: SpeechChecker,
    wave_of: Callable[[SpeechClip], Wave],
    progress: Progress = no_progress,
) -> tuple[list[CheckedText], str]:
    """Checks the text of every clip. Returns them all, the worst first, and why the recogniser cannot tell: then
    none of them differs."""
    checks = []
    for done, (clip, other) in enumerate(zip(clips, other_texts([clip.text for clip in clips]), strict=True), start=1):
        checks.append(checker.check(from_int16(wave_of(clip)), rate_hz, clip.text, other))
        progress(done, len(clips))
    doubt = doubt_of(checks)
    odd = set() if doubt else set(mismatches(checks))
    found = [
        CheckedText(name, clip.text, check.read, check.cer, check.loss if check.loss < math.inf else None, place in odd)
        for place, (name, clip, check) in enumerate(zip(names, clips, checks, strict=True))
    ]
    return sorted(found, key=lambda check: (not check.differs, -math.inf if check.loss is None else -check.loss)), doubt


def doubt_of(checks: Sequence[TranscriptCheck]) -> str:
    """Returns why a recogniser cannot tell whether texts differ; "" if it can."""
    count, silent = len(checks), sum(not check.read for check in checks)
    impossible = sum(check.loss == math.inf for check in checks)
    pairs = [check for check in checks if check.loss < math.inf and check.other_loss < math.inf]
    preferred = sum(check.loss < check.other_loss for check in pairs)
    if 2 * silent > count:
        why = f"wrote nothing for {silent} of {count} clips: it has not learnt to write, or not this language"
    elif 2 * impossible > count:
        why = f"cannot write {impossible} of {count} texts: it lacks their letters, or the recordings are too short"
    elif len(pairs) >= ENOUGH_CLIPS and preferred < LEAST_PREFERRED * len(pairs):
        why = (
            f"found another clip's text as probable as its own for {len(pairs) - preferred} of {len(pairs)} clips: "
            "it does not know this speech, or most texts belong to other recordings"
        )
    else:
        return ""
    return f"the recogniser {why}; it was not used on the texts"


def other_texts(texts: Sequence[str]) -> list[str]:
    """Returns for each text another one, half of the list of different texts away: neighbours may continue one another.
    It is empty if all texts are equal."""
    place = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    others = [*place]
    return [others[(place[text] + len(others) // 2) % len(others)] if len(others) > 1 else "" for text in texts]


def mismatches(checks: Iterable[TranscriptCheck]) -> list[int]:
    """Returns the places of the transcripts that do not fit, the worst first.

    How high the loss of a right text is depends on the recogniser, and so does that of a wrong one. The limit is
    between the two medians, so that a recogniser of any quality will do.
    """
    found = list(checks)
    losses = [min(check.loss, 1e6) for check in found]
    if not losses:
        return []
    middle = statistics.median(losses)
    others = [check.other_loss for check in found if check.other_loss < math.inf]
    wrong = statistics.median(others) if others else math.inf
    limit = min(middle + max(NEARER_TO_OTHERS * (wrong - middle), LEAST_LOSS), 1e6 - 1)
    odd = [place for place, check in enumerate(found) if losses[place] > limit and check.cer > LEAST_CER]
    return sorted(odd, key=lambda place: -losses[place])


# --------------------------------------------------------------------------------------------- cutting long recordings


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
    if unread and all(item.reason == "not recognised" for item in refused) and len(refused) == len(long):
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
    for sentence, low, high in zip(sentences, cuts, cuts[1:], strict=False):
        places = (round(second * rate_hz / window) for second in (low, sentence.begin, sentence.end, high))
        first, begin, end, stop = (min(place, count) for place in places)
        speech = float(power_W[begin : max(end, begin + 1)].mean()) if begin < count else 0.0
        heard_before = _louder(power_W[first:begin], speech)
        heard_after = _louder(power_W[end:stop], speech)
        edges.append(
            (
                (first + int(heard_before[0])) * window / rate_hz if len(heard_before) else sentence.begin,
                (end + int(heard_after[-1]) + 1) * window / rate_hz if len(heard_after) else sentence.end,
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
