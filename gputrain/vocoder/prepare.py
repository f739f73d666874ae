"""Prepare recordings for training a vocoder: of one rate, one channel, their pitch beside them, in a store.

Files of any rate, number of channels and depth are resampled, never refused for it. Sources are only read.
"""

import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from gputrain.audio.f0 import CEILING_HZ, FLOOR_HZ, Method, compile_tracker, default_method, f0
from gputrain.audio.mel import BLOCK, Samples, read_sound, resample, trim
from gputrain.engine.data import fingerprint, in_processes, write_rows
from gputrain.engine.wav import to_int16
from gputrain.errors import UserError
from gputrain.vocoder.config import SAMPLING_RATE
from gputrain.vocoder.config import Sound as Wishes
from gputrain.vocoder.store import Format, Pitch, Wave, Writer

log = logging.getLogger(__name__)

SUFFIXES = {".wav", ".flac", ".ogg", ".opus", ".mp3", ".aif", ".aiff", ".w64", ".caf"}
# Sound that is not understood here: such files are listed among what is left out, as unreadable.
OTHER_SUFFIXES = {
    ".m4a", ".m4b", ".aac", ".wma", ".amr", ".ape", ".wv", ".ac3", ".mka", ".mp4", ".webm", ".3gp"
}  # fmt: skip
QUARANTINE = "quarantine.jsonl"
SILENCE = 1e-3  # peak of a recording that holds nothing: 60 dB below full scale
HEADROOM = 0.99  # of full scale, that no loudness is bought beyond

Progress = Callable[[int, int], None]  # files done, files in all


@dataclass(frozen=True)
class Refusal:
    """A file that is left out, and why; `path` is relative to the folder that was read."""

    path: str
    reason: Literal["unreadable", "silent", "duplicate"]
    detail: str


@dataclass(frozen=True)
class Recipe:
    """What prepared sound depends on, beside its source."""

    sampling_rate: int  # Hz
    hop_size: int  # samples
    f0_method: Method
    f0_min: float = FLOOR_HZ  # Hz, of the pitch that is looked for
    f0_max: float = CEILING_HZ
    trim_db: float = 0.0  # silence at both ends, so far below the loudest, is cut off; 0: nothing is
    loudness_db: float = 0.0  # root mean square to bring each file to, in dB below full scale (negative); 0: as it is

    @property
    def format(self) -> Format:
        return Format(self.sampling_rate, self.hop_size, self.f0_method, self.f0_min, self.f0_max)


class Refused(Protocol):
    """What every kind of refusal tells."""

    @property
    def path(self) -> str: ...

    @property
    def reason(self) -> str: ...

    @property
    def detail(self) -> str: ...


def recipe_of(wishes: Wishes) -> Recipe:
    """As the options ask for it. Where parselmouth is missing, pyin tracks the pitch, and a warning says so."""
    method = default_method() if wishes.f0_method == "auto" else wishes.f0_method
    if wishes.f0_method == "auto" and method == "pyin":
        log.warning("pyin tracks the pitch, a hundred times slower than parselmouth: pip install 'gputrain[f0]'")
    return Recipe(
        wishes.audio_sample_rate or SAMPLING_RATE, wishes.hop_size, method, wishes.f0_min, wishes.f0_max,
        wishes.trim_db or 0.0, wishes.loudness_db,
    )  # fmt: skip


@dataclass(frozen=True)
class Report:
    """What a preparation did: files `made` into clips by this run or `kept` from earlier ones, and those left out."""

    input_dir: str
    output_dir: str
    made: int
    kept: int
    hours: float
    ignored: dict[str, int]  # other files, by suffix
    refused: list[Refusal]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def silent(done: int, total: int) -> None:
    pass


def prepare_sound(
    input_dir: Path, output_dir: Path, recipe: Recipe, *, num_workers: int = 0, progress: Progress = silent
) -> Report:
    """Put every usable recording of a folder tree into the store `output_dir`. Run again, it does what is missing.

    Raises UserError if a folder will not do, no recording is usable, or the sources are no longer those of the store.
    """
    _check(input_dir, output_dir)
    paths, ignored = scan(input_dir)
    if not paths:
        raise no_recording(input_dir, ignored)
    refused: list[Refusal] = []
    prints = fingerprints(input_dir, paths, refused)
    writer = Writer(output_dir, recipe.format)
    kept = {clip.path: clip.fingerprint for clip in writer.clips}
    for path, known in kept.items():
        if prints.get(path) != known:
            writer.close()
            raise UserError(
                f"{output_dir} holds {path} as it is no longer in {input_dir}", hint="prepare into another folder"
            )
    missing = [path for path in prints if path not in kept]
    progress(len(kept), len(prints))
    if missing:
        compile_tracker(recipe.f0_method)
    with closing(in_processes(make, [(input_dir, path, recipe) for path in missing], num_workers)) as results:
        for done, (path, made) in enumerate(zip(missing, results, strict=True), start=len(kept) + 1):
            if isinstance(made, Refusal):
                refused.append(made)
            else:
                writer.add(path, prints[path], *made)
            progress(done, len(prints))
    refused.sort(key=lambda refusal: refusal.path)
    write_rows(output_dir / QUARANTINE, map(asdict, refused))
    if not writer.clips:
        writer.close()
        raise UserError(
            f"{input_dir}: none of {len(paths)} files holds usable sound: {faults_of(refused)}",
            hint=f"{output_dir / QUARANTINE} names each and its fault",
        )
    writer.finish()
    hours = sum(clip.samples for clip in writer.clips) / recipe.sampling_rate / 3600
    return Report(
        str(input_dir), str(output_dir), len(writer.clips) - len(kept), len(kept), hours, dict(ignored), refused
    )


