"""A new speaker in a voice that keeps its own: whose speech the data are, and the place of the speaker in the voice."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gputrain.errors import UserError
from gputrain.speech.buckets import Speech
from gputrain.speech.store import SpeechStore, format_store_folders
from gputrain.speech.text.frontend import Frontend
from gputrain.tts.config import TrainTts
from gputrain.tts.load import SPEAKERS, SYMBOLS
from gputrain.tts.model import Voice
from gputrain.tts.pretrained_import import Origin

log = logging.getLogger(__name__)

CONDITION = ".condition."  # A part of the names of the layers that a voice of one speaker lacks.


@dataclass(frozen=True)
class KnownVoice:
    """A voice that the speech of a new speaker must go with. `front_end` is None if it is another toolkit's."""

    speakers: tuple[str, ...]  # Names in the order of their rows; "" is a speaker without a name.
    front_end: Frontend | None
    source: str

    @classmethod
    def of(cls, origin: Origin) -> "KnownVoice":
        rows = len(origin.voice[SPEAKERS]) if SPEAKERS in origin.voice else 1
        names = {row: name for name, row in origin.speakers.items()}
        unnamed = [""] if rows == 1 else map(str, range(rows))
        return cls(tuple(names.get(row, name) for row, name in enumerate(unnamed)), origin.front_end, origin.source)


def names_in(store: SpeechStore, known: KnownVoice, new: str) -> list[str]:
    """Returns the names of a store's speakers, with one for those that have none: they are the new speaker, or if that
    one is there by name, the only speaker of the voice. Raises UserError if that is not clear."""
    given = store.format.speakers
    if "" not in given:
        return list(given)
    meant = new
    if new in given:
        if len(known.speakers) > 1:
            raise UserError(
                f"{format_store_folders([store])}: some of the speech names no speaker, and {known.source} has "
                f"{len(known.speakers)}",
                hint="prepare it with a column of speakers in its transcripts",
            )
        (meant,) = known.speakers
    if meant:
        level = logging.WARNING if "" in known.speakers else logging.INFO  # It might be that one's.
        log.log(level, "speech without the name of a speaker counts as that of %s", meant)
    return [name or meant for name in given]


def with_new_speaker(speech: Speech, settings: TrainTts, known: KnownVoice) -> Speech:
    """Returns the speech with the speakers of the voice and then the new one. Raises UserError if it isn't the speech
    that the training needs."""
    new, store = settings.model.add_speaker, speech.store
    folders = format_store_folders([store])
    if new in known.speakers:
        raise UserError(
            f"add_speaker {new}: {known.source} has a speaker of this name",
            hint="give the new one another name, or train without --add-speaker",
        )
    names = names_in(store, known, new)
    if unknown := [name for name in names if name not in (new, *known.speakers)]:
        raise UserError(
            f"{folders}: speech of {', '.join(unknown)}, who is neither {new} nor in {known.source}",
            hint=f"--add-speaker {unknown[0]}, or prepare only the recordings of one new speaker",
        )
    if new not in names:
        raise UserError(f"{folders}: no speech of {new}", hint="name a folder with recordings of the new speaker, too")
    only_speaker = settings.model.train_part == "speaker"
    if only_speaker and len(names) > 1:
        raise UserError(
            f"{folders}: also has speech of others than {new}, of which train_part speaker learns nothing",
            hint="leave it out, or train all weights on it: --train-part all",
        )
    if not only_speaker and len(names) == 1:
        raise UserError(
            f"{folders}: speech of {new} alone, of which the other speakers would be unlearnt",
            hint="--train-part speaker trains only the embedding, or add speech of the others (--data-path FOLDER), "
            "told apart by a column of speakers in its transcripts",
        )
    speakers = (*known.speakers, new)
    format = replace(store.format, frontend=common_front_end(store, known), speakers=speakers)
    moved = {clip: replace(clip, speaker=speakers.index(names[clip.speaker])) for clip in store.clips}
    parts = speech.split.parts
    train, held_out = ([moved[clip] for clip in clips] for clips in (parts.train, parts.held_out))
    parts = replace(parts, train=train, held_out=held_out)
    store = replace(store, format=format, clips=[moved[clip] for clip in store.clips])
    return replace(speech, store=store, split=replace(speech.split, parts=parts))


def common_front_end(store: SpeechStore, known: KnownVoice) -> Frontend:
    """Returns the front end of the voice, whose symbols must contain those of the data. Raises UserError otherwise."""
    own, theirs = store.format.front_end, known.front_end
    if theirs is None:
        return own
    missing = sorted(set(own.symbols) - set(theirs.symbols))
    if missing or (own.language, own.espeak_voice) != (theirs.language, theirs.espeak_voice):
        found = f"symbols that {known.source} lacks: {' '.join(missing)}" if missing else "another language"
        voice = f" --espeak-voice {theirs.espeak_voice}" if theirs.espeak_voice else ""
        raise UserError(
            f"{format_store_folders([store])}: {found}",
            hint=f"prepare the speech as that of the voice was: --language {theirs.language}{voice}, with its alphabet",
        )
    return theirs


def check_layers(origin: Origin, voice: Voice, preset: str, spoken: Sequence[str]) -> None:
    """Raises UserError if the voice would not keep every layer of the origin, and so not its speakers either.
    `spoken` are symbols that must have weights there."""
    given, single = origin.voice, SPEAKERS not in origin.voice
    other = [
        name
        for name, tensor in voice.state_dict().items()
        if name not in (SYMBOLS, SPEAKERS)
        and not (single and CONDITION in f".{name}")
        and (name not in given or given[name].shape != tensor.shape)
    ]
    if other:
        raise UserError(
            f"{origin.source}: {len(other)} tensors have other shapes than those of preset {preset}, such as "
            f"{other[0]}, so that its speakers would be lost",
            hint="give the --preset with which it was trained",
        )
    if new := [symbol for symbol in spoken if symbol not in origin.symbols]:
        raise UserError(
            f"{origin.source}: has no weights for {' '.join(new)}, and train_part speaker trains none",
            hint="prepare the speech as that of the voice was, or train all weights: --train-part all",
        )


@torch.no_grad()
def place_new_speaker(voice: Voice, origin: Origin) -> None:
    """Gives the last row of the speakers its start: the mean of the others.

    A voice of one speaker has no layers that are conditioned on it. Its row is zero, and so are their biases, so that
    they add exactly nothing; their weights stay random, as the new row could not learn through zeros.
    """
    table_RG = voice.speakers.weight
    if SPEAKERS in origin.voice:
        table_RG[-1] = table_RG[:-1].mean(dim=0)
        return
    table_RG.zero_()
    for name, parameter in voice.named_parameters():
        if CONDITION in f".{name}" and name.endswith("bias"):
            parameter.zero_()
