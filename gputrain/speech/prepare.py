"""Prepares recordings for training a voice or a recogniser: resampled, trimmed, and stored with their texts.

Sources are only read. Shape suffixes: T samples, F frames.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gputrain.audio import prepare as audio_prepare
from gputrain.audio.config import Sound
from gputrain.audio.io import length_of
from gputrain.audio.prepare import SoundPrepareReport, bandwidth_of, is_narrow
from gputrain.audio.store import Wave, check_format
from gputrain.data_in.preparation import (
    EXCLUDED,
    Journal,
    RefusedItem,
    check_folders,
    check_input_folder,
    faults_of,
    nothing_usable,
    run_jobs,
    sorted_refusals,
    write_quarantine,
)
from gputrain.errors import UserError
from gputrain.files import Progress, no_progress, to_int16
from gputrain.formatting import counted
from gputrain.speech.checker import SpeechChecker, cut_utterances
from gputrain.speech.clip_filter import (
    BEYOND_SECONDS,
    reader_of,
    select_clips,
    text_notes,
)
from gputrain.speech.config import POLICIES, SpeechKind, SpeechOptions, SpeechPrepareConfig
from gputrain.speech.store import SOUNDS, Recording, SoundFormat, SpeechWriter, read_wave, stored_kind
from gputrain.speech.transcripts import Transcripts, has_transcripts, read_transcripts
from gputrain.speech.utterances import TranscriptRules, Utterance

log = logging.getLogger(__name__)

ROUNDED_SECONDS = 0.1  # accepted difference between the length in a manifest and the longer one of the recording


def speech_prepare_config(kind: SpeechKind, speech: SpeechOptions, sound: Sound) -> SpeechPrepareConfig:
    policy = POLICIES[kind]
    trim_db = policy.trim_db if sound.trim_db is None else sound.trim_db
    rate_hz = sound.audio_sample_rate or policy.sampling_rate
    return SpeechPrepareConfig(speech, rate_hz, policy.hop_size, trim_db, sound.loudness_db, kind)


@dataclass(frozen=True, kw_only=True)
class SpeechPrepareReport(SoundPrepareReport):
    transcripts: str  # file and detected format
    clips: int
    speakers: tuple[str, ...]
    vocabulary: tuple[str, ...] = ()  # symbols of a recogniser
    findings: tuple[str, ...] = ()  # oddities of the vocabulary, as text


@dataclass(frozen=True)
class Material:
    """A folder before decoding: its transcripts, the fingerprints of its files, and unusable items. `config` has the
    trimming that its transcripts allow, and `notes` say as text what a reader may not expect."""

    config: SpeechPrepareConfig
    transcripts: Transcripts
    notes: list[str]
    prints: dict[str, str]  # fingerprints of transcribed recordings, by path
    refused: list[RefusedItem]
    ignored: dict[str, list[str]]


def prepare_speech(
    input_dir: Path,
    output_dir: Path,
    config: SpeechPrepareConfig,
    *,
    checker: SpeechChecker | None = None,
    exclude: Sequence[str] = (),
    num_workers: int = 0,
    progress: Progress = no_progress,
) -> SpeechPrepareReport:
    """Writes every usable recording of a folder tree, with its text, to the store `output_dir`. A later run prepares
    only new and changed recordings, and selects the training clips again.

    With a `checker`, recordings that exceed the maximum length are cut where it hears the ends of sentences.

    Raises UserError if a folder or the transcripts are invalid, or no recording is usable.
    """
    check_folders(input_dir, output_dir, config.kind)
    check_output(output_dir, config)
    material = gather_material(input_dir, config, exclude)
    config = material.config
    for note in material.notes:
        log.warning("%s", note)
    reader = reader_of(config, material.transcripts.utterances)  # Invalid options raise here, before hours of work.
    for note in text_notes(reader, material.transcripts.utterances):
        log.warning("%s", note)
    writer = SpeechWriter(output_dir, sound_format(config))
    prints, utterances = material.prints, material.transcripts.utterances
    ready = {stored.path: stored for stored in writer.sounds if prints.get(stored.path) == stored.fingerprint}
    missing = [path for path in prints if path not in ready]
    refused, kept = list(material.refused), len(ready)

    def store(made: tuple[Recording, Wave] | RefusedItem) -> None:
        if isinstance(made, RefusedItem):
            refused.append(made)
        else:
            ready[made[0].path] = writer.append(*made)

    jobs = [(input_dir, path, prints[path], sound_format(config)) for path in missing]
    run_jobs(convert_recording, jobs, num_workers, store, progress, kept)
    for note in audio_prepare.remarks_on((path, ready[path].remark) for path in missing if path in ready):
        log.warning("%s", note)
    if checker:
        waves = partial(read_wave, output_dir)
        utterances, misfits = cut_utterances(utterances, ready, config, checker, reader.sentences, waves, progress)
        refused += misfits
    chosen = select_clips(utterances, ready, config)
    refused = sorted_refusals([*refused, *chosen.refused])
    write_quarantine(output_dir, refused)
    if not chosen.clips:
        faults = faults_of(refused) or "no recording has a transcript"
        raise nothing_usable(f"{input_dir}: nothing to train on: {faults}", output_dir)
    writer.finish(chosen.format, chosen.clips)
    hours = sum(clip.samples for clip in chosen.clips) / config.sampling_rate / 3600
    return SpeechPrepareReport(
        input_dir=str(input_dir), output_dir=str(output_dir), transcripts=material.transcripts.source,
        made=len(ready) - kept, kept=kept, clips=len(chosen.clips), hours=hours, speakers=chosen.format.speakers,
        ignored=material.ignored, refused=refused, columns=material.transcripts.columns,
        vocabulary=chosen.format.vocabulary.symbols if config.kind == "asr" else (),
    )  # fmt: skip


def check_output(folder: Path, config: SpeechPrepareConfig) -> None:
    """Raises UserError if the folder holds speech that was prepared for another kind of model or otherwise."""
    found = stored_kind(folder)
    if found not in (None, config.kind):
        raise UserError(
            f"{folder}: holds speech prepared with --kind {found}",
            hint=f"prepare for --kind {config.kind} into another folder",
        )
    head = Journal(folder / SOUNDS).head or {}
    # Transcripts that cut clips out switch trimming off.
    check_format(folder, SOUNDS, sound_format(config if head.get("trim_db") else replace(config, trim_db=0.0)))


def sound_format(config: SpeechPrepareConfig) -> SoundFormat:
    return SoundFormat(config.sampling_rate, config.trim_db, config.loudness_db)


def gather_material(input_dir: Path, config: SpeechPrepareConfig, exclude: Sequence[str] = ()) -> Material:
    """Reads the transcripts of a folder, and fingerprints their recordings. Raises UserError as `read_transcripts`."""
    check_input_folder(input_dir, "recordings")
    options = config.speech
    has_table = options.transcripts is not None or has_transcripts(input_dir)  # It may name recordings elsewhere.
    tree = audio_prepare.scan_recordings(input_dir, exclude, may_be_empty=has_table)
    policy, language = POLICIES[config.kind], options.language_for(config.kind)
    rules = TranscriptRules(policy.needs_speakers, options.max_seconds, language, policy.reads_subtitles)
    file = options.transcripts
    if file and not file.exists() and (input_dir / file).is_file():  # A file in an archive has no other name.
        file = input_dir / file
    # Transcripts may name recordings that are excluded.
    excluded = {name for kind, names in tree.ignored.items() if kind.startswith(EXCLUDED) for name in names}
    transcripts = read_transcripts(
        input_dir, sorted({*tree.paths, *excluded}), file=file, columns=options.transcript_columns, rules=rules
    )
    transcripts = replace(
        transcripts, utterances=[utterance for utterance in transcripts.utterances if utterance.path not in excluded],
        refused=[item for item in transcripts.refused if item.path not in excluded],
    )  # fmt: skip
    unread = {kind: [name for name in names if name not in transcripts.files] for kind, names in tree.ignored.items()}
    others = {kind: names for kind, names in unread.items() if names}
    if transcripts.unnamed and file:
        others[f"not in {file.name}"] = [name for name in transcripts.unnamed if name not in excluded]
    refused, notes = [*tree.refused, *transcripts.refused], list(transcripts.notes)
    transcripts = replace(transcripts, utterances=without_whole_spans(input_dir, transcripts.utterances, notes))
    if config.trim_db and any(utterance.span for utterance in transcripts.utterances):
        # Trimming would move the beginning from which the times count.
        config = replace(config, trim_db=0.0)
        notes.append("silence at both ends is kept, since the transcripts cut clips out of recordings by their times")
    prints = audio_prepare.fingerprints(
        input_dir, sorted({utterance.path for utterance in transcripts.utterances}), refused
    )
    return Material(config, transcripts, notes, prints, refused, others)


def without_whole_spans(folder: Path, utterances: list[Utterance], notes: list[str]) -> list[Utterance]:
    """Returns the utterances; the only one of a recording has no times if they are those of the whole recording, which
    many manifests give: in it, or in a longer one from which it was cut. Recordings that go on after such times are
    added to the notes."""
    parts = Counter(utterance.path for utterance in utterances)
    found, longer = [], list[str]()
    for utterance in utterances:
        seconds = length_of(folder / utterance.path) if utterance.span and parts[utterance.path] == 1 else None
        if utterance.span is None or seconds is None:
            found.append(utterance)
            continue
        begin, end = utterance.span
        if begin:
            is_cut_out = end > seconds + BEYOND_SECONDS and abs(end - begin - seconds) <= ROUNDED_SECONDS
            found.append(replace(utterance, span=None) if is_cut_out else utterance)
            continue
        is_whole = -ROUNDED_SECONDS <= utterance.span[1] - seconds <= BEYOND_SECONDS
        found.append(replace(utterance, span=None) if is_whole else utterance)
        if utterance.span[1] < seconds - ROUNDED_SECONDS:
            longer.append(f"{utterance.path}, of which {utterance.span[1]:g} of {seconds:.2f} seconds are used")
    if longer:
        go_on = counted(len(longer), "recording goes", "recordings go")
        notes.append(f"{go_on} on after the end that the transcripts give, such as {longer[0]}")
    return found


def convert_recording(job: tuple[Path, str, str, SoundFormat]) -> tuple[Recording, Wave] | RefusedItem:
    """Decodes a recording in a worker process. Returns the samples to store, or the reason for leaving it out."""
    folder, path, content, format = job
    decoded = audio_prepare.decode_recording(
        folder, path, format.sampling_rate, trim_db=format.trim_db, loudness_db=format.loudness_db
    )
    if isinstance(decoded, RefusedItem):
        return decoded
    wave_T, source_hz, clipped, remark = decoded
    bandwidth_hz = bandwidth_of(wave_T, format.sampling_rate)
    recording = Recording(
        path, content, 0, len(wave_T), source_hz, clipped, remark=remark,
        bandwidth_hz=bandwidth_hz if is_narrow(bandwidth_hz, source_hz, format.sampling_rate) else None,
    )  # fmt: skip
    return recording, to_int16(wave_T)


def measure_recording(job: tuple[Path, str, str, SoundFormat]) -> Recording | RefusedItem:
    """Returns the result of `convert_recording` without the samples."""
    made = convert_recording(job)
    return made if isinstance(made, RefusedItem) else made[0]
