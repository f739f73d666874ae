"""Reads the inputs of a vocoder: mel and pitch, computed from recordings or read from files.

Shape suffixes: M mel bands, F frames, T samples.
"""

import zipfile
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gputrain.audio.config import Mel
from gputrain.audio.f0 import Method, f0
from gputrain.audio.io import read_sound, resample
from gputrain.audio.mel import log_mel
from gputrain.audio.prepare import SILENCE, SUFFIXES
from gputrain.engine.preparation import scan
from gputrain.errors import UserError

ANALYSED_FRAMES = 8192  # Frames whose mel is computed at once, with a margin on either side.
ANALYSED_MARGIN = 128
FEATURES = {".npz", ".npy"}
MEL_SUFFIX, F0_SUFFIX = ".mel.npy", ".f0.npy"

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
        f0_F = f0(whole_T, self.mel.sampling_rate, hop, self.method, floor_hz=self.f0_min, ceiling_hz=self.f0_max)
        mels = [self._mel_of(whole_T, first, frames) for first in range(0, frames, ANALYSED_FRAMES)]
        return VocoderInput(torch.cat(mels, dim=1), torch.from_numpy(f0_F), len(wave_T))

    def _mel_of(self, whole_T: Numbers, first: int, frames: int) -> Tensor:
        """Computes the mel of a part with context around it, so that an hour needs little memory on the device."""
        hop, last = self.mel.hop_size, min(first + ANALYSED_FRAMES, frames)
        low, high = max(0, first - ANALYSED_MARGIN), min(frames, last + ANALYSED_MARGIN)
        wave_1T = torch.from_numpy(whole_T[low * hop : high * hop])[None].to(self.device)
        return log_mel(wave_1T, self.mel)[0, :, first - low : last - low].cpu()

    def _features(self, path: Path) -> VocoderInput:
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
        return VocoderInput(torch.from_numpy(mel_MF), torch.from_numpy(f0_F), frames * self.mel.hop_size)


def _arrays(path: Path) -> tuple[Numbers, Numbers]:
    """Reads a mel and a pitch in their stored shapes, in fp32."""
    f0_path = path.with_name(path.name.removesuffix(MEL_SUFFIX) + F0_SUFFIX)
    try:
        if path.suffix.lower() == ".npz":
            with np.load(path, allow_pickle=False) as file:
                mel, f0_F = file["mel"], file["f0"]
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
        found = [root / path for path in scan(root, SUFFIXES | FEATURES).paths]
        is_pitch = [path.suffix.lower() == ".npy" and not path.name.endswith(MEL_SUFFIX) for path in found]
        sources = [path for path, skip in zip(found, is_pitch, strict=True) if path.is_file() and not skip]
    if not sources:
        raise UserError(
            f"{input}: no recording and no mel in it", hint=f"looked for {', '.join(sorted(SUFFIXES))}, .npz, .mel.npy"
        )
    plain = {}
    for source in sources:
        stem = source.name.removesuffix(MEL_SUFFIX) if source.name.endswith(MEL_SUFFIX) else source.stem
        plain[source] = output_dir / source.relative_to(root).with_name(f"{stem}.wav")
    times = Counter(plain.values())
    targets = {
        source: target if times[target] == 1 else target.with_name(f"{source.name}.wav")
        for source, target in plain.items()
    }
    for source in {source.resolve() for source in sources} & {target.resolve() for target in targets.values()}:
        raise UserError(f"{source} would be overwritten", hint="name another --output-dir")
    return targets
