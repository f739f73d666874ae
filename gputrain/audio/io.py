"""Reads, resamples and trims recordings. Shape suffixes: T samples, F frames, C channels."""

import logging
import math
import mmap
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from gputrain.data_in.containers import FFMPEG_SOUNDS
from gputrain.data_in.preparation import hole_of_zeros
from gputrain.errors import UserError
from gputrain.files import FULL_SCALE

if TYPE_CHECKING:  # Packages that read sound are imported where they read: a training of prepared data needs none.
    import soundfile

log = logging.getLogger(__name__)

Samples = npt.NDArray[np.float32]
BLOCK = 1 << 20  # Samples of a file that are decoded at once.
# Subtypes of libsndfile whose samples may exceed full scale, or have another one: floating point, decoded sound, and
# integers that hold shorter ones.
UNSCALED = frozenset({"FLOAT", "DOUBLE", "PCM_32", "VORBIS", "OPUS", "MPEG_LAYER_I", "MPEG_LAYER_II", "MPEG_LAYER_III"})
LOUDEST = 16.0  # Highest peak, relative to full scale, of sound that is merely too loud: 24 dB.
CANCELLED = 0.5  # A mix with less than this share of what it keeps of a single channel cancels channels.
CANCELLED_SHARE = 0.02  # Share of the sound in which channels cancel each other, above which they are not mixed.
ALONE = 10.0  # Ratio of powers, 10 dB, above which one of two channels is heard alone.
ALONE_SHARE = 0.05  # Share of the sound in which each of two channels is alone, if they are two speakers of a call.
UNRELATED = 0.1  # Correlation of two channels below which they are not the same sound.
# What libsndfile notes of damage in Ogg, and of sound whose length in the header is not that in the file.
DAMAGED_OGG = re.compile("Junk after the last page|reports a hole|Corrupted bitstream")
CUT_WAV = re.compile(r"^ *(?:data|SSND|Data Size) *: (\d+) \(should be (\d+)\)", re.MULTILINE)
# Heads of whole recordings; decoders do not read another one that was joined to it.
HEADS = {"FLAC": rb"fLaC\0\0\0\x22", "MP3": rb"(?:Xing|Info)\0\0\0"}
JUMP = 256  # Lowest level, of 16 bits, from which sound does not fall to zero at once.
UNKNOWN_BYTES = 2**31 - 2**16  # From here on, a length in a header stands for one that was not known yet.
LEAST_CUT = 0.03  # Seconds that may be missing at the end of a recording: a frame of MP3.
LOAD_AGAIN = "copy or load it again, or leave it out"
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
    Frames of 2048 samples are 512 apart."""
    import librosa

    trimmed_T: Samples = librosa.effects.trim(wave_T, top_db=top_db)[0]
    return trimmed_T


class Mixing(NamedTuple):
    """The way from the samples of a file to one channel between -1 and 1. `remark` says what is unusual about it."""

    full_scale: float = 1.0
    channel: int | None = None  # The channel that is taken; None for the mean of all.
    remark: str = ""


def read_sound(path: Path, remarks: list[str] | None = None) -> DecodedSound:
    """Returns the mean of the channels of a sound file: wav, flac, ogg, mp3 and other formats that libsndfile decodes.
    One channel is taken where channels cancel each other, and samples above full scale are scaled down; both are added
    to `remarks`, and without them logged.

    Raises UserError, naming the file, if it is missing, damaged or of an unknown kind, empty, of an unknown scale, or
    holds NaN or infinity.
    """
    rate_hz, blocks, mixing = _decoded(path)
    if mixing.remark and remarks is not None:
        remarks.append(mixing.remark)
    elif mixing.remark:
        log.warning("%s: %s", path, mixing.remark)
    return DecodedSound(np.concatenate(list(blocks)), rate_hz)


def read_in_blocks(path: Path, rate_hz: int, known: list[Mixing] | None = None) -> Iterator[Samples]:
    """Yields the samples of `resample(*read_sound(path), rate_hz)` in blocks, so that an hour needs no memory. `known`
    keeps what the first reading of a file finds out, so that later ones need not look for it, nor log it again.

    Raises UserError as `read_sound` does, the errors of later samples when they are reached.
    """
    source_hz, blocks, mixing = _decoded(path, known[0] if known else None)
    if mixing.remark and not known:
        log.warning("%s: %s", path, mixing.remark)
    if known is not None and not known:
        known.append(mixing)
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


def _decoded(path: Path, known: Mixing | None = None) -> tuple[int, Iterator[Samples], Mixing]:
    """Returns the sampling rate of a file, its decoded blocks, at least one, and how their samples are made."""
    if not path.is_file():
        raise UserError(f"{path}: no such file", hint="name a sound file: wav, flac, ogg or mp3")
    if path.suffix.lower() not in FFMPEG_SOUNDS:
        return _blocks_of(path, path, known)
    folder = TemporaryDirectory(prefix="gputrain-")
    converted = Path(folder.name) / "sound.wav"
    _by_ffmpeg(path, converted)
    return _blocks_of(converted, path, known, folder)


def _by_ffmpeg(path: Path, converted: Path) -> None:
    """Writes the first sound track of a file as wav. Raises UserError if ffmpeg is missing or cannot read it."""
    program = shutil.which("ffmpeg")
    if program is None:
        raise UserError(
            f"{path}: cannot be decoded without ffmpeg, which is not installed or not on the PATH",
            hint="install it (apt, brew or winget install ffmpeg), or convert the file to wav or flac",
        )
    # With `file:` no name is read as an option or as an address.
    read = f"file:{path.absolute()}"
    command = [program, "-nostdin", "-v", "error", "-i", read, "-map", "0:a:0", "-c:a", "pcm_f32le"]
    done = subprocess.run([*command, "-rf64", "auto", "-y", f"file:{converted}"], capture_output=True, check=False)
    if done.returncode or not converted.is_file():
        said = done.stderr.decode(errors="replace").strip() or "no reason given"
        no_sound = "matches no streams" in said
        reason = "it has no sound track" if no_sound else said.splitlines()[-1].removeprefix(f"{read}: ")
        raise UserError(f"{path}: cannot be decoded by ffmpeg: {reason}", hint=HOW_TO_CONVERT)
    # Faults after which it goes on; times of packets that do not increase are none.
    for line in done.stderr.decode(errors="replace").splitlines():
        if "monoton" not in line:
            raise UserError(f"{path}: damaged: ffmpeg says: {line.rpartition('] ')[2]}", hint=LOAD_AGAIN)


def _blocks_of(
    path: Path, source: Path, known: Mixing | None, folder: TemporaryDirectory[str] | None = None
) -> tuple[int, Iterator[Samples], Mixing]:
    """Returns the sampling rate and the blocks of a file that libsndfile decodes, and how they are made; `source` is
    named in errors. The file's temporary `folder` is deleted with the last block."""
    with _open(path) as file:
        rate_hz = file.samplerate
        is_plain = file.channels == 1 and file.subtype not in UNSCALED
        mixing = known or (Mixing() if is_plain else _mixing_of(file, source))

    def blocks() -> Iterator[Samples]:
        first = 0
        with folder or nullcontext(), _open(path) as file:
            for block_TC in _read(file, BLOCK):
                wave_T = block_TC.mean(axis=1) if mixing.channel is None else block_TC[:, mixing.channel]
                if not np.isfinite(wave_T).all():
                    seconds = (first + int(np.argmin(np.isfinite(wave_T)))) / file.samplerate
                    raise UserError(
                        f"{source}: a sample is no finite number, the first at {seconds:.3f} seconds",
                        hint="export it again as 16-bit wav or flac",
                    )
                yield wave_T if mixing.full_scale == 1 else wave_T / np.float32(mixing.full_scale)
                first += len(wave_T)
            if first and (fault := _damage_of(file, first) or _damage_in(path, file)):
                raise UserError(f"{source}: damaged: {fault}", hint=LOAD_AGAIN)
        if not first:
            raise UserError(f"{source}: holds no sound", hint="leave it out, or record it again")

    return rate_hz, blocks(), mixing


