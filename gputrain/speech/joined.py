"""Several folders of prepared speech as one store: the symbols and speakers of all, and the clips of each."""

import logging
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from gputrain.audio.store import Wave
from gputrain.errors import UserError
from gputrain.speech.store import SpeechClip, SpeechFormat, SpeechStore, folders_in_words
from gputrain.speech.text.frontend import RESERVED, Frontend
from gputrain.speech.text.language import PUNCTUATION
from gputrain.speech.text.vocabulary import SPECIAL, Vocabulary

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class JoinedSpeech(SpeechStore):
    """Several stores as one, whose samples are numbered through: `first_sample` of a clip counts from the first sample
    of the first store. `folder` is that of the first store."""

    stores: tuple[SpeechStore, ...] = ()

    @property
    def parts(self) -> tuple[SpeechStore, ...]:
        return self.stores

    def wave(self, clip: SpeechClip) -> Wave:
        number = bisect_right(self._begins, clip.first_sample) - 1
        return self.stores[number].wave(replace(clip, first_sample=clip.first_sample - self._begins[number]))

    @cached_property
    def _begins(self) -> list[int]:
        return begins_of(self.stores)[:-1]


def joined(stores: tuple[SpeechStore, ...]) -> SpeechStore:
    """Returns stores of the same kind as one. Raises UserError if their texts or their sound do not go together."""
    if len(stores) == 1:
        return stores[0]
    format = stores[0].format
    for store in stores[1:]:
        format = _joined_format(stores[0], format, store)
    _check_speakers(stores)
    places = {speaker: place for place, speaker in enumerate(format.speakers)}
    clips = [
        replace(clip, first_sample=begin + clip.first_sample, speaker=places[store.format.speakers[clip.speaker]])
        for begin, store in zip(begins_of(stores), stores, strict=False)
        for clip in store.clips
    ]
    return JoinedSpeech(stores[0].folder, format, clips, stores)


def begins_of(stores: Sequence[SpeechStore]) -> list[int]:
    """Returns the number of the first sample of each store among the samples of all, and at the end their number."""
    ends = (max(clip.first_sample + clip.samples for clip in store.clips) for store in stores)
    return [0, *accumulate(ends)]


def _joined_format(first: SpeechStore, format: SpeechFormat, other: SpeechStore) -> SpeechFormat:
    """Returns the format of stores with the symbols and speakers of another one added."""
    added = other.format
    for name, own, theirs in (
        ("sampling rate", format.sampling_rate, added.sampling_rate),
        ("hop size", format.hop_size, added.hop_size),
        ("language", format.frontend.language, added.frontend.language),
        ("rules of text", _rules(format.frontend), _rules(added.frontend)),
    ):
        if own != theirs:
            values = "" if isinstance(own, tuple) else f": {own} and {theirs}"
            raise UserError(
                f"{first.folder} and {other.folder} were prepared with another {name}{values}",
                hint="run gputrain prepare-data for both with the same options",
            )
    speakers = (*format.speakers, *(one for one in added.speakers if one not in format.speakers))
    return replace(format, frontend=_joined_symbols(format.frontend, added.frontend), speakers=speakers)


def _check_speakers(stores: Sequence[SpeechStore]) -> None:
    """Warns of several folders of a voice whose speaker has no name. Raises UserError if others have names."""
    unnamed = [store for store in stores if store.format.kind == "tts" and "" in store.format.speakers]
    named = [store for store in stores if any(store.format.speakers)]
    if unnamed and named:
        names = ", ".join(sorted({name for store in named for name in store.format.speakers if name}))
        raise UserError(
            f"{folders_in_words(unnamed)}: the speaker has no name, and in {folders_in_words(named)} it is {names}",
            hint="prepare it with a column of speakers in its transcripts",
        )
    if len(unnamed) > 1:
        log.warning(
            "%s name no speaker and are trained as one voice; name them in the transcripts if they are several",
            folders_in_words(unnamed),
        )


def _rules(frontend: Frontend | Vocabulary) -> tuple[object, ...]:
    """Returns what decides how a text is read, besides the symbols."""
    if isinstance(frontend, Frontend):
        return (dict(frontend.alphabet), frontend.espeak_voice, frontend.raw)
    return (frontend.blank, frontend.unknown_id, frontend.delimiter, frontend.upper, frontend.raw)


def _joined_symbols(own: Frontend | Vocabulary, added: Frontend | Vocabulary) -> Frontend | Vocabulary:
    """Returns the front end with the symbols of both, in the order in which one preparation of all would have them."""
    if own.symbols == added.symbols:
        return own
    fixed = (*RESERVED, *PUNCTUATION) if isinstance(own, Frontend) else SPECIAL
    return replace(own, symbols=(*fixed, *sorted({*own.symbols, *added.symbols} - {*fixed})))
