"""Reads training crops from a store of prepared sound. Augmentation and spectrograms are computed on the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from gputrain.engine.data import HELD_OUT_SHARE, Sample, Split, item_rng, split
from gputrain.vocoder.store import VocoderClip, VocoderStore


@dataclass(frozen=True)
class VocoderData:
    """A store and its clips split into training and held-out ones; `parts.shared`: a single clip serves as both."""

    store: VocoderStore
    parts: Split[VocoderClip]

    @property
    def voiced_share(self) -> float:
        return float((self.store.pitches() > 0).mean())


def open_sounds(folder: Path, held_out_share: float = HELD_OUT_SHARE, held_out: int = 0) -> VocoderData:
    """Opens prepared sound; what is held out depends only on the content of the files. Raises UserError."""
    store = VocoderStore.open(folder)
    return VocoderData(store, split(store.clips, held_out_share, key=lambda clip: clip.fingerprint, count=held_out))


@dataclass(frozen=True)
class SoundCrops:
    """Random crops of `frames` hops, the data set of `gputrain.engine.data.loader`.

    An epoch has one crop for each `frames` hops of a clip, and one for a shorter clip, which is padded with silence: so
    an hour has the same weight in one file or in a thousand. Each crop of a clip lies in a segment of its own; its
    position there is a function of (seed, epoch, item).
    """

    store: VocoderStore
    clips: Sequence[VocoderClip]
    frames: int
    seed: int

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def item_bytes(self) -> int:
        """Returns the bytes of a crop: two per sample, four per pitch."""
        return self.frames * (2 * self.store.format.hop_size + 4)

    def __getitem__(self, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns int16 samples (frames * hop_size,) and pitch in Hz (frames,), 0 where unvoiced."""
        epoch, item = sample
        number = int(np.searchsorted(self._ends, item, side="right"))
        clip = self.clips[number]
        places = max(0, clip.frames - self.frames) + 1
        stretch = item - (int(self._ends[number - 1]) if number else 0)
        at = (stretch + item_rng(self.seed, epoch, item).random()) / self._crops_of(clip)
        wave_T, f0_F = self.store.crop(clip, int(at * places), self.frames)
        return torch.from_numpy(wave_T), torch.from_numpy(f0_F)

    def _crops_of(self, clip: VocoderClip) -> int:
        return max(1, clip.frames // self.frames)

    @cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        """Returns the cumulative number of crops of the clips."""
        return np.cumsum([self._crops_of(clip) for clip in self.clips])
