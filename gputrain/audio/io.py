"""Reads, resamples and trims recordings. Shape suffixes: T samples, F frames."""

import math
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from gputrain.engine.data import FULL_SCALE
from gputrain.errors import UserError

if TYPE_CHECKING:  # Packages that read sound are imported where they read: a training of prepared data needs none.
    import soundfile

Samples = npt.NDArray[np.float32]
# Sound and video that ffmpeg decodes, if it is installed.
FFMPEG_SUFFIXES = frozenset({
    ".m4a", ".m4b", ".aac", ".wma", ".amr", ".ape", ".wv", ".ac3", ".mka",
    ".mp4", ".m4v", ".webm", ".3gp", ".mkv", ".mov", ".avi",
})  # fmt: skip
BLOCK = 1 << 20  # Samples of a file that are decoded at once.
TRIM_WINDOW = 2048  # Samples over which power is averaged to detect silence.
TRIM_HOP = 512
HOW_TO_CONVERT = "wav, flac, ogg and mp3 are supported; an installed ffmpeg also reads m4a, aac, webm, mp4 and others"


class DecodedSound(NamedTuple):
    """One channel, in [-1, 1] unless the file exceeds it, and its rate in Hz."""

    wave_T: Samples
    rate_hz: int


def from_int16(samples_T: npt.NDArray[np.int16]) -> Samples:
    """Returns 16-bit samples as a wave in [-1, 1)."""
    return np.divide(samples_T, FULL_SCALE, dtype=np.float32)


def resample(wave_T: Samples, from_hz: float, to_hz: float) -> Samples:
    """Returns the sound at another rate, ceil(T * to_hz / from_hz) samples long, by soxr's high-quality filter."""
    if from_hz == to_hz:
        return wave_T
    import soxr

    resampled_T = soxr.resample(wave_T, from_hz, to_hz, quality="HQ")
    length = math.ceil(len(wave_T) * (to_hz / from_hz))
    return np.asarray(np.pad(resampled_T, (0, max(0, length - len(resampled_T))))[:length])  # soxr rounds the length.


