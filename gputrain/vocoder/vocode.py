"""Sound from a trained vocoder, of any length: recordings taken apart and sung again, or files of mel and pitch.

Shape suffixes: M mel bands, F frames, T samples, B items (one), C channels, H harmonics.
"""

import logging
import math
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gputrain.audio import HOW_TO_CONVERT, log_mel, read_sound, resample, write_wav
from gputrain.data import writing
from gputrain.errors import UserError
from gputrain.hw.plan import Hardware, decide
from gputrain.hw.probe import probe
from gputrain.hw.runtime import apply
from gputrain.vocoder.architecture import Architecture, Mel
from gputrain.vocoder.config import F0Method
from gputrain.vocoder.f0 import CEILING_HZ, FLOOR_HZ, Method, default_method, f0
from gputrain.vocoder.generator import Generator, Noise, draw_noise, weights_made_once
from gputrain.vocoder.load import load
from gputrain.vocoder.prepare import SILENCE, SUFFIXES, silent
from gputrain.vocoder.pretrained import shortened

log = logging.getLogger(__name__)

CHUNK_SECONDS = 20.0
NOISE_FRAMES = 256  # drawn at once, from a seed of their own
ANALYSED_FRAMES = 8192  # of a recording at once, and what is heard on either side of them
ANALYSED_MARGIN = 128
FEATURES = {".npz", ".npy"}
MEL_SUFFIX, F0_SUFFIX = ".mel.npy", ".f0.npy"

Numbers = npt.NDArray[Any]


@dataclass(frozen=True)
class Refusal:
    """A file that gave no sound, and why; `path` as it was found."""

    path: Path
    detail: str


@dataclass(frozen=True)
class Vocoded:
    written: list[Path]
    refused: list[Refusal]


def vocode(
    generator: Generator, mel_MF: Tensor, f0_F: Tensor, *, seed: int = 0, chunk_seconds: float = CHUNK_SECONDS
) -> Tensor:
    """The wave (T,) of a log-mel spectrogram and a pitch in Hz, 0 where unvoiced: T = F * hop_size, fp32, on the CPU.

    It is made in chunks on the device of the generator, and is the same for any length of them: they see as far as the
    convolutions do, continue the phase of the whole, and draw noise that depends on the seed and the moment.
    """
    mel = generator.architecture.mel
    frames = max(1, round(chunk_seconds * mel.sampling_rate / mel.hop_size))
    return torch.cat(list(chunks(generator, mel_MF, f0_F, seed=seed, frames=frames)))


@torch.no_grad()
def chunks(generator: Generator, mel_MF: Tensor, f0_F: Tensor, *, seed: int, frames: int) -> Iterator[Tensor]:
    """The same wave piece by piece, each of `frames` but the last."""
    architecture, device = generator.architecture, next(generator.parameters()).device
    margin, hop, count = reach_frames(architecture), architecture.mel.hop_size, len(f0_F)
    start_F = generator.frame_starts(f0_F[None].float())[0]
    noise = FrameNoise(architecture, seed, device)
    for first in range(0, count, frames):
        last = min(first + frames, count)
        low, high = max(0, first - margin), min(count, last + margin)
        seen = [part[..., low:high].to(device, torch.float32)[None] for part in (mel_MF, f0_F, start_F)]
        with weights_made_once(generator):
            wave_T = generator(seen[0], seen[1], noise.between(low, high), seen[2])[0, 0]
        yield wave_T[(first - low) * hop : (last - low) * hop].cpu()


