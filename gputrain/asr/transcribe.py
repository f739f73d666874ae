"""Transcribes recordings of any length: text, words with times, and subtitles.

Shapes: F frames, V symbols.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path

from gputrain.asr.config import Transcribe, TranscriptFormat
from gputrain.asr.decode import GreedyDecoder, words_of
from gputrain.asr.load import Recogniser, load_recogniser
from gputrain.asr.long_audio import ChunkLengths, blocks_of_file, log_prob_pieces, moments_of
from gputrain.audio.io import HOW_TO_CONVERT, length_of
from gputrain.audio.prepare import scan_recordings
from gputrain.data_in.preparation import RefusedItem
from gputrain.errors import UserError
from gputrain.files import Progress, check_report, no_progress, output_names, writing
from gputrain.hw.runtime import runtime_on
from gputrain.speech import subtitles
from gputrain.speech.frames import STRIDE

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Transcript:
    path: str
    text: str
    words: list[subtitles.TimedWord]
    seconds: float  # length of the recording

    def to_json(self) -> dict[str, object]:
        rounded = [{"word": word.word, "start": round(word.start, 3), "end": round(word.end, 3)} for word in self.words]
        return {"path": self.path, "text": self.text, "words": rounded}


@dataclass
class Transcribed:
    """Result of `transcribe_files`."""

    files: list[Path] = field(default_factory=list)
    recordings: int = 0
    words: int = 0
    refused: list[RefusedItem] = field(default_factory=list)
    sound_seconds: float = 0.0
    computing_seconds: float = 0.0

    @property
    def real_time_factor(self) -> float:
        """Computing time per second of audio."""
        return self.computing_seconds / self.sound_seconds


WRITERS: dict[TranscriptFormat, Callable[[Transcript], str]] = {
    "txt": lambda transcript: f"{transcript.text}\n",
    "srt": lambda transcript: subtitles.srt(transcript.words),
    "vtt": lambda transcript: subtitles.vtt(transcript.words),
}


def transcribe_files(
    settings: Transcribe,
    *,
    show: Callable[[Transcript], None] = lambda transcript: None,
    progress: Progress = no_progress,
) -> Transcribed:
    """Transcribes every recording of a file or folder tree. `show` receives each transcript as soon as it is made, and
    `progress` the seconds of sound, also within a recording.

    What was made before an interruption is in the files. Raises UserError if there is no such model or no recording,
    or none could be transcribed.
    """
    paths = recordings_of(settings.input)
    runtime = runtime_on(settings.device)
    recogniser = load_recogniser(settings.weights, runtime.device)
    lengths = ChunkLengths.of_seconds(settings.chunk_seconds, settings.overlap_seconds, recogniser.sampling_rate)
    done, began = Transcribed(), time.perf_counter()
    targets = _targets(settings, paths)
    *begins, end = accumulate((length_of(path) or 0.0 for path in paths), initial=0.0)
    total = math.ceil(end)
    with _json_list(settings.json) as add, runtime.autocast():
        for path, begin in zip(paths, begins, strict=True):
            try:
                advance = partial(_advance, progress, begin, total)
                transcript = transcribe_sound(recogniser, path, lengths, advance)
            except UserError as error:
                if not settings.input.is_dir():
                    raise
                log.warning("%s; left out", error.message)
                done.refused.append(RefusedItem(str(path), "unreadable", error.message.removeprefix(f"{path}: ")))
            else:
                done.recordings += 1
                done.words += len(transcript.words)
                done.sound_seconds += transcript.seconds
                show(transcript)
                add(transcript.to_json())
                done.files += _write(transcript, targets.get(path, {}))
    progress(total, total)
    done.computing_seconds = time.perf_counter() - began
    if not done.recordings:
        first = done.refused[0]
        more = f", and {len(done.refused) - 1} more" if len(done.refused) > 1 else ""
        raise UserError(
            f"{settings.input}: no usable recording: {first.path}: {first.detail}{more}", hint=HOW_TO_CONVERT
        )
    if not done.words:
        log.warning("no word was recognised: the recogniser has not learnt to write yet, or not this language")
    return done


def recordings_of(input: Path) -> list[Path]:
    """Returns a file, or the recordings of a folder tree. Raises UserError if there are none."""
    if not input.is_dir():
        if not input.exists():
            raise UserError(f"{input}: no such file or folder", hint="--input takes a recording or a folder of them")
        return [input]
    return [input / path for path in scan_recordings(input).paths]


def _advance(progress: Progress, begin: float, total: int, seconds: float) -> None:
    progress(min(total, round(begin + seconds)), total)


def transcribe_sound(
    recogniser: Recogniser,
    path: Path,
    lengths: ChunkLengths,
    advance: Callable[[float], None] = lambda seconds: None,
) -> Transcript:
    """Transcribes a recording of any length in bounded memory; `advance` receives the seconds that are done. Raises
    UserError if it cannot be read, or is shorter than a frame of the recogniser."""
    rate_hz = recogniser.sampling_rate
    blocks = blocks_of_file(path, rate_hz)
    sound = moments_of(blocks())
    if sound.samples < (field := recogniser.field):
        raise UserError(
            f"{path}: lasts {1000 * sound.samples / rate_hz:.3g} ms, less than a frame, {1000 * field / rate_hz:g} ms",
            hint="leave it out, or record it again",
        )
    decoder, frames = GreedyDecoder(recogniser.vocabulary), 0
    for log_probs_FV in log_prob_pieces(recogniser, blocks, sound, lengths):
        decoder.feed(log_probs_FV)
        frames += len(log_probs_FV)
        advance(frames * STRIDE / rate_hz)
    words = words_of(decoder.finish(), recogniser.vocabulary, STRIDE / rate_hz)
    return Transcript(str(path), " ".join(word.word for word in words), words, sound.samples / rate_hz)


def _targets(settings: Transcribe, paths: list[Path]) -> dict[Path, dict[TranscriptFormat, Path]]:
    """Returns the files to write for each recording. Those that differ in the suffix alone keep it in the name."""
    if settings.output_dir is None:
        return {}
    root = settings.input if settings.input.is_dir() else settings.input.parent
    names = output_names([path.relative_to(root) for path in paths], lambda name: name.with_suffix(""))
    targets = {
        path: {format: settings.output_dir / f"{name}.{format}" for format in settings.formats}
        for path, name in zip(paths, names, strict=True)
    }
    if settings.output_dir.resolve() == root.resolve():  # What stands there may be the user's own texts.
        for target in (target for formats in targets.values() for target in formats.values() if target.exists()):
            raise UserError(f"{target} stands beside its recording already", hint="name another --output-dir")
    return targets


def _write(transcript: Transcript, targets: dict[TranscriptFormat, Path]) -> list[Path]:
    for format, target in targets.items():
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(WRITERS[format](transcript), encoding="utf-8")
    return list(targets.values())


@contextmanager
def _json_list(path: Path | None) -> Iterator[Callable[[dict[str, object]], None]]:
    """Yields a function that appends an object to the list in a JSON file, which is valid at the end of the block even
    if an error ends it."""
    if path is None:
        yield lambda row: None
        return
    check_report(path, ["words"])
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w", encoding="utf-8")
    with file:
        first = True

        def add(row: dict[str, object]) -> None:
            nonlocal first
            with writing(path):
                file.write(("[\n" if first else ",\n") + json.dumps(row, ensure_ascii=False))
                file.flush()
            first = False

        try:
            yield add
        finally:
            file.write("[]\n" if first else "\n]\n")
