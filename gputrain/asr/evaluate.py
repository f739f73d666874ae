"""Evaluates a recogniser on prepared speech: error rates, by speaker and by length, the worst clips, and confusions;
and the evaluations and samples of a training.

Shapes: F frames, V symbols.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from gputrain.asr.config import Data, TrainAsr
from gputrain.asr.load import Recogniser, comparable, greedy_text, load_recogniser
from gputrain.audio.io import from_int16
from gputrain.config import convert, leaves, read_file
from gputrain.data_in.split import HELD_OUT_SHARE, GivenFolders
from gputrain.errors import UserError
from gputrain.files import FULL_SCALE, Progress, no_progress
from gputrain.formatting import counted
from gputrain.hw.plan import DeviceName
from gputrain.hw.runtime import runtime_on
from gputrain.samples import Report, SoundSample, clip_caption
from gputrain.speech.buckets import Speech, open_speech
from gputrain.speech.error_rates import character_error_rate, error_rates
from gputrain.speech.store import SpeechClip, SpeechStore, format_store_folders
from gputrain.speech.text.frontend import shortened

log = logging.getLogger(__name__)

BATCH_SECONDS = 60.0  # Clips of similar length are recognised at once, as many as are so long together.
LENGTHS = (0.0, 2.0, 4.0, 8.0, 16.0, math.inf)  # Edges of the groups by length, in seconds.
MOST_LISTED = 20  # Number of the worst clips and of the most frequent confusions in a report.
SHOWN_CLIPS = 8  # Held-out clips whose transcripts are samples of a training.
MOST_SHOWN = 5  # Number of them on the terminal.
NOTHING = ""  # Stands for a letter or word that was left out or added.
ONLY_BLANKS = 0.995  # Above this share of blanks, nothing is written.
SPOKEN = 0.97  # Below this share, the recogniser has begun to write.

Confusion = tuple[str, str]  # A letter or word of the reference, and what was recognised for it.


@dataclass(frozen=True)
class RecognisedClip:
    path: str
    speaker: str
    seconds: float
    reference: str
    read: str
    blank_share: float  # Share of the frames in which the most probable symbol is the blank.

    @property
    def cer(self) -> float:
        """The clip's character error rate."""
        return character_error_rate(self.reference, self.read)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "cer": self.cer}


@dataclass(frozen=True)
class ClipGroup:
    clips: int
    hours: float
    cer: float
    wer: float

    @classmethod
    def of(cls, clips: Sequence[RecognisedClip]) -> "ClipGroup":
        rates = rates_of(clips)
        return cls(len(clips), sum(clip.seconds for clip in clips) / 3600, rates["cer"], rates["wer"])


@dataclass(frozen=True)
class RecogniserReport:
    """Results of `evaluate_recogniser`, which docs/asr.md lists."""

    clips: int
    scalars: dict[str, float]
    by_speaker: dict[str, ClipGroup]
    by_seconds: dict[str, ClipGroup]
    worst: list[RecognisedClip]  # the highest character error rates first
    letters: dict[Confusion, int] = field(repr=False)  # the most frequent first
    words: dict[Confusion, int] = field(repr=False)

    @property
    def shown(self) -> dict[str, object]:
        """The figures for the terminal."""
        scalars = self.scalars
        figures: dict[str, object] = {
            name.upper(): f"{100 * scalars[name]:.2f} % ({100 * scalars[f'{name}_low']:.2f} to "
            f"{100 * scalars[f'{name}_high']:.2f}, 95 % interval)"
            for name in ("cer", "wer")
        }
        figures |= {"clips without error": f"{100 * scalars['correct']:.3g} %", "computing per second": scalars["rtf"]}
        for title, groups in (("speaker", self.by_speaker), ("seconds", self.by_seconds)):
            if len(groups) > 1:
                by_cer = sorted(groups.items(), key=lambda pair: -pair[1].cer) if title == "speaker" else groups.items()
                figures |= {
                    f"{title} {name}": f"CER {100 * group.cer:.2f} %, WER {100 * group.wer:.2f} %, "
                    + counted(group.clips, "clip")
                    for name, group in list(by_cer)[: 2 * MOST_SHOWN]
                }
        for name, confusions in (("letters", self.letters), ("words", self.words)):
            named = [f"{_shown(text)} > {_shown(read)} {count}x" for (text, read), count in confusions.items()]
            figures[f"confused {name}"] = ", ".join(named[:MOST_SHOWN]) or "none"
        for number, clip in enumerate(self.worst[:MOST_SHOWN], start=1):
            if clip.cer:
                figures[f"worst clip {number}"] = f"{clip.path}, CER {100 * clip.cer:.3g} %"
                figures[f"  text {number}"] = shortened(clip.reference)
                figures[f"  read {number}"] = shortened(clip.read)
        return figures

    def to_json(self) -> dict[str, Any]:
        return {
            "clips": self.clips,
            **self.scalars,
            "by_speaker": {name: asdict(group) for name, group in self.by_speaker.items()},
            "by_seconds": {name: asdict(group) for name, group in self.by_seconds.items()},
            "worst": [clip.to_json() for clip in self.worst],
            "confused_letters": _rows(self.letters),
            "confused_words": _rows(self.words),
        }