def reach_frames(architecture: Architecture) -> int:
    """How many frames on either side of a moment its sample depends on."""
    per_frame, reach = 1, 3.0  # of conv_pre
    blocks = max(
        sum((kernel - 1) // 2 * (dilation + 1) for dilation in dilations)
        for kernel, dilations in zip(
            architecture.resblock_kernel_sizes, architecture.resblock_dilation_sizes, strict=True
        )
    )
    for rate, kernel in zip(architecture.upsample_rates, architecture.upsample_kernel_sizes, strict=True):
        reach += kernel / rate / per_frame  # the source, seen through twice a stride, reaches no further
        per_frame *= rate
        reach += blocks / per_frame
    return math.ceil(reach + 3 / per_frame) + 1  # conv_post; mini-NSF's pitch glides to that of the next frame


@dataclass(frozen=True)
class FrameNoise:
    """Noise as a function of the seed and the frame, so that an hour of it need not be kept."""

    architecture: Architecture
    seed: int
    device: torch.device

    def between(self, low: int, high: int) -> Noise:
        """For the frames low .. high - 1."""
        hop = self.architecture.mel.hop_size
        numbers = range(low // NOISE_FRAMES, -(-high // NOISE_FRAMES))
        blocks = [self._drawn(NOISE_FRAMES, self.seed, number) for number in numbers]
        begin, end = (frame - numbers.start * NOISE_FRAMES for frame in (low, high))
        return Noise(
            self._drawn(0, self.seed).phase_BH,
            torch.cat([block.source_BTH for block in blocks], dim=1)[:, begin * hop : end * hop],
            torch.cat([block.features_BCF for block in blocks], dim=2)[..., begin:end],
        )

    def _drawn(self, frames: int, *words: int) -> Noise:
        (seed,) = np.random.SeedSequence(words).generate_state(1, np.uint64)
        random = torch.Generator(self.device).manual_seed(int(seed) >> 1)
        return draw_noise(self.architecture, 1, frames, random)


def vocode_files(
    model: Path,
    input: Path,
    output_dir: Path,
    *,
    shift_semitones: float = 0.0,
    f0_method: F0Method = "auto",
    f0_min: float = FLOOR_HZ,
    f0_max: float = CEILING_HZ,
    chunk_seconds: float = CHUNK_SECONDS,
    seed: int = 0,
    device: Literal["auto", "cuda", "cpu"] = "auto",
    progress: Callable[[int, int], None] = silent,
) -> Vocoded:
    """Sing every recording, and every mel with its pitch, of a file or a folder tree: 16-bit wav in `output_dir`.

    A recording is taken apart at the model's rate and sung again, as long as it was. A mel (its natural logarithm,
    frames and bands in any order) and its pitch in Hz are `mel` and `f0` in NAME.npz, or NAME.mel.npy and NAME.f0.npy.
    Pitches are shifted by `shift_semitones`, and clipped where they are above what the model's source can be. Raises
    UserError if there is no such model or nothing to sing, if a source would be overwritten, or if no file gives sound.
    """
    targets = _targets(input, output_dir)
    runtime = apply(decide(probe(), Hardware(device=device)))
    generator = load(model, runtime.device).generator
    mel = generator.architecture.mel
    method = default_method() if f0_method == "auto" else f0_method
    read = Reader(mel, method, f0_min, f0_max, runtime.device)
    done = Vocoded([], [])
    for count, (source, target) in enumerate(targets.items(), start=1):
        try:
            song = read(source)
        except UserError as error:
            log.warning("%s; left out", error.message)
            done.refused.append(Refusal(source, error.message.removeprefix(f"{source}: ")))
        else:
            f0_F = _reachable(generator, song.f0_F * 2 ** (shift_semitones / 12), source)
            wave_T = vocode(generator, song.mel_MF, f0_F, seed=seed, chunk_seconds=chunk_seconds)
            with writing(target):
                target.parent.mkdir(parents=True, exist_ok=True)
            write_wav(target, wave_T[: song.samples].numpy(), mel.sampling_rate)
            done.written.append(target)
        progress(count, len(targets))
    if not done.written:
        told = shortened([f"{refusal.path}: {refusal.detail}" for refusal in done.refused])
        raise UserError(f"{input}: nothing that can be sung: {told}", hint=HOW_TO_CONVERT)
    return done


class Song(NamedTuple):
    """What a model sings from: a log-mel, a pitch in Hz, and how many samples of the wave are wanted."""

    mel_MF: Tensor
    f0_F: Tensor
    samples: int


@dataclass(frozen=True)
class Reader:
    """Files to what a model of this mel sings from."""

    mel: Mel
    method: Method
    f0_min: float  # Hz
    f0_max: float
    device: torch.device

    def __call__(self, path: Path) -> Song:
        """Raises UserError, naming the file and its fault."""
        return self._features(path) if path.suffix.lower() in FEATURES else self._recording(path)

    def _recording(self, path: Path) -> Song:
        sound = read_sound(path)
        wave_T = resample(sound.wave_T, sound.rate_hz, self.mel.sampling_rate)
        peak = float(np.abs(wave_T).max(initial=0.0))
        if peak < SILENCE:
            raise UserError(f"{path}: silent; its peak is {peak:.2g} of full scale")
        hop, frames = self.mel.hop_size, -(-len(wave_T) // self.mel.hop_size)
        whole_T = np.pad(wave_T, (0, frames * hop - len(wave_T)))
        pieces = [self._analysed(whole_T, first, frames) for first in range(0, frames, ANALYSED_FRAMES)]
        mels, pitches = zip(*pieces, strict=True)
        return Song(torch.cat(mels, dim=1), torch.cat(pitches), len(wave_T))

    def _analysed(self, whole_T: Numbers, first: int, frames: int) -> tuple[Tensor, Tensor]:
        """Mel and pitch of a stretch, so that an hour needs little memory; what is around it is heard too."""
        hop, last = self.mel.hop_size, min(first + ANALYSED_FRAMES, frames)
        low, high = max(0, first - ANALYSED_MARGIN), min(frames, last + ANALYSED_MARGIN)
        wave_T = whole_T[low * hop : high * hop]
        mel_1MF = log_mel(torch.from_numpy(wave_T)[None].to(self.device), self.mel)
        f0_F = f0(wave_T, self.mel.sampling_rate, hop, self.method, floor_hz=self.f0_min, ceiling_hz=self.f0_max)
        kept = slice(first - low, last - low)
        return mel_1MF[0, :, kept].cpu(), torch.from_numpy(f0_F[kept])

    def _features(self, path: Path) -> Song:
        mel, f0_F = _arrays(path)
        if mel.ndim == 3 and len(mel) == 1:
            mel = mel[0]
        if mel.ndim != 2 or self.mel.num_mels not in mel.shape:
            raise UserError(f"{path}: a mel of shape {mel.shape}, expected (frames, {self.mel.num_mels})")
        mel_MF = mel.T if mel.shape[1] == self.mel.num_mels else mel
        if f0_F.size != max(f0_F.shape, default=0):
            raise UserError(f"{path}: f0 of shape {f0_F.shape}, expected (frames,)")
        f0_F = f0_F.reshape(-1)
        frames = min(mel_MF.shape[1], len(f0_F))
        if abs(mel_MF.shape[1] - len(f0_F)) > 1 or not frames:
            raise UserError(
                f"{path}: a mel of {mel_MF.shape[1]} frames and an f0 of {len(f0_F)}",
                hint=f"both have a frame for every {self.mel.hop_size} samples",
            )
        for name, values, least, kinds in (
            ("mel", mel_MF, -np.inf, "NaN or infinite"),
            ("f0", f0_F[None], 0, "NaN, infinite or negative"),
        ):
            bad_F = ~(np.isfinite(values) & (values >= least)).all(axis=0)
            if bad_F.any():
                raise UserError(f"{path}: {name} is {kinds} in frame {int(bad_F.argmax())}")
        mel_MF, f0_F = np.ascontiguousarray(mel_MF[:, :frames]), f0_F[:frames]
        return Song(torch.from_numpy(mel_MF), torch.from_numpy(f0_F), frames * self.mel.hop_size)


def _arrays(path: Path) -> tuple[Numbers, Numbers]:
    """A mel and a pitch in the shapes in which they are stored, in fp32."""
    beside = path.with_name(path.name.removesuffix(MEL_SUFFIX) + F0_SUFFIX)
    try:
        if path.suffix.lower() == ".npz":
            with np.load(path, allow_pickle=False) as file:
                mel, f0_F = file["mel"], file["f0"]
        elif not path.name.endswith(MEL_SUFFIX):
            raise UserError(f"{path}: mel or pitch?", hint="name them NAME.mel.npy and NAME.f0.npy, or use a .npz")
        else:
            mel, f0_F = (np.load(file, allow_pickle=False) for file in (path, beside))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no {Path(str(error.filename)).name} beside it") from None
    except KeyError:
        raise UserError(f"{path}: does not hold both mel and f0") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path}: damaged, or no arrays of numbers: {error}") from None
    for array in (mel, f0_F):
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
            raise UserError(f"{path}: holds something else than numbers")
    with np.errstate(over="ignore"):  # what becomes infinite is told of
        return mel.astype(np.float32), f0_F.astype(np.float32)


def _reachable(generator: Generator, f0_F: Tensor, source: Path) -> Tensor:
    """Clipped to half the rate of the model's sine: above it, another pitch would be heard."""
    ceiling_hz = generator.m_source.rate_hz / 2
    above = int((f0_F > ceiling_hz).sum())
    if above:
        log.warning(
            "%s: %d frames are above %.0f Hz, the highest pitch of this model: clipped", source, above, ceiling_hz
        )
    return f0_F.clamp(max=ceiling_hz)


def _targets(input: Path, output_dir: Path) -> dict[Path, Path]:
    """Where the sound of each file goes. Two files of a name keep their suffixes."""
    if not input.exists():
        raise UserError(f"{input}: no such file or folder", hint="name a recording, a .npz of mel and f0, or a folder")
    root = input if input.is_dir() else input.parent
    sources = sorted(_found(root)) if input.is_dir() else [input]
    if not sources:
        raise UserError(
            f"{input}: nothing to sing in it", hint=f"looked for {', '.join(sorted(SUFFIXES))}, .npz, .mel.npy"
        )
    plain = {source: output_dir / source.relative_to(root).with_name(_stem(source) + ".wav") for source in sources}
    times = Counter(plain.values())
    targets = {
        source: target if times[target] == 1 else target.with_name(f"{source.name}.wav")
        for source, target in plain.items()
    }
    for source in {source.resolve() for source in sources} & {target.resolve() for target in targets.values()}:
        raise UserError(f"{source} would be overwritten", hint="name another --output-dir")
    return targets


def _found(root: Path) -> Iterator[Path]:
    """Files of a tree that can be sung, by their names; hidden ones are passed over."""
    for path in root.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
        known = path.suffix.lower() in SUFFIXES | {".npz"} or path.name.endswith(MEL_SUFFIX)
        if known and not hidden and path.is_file():
            yield path


def _stem(path: Path) -> str:
    return path.name.removesuffix(MEL_SUFFIX) if path.name.endswith(MEL_SUFFIX) else path.stem