def trim(wave_T: Samples, top_db: float) -> Samples:
    """Returns a view of the wave without silence at both ends: frames with a power `top_db` below the loudest frame's.

    Frames of TRIM_WINDOW samples are TRIM_HOP apart and centred on their positions, as in librosa.effects.trim.
    """
    squares_T = np.pad(np.square(wave_T), TRIM_WINDOW // 2)
    power_F = np.lib.stride_tricks.sliding_window_view(squares_T, TRIM_WINDOW)[::TRIM_HOP].mean(axis=1)
    # Power below 1e-10, which is -100 dB, counts as equally silent.
    level_F = power_F.clip(min=1e-10)
    loud = np.flatnonzero(level_F > level_F.max() * 10 ** (-top_db / 10))
    return wave_T[loud[0] * TRIM_HOP : (loud[-1] + 1) * TRIM_HOP]


def read_sound(path: Path) -> DecodedSound:
    """Returns the mean of the channels of a sound file: wav, flac, ogg, mp3 and other formats that libsndfile decodes.

    Raises UserError, naming the file, if it is missing, damaged or of an unknown kind, empty, or holds NaN or infinity.
    """
    rate_hz, blocks = _decoded(path)
    return DecodedSound(np.concatenate(list(blocks)), rate_hz)


def read_in_blocks(path: Path, rate_hz: int) -> Iterator[Samples]:
    """Yields the samples of `resample(*read_sound(path), rate_hz)` in blocks, so that an hour needs no memory.

    Raises UserError as `read_sound` does, the errors of later samples when they are reached.
    """
    source_hz, blocks = _decoded(path)
    if source_hz == rate_hz:
        yield from blocks
        return
    import soxr

    stream = soxr.ResampleStream(source_hz, rate_hz, 1, dtype="float32", quality="HQ")
    taken = made = 0
    for block in blocks:
        taken += len(block)
        resampled_T = stream.resample_chunk(block)
        made += len(resampled_T)
        yield resampled_T
    length = math.ceil(taken * (rate_hz / source_hz)) - made
    rest_T = stream.resample_chunk(np.empty(0, np.float32), last=True)
    yield np.pad(rest_T, (0, max(0, length - len(rest_T))))[: max(0, length)]


def length_of(path: Path) -> float | None:
    """Returns the seconds of a file by its header; None if it has none that libsndfile reads."""
    import soundfile

    try:
        return float(soundfile.info(str(path)).duration)
    except (soundfile.LibsndfileError, OSError, ValueError):
        return None


def _decoded(path: Path) -> tuple[int, Iterator[Samples]]:
    """Returns the sampling rate of a file, and its decoded blocks; there is one at least."""
    if not path.is_file():
        raise UserError(f"{path}: no such file", hint="name a sound file: wav, flac, ogg or mp3")
    if path.suffix.lower() not in FFMPEG_SUFFIXES:
        return _blocks_of(path, path)
    folder = TemporaryDirectory(prefix="gputrain-")  # It is deleted with the last block.
    converted = Path(folder.name) / "sound.wav"
    _by_ffmpeg(path, converted)
    rate_hz, blocks = _blocks_of(converted, path)

    def kept_until_read() -> Iterator[Samples]:
        with folder:
            yield from blocks

    return rate_hz, kept_until_read()


def _by_ffmpeg(path: Path, converted: Path) -> None:
    """Writes the first sound track of a file as wav. Raises UserError if ffmpeg is missing or cannot read it."""
    program = shutil.which("ffmpeg")
    if program is None:
        raise UserError(
            f"{path}: cannot be decoded without ffmpeg, which is not installed or not on the PATH",
            hint="install it (apt, brew or winget install ffmpeg), or convert the file to wav or flac",
        )
    # With `file:` no name is read as an option or as an address.
    command = [
        program,
        "-nostdin",
        "-v",
        "error",
        "-i",
        f"file:{path.absolute()}",
        "-map",
        "0:a:0",
        "-c:a",
        "pcm_f32le",
    ]
    command += ["-rf64", "auto", "-y", f"file:{converted}"]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode or not converted.is_file():
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        no_sound = "matches no streams" in said[-1] or "matches no streams" in " ".join(said)
        reason = "it has no sound track" if no_sound else said[-1].removeprefix(f"file:{path.absolute()}: ")
        raise UserError(f"{path}: cannot be decoded by ffmpeg: {reason}", hint=HOW_TO_CONVERT)


def _blocks_of(path: Path, source: Path) -> tuple[int, Iterator[Samples]]:
    """Returns the sampling rate and the blocks of a file that libsndfile decodes; `source` is named in errors."""

    def blocks() -> Iterator[Samples]:
        first = 0
        with _open(path) as file:
            for block in file.blocks(BLOCK, dtype="float32", always_2d=True):
                wave_T = block.mean(axis=1)
                if not np.isfinite(wave_T).all():
                    seconds = (first + int(np.argmin(np.isfinite(wave_T)))) / file.samplerate
                    raise UserError(
                        f"{source}: a sample is no finite number, the first at {seconds:.3f} seconds",
                        hint="export it again as 16-bit wav or flac",
                    )
                yield wave_T
                first += len(wave_T)
        if not first:
            raise UserError(f"{source}: holds no sound", hint="leave it out, or record it again")

    with _open(path) as file:
        return file.samplerate, blocks()


@contextmanager
def _open(path: Path) -> "Iterator[soundfile.SoundFile]":
    """Opens a file for decoding. Raises UserError if libsndfile cannot decode it, while reading too."""
    import soundfile

    try:
        # libsndfile takes names that are no UTF-8 as bytes, except on Windows.
        with soundfile.SoundFile(path if os.name == "nt" else os.fsencode(path)) as file:
            yield file
    except soundfile.LibsndfileError as error:
        raise UserError(f"{path}: cannot be decoded: {error.error_string}", hint=HOW_TO_CONVERT) from None
