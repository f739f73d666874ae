"""Training crops out of a store of prepared sound. What lies between a crop and the model is done on the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from gputrain.engine.data import HELD_OUT_SHARE, Sample, Split, item_rng, split
from gputrain.vocoder.store import Clip, Store


@dataclass(frozen=True)
class Sounds:
    """A store and its clips in two parts; `parts.shared`: a single clip serves as both."""

    store: Store
    parts: Split[Clip]

    @property
    def voiced_share(self) -> float:
        """Of all frames."""
        return float((self.store.pitches() > 0).mean())


def open_sounds(folder: Path, held_out_share: float = HELD_OUT_SHARE, held_out: int = 0) -> Sounds:
    """Open prepared sound; which clips are held out, a share or so many of them, depends on the content of their files
    alone. Raises UserError."""
    store = Store.open(folder)
    return Sounds(store, split(store.clips, held_out_share, key=lambda clip: clip.fingerprint, count=held_out))


@dataclass(frozen=True)
class Crops:
    """Random crops of `frames` hops, the data set of `gputrain.engine.data.loader`.

    An epoch has a crop for each `frames` hops of a clip, and one for a shorter clip, which is padded with silence: so
    an hour is heard as often whether it lies in one file or in a thousand. The crops of a clip lie apart, each in its
    stretch of it; where in there is a function of (seed, epoch, item).
    """

    store: Store
    clips: Sequence[Clip]
    frames: int
    seed: int

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def item_bytes(self) -> int:
        """Bytes of a crop: samples of two, pitches of four."""
        return self.frames * (2 * self.store.format.hop_size + 4)

    def __getitem__(self, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        """int16 samples (frames * hop_size,) and pitch in Hz (frames,), 0 where unvoiced."""
        epoch, item = sample
        number = int(np.searchsorted(self._ends, item, side="right"))
        clip = self.clips[number]
        places = max(0, clip.frames - self.frames) + 1
        stretch = item - (int(self._ends[number - 1]) if number else 0)
        at = (stretch + item_rng(self.seed, epoch, item).random()) / self._crops_of(clip)
        wave_T, f0_F = self.store.crop(clip, int(at * places), self.frames)
        return torch.from_numpy(wave_T), torch.from_numpy(f0_F)

    def _crops_of(self, clip: Clip) -> int:
        return max(1, clip.frames // self.frames)

    @cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        """Count of the crops of all clips up to each."""
        return np.cumsum([self._crops_of(clip) for clip in self.clips])