def _shown(part: str) -> str:
    return {NOTHING: "nothing", " ": "space"}.get(part, part)


def _rows(confusions: dict[Confusion, int]) -> list[dict[str, object]]:
    return [{"text": text, "read": read, "count": count} for (text, read), count in confusions.items()]


def evaluate_recogniser(
    model: Path,
    data_dir: GivenFolders,
    *,
    device: DeviceName = "auto",
    held_out_share: float | None = None,
    max_clips: int = 1000,
    progress: Progress = no_progress,
) -> RecogniserReport:
    """Evaluates a recogniser on the held-out clips of prepared speech, the first `max_clips` of them.

    Without `held_out_share`, they are those that the training held out; 1 takes all clips. Raises UserError if there is
    no such model or speech, or the speech is not for a recogniser.
    """
    runtime = runtime_on(device)
    share = held_out_share_of(model) if held_out_share is None else held_out_share
    speech = open_speech(data_dir, share, kind="asr")
    clips = speech.store.clips if share == 1 else speech.parts.held_out
    recogniser = load_recogniser(model, runtime.device)
    vocabulary, letters = recogniser.vocabulary, set("".join(clip.normalized for clip in clips)) - {" "}
    if unknown := vocabulary.unknown(vocabulary.normalize(" ".join(sorted(letters)))):
        named, missing = " ".join(unknown[:MOST_LISTED]), set(unknown)
        others = [
            part
            for part in speech.store.parts
            if any(missing & set(vocabulary.normalize(clip.normalized)) for clip in part.clips)
        ]
        if len(unknown) >= len(letters) / 2:
            raise UserError(
                f"{format_store_folders(others)}: most of its letters are none of {recogniser.source}: {named}",
                hint="name speech in the language of the recogniser",
            )
        log.warning(
            "%s: the recogniser has no symbol for %s, which count as errors",
            format_store_folders(others),
            " ".join(map(repr, unknown[:MOST_LISTED])),
        )
    began = time.perf_counter()
    with runtime.autocast():
        found = list(recognise_clips(recogniser, speech.store, clips[:max_clips], progress=progress))
    seconds = time.perf_counter() - began
    if (unread := sum(not clip.read for clip in found)) > len(found) / 2:
        log.warning("the recogniser wrote nothing for %d of %d clips", unread, len(found))
    return report_of(found, seconds)


def held_out_share_of(model: Path) -> float:
    """Returns the share that the training of a run held out; the default for models of other programs."""
    config = (model if model.is_dir() else model.parent) / "config.yaml"
    share = read_file(config).get("held_out_share") if config.is_file() else None
    return HELD_OUT_SHARE if share is None else float(convert(leaves(Data)["held_out_share"], share, f"{config}: "))


def recognise_clips(
    recogniser: Recogniser,
    store: SpeechStore,
    clips: Sequence[SpeechClip],
    *,
    batch_size: int | None = None,
    progress: Progress = no_progress,
) -> Iterator[RecognisedClip]:
    """Yields the transcripts of clips, the shortest first, of `batch_size` at once, or as many as BATCH_SECONDS has."""
    rate_hz, done = recogniser.sampling_rate, 0
    progress(0, len(clips))
    for batch in _batches(clips, BATCH_SECONDS * rate_hz, batch_size):
        log_probs = recogniser.log_probs([from_int16(store.wave(clip)) for clip in batch])
        for clip, log_probs_FV in zip(batch, log_probs, strict=True):
            blanks_F = log_probs_FV.argmax(dim=1) == recogniser.vocabulary.blank
            yield RecognisedClip(
                clip.path,
                store.format.speakers[clip.speaker],
                clip.samples / rate_hz,
                recogniser.vocabulary.normalize(clip.normalized),
                comparable(greedy_text(log_probs_FV.numpy(), recogniser.vocabulary), recogniser.vocabulary),
                float(blanks_F.double().mean()) if len(blanks_F) else 1.0,
            )
        done += len(batch)
        progress(done, len(clips))


def _batches(clips: Sequence[SpeechClip], samples: float, most: int | None) -> Iterator[list[SpeechClip]]:
    """Yields clips of similar length, `most` of them, or as many as have so many samples together with their padding,
    one at least."""
    batch: list[SpeechClip] = []
    for clip in sorted(clips, key=lambda clip: clip.samples):
        is_full = len(batch) == most if most else clip.samples * (len(batch) + 1) > samples
        if batch and is_full:
            yield batch
            batch = []
        batch.append(clip)
    if batch:
        yield batch


def rates_of(clips: Sequence[RecognisedClip]) -> dict[str, float]:
    return error_rates([(clip.reference, clip.read) for clip in clips])