def _read(file: "soundfile.SoundFile", samples: int) -> Iterator[Samples]:
    """Yields the samples of a file, T x C. soundfile's own `blocks` returns memory of no content where the file ends
    before its promised length."""
    while len(block_TC := file.read(samples, dtype="float32", always_2d=True)):
        yield block_TC


def _damage_of(file: "soundfile.SoundFile", samples: int) -> str:
    """Returns what is missing in a file that has been decoded, to so many samples of a channel; "" if nothing is known
    to be. libsndfile passes over it, but keeps a record."""
    if samples < file.frames - LEAST_CUT * file.samplerate:
        return (
            f"it holds {samples / file.samplerate:.2f} of the {file.frames / file.samplerate:.2f} seconds it promises"
        )
    if DAMAGED_OGG.search(file.extra_info):
        return "parts of it are missing or changed"
    for promised, held in CUT_WAV.findall(file.extra_info):
        if 1.001 * int(held) < int(promised) < UNKNOWN_BYTES:
            return f"it holds {held} of the {promised} bytes of sound that its header promises"
    return ""


def _damage_in(path: Path, file: "soundfile.SoundFile") -> str:
    """Returns what is wrong in the bytes of a file that decodes whole: sectors of zeros within loud sound, or another
    recording after the first; "" if nothing is."""
    if not (file.subtype.startswith("PCM") or file.format in HEADS) or not path.stat().st_size:
        return ""
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if file.format in HEADS and len(re.findall(HEADS[file.format], content)) > 1:
            return "another recording follows in it behind the one that is read"
        hole = hole_of_zeros(content, 0, len(content), 512, 4096) if file.subtype.startswith("PCM") else None
        # Silence begins and ends quietly.
        for at in (hole[0] - 8, hole[1]) if hole else ():
            side = np.frombuffer(content[at : at + 8][: (len(content) - at) // 2 * 2], "<i2")
            if int(np.abs(side.astype(int)).max(initial=JUMP + 1)) <= JUMP:
                return ""
    return f"the bytes {hole[0]} to {hole[1]} of the file are zero" if hole else ""


def _mixing_of(file: "soundfile.SoundFile", source: Path) -> Mixing:
    """Reads a file to find its scale, and whether its channels cancel each other when they are mixed, or two of them
    hold different sound.

    A mix of C uncorrelated channels keeps 1 / C of their power, and of a single one 1 / C^2; it has less than that only
    where channels have opposite phases. Raises UserError if the scale is unknown.
    """
    peak, loudest, cancelled, shared = 0.0, 0.0, 0.0, 0.0
    power_C, alone_C = np.zeros(file.channels), np.zeros(file.channels)
    for block_TC in _read(file, BLOCK // file.channels):
        peak = max(peak, float(block_TC.max()), -float(block_TC.min()))
        for begin in range(0, len(block_TC) if file.channels > 1 else 0, file.samplerate):
            second_TC = block_TC[begin : begin + file.samplerate].astype(np.float64)
            second_TC -= second_TC.mean(axis=0)  # A constant offset is no sound.
            second_C = np.square(second_TC).sum(axis=0)
            power_C, loudest = power_C + second_C, loudest + second_C.max()
            shared += float(second_TC[:, 0] @ second_TC[:, -1])
            alone_C[second_C.argmax()] += second_C.max() * (second_C.max() > ALONE * second_C.min())
            mixed = np.square(second_TC.mean(axis=1)).sum()
            cancelled += second_C.max() * (mixed < CANCELLED * second_C.max() / file.channels**2)
    remarks = []
    if math.isfinite(peak) and peak > LOUDEST:
        raise UserError(
            f"{source}: its samples reach {peak:.3g}, and full scale of floating point is 1",
            hint="divide the samples by their full scale, such as 32768, or export the file again as 16-bit wav",
        )
    if file.subtype == "PCM_32" and LOUDEST < peak * 2.0**31 <= 2.0**23:
        raise UserError(
            f"{source}: the samples of 32 bits reach {peak * 2.0**31:.0f}, which is the scale of fewer bits",
            hint="export it again at full scale, as 16-bit wav or flac",
        )
    # MP3 and others often exceed full scale a little.
    is_decoded = file.subtype not in ("FLOAT", "DOUBLE") or source.suffix.lower() in FFMPEG_SOUNDS
    full_scale = peak if 1 < peak < math.inf else 1.0
    if full_scale > 1 and not (is_decoded and peak <= 2):
        remarks.append(f"its samples reach {peak:.3g} times full scale and are scaled down")
    channel = None
    if cancelled > CANCELLED_SHARE * loudest:
        channel = int(power_C.argmax())
        remarks.append(f"its channels cancel each other when mixed, so that channel {channel + 1} is taken")
    elif file.channels == 2:
        takes_turns = alone_C.min() > ALONE_SHARE * power_C.sum()
        are_unrelated = abs(shared) < UNRELATED * math.sqrt(power_C.prod()) and power_C.min() * ALONE > power_C.max()
        if takes_turns or are_unrelated:
            remarks.append("its channels hold different sound, such as the two speakers of a call, and are mixed")
    return Mixing(full_scale, channel, "; ".join(remarks))


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
