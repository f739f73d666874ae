"""Augments clips as they are read: other speeds (Ko et al. 2015, Audio Augmentation for Speech Recognition), and noise
or music from a folder.

What is drawn is a function of the seed, the epoch and the clip's place among those of the epoch, so that a resumed run
and any number of workers and ranks read the same sound.

Shapes: T samples, M clips of an epoch.
"""

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gputrain.audio.io import Samples, from_int16, read_part, resample
from gputrain.audio.prepare import rms, scan_recordings
from gputrain.engine.data import DataWarning
from gputrain.errors import UserError
from gputrain.files import to_int16
from gputrain.formatting import counted

log = logging.getLogger(__name__)

PROBED_SECONDS = 0.1  # So much of each recording is read before the training.
NAMED = 3  # Unreadable recordings that a warning names.
Uniform = npt.NDArray[np.float64]


@dataclass(frozen=True)
class NoiseFolder:
    """The recordings of a folder tree that can be read."""

    folder: Path
    paths: tuple[str, ...]  # Relative to the folder, in their order.

    @classmethod
    def open(cls, folder: Path, data_folders: Sequence[Path]) -> "NoiseFolder":
        """Opens a folder. Logs how many recordings cannot be read, and leaves them out. Raises UserError if the folder
        is missing, holds no recording that can be read, or contains the data or is a part of them."""
        if not folder.is_dir():
            raise UserError(
                f"noise_dir {folder}: {'is a file, expected a folder' if folder.exists() else 'no such folder'}",
                hint="--noise-dir names a folder of recordings, which a resumed run reads again; without it, clips "
                "stay as they are",
            )
        own = folder.resolve()
        for data in map(Path.resolve, data_folders):
            if own == data or own in data.parents or data in own.parents:
                raise UserError(
                    f"noise_dir {folder} and the data {data}: one contains the other",
                    hint="put recordings of noise into a folder of their own, so that no speech is added as noise",
                )
        tree = scan_recordings(folder)
        faults = [f"{one.path}: {one.detail}" for one in tree.refused]
        readable: list[str] = []
        for path in tree.paths:
            try:
                read_part(folder / path, 0.0, PROBED_SECONDS, 16000)
                readable.append(path)
            except UserError as error:
                faults.append(error.message.replace(f"{folder / path}", path))
        if not readable:
            raise UserError(
                f"noise_dir {folder}: none of {counted(len(tree.paths), 'recording')} can be read ({faults[0]})",
                hint="gputrain validate --input-dir shows what is wrong with each; or leave --noise-dir out",
            )
        if faults:
            more = f"; and {len(faults) - NAMED} more" if len(faults) > NAMED else ""
            log.warning(
                "noise_dir %s: %d of %d recordings cannot be read and are left out: %s%s",
                folder, len(faults), len(readable) + len(faults), "; ".join(faults[:NAMED]), more,
            )  # fmt: skip
        return cls(folder, tuple(readable))

    def read(self, which: float, where: float, samples: int, rate_hz: int) -> Samples:
        """Returns so many samples of one of the recordings, from a place in it, both drawn from [0, 1). A shorter one
        is repeated."""
        path = self.folder / self.paths[int(which * len(self.paths))]
        wave_T = read_part(path, where, samples / rate_hz, rate_hz)
        if len(wave_T) < samples:
            wave_T = np.resize(np.roll(wave_T, -int(where * len(wave_T))), samples)
        return wave_T[:samples]


@dataclass(frozen=True)
class ClipChange:
    """The speed of one clip of an epoch, and what else is drawn for it."""

    speed: float
    epoch: int
    place: int  # Among the clips of the epoch.


@dataclass(frozen=True)
class ClipAugment:
    """Changes of the clips of a training."""

    seed: int
    rate_hz: int
    speed_change: float = 0.0  # A clip is played at 1 - this, 1 or 1 + this times its speed.
    noise: NoiseFolder | None = None
    noise_probability: float = 0.0
    snr_db: tuple[float, float] = (0.0, 0.0)  # Lowest and highest ratio of the powers of speech and noise.

    @property
    def slowest(self) -> float:
        return 1 - self.speed_change

    @property
    def fastest(self) -> float:
        return 1 + self.speed_change

    def __str__(self) -> str:
        """The changes in a few words, for the log."""
        parts = [f"speeds {self.slowest:g}, 1 and {self.fastest:g}"] * bool(self.speed_change)
        if self.noise:
            low, high = self.snr_db
            kinds = counted(len(self.noise.paths), "recording")
            parts.append(
                f"noise of {kinds} {low:g} to {high:g} dB below {100 * self.noise_probability:g} % of the clips"
            )
        return ", ".join(parts)

    def speeds(self, epoch: int, count: int) -> Uniform:
        """Returns the speeds of the clips of an epoch, (M,)."""
        if not self.speed_change:
            return np.ones(count)
        choices = np.array([self.slowest, 1.0, self.fastest])
        return choices[(_uniform(self.seed, (4, epoch), count) * len(choices)).astype(np.int64)]

    def changed(self, wave_T: npt.NDArray[np.int16], change: ClipChange) -> npt.NDArray[np.int16]:
        """Returns a clip at another speed and with noise: 16 bits, as long as `samples_at` says."""
        at_speed_T = from_int16(wave_T)
        if change.speed != 1:  # The pitch and the tempo change, as on a tape.
            at_speed_T = resample(at_speed_T, change.speed, 1.0)
        mixed_T = self._with_noise(at_speed_T, change)
        return wave_T if change.speed == 1 and mixed_T is at_speed_T else to_int16(mixed_T)

    def _with_noise(self, wave_T: Samples, change: ClipChange) -> Samples:
        """Returns a wave with noise, scaled down if the sum exceeds full scale, or the wave itself."""
        if self.noise is None:
            return wave_T
        chosen, which, where, ratio = _uniform(self.seed, (5, change.epoch, change.place), 4).tolist()
        if chosen >= self.noise_probability:
            return wave_T
        try:
            noise_T = self.noise.read(which, where, len(wave_T), self.rate_hz)
        except UserError as error:
            # Only the beginning of each recording was read before the training, which damage further on must not end.
            if not self.noise.folder.is_dir():
                raise
            warnings.warn(f"noise is left out where it cannot be read: {error.message}", DataWarning, stacklevel=2)
            return wave_T
        speech, noise = rms(wave_T), rms(noise_T)
        if not speech or not noise:  # Silence has no ratio to anything.
            return wave_T
        low, high = self.snr_db
        mixed_T = wave_T + noise_T * np.float32(speech / noise * 10 ** (-(low + (high - low) * ratio) / 20))
        return np.asarray(mixed_T / np.float32(max(1.0, float(np.abs(mixed_T).max()))))


def samples_at(samples: npt.NDArray[np.int64], speeds: Uniform | float) -> npt.NDArray[np.int64]:
    """Returns the numbers of samples of clips at other speeds."""
    return np.ceil(samples * (1.0 / np.asarray(speeds))).astype(np.int64)


def _uniform(seed: int, key: tuple[int, ...], count: int) -> Uniform:
    """Returns numbers in [0, 1)."""
    # numpy guarantees that raw words do not change between versions (NEP 19).
    words = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)).random_raw(count)
    return np.asarray((words >> np.uint64(11)) * 2.0**-53)