def report_of(clips: Sequence[RecognisedClip], computing_seconds: float) -> RecogniserReport:
    """Returns the report on recognised clips."""
    scalars = rates_of(clips)
    sound_seconds = sum(clip.seconds for clip in clips)
    scalars["correct"] = sum(clip.reference == clip.read for clip in clips) / len(clips)
    scalars["hours"] = sound_seconds / 3600
    scalars["rtf"] = computing_seconds / sound_seconds
    names = {f"{low:g}-{'' if high == math.inf else f'{high:g}'}": (low, high) for low, high in pairwise(LENGTHS)}
    grouped = {name: [clip for clip in clips if low <= clip.seconds < high] for name, (low, high) in names.items()}
    by_speaker: dict[str, list[RecognisedClip]] = {}
    for clip in sorted(clips, key=lambda clip: clip.speaker):
        by_speaker.setdefault(clip.speaker, []).append(clip)
    return RecogniserReport(
        clips=len(clips),
        scalars=scalars,
        by_speaker={name: ClipGroup.of(group) for name, group in by_speaker.items()},
        by_seconds={name: ClipGroup.of(group) for name, group in grouped.items() if group},
        worst=sorted(clips, key=lambda clip: (-clip.cer, clip.path))[:MOST_LISTED],
        letters=confusions((clip.reference, clip.read) for clip in clips),
        words=confusions((clip.reference.split(), clip.read.split()) for clip in clips),
    )


def confusions(pairs: Iterable[tuple[Sequence[str], Sequence[str]]]) -> dict[Confusion, int]:
    """Counts the parts of texts that are replaced, left out or added by the fewest edits, the most frequent first."""
    from rapidfuzz.distance import Levenshtein

    counts = Counter[Confusion]()
    for reference, read in pairs:
        for edit in Levenshtein.editops(reference, read):
            written = NOTHING if edit.tag == "insert" else reference[edit.src_pos]
            recognised = NOTHING if edit.tag == "delete" else read[edit.dest_pos]
            counts[written, recognised] += 1
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:MOST_LISTED])


# ------------------------------------------------------------------------------------------------- in a training


class HeldOutSpeech:
    """Held-out clips of a training, sorted by fingerprint so that they come from many recordings."""

    def __init__(self, speech: Speech, settings: TrainAsr, *, normalizes: bool) -> None:
        """`normalizes` tells whether waves get zero mean and unit variance before the model reads them."""
        data, self.normalizes = settings.data, normalizes
        self.store, self.batch_size = speech.store, data.eval_batch_size
        held_out = sorted(speech.parts.held_out, key=lambda clip: clip.fingerprint)
        self.clips, self.shown = held_out[: data.eval_clips], held_out[:SHOWN_CLIPS]
        self.has_written = False

    def sample(self, model: Any, device: torch.device) -> Report:
        """Returns the transcripts of a few clips as text, each under its reference, and the clips."""
        made = self._recognised(model, self.shown)
        lines = [
            f"clip: {clip.path}\ntext: {read.reference}\nread: {read.read}\n"
            for clip, read in zip(self.shown, made, strict=True)
        ]
        return Report(texts={"transcripts": "\n".join(lines)} if lines else {}, recordings=self._recordings(made))

    def _recordings(self, made: Sequence[RecognisedClip]) -> dict[str, SoundSample]:
        """Returns the sounds of the clips whose transcripts are shown. Their captions begin as their entries do."""
        rate_hz = self.store.format.sampling_rate
        return {
            f"clip_{number}": SoundSample(
                torch.from_numpy(self.store.wave(clip) / FULL_SCALE).float(),
                rate_hz,
                clip_caption(clip.path, read.reference),
            )
            for number, (clip, read) in enumerate(zip(self.shown, made, strict=True), start=1)
        }

    def evaluate(self, model: Any, device: torch.device) -> Report:
        made = self._recognised(model, self.clips)
        rates = rates_of(made)
        blank_share = sum(clip.blank_share for clip in made) / len(made)
        self.has_written |= blank_share < SPOKEN
        if self.has_written and blank_share > ONLY_BLANKS:
            log.warning(
                "collapsed: the recogniser writes nothing any more; go back to an earlier checkpoint with a lower "
                "--learning-rate or a longer --warmup-steps"
            )
        scalars = {"score": 1 - rates["cer"], "blank_share": blank_share, **rates}
        return Report(scalars=scalars, headline=("cer", "wer"))

    def _recognised(self, model: Any, clips: Sequence[SpeechClip]) -> list[RecognisedClip]:
        """Returns the transcripts of clips in their order."""
        format = self.store.format
        recogniser = Recogniser(model, format.vocabulary, format.sampling_rate, self.normalizes, "the training")
        shortest_first = sorted(clips, key=lambda clip: clip.samples)
        made = recognise_clips(recogniser, self.store, clips, batch_size=self.batch_size)
        by_clip = dict(zip(shortest_first, made, strict=True))
        return [by_clip[clip] for clip in clips]
