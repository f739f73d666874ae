"""Reports on the data in a folder of recordings and transcripts, or in a store of prepared speech."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from gputrain.audio.prepare import lacking_treble, rate_for, remarks_on
from gputrain.audio.store import PREPARE_AGAIN, WAVES
from gputrain.data_in.preparation import (
    DataReport,
    RefusedItem,
    ValueRange,
    check_input_folder,
    read_quarantine,
    refuse_exclude,
    run_jobs,
    sorted_refusals,
    value_range,
)
from gputrain.engine.stop import format_duration
from gputrain.errors import UserError
from gputrain.files import Progress, no_progress, read_rows
from gputrain.formatting import counted
from gputrain.serialization import from_row, unreadable
from gputrain.speech.buckets import check_kind
from gputrain.speech.checker import CheckedText, SpeechChecker, check_clips
from gputrain.speech.clip_filter import (
    ANNOTATION,
    RARE,
    lookalike_findings,
    script_findings,
    select_clips,
    symbol_counts,
    text_notes,
    vocabulary_findings,
)
from gputrain.speech.config import SpeechKind, SpeechPrepareConfig
from gputrain.speech.prepare import gather_material, measure_recording, sound_format
from gputrain.speech.store import SOUNDS, TEXT, Recording, SpeechClip, SpeechFormat, SpeechStore, read_wave
from gputrain.speech.text.frontend import shortened
from gputrain.speech.text.unicode_cleanup import APOSTROPHES
from gputrain.speech.text.vocabulary import Vocabulary

FEW_HOURS = 1.0
MANY_REFUSED = 0.2  # share


@dataclass(frozen=True)
class SpeakerSummary:
    clips: int
    hours: float


@dataclass(frozen=True, kw_only=True)
class SpeechReport(DataReport):
    """Report on a data set. `findings` are recommendations as text; the spreads are None without clips."""

    prepared: bool
    transcripts: str  # file and detected format; empty for a store
    language: str
    sampling_rate: int  # Hz, of training
    source_rates: dict[int, int]  # Hz, recordings
    clips: int
    hours: float
    seconds: ValueRange | None
    symbols: dict[str, int]  # occurrences of each symbol, the most frequent first
    speakers: dict[str, SpeakerSummary]
    symbols_a_second: ValueRange | None
    findings: list[str]
    checked: list[CheckedText] = field(default_factory=list)  # readings by a recogniser, the worst clips first

    @property
    def rare(self) -> dict[str, int]:
        """Symbols that occur fewer than RARE times, but at least once."""
        return {symbol: count for symbol, count in self.symbols.items() if 0 < count < RARE}

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "rare": self.rare}

    @property
    def differing(self) -> list[RefusedItem]:
        """The texts that are not what the recogniser reads; their clips are used all the same."""
        return [
            RefusedItem(clip.path, "text differs", f"{shortened(clip.text)!r}, recognised: {shortened(clip.read)!r}")
            for clip in self.checked
            if clip.differs
        ]


@dataclass(frozen=True)
class _Held:
    format: SpeechFormat
    clips: Sequence[SpeechClip]
    source_rates: dict[int, int]
    refused: list[RefusedItem]
    transcripts: str = ""
    ignored: dict[str, list[str]] | None = None
    columns: dict[str, str] | None = None
    notes: Sequence[str] = ()
    narrow: Mapping[str, float] = field(default_factory=dict)  # bandwidths in Hz of recordings that lack treble
    starts: Sequence[int] = (0,)  # first samples of recordings, in order

    def names(self) -> list[str]:
        """Returns the names of the clips in reports: their recordings, and the second where a part of one begins."""
        firsts = [clip.first_sample for clip in self.clips]
        starts = [first - self.starts[max(0, bisect_right(self.starts, first) - 1)] for first in firsts]
        parts = Counter(clip.path for clip in self.clips)
        rate_hz = self.format.sampling_rate
        return [
            f"{clip.path} at {start / rate_hz:.2f} s" if start or parts[clip.path] > 1 else clip.path
            for clip, start in zip(self.clips, starts, strict=True)
        ]


def validate_speech(
    input_dir: Path,
    config: SpeechPrepareConfig,
    *,
    checker: SpeechChecker | None = None,
    exclude: Sequence[str] = (),
    num_workers: int = 0,
    progress: Progress = no_progress,
) -> SpeechReport:
    """Reports on a folder as `prepare_speech` would read it, without writing; or on a prepared store, with the items
    that its preparation left out, where `config` is ignored. A `checker` reads every clip of a store.

    Raises UserError as `prepare_speech` does, and if a store is damaged.
    """
    check_input_folder(input_dir, "recordings, or the prepared speech")
    prepared = any((input_dir / name).is_file() for name in (SOUNDS, TEXT, WAVES))
    if prepared:
        refuse_exclude(input_dir, exclude)
        held = _in_store(input_dir, config.kind)
    elif checker:
        raise UserError(f"{input_dir}: a recogniser checks prepared speech", hint="run gputrain prepare-data before")
    else:
        held = _in_tree(input_dir, config, exclude, num_workers, progress)
    rate_hz, reader = held.format.sampling_rate, held.format.frontend
    seconds = [clip.samples / rate_hz for clip in held.clips]
    symbols = symbol_counts(held.clips, reader)
    checked: list[CheckedText] = []
    doubt = ""
    if checker:
        wave_of = partial(read_wave, input_dir)
        checked, doubt = check_clips(held.clips, held.names(), rate_hz, checker, wave_of, progress)
    rates = [reader.spoken(clip.normalized) / length for clip, length in zip(held.clips, seconds, strict=True)]
    return SpeechReport(
        input_dir=str(input_dir),
        prepared=prepared,
        transcripts=held.transcripts,
        language=reader.language,
        sampling_rate=rate_hz,
        source_rates=held.source_rates,
        clips=len(seconds),
        hours=sum(seconds) / 3600,
        seconds=value_range(seconds),
        symbols=symbols,
        speakers=_speakers(held),
        symbols_a_second=value_range(rates),
        refused=sorted_refusals(held.refused),
        ignored=held.ignored or {},
        columns=held.columns or {},
        findings=[*filter(None, [doubt]), *_findings(held, sum(seconds) / 3600, symbols)],
        checked=checked,
    )


def _in_tree(
    folder: Path, config: SpeechPrepareConfig, exclude: Sequence[str], num_workers: int, progress: Progress
) -> _Held:
    material = gather_material(folder, config, exclude)
    config = material.config
    refused = list(material.refused)
    jobs = [(folder, path, content, sound_format(config)) for path, content in material.prints.items()]
    results: list[Recording | RefusedItem] = []
    run_jobs(measure_recording, jobs, num_workers, results.append, progress)
    refused += [result for result in results if isinstance(result, RefusedItem)]
    ready = {result.path: result for result in results if isinstance(result, Recording)}
    chosen = select_clips(material.transcripts.utterances, ready, config)
    rates = dict(Counter(recording.source_hz for recording in ready.values()))
    refused += chosen.refused
    notes = [*material.notes, *remarks_on((path, recording.remark) for path, recording in ready.items())]
    notes += text_notes(chosen.format.frontend, material.transcripts.utterances)
    return _Held(
        chosen.format, chosen.clips, rates, refused, material.transcripts.source, material.ignored,
        material.transcripts.columns, notes,
        {path: sound.bandwidth_hz for path, sound in ready.items() if sound.bandwidth_hz is not None},
    )  # fmt: skip


def _in_store(folder: Path, kind: SpeechKind) -> _Held:
    store = SpeechStore.open(folder)
    check_kind(store, kind)
    used = {clip.fingerprint for clip in store.clips}
    try:
        sounds = [from_row(Recording, row) for row in read_rows(folder / SOUNDS, ())[1:]]
    except ValueError:
        raise unreadable(folder / SOUNDS, PREPARE_AGAIN) from None
    notes = remarks_on((sound.path, sound.remark) for sound in sounds)
    rates = dict(Counter(sound.source_hz for sound in sounds if sound.fingerprint in used))
    narrow = {sound.path: sound.bandwidth_hz for sound in sounds if sound.bandwidth_hz is not None}
    starts = sorted(sound.first_sample for sound in sounds) or [0]
    return _Held(store.format, store.clips, rates, read_quarantine(folder), notes=notes, narrow=narrow, starts=starts)


def findings_of(folder: Path, kind: SpeechKind) -> list[str]:
    """Returns what validation finds in prepared speech, without the remarks on recordings, which its preparation has
    logged."""
    held = replace(_in_store(folder, kind), notes=())
    seconds = sum(clip.samples for clip in held.clips) / held.format.sampling_rate
    return list(_findings(held, seconds / 3600, symbol_counts(held.clips, held.format.frontend)))


def _speakers(held: _Held) -> dict[str, SpeakerSummary]:
    summaries = {}
    for number, name in enumerate(held.format.speakers):
        own = [clip.samples for clip in held.clips if clip.speaker == number]
        summaries[name] = SpeakerSummary(len(own), sum(own) / held.format.sampling_rate / 3600)
    return summaries


def _findings(held: _Held, hours: float, symbols: dict[str, int]) -> Iterator[str]:
    if not held.clips:
        yield "no clip can be used for training"
        return
    yield from held.notes
    odd = [clip.text for clip in held.clips if ANNOTATION.search(clip.text)]
    if odd:
        yield f"{counted(len(odd), 'text has', 'texts have')} what may be no speech, such as {shortened(odd[0])!r}"
    left_out, rate_hz, is_voice = len(held.refused), held.format.sampling_rate, held.format.kind == "tts"
    if left_out > MANY_REFUSED * (left_out + len(held.clips)):
        yield f"{left_out} of {left_out + len(held.clips)} items are left out: see the reasons"
    if low := sum(count for source_hz, count in held.source_rates.items() if source_hz < rate_hz):
        lacks = f"{counted(low, 'recording has', 'recordings have')} less than {rate_hz} Hz, and so no high frequencies"
        remedy = f"prepare at {min(held.source_rates)} Hz, or record again"
        yield f"{lacks}: {remedy if is_voice else 'this suits a recogniser of telephone speech only'}"
    if held.narrow:
        remedy = f"leave them out, or prepare at {rate_for(min(held.narrow.values()))} Hz"
        lacks = lacking_treble(held.narrow, sum(held.source_rates.values()), rate_hz)
        yield f"{lacks}: {remedy if is_voice else 'this suits such sound only'}"
    if hours < FEW_HOURS:
        enough = "enough to fine-tune" if is_voice else "enough to adapt to a few words and one voice"
        yield f"{format_duration(3600 * hours)} of speech is little: {enough} (--init-from), not to train from scratch"
    characters = Counter(char for clip in held.clips for char in clip.normalized)
    if isinstance(held.format.frontend, Vocabulary):
        read = [clip for clip in held.clips if any(char.isnumeric() for char in {*clip.text} - {*clip.normalized})]
        if read:
            read_as = f"such as {shortened(read[0].text)!r} as {shortened(read[0].normalized)!r}"
            has = counted(len(read), "text has", "texts have")
            yield f"{has} digits, which rules read and may be said otherwise, {read_as}"
        # Those of apostrophes are named on their own.
        yield from lookalike_findings({char: characters[char] for char in characters.keys() - {*APOSTROPHES}})
        if len(held.format.speakers) == 1:
            yield "one speaker, or no speakers are named: held-out clips show nothing about other voices"
        yield from vocabulary_findings(held.clips, symbols)
        return
    if held.format.frontend.espeak_voice:  # It says the names of letters that its language has not.
        yield from script_findings(Counter(char for clip in held.clips for char in clip.text))
    else:
        yield from lookalike_findings(characters)
    rare = [symbol for symbol, count in symbols.items() if 0 < count < RARE and symbol.isalpha()]
    if rare:
        yield f"{' '.join(rare)}: these letters occur less than {RARE} times, too rarely for the voice to learn them"
    several = len(held.format.speakers) > 1
    few = [name for name, summary in _speakers(held).items() if several and summary.hours * 60 < 5]
    if few:
        yield f"less than five minutes of {', '.join(few[:10])}: too little for a separate voice"
