"""Provides prepared sound and settings for tests of tiny trainings."""

import functools
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gputrain.config import leaves
from gputrain.kinds import kinds
from gputrain.vocoder.store import VocoderFormat, VocoderStoreWriter

RATE_HZ, HOP = 16000, 64
# What any configuration needs on top to train within a second.
TINY: dict[str, Any] = {
    "audio_sample_rate": RATE_HZ,
    "audio_num_mel_bins": 16,
    "hop_size": HOP,
    "fft_size": 256,
    "win_size": 256,
    "fmax": 8000,
    "upsample_rates": [8, 8],
    "upsample_kernel_sizes": [16, 16],
    "upsample_initial_channel": 32,
    "resblock_kernel_sizes": [3],
    "resblock_dilation_sizes": "1,3,5",
    "crop_mel_frames": 24,
    "batch_size": 4,
    "discriminator_periods": [3],
    "msd_channels": 16,
    "mpd_channels": 2,
    "fast_mpd_init_channel": 2,
    "fast_mrd_init_channel": 2,
    "fast_mrd_fft_sizes": [128],
    "fast_mrd_hop_sizes": [16],
    "fast_mrd_win_lengths": [128],
    "use_stftloss": False,
    "learning_rate": 1e-3,
    "warmup_steps": 2,
    "generator_optimizer": "adamw",
    "discriminator_optimizer": "adamw",
    "log_every_steps": 1,
    "num_workers": 0,
    "device": "cpu",
    "plan": False,
}


FILE_KEYS = frozenset(
    leaf.name for kind in kinds().values() for leaf in leaves(kind.train).values() if leaf.level == "file"
)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def flags(values: dict[str, Any]) -> list[str]:
    """Returns the words of a command line that set keys: flags, and --config with a file of those that are no flags."""
    words: list[str] = []
    in_file = {name: value for name, value in values.items() if name in FILE_KEYS}
    if in_file:
        text = json.dumps(in_file)
        file = Path(_folder().name, f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json")
        file.write_text(text)
        words += ["--config", str(file)]
    for name, value in values.items():
        flag = name.replace("_", "-")
        if name in in_file:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    return words


def hummed(
    folder: Path, rate_hz: int = RATE_HZ, hop: int = HOP, *, clips: int = 6, seconds: float = 1.2, voiced: bool = True
) -> Path:
    """A store of clips, each a note that glides, with overtones, breath, and a rest at its end; unless `voiced`, its
    pitch is missing."""
    writer = VocoderStoreWriter(folder, VocoderFormat(rate_hz, hop, "parselmouth", f0_min=65.0))
    frames = int(seconds * rate_hz / hop)
    rest = frames - frames // 6
    for number in range(clips):
        draws = np.random.default_rng(number)
        f0 = np.linspace(*draws.uniform(120, 400, 2), frames).astype(np.float32)
        f0[rest:] = 0
        phase = 2 * np.pi * np.cumsum(np.repeat(f0, hop)) / rate_hz
        wave = 0.01 * draws.standard_normal(frames * hop)
        wave[: rest * hop] += sum(0.25 / k * np.sin(k * phase[: rest * hop]) for k in (1, 2, 3, 4))
        fingerprint = hashlib.md5(wave.tobytes(), usedforsecurity=False).hexdigest()
        f0 = f0 if voiced else np.zeros_like(f0)
        writer.add(f"{number}.wav", fingerprint, (wave * 32767).astype(np.int16), f0)
    writer.finish()
    return folder


@pytest.fixture(scope="session")
def notes(tmp_path_factory) -> Path:
    """Returns seven seconds of prepared sound for TINY."""
    return hummed(tmp_path_factory.mktemp("prepared") / "notes")
