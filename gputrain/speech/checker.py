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
from gputrain.errors import UserError
from gputrain.files import Progress, no_progress
from gputrain.speech.store import SpeechClip

# A transcript is a mismatch if its loss is this far on the way from the median to that of texts of other clips,
NEARER_TO_OTHERS = 0.6
LEAST_LOSS = 4.0  # at least this much higher than the median, in nats per letter,
LEAST_CER = 0.5  # and this share of the text is not what was recognised.
# Of so many clips and more, a recogniser that knows the language finds the own text of nearly all more probable than
# that of another clip, and one that knows nothing that of half of them.
ENOUGH_CLIPS, LEAST_PREFERRED = 20, 0.7


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
        CheckedText(name, clip.text, one.read, one.cer, one.loss if one.loss < math.inf else None, place in odd)
        for place, (name, clip, one) in enumerate(zip(names, clips, checks, strict=True))
    ]
    return sorted(found, key=lambda one: (not one.differs, -math.inf if one.loss is None else -one.loss)), doubt


def doubt_of(checks: Sequence[TranscriptCheck]) -> str:
    """Returns why a recogniser cannot tell whether texts differ; "" if it can."""
    count, silent = len(checks), sum(not one.read for one in checks)
    impossible = sum(one.loss == math.inf for one in checks)
    pairs = [one for one in checks if one.loss < math.inf and one.other_loss < math.inf]
    preferred = sum(one.loss < one.other_loss for one in pairs)
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
    """Returns for each text that of another clip, half of the list away: neighbours may continue one another. It is
    empty if all texts are equal."""
    count, twice = len(texts), [*texts, *texts]
    following = list(range(1, 2 * count + 1))  # The next place with another text, which equal neighbours share.
    for place in range(2 * count - 2, -1, -1):
        if twice[place] == twice[place + 1]:
            following[place] = following[place + 1]
    others = []
    for place, own in enumerate(texts):
        begin = (place + count // 2) % count
        found = begin if texts[begin] != own else following[begin]
        others.append(twice[found] if found < begin + count else "")
    return others


def mismatches(checks: Iterable[TranscriptCheck]) -> list[int]:
    """Returns the places of the transcripts that do not fit, the worst first.

    How high the loss of a right text is depends on the recogniser, and so does that of a wrong one. The limit is
    between the two medians, so that a recogniser of any quality will do.
    """
    found = list(checks)
    losses = [min(one.loss, 1e6) for one in found]
    if not losses:
        return []
    middle = statistics.median(losses)
    others = [one.other_loss for one in found if one.other_loss < math.inf]
    wrong = statistics.median(others) if others else math.inf
    limit = min(middle + max(NEARER_TO_OTHERS * (wrong - middle), LEAST_LOSS), 1e6 - 1)
    odd = [place for place, one in enumerate(found) if losses[place] > limit and one.cer > LEAST_CER]
    return sorted(odd, key=lambda place: -losses[place])
