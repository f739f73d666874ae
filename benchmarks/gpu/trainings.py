"""Trainings of every kind on synthetic data, with the plan that the train command makes."""

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gputrain.bench.step_bench import StepBench, begin_bench
from gputrain.cli.options import read_defaults
from gputrain.config import assemble, flatten
from gputrain.hw.plan import Plan
from gputrain.hw.probe import probe
from gputrain.hw.runtime import Runtime
from gputrain.kinds import kinds
from gputrain.planner.kind_work import KindWork
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
        if not self.clip_seconds:
            return self.work
        values = {name: value for name, value in flatten(settings).items() if name != "data_path"}
        planned = self.work.planned(assemble(kinds()[self.kind].plan, {**values, **self.options}))
        found: KindWork[Any] = planned.work
        return found

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


MODES: dict[str, dict[str, Any]] = {
    "eager": {"use_torch_compile": False, "use_cuda_graphs": False},
    "graphs": {"use_torch_compile": False, "use_cuda_graphs": True},
    "compiled": {"use_torch_compile": True, "use_cuda_graphs": False},
    "compiled graphs": {"use_torch_compile": True, "use_cuda_graphs": True},
}
FLUX = {"preset": "flux", "image_size": 512, "batch_size": 4}  # Of 8 pictures, plain layers would take 63 GB.
TRAININGS = {
    "vocoder standard, 16 x 48": vocoder("base_hifi_gpu.yaml"),
    "voice high, 64 x 4.7 s": Training("tts", {"preset": "high", "batch_size": 64}, 4.7),
    "flux 512 px x 4": Training("vae", {**FLUX, "recompute_norms": True}),
    "flux 512 px x 4, plain": Training("vae", {**FLUX, "recompute_norms": False}),
    "XLS-R 300M, 8 x 8 s": Training("asr", {"preset": "xls-r-300m", "batch_size": 8}, 8.0),
    "vocoder optimised, 32 x 80": vocoder("base_hifi_rtx5090_optimized.yaml"),
}
# The memory that a cell may take, in GB, and its training, which runs kernel by kernel.
CELLS: dict[str, tuple[float, Training]] = {
    **{f"flux {size} px x {batch}": (32, Training("vae", {"preset": "flux", "image_size": size, "batch_size": batch}))
       for size, batch in ((512, 32), (1024, 16), (768, 24), (1536, 8), (2048, 4))},
    **{f"{preset} 1024 px x 16": (16, Training("vae", {"preset": preset, "image_size": 1024, "batch_size": 16}))
       for preset in ("fast", "lite")},
    "vocoder standard": (16, TRAININGS["vocoder standard, 16 x 48"]),
    "vocoder optimised": (16, TRAININGS["vocoder optimised, 32 x 80"]),
    "voice high": (16, TRAININGS["voice high, 64 x 4.7 s"]),
    "voice medium": (16, Training("tts", {"preset": "medium", "batch_size": 64}, 4.7)),
    "XLS-R 300M": (24, TRAININGS["XLS-R 300M, 8 x 8 s"]),
}  # fmt: skip

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


def smoke_size(training: Training) -> Training:
    """Returns a tiny training of the same kind, for the CPU."""
    tiny = SMALL[training.kind]
    changes = {"batch_size": 2, "image_size": 32, "channels": [32, 32]} if training.kind == "vae" else {"batch_size": 1}
    seconds = min(1.0, training.clip_seconds)
    return dataclasses.replace(tiny, values={**tiny.values, **changes}, clip_seconds=seconds)