def make(job: tuple[Path, str, Recipe]) -> tuple[Wave, Pitch] | Refusal:
    """In a process of its own: the samples of a recording and its pitch by frame, or why there are none."""
    folder, path, recipe = job
    try:
        sound = read_sound(folder / path)
    except UserError as error:
        return Refusal(path, "unreadable", error.message.removeprefix(f"{folder / path}: "))
    wave_T = resample(sound.wave_T, sound.rate_hz, recipe.sampling_rate)
    del sound  # an hour is half a gigabyte
    peak = max(float(wave_T.max()), -float(wave_T.min()))
    if peak < SILENCE:
        return Refusal(path, "silent", f"its peak is {peak:.2g} of full scale")
    if recipe.trim_db:
        wave_T = trim(wave_T, recipe.trim_db)
    if recipe.loudness_db:
        wave_T = wave_T * min(10 ** (recipe.loudness_db / 20) / rms(wave_T), HEADROOM / peak)
    samples = len(wave_T)
    frames = -(-samples // recipe.hop_size)
    wave_T = np.pad(wave_T, (0, frames * recipe.hop_size - samples))
    pitch_F = f0(
        wave_T,
        recipe.sampling_rate,
        recipe.hop_size,
        recipe.f0_method,
        floor_hz=recipe.f0_min,
        ceiling_hz=recipe.f0_max,
    )
    return np.concatenate([to_int16(block_T) for block_T in _blocks(wave_T[:samples])]), pitch_F


def rms(wave_T: Samples) -> float:
    return math.sqrt(
        sum(float(np.square(block_T, dtype=np.float64).sum()) for block_T in _blocks(wave_T)) / len(wave_T)
    )


def _blocks(wave_T: Samples) -> Iterator[Samples]:
    for begin in range(0, len(wave_T), BLOCK):
        yield wave_T[begin : begin + BLOCK]


def _check(input_dir: Path, output_dir: Path) -> None:
    if not input_dir.is_dir():
        fault = "is a file, expected a folder" if input_dir.exists() else "no such folder"
        raise UserError(f"{input_dir}: {fault}", hint="name the folder that holds the recordings")
    read, written = input_dir.resolve(), output_dir.resolve()
    if read == written or read in written.parents or written in read.parents:
        raise UserError(
            f"{input_dir} and {output_dir}: one holds the other, so prepared sound would mix with sources",
            hint="choose an output folder beside the input folder",
        )


def scan(folder: Path) -> tuple[list[str], Counter[str]]:
    """Recordings of a tree by their suffixes, in order, and other files counted. Hidden ones are passed over, and links
    are followed, each folder once."""
    found, ignored = [], Counter[str]()
    seen = {os.path.realpath(folder)}
    for at, folders, names in os.walk(folder, followlinks=True):
        visible = {os.path.realpath(Path(at, name)): name for name in sorted(folders) if not name.startswith(".")}
        folders[:] = [name for place, name in visible.items() if place not in seen]
        seen |= visible.keys()
        for name in names:
            path = Path(at, name)
            if name.startswith(".") or path.suffix.lower() not in SUFFIXES | OTHER_SUFFIXES:
                ignored["hidden" if name.startswith(".") else path.suffix.lower() or "none"] += 1
            else:
                found.append(path.relative_to(folder).as_posix())
    return sorted(found), ignored


def no_recording(folder: Path, ignored: Counter[str]) -> UserError:
    """The error for a folder without a recording, which says what else there is."""
    others = ", ".join(f"{count} {suffix}" for suffix, count in ignored.most_common(5))
    return UserError(
        f"{folder}: no recording in it{f', but other files: {others}' if others else ''}",
        hint=f"looked for {', '.join(sorted(SUFFIXES))}",
    )


def faults_of(refused: Iterable[Refused]) -> str:
    """How many are left out for each reason, and the first with its fault."""
    refused = list(refused)
    counts = Counter(refusal.reason for refusal in refused).most_common(5)
    first = f"; {refused[0].path}: {refused[0].detail}" if refused else ""
    return ", ".join(f"{count} {reason}" for reason, count in counts) + first


def fingerprints(folder: Path, paths: list[str], refused: list[Refusal]) -> dict[str, str]:
    """By path; what cannot be read, and what repeats the content of an earlier file, is refused."""
    firsts: dict[str, str] = {}
    found: dict[str, str] = {}
    for path in paths:
        try:
            content = fingerprint(folder / path)
        except OSError as error:
            refused.append(Refusal(path, "unreadable", why_unreadable(folder / path, error)))
            continue
        if (first := firsts.setdefault(content, path)) == path:
            found[path] = content
        else:
            refused.append(Refusal(path, "duplicate", f"has the content of {first}"))
    return found


def why_unreadable(path: Path, error: OSError) -> str:
    """In words; a link whose target is gone says where it leads."""
    if path.is_symlink() and not path.exists():
        return f"a link to {os.readlink(path)}, which is not there"
    return error.strerror or str(error)
