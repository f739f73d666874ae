"""Synthesises sound of any length with a trained vocoder, from recordings or from files of mel and pitch.

Shape suffixes: M mel bands, F frames, T samples, B items (one), C channels, H harmonics.
"""

import logging
import math
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gputrain.audio.config import Mel
from gputrain.audio.f0 import Method, default_method, f0, interpolated, pitch_beyond, require_tracker
from gputrain.audio.io import HOW_TO_CONVERT, read_sound, resample
from gputrain.audio.mel import log_mel
from gputrain.audio.prepare import SILENCE
from gputrain.audio.weight_norm import cached_weights
from gputrain.data_in.containers import SOUNDS
from gputrain.data_in.preparation import RefusedItem, scan
from gputrain.engine.checkpoint import format_list
from gputrain.errors import UserError
from gputrain.files import Progress, no_progress, output_names, write_wav, writing
from gputrain.hw.runtime import runtime_on
from gputrain.vocoder.config import NsfHifiganArchitecture, Vocode
from gputrain.vocoder.generator import Generator, Noise, draw_noise
from gputrain.vocoder.load import load_vocoder

log = logging.getLogger(__name__)

CHUNK_SECONDS = 20.0
NOISE_FRAMES = 256  # Frames whose noise is drawn at once, from a seed of their own.


@dataclass(frozen=True)
class Vocoded:
    written: list[Path]
    refused: list[RefusedItem]


def vocode(
    generator: Generator, mel_MF: Tensor, f0_F: Tensor, *, seed: int = 0, chunk_seconds: float = CHUNK_SECONDS
) -> Tensor:
    """Returns the wave (T,) of a log-mel spectrogram and a pitch in Hz, 0 where unvoiced: T = F * hop_size, fp32, CPU.

    Where the pitch is 0, it is interpolated, as in training. The wave is computed in chunks on the device of the
    generator and does not depend on their length: chunks have the context of the receptive field, continue the phase of
    the whole, and draw noise as a function of seed and frame.
    """
    mel = generator.architecture.mel
    frames = max(1, round(chunk_seconds * mel.sampling_rate / mel.hop_size))
    return torch.cat(list(wave_chunks(generator, mel_MF, f0_F, seed=seed, frames=frames)))


@torch.no_grad()
def wave_chunks(generator: Generator, mel_MF: Tensor, f0_F: Tensor, *, seed: int, frames: int) -> Iterator[Tensor]:
    """Yields the same wave in pieces of `frames`; the last may be shorter."""
    f0_F = torch.from_numpy(interpolated(f0_F.cpu().numpy()))
    architecture, device = generator.architecture, next(generator.parameters()).device
    margin, hop, count = receptive_field_frames(architecture), architecture.mel.hop_size, len(f0_F)
    start_F = generator.frame_starts(f0_F[None].float())[0]
    noise = FrameNoise(architecture, seed, device)
    for first in range(0, count, frames):
        last = min(first + frames, count)
        low, high = max(0, first - margin), min(count, last + margin)
        seen = [part[..., low:high].to(device, torch.float32)[None] for part in (mel_MF, f0_F, start_F)]
        with cached_weights(generator):
            wave_T = generator(seen[0], seen[1], noise.between(low, high), seen[2])[0, 0]
        yield wave_T[(first - low) * hop : (last - low) * hop].cpu()


