"""Trainings of every kind on synthetic data, with the plan that the train command makes."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gputrain.bench.step_bench import StepBench, begin_bench
from gputrain.cli.options import read_defaults
from gputrain.config import assemble
from gputrain.hw.plan import Plan
from gputrain.hw.probe import probe
from gputrain.hw.runtime import Runtime
from gputrain.kinds import kinds
from gputrain.planner.work import KindWork
from gputrain.session import with_plan
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.openvpi import PROFILES, translate


@dataclass(frozen=True)
class Training:
    """A train command: its kind, its options, and the seconds of a clip if the kind has clips."""

    kind: str
    values: dict[str, Any]
    clip_seconds: float = 0.0

    @property
    def work(self) -> KindWork[Any]:
        found: KindWork[Any] = kinds()[self.kind].work()
        return found

    @property
    def options(self) -> dict[str, Any]:
        return {"clip_seconds": self.clip_seconds} if self.clip_seconds else {}

    def settings(self, device: str, **changes: Any) -> Any:
        return assemble(kinds()[self.kind].train, {"data_path": ".", **self.values, **changes, "device": device})

    def model(self, settings: Any) -> KindWork[Any]:
        return self.work.of_bench(self.work.completed(settings), **self.options)

    def decide(self, settings: Any) -> Plan:
        """Returns the plan of the train command on this machine, without the settings of the batch."""
        return self.model(settings).decide(probe(), settings.hardware)

    @contextmanager
    def begun(self, settings: Any, runtime: Runtime) -> Iterator[StepBench]:
        """Yields the training, with the settings of the batch that the runtime's plan has."""
        with TemporaryDirectory() as folder:
            yield begin_bench(self.work, with_plan(settings, runtime.plan), runtime, Path(folder), **self.options)


def vocoder(file: str, **changes: Any) -> Training:
    """Returns the training of a shipped configuration."""
    values = read_defaults(PROFILES / file, TrainVocoder, functools.partial(translate, of="train"))
    return Training("vocoder", {**values, **changes})


# Small enough for a step in milliseconds, with every kind of layer.
SMALL = {
    "vae": Training("vae", {"preset": "fast", "channels": [32, 64], "image_size": 64, "batch_size": 8,
                            "adversarial_weight": 0.5, "discriminator_start": 0, "discriminator_warmup_steps": 0,
                            "discriminator_channels": 16}),
    "vocoder": Training("vocoder", {"upsample_initial_channel": 64, "batch_size": 4, "crop_mel_frames": 16,
                                    "discriminators": ["mpd", "fast_mrd", "fast_mpd"], "discriminator_periods": [2, 3],
                                    "mpd_channels": 4, "fast_mpd_init_channel": 2, "fast_mrd_init_channel": 2,
                                    "generator_optimizer": "muon"}),
    "tts": Training("tts", {"preset": "fast", "batch_size": 4, "discriminator_channels": 8, "encoder_dropout": 0.0,
                            "duration_dropout": 0.0}, 1.0),
    "asr": Training("asr", {"preset": "tiny", "batch_size": 4}, 2.0),
}  # fmt: skip
