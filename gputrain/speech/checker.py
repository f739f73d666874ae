"""Checks transcripts by a recogniser, and declares what a recogniser does for the preparation of speech.

This package is below that of the recognisers, so that callers give a `SpeechChecker`. Shape suffix: T samples.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from gputrain.audio.io import Samples, from_int16
from gputrain.audio.store import Wave
from gputrain.engine.dataset_report import Progress, silent
from gputrain.speech.clip_filter import DEVIATION
from gputrain.speech.store import SpeechClip

MOST_DEVIATIONS = 6.0  # Transcripts that fit worse than the median by so many deviations are mismatches,
LEAST_LOSS = 4.0  # if the loss is this much higher, in nats per letter,
LEAST_CER = 0.5  # and this share of the text is not what was recognised.


class SentenceTimes(NamedTuple):
    """Place of a sentence in a recording, in seconds, and the log-probability that a path loses there by being bound to
    the sentence, in nats per letter."""

    begin: float
    end: float
    loss: float


@dataclass(frozen=True)
class TranscriptCheck:
    """Tells how well a text fits a recording. `loss` is the log-probability that the best path loses by being bound to
    the text, in nats per letter, and infinite if the recording is too short for it."""

    loss: float
    cer: float  # character error rate of the recognised text
    read: str


class SpeechChecker(Protocol):
    def align(self, wave_T: Samples, rate_hz: int, sentences: Sequence[str]) -> list[SentenceTimes | None]:
        """Returns the place of each sentence, None for one that is not said. Raises UserError if the recording is too
        short for them."""

    def check(self, wave_T: Samples, rate_hz: int, text: str) -> TranscriptCheck:
        """Compares a text with a recording."""


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
    progress: Progress = silent,
) -> list[CheckedText]:
    """Checks the text of every clip. Returns them all, the worst first."""
    checks = []
    for done, clip in enumerate(clips, start=1):
        checks.append(checker.check(from_int16(wave_of(clip)), rate_hz, clip.text))
        progress(done, len(clips))
    odd = set(mismatches(checks))
    found = [
        CheckedText(name, clip.text, one.read, one.cer, one.loss if one.loss < math.inf else None, place in odd)
        for place, (name, clip, one) in enumerate(zip(names, clips, checks, strict=True))
    ]
    return sorted(found, key=lambda one: (not one.differs, -math.inf if one.loss is None else -one.loss))


def mismatches(checks: Iterable[TranscriptCheck]) -> list[int]:
    """Returns the places of the transcripts that do not fit, the worst first: outliers among all of them, so that a
    recogniser of any quality will do."""
    found = list(checks)
    losses = [min(one.loss, 1e6) for one in found]
    if not losses:
        return []
    middle = statistics.median(losses)
    spread = DEVIATION * statistics.median(abs(loss - middle) for loss in losses)
    limit = middle + max(MOST_DEVIATIONS * spread, LEAST_LOSS)
    odd = [place for place, one in enumerate(found) if losses[place] > limit and one.cer > LEAST_CER]
    return sorted(odd, key=lambda place: -losses[place])