def receptive_field_frames(architecture: NsfHifiganArchitecture) -> int:
    """Returns the receptive field of a sample in frames to either side."""
    per_frame, reach = 1, 3.0  # The reach of conv_pre is 3 frames.
    blocks = max(
        sum((kernel - 1) // 2 * (dilation + 1) for dilation in dilations)
        for kernel, dilations in zip(
            architecture.resblock_kernel_sizes, architecture.resblock_dilation_sizes, strict=True
        )
    )
    for rate, kernel in zip(architecture.upsample_rates, architecture.upsample_kernel_sizes, strict=True):
        reach += kernel / rate / per_frame  # The kernels of the source, two strides long, reach no further.
        per_frame *= rate
        reach += blocks / per_frame
    return math.ceil(reach + 3 / per_frame) + 1  # For conv_post and the glide of mini-NSF.


@dataclass(frozen=True)
class FrameNoise:
    """Noise as a function of the seed and the frame, so that the noise of an hour need not be kept."""

    architecture: NsfHifiganArchitecture
    seed: int
    device: torch.device

    def between(self, low: int, high: int) -> Noise:
        """Returns the noise of the frames low .. high - 1."""
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


def vocode_files(settings: Vocode, *, progress: Progress = no_progress) -> Vocoded:
    """Synthesises every recording, and every mel with its pitch, of a file or a folder tree: 16-bit wav in
    `output_dir`.

    A recording is resampled to the model's rate, analysed and resynthesised at its length. A mel (natural logarithm,
    frames and bands in any order) and its pitch in Hz are `mel` and `f0` in NAME.npz, or NAME.mel.npy and NAME.f0.npy.
    Pitches are shifted by `shift_semitones`, and clipped at the highest pitch of the model's source. Raises UserError
    if there is no such model or no input, if a source would be overwritten, or if no input could be synthesised.
    """
    wanted = targets(settings.input, settings.output_dir)
    runtime = runtime_on(settings.device)
    generator = load_vocoder(settings.weights, runtime.device).generator
    mel = generator.architecture.mel
    method = default_method() if settings.f0_method == "auto" else settings.f0_method
    require_tracker(method)
    read = VocoderInputReader(mel, method, settings.f0_min, settings.f0_max, runtime.device)
    ceiling_hz = generator.m_source.rate_hz / 2  # Above half of its rate, the model's sine would alias.
    done = Vocoded([], [])
    for count, (source, target) in enumerate(wanted.items(), start=1):
        try:
            song = read(source)
        except UserError as error:
            if not settings.input.is_dir():
                raise
            log.warning("%s; left out", error.message)
            done.refused.append(RefusedItem(str(source), "unreadable", error.message.removeprefix(f"{source}: ")))
        else:
            f0_F = song.f0_F * 2 ** (settings.shift_semitones / 12)
            if above := int((f0_F > ceiling_hz).sum()):
                log.warning(
                    "%s: %d frames are above %.0f Hz, the highest pitch of this model: clipped",
                    source,
                    above,
                    ceiling_hz,
                )
            f0_F = f0_F.clamp(max=ceiling_hz)
            wave_T = vocode(generator, song.mel_MF, f0_F, seed=settings.seed, chunk_seconds=settings.chunk_seconds)
            with writing(target):
                target.parent.mkdir(parents=True, exist_ok=True)
            write_wav(target, wave_T[: song.samples].numpy(), mel.sampling_rate)
            done.written.append(target)
        progress(count, len(wanted))
    if not done.written:
        causes = format_list([f"{refusal.path}: {refusal.detail}" for refusal in done.refused])
        raise UserError(f"{settings.input}: no usable input: {causes}", hint=HOW_TO_CONVERT)
    return done


# --------------------------------------------------------------------------------------------------------------- inputs


ANALYSED_FRAMES = 8192  # Frames whose mel is computed at once, with a margin on either side.
ANALYSED_MARGIN = 128
FEATURES = {".npz", ".npy"}
MEL_SUFFIX, F0_SUFFIX = ".mel.npy", ".f0.npy"
# Names of numbers beside a mel that say how it was made, and the settings that they mean.
DECLARED = {
    "sampling_rate": "sampling_rate", "sample_rate": "sampling_rate", "sr": "sampling_rate",
    "hop_size": "hop_size", "hop_length": "hop_size",
}  # fmt: skip

LOWEST_MEL, QUIET_MEL = -13.0, -3.0  # The lowest value lies between them; acoustic models go a little below ln(1e-5).
LOUDEST_MEL = 3.5  # A square wave at full scale has 3.2, in a window of the usual size.
HIGHEST_MIDI = 96.0  # No note of a voice is above it.
LOWEST_HZ, HIGHEST_HZ = 40.0, 3000.0  # The median pitch of no voice is outside of it.

Numbers = npt.NDArray[Any]


class VocoderInput(NamedTuple):
    """Input of a vocoder: a log-mel, a pitch in Hz, and the number of samples of the wave to keep."""

    mel_MF: Tensor
    f0_F: Tensor
    samples: int


@dataclass(frozen=True)
class VocoderInputReader:
    mel: Mel
    method: Method
    f0_min: float  # Hz
    f0_max: float
    device: torch.device

    def __call__(self, path: Path) -> VocoderInput:
        """Reads a recording, or a file of mel and pitch. Raises UserError that names the file and its fault."""
        return self._features(path) if path.suffix.lower() in FEATURES else self._recording(path)

    def _recording(self, path: Path) -> VocoderInput:
        sound = read_sound(path)
        wave_T = resample(sound.wave_T, sound.rate_hz, self.mel.sampling_rate)
        peak = float(np.abs(wave_T).max(initial=0.0))
        if peak < SILENCE:
            raise UserError(f"{path}: silent; its peak is {peak:.2g} of full scale")
        hop, frames = self.mel.hop_size, -(-len(wave_T) // self.mel.hop_size)
        whole_T = np.pad(wave_T, (0, frames * hop - len(wave_T)))
        rate_hz = self.mel.sampling_rate
        f0_F = f0(whole_T, rate_hz, hop, self.method, floor_hz=self.f0_min, ceiling_hz=self.f0_max)
        if beyond := pitch_beyond(whole_T, rate_hz, hop, f0_F, self.f0_min, self.f0_max):
            log.warning("%s: its pitch of %.0f to %.0f Hz needs a lower --f0-min or higher --f0-max", path, *beyond)
        mels = [self._mel_of(whole_T, first, frames) for first in range(0, frames, ANALYSED_FRAMES)]
        return VocoderInput(torch.cat(mels, dim=1), torch.from_numpy(f0_F), len(wave_T))

    def _mel_of(self, whole_T: Numbers, first: int, frames: int) -> Tensor:
        """Computes the mel of a part with context around it, so that an hour needs little memory on the device."""
        hop, last = self.mel.hop_size, min(first + ANALYSED_FRAMES, frames)
        low, high = max(0, first - ANALYSED_MARGIN), min(frames, last + ANALYSED_MARGIN)
        wave_1T = torch.from_numpy(whole_T[low * hop : high * hop])[None].to(self.device)
        return log_mel(wave_1T, self.mel)[0, :, first - low : last - low].cpu()

    def _features(self, path: Path) -> VocoderInput:
        mel, f0_F = _arrays(path, self.mel)
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
        check_units(path, mel_MF, f0_F, self.mel)
        return VocoderInput(torch.from_numpy(mel_MF), torch.from_numpy(f0_F), frames * self.mel.hop_size)


def check_units(path: Path, mel_MF: Numbers, f0_F: Numbers, mel: Mel) -> None:
    """Raises UserError if a mel cannot be the natural logarithm of amplitudes, or a pitch cannot be in Hz.

    That logarithm is at least ln(1e-5), quiet somewhere, and at most that of a square wave. Where it is neither quiet
    nor loud, it would be of steady noise, and is rather a decimal logarithm.
    """
    low, high = float(mel_MF.min()), float(mel_MF.max())
    highest = LOUDEST_MEL + math.log(mel.win_size / Mel.win_size)
    is_decimal = low > -5.05 and math.log(10) * high <= highest
    if is_decimal or not LOWEST_MEL <= low <= QUIET_MEL or high > highest:
        raise UserError(
            f"{path}: the mel, from {low:.3g} to {high:.3g}, is likely no natural logarithm of amplitudes",
            hint="store ln(max(amplitude, 1e-5)) of its bands; a decimal logarithm times 2.3026 is one",
        )
    voiced_V = f0_F[f0_F > 0]
    middle_hz = float(np.median(voiced_V)) if len(voiced_V) else LOWEST_HZ
    # Bins of a coarse pitch have 1 where a frame is unvoiced.
    if not LOWEST_HZ <= middle_hz <= HIGHEST_HZ or voiced_V.min(initial=LOWEST_HZ) <= 1:
        raise UserError(
            f"{path}: f0, with a median of {middle_hz:.3g}, is likely not in Hz",
            hint="store it in Hz, and 0 where a frame is unvoiced",
        )
    if len(voiced_V) and np.percentile(voiced_V, 95) <= HIGHEST_MIDI:
        log.warning(
            "%s: its f0, about %.0f, is read as Hz, a deep bass: convert it if it is in notes of MIDI", path, middle_hz
        )


def _arrays(path: Path, expected: Mel) -> tuple[Numbers, Numbers]:
    """Reads a mel and a pitch in their stored shapes, in fp32. Raises UserError if the file declares another mel."""
    f0_path = path.with_name(path.name.removesuffix(MEL_SUFFIX) + F0_SUFFIX)
    try:
        if path.suffix.lower() == ".npz":
            with np.load(path, allow_pickle=False) as file:
                mel, f0_F = file["mel"], file["f0"]
                for name in sorted(DECLARED.keys() & set(file.files)):
                    if file[name].size == 1 and file[name].item() != (own := getattr(expected, DECLARED[name])):
                        raise UserError(f"{path}: its {name} is {file[name].item()}, that of the model {own}")
        elif not path.name.endswith(MEL_SUFFIX):
            raise UserError(f"{path}: mel or pitch?", hint="name them NAME.mel.npy and NAME.f0.npy, or use a .npz")
        else:
            mel, f0_F = (np.load(file, allow_pickle=False) for file in (path, f0_path))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no {Path(str(error.filename)).name} next to it") from None
    except KeyError:
        raise UserError(f"{path}: does not hold both mel and f0") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path}: damaged, or no arrays of numbers: {error}") from None
    for array in (mel, f0_F):
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
            raise UserError(f"{path}: holds values that are not numbers")
    with np.errstate(over="ignore"):  # Infinite values are refused later.
        return mel.astype(np.float32), f0_F.astype(np.float32)


def targets(input: Path, output_dir: Path) -> dict[Path, Path]:
    """Returns the path of the wave of each input. Files with the same stem keep their suffixes."""
    if not input.exists():
        raise UserError(f"{input}: no such file or folder", hint="name a recording, a .npz of mel and f0, or a folder")
    root = input if input.is_dir() else input.parent
    sources = [input]
    if input.is_dir():
        found = [root / path for path in scan(root, SOUNDS | FEATURES).paths]
        mels = [path for path in found if path.suffix.lower() != ".npy" or path.name.endswith(MEL_SUFFIX)]
        sources = [path for path in mels if path.is_file()]
    if not sources:
        raise UserError(
            f"{input}: no recording and no mel in it", hint=f"looked for {', '.join(sorted(SOUNDS))}, .npz, .mel.npy"
        )
    names = output_names(
        [source.relative_to(root) for source in sources],
        lambda name: name.with_name(
            name.name.removesuffix(MEL_SUFFIX if name.name.endswith(MEL_SUFFIX) else name.suffix)
        ),
    )
    targets = {source: output_dir / f"{name}.wav" for source, name in zip(sources, names, strict=True)}
    for source in {source.resolve() for source in sources} & {target.resolve() for target in targets.values()}:
        raise UserError(f"{source} would be overwritten", hint="name another --output-dir")
    return targets
