"""A small adversarial recipe with all that the engine must carry: three discriminators whose terms share no graph, a
gradient gathered on a detached copy, noise, statistics of the batch, and a discriminator that begins late."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from gputrain.config import config
from gputrain.engine.checkpoint import PARTS, Content
from gputrain.engine.optim import Ema, adamw
from gputrain.engine.recipe import BatchStat, ChainGradients, Phase, Recipe, StepGroup, Term, Yielded
from gputrain.engine.run_folder import Run, open_run
from gputrain.engine.schedule import RunProgress, Saving, Schedule, steps_of_stage
from gputrain.engine.state import TrainState
from gputrain.engine.train import train
from gputrain.hw.plan import Hardware, Plan, Setting, decide
from gputrain.hw.probe import Machine
from gputrain.hw.runtime import Runtime, apply
from gputrain.samples import Report

WIDTH, BATCH = 6, 8


def whole_checkpoint(*, step: int = 0, **parts: object) -> Content:
    """Returns the content of a checkpoint whose other parts are empty."""
    empty = {name: kind() for name, kind in PARTS.items()}
    return {**empty, "kind": "toy", "progress": asdict(RunProgress(step=step)), **parts}


@config()
class ToySettings:
    schedule: Schedule = Schedule()
    saving: Saving = Saving()


@dataclass(frozen=True)
class ToyBatch:
    x_BD: Tensor
    noise_BD: Tensor
    whole: int


class Statistics(nn.Module):
    """A moving average of the discriminators' opinion, which their loss uses a step later."""

    opinion: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("opinion", torch.zeros(()))


class ToyRecipe:
    kind, unit = "toy", "items"

    def __init__(self, schedule: Schedule, dtype: torch.dtype = torch.float64, adversarial_from: int = 0) -> None:
        torch.manual_seed(schedule.seed)
        self.schedule, self.dtype, self.adversarial_from = schedule, dtype, adversarial_from
        self.generator = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH)).to(dtype)
        self.discriminators = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(3)
        ).to(dtype)
        self.statistics = Statistics().to(dtype)
        self.ema = Ema(
            self.generator, nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH)).to(dtype), 0.99
        )
        self.modules = {"g": self.generator, "d": self.discriminators, "s": self.statistics, "ema": self.ema}
        discriminators = Phase(
            "discriminators", (self.discriminators,), self._adamw(self.discriminators), self.update_opinion
        )
        generator = Phase("generator", (self.generator,), self._adamw(self.generator))
        self.step_groups = [
            StepGroup((discriminators,), self.discriminators_loss, graph_key=self.is_adversarial),
            StepGroup((generator,), self.generator_loss, graph_key=self.is_adversarial),
        ]
        self.fail: dict[tuple[str, int], int] = {}  # Memory runs out above this number of items, by (phase, step).

    def _adamw(self, module: nn.Module) -> torch.optim.Optimizer:
        return adamw(module.parameters(), learning_rate=0.0, weight_decay=0.01, betas=(0.5, 0.99))

    def prepare(self, loaded: Tensor, step: int) -> ToyBatch:
        noise = torch.randn(loaded.shape, generator=torch.Generator().manual_seed(1000 + step), dtype=self.dtype)
        return ToyBatch(loaded, noise, len(loaded))

    def size(self, batch: ToyBatch) -> int:
        return len(batch.x_BD)

    def flops(self, batch: ToyBatch, step: int) -> float:
        return 1000.0 * len(batch.x_BD)

    def peak_memory_step(self, step: int) -> int:
        return step

    def split(self, batch: ToyBatch, parts: int) -> list[ToyBatch]:
        pieces = zip(batch.x_BD.tensor_split(parts), batch.noise_BD.tensor_split(parts), strict=True)
        return [ToyBatch(x, noise, batch.whole) for x, noise in pieces]

    def is_adversarial(self, step: int) -> bool:
        return step >= self.adversarial_from

    def generated(self, batch: ToyBatch) -> Tensor:
        return self.generator(batch.x_BD + 0.1 * batch.noise_BD)

    def discriminators_loss(self, batch: ToyBatch, step: int) -> Iterator[Yielded]:
        if step < self.adversarial_from:
            return
        with torch.no_grad():
            fake_BD = self.generated(batch)
        for index, discriminator in enumerate(self.discriminators):
            real, fake = discriminator(batch.x_BD), discriminator(fake_BD)
            error = (real - 1 - self.statistics.opinion) ** 2 + fake**2
            yield Term(f"discriminator_{index}", error.sum() / batch.whole)
            self._maybe_run_out("discriminators", step, batch)  # A part of the gradient is accumulated by now.
            yield BatchStat(f"opinion_{index}", real.detach().sum() / batch.whole)

    def update_opinion(self, statistics: dict[str, Tensor], finite: Tensor) -> None:
        seen = torch.stack([statistics[f"opinion_{index}"] for index in range(3)]).mean()
        kept = self.statistics.opinion
        kept.copy_(torch.where(finite, 0.9 * kept + 0.1 * seen, kept))

    def generator_loss(self, batch: ToyBatch, step: int) -> Iterator[Yielded]:
        made_BD = self.generated(batch)
        leaf_BD = made_BD.detach().requires_grad_()
        yield Term("l2", ((leaf_BD - batch.x_BD) ** 2).sum() / batch.whole, weight=2.0)
        if step >= self.adversarial_from:
            for index, discriminator in enumerate(self.discriminators):
                yield Term(f"fool_{index}", ((discriminator(leaf_BD) - 1) ** 2).sum() / batch.whole, weight=0.3)
        assert leaf_BD.grad is not None
        yield ChainGradients((made_BD,), (leaf_BD.grad,))
        self._maybe_run_out("generator", step, batch)

    def _maybe_run_out(self, phase: str, step: int, batch: ToyBatch) -> None:
        if len(batch.x_BD) > self.fail.get((phase, step), BATCH):
            torch.empty(10**15)  # No machine has a petabyte, so this raises the allocator's own error.

    def average(self, step: int) -> None:
        self.ema.update(self.generator, step)

    def sample(self) -> Report:
        return Report(pictures={"ramp": torch.arange(48, dtype=torch.uint8).reshape(4, 4, 3)})

    def evaluate(self) -> Report:
        return Report({"score": -float(sum(p.square().sum() for p in self.ema.average.parameters()))})


ITEMS = torch.randn(4 * BATCH, WIDTH, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def batches(first: int, last: int) -> Iterator[Tensor]:
    for step in range(first, last):
        yield ITEMS[torch.arange(step * BATCH, (step + 1) * BATCH) % len(ITEMS)]


def as_on_a_gpu(plan: Plan, *, precision: str = "fp32", compiled: bool = False) -> Plan:
    """Return a plan for a CPU with what is planned for GPUs alone, so that a test can check its arithmetic."""
    return replace(plan, precision=Setting(precision, "for a test"), compile=Setting(compiled, "for a test"))


def cpu_runtime(**of_a_gpu: Any) -> Runtime:
    """Return the runtime of a CPU, with what `as_on_a_gpu` is given."""
    plan = decide(Machine(system="Linux", cpu_cores=2), Hardware(device="cpu"))
    return apply(as_on_a_gpu(plan, **of_a_gpu) if of_a_gpu else plan)


def train_toy(
    recipe: ToyRecipe, saving: Saving, source=batches, prediction: dict | None = None, *, starts_pretrained: bool = True
) -> None:
    settings = ToySettings(schedule=recipe.schedule, saving=saving)
    run = open_run(settings, saving, kind="toy", command="gputrain train-toy")
    run = replace(run, prediction=prediction or {}, starts_pretrained=starts_pretrained)
    steps = steps_of_stage(recipe.schedule, run.progress, len(ITEMS), beyond_end=run.continues_beyond_end)
    runtime = cpu_runtime()
    vars(runtime)["product_rate"] = 1e11  # Measuring it would take longer than the training.
    train(recipe, source, steps, run, runtime, Console(quiet=True))


def new_state(recipe: Recipe, folder: Path, runtime: Runtime | None = None) -> TrainState:
    """Return the state with which a training of any recipe begins."""
    schedule = getattr(recipe, "settings", recipe).schedule
    return TrainState.begin(recipe, schedule, runtime or cpu_runtime(), Run(folder, quiet(folder), {}, ""))


def weights(recipe: Recipe) -> dict[str, Tensor]:
    return {f"{n}.{k}": v.clone() for n, m in recipe.modules.items() for k, v in m.state_dict().items()}


def quiet(folder: Path, **others: object) -> Saving:
    """A run folder without evaluations and samples between."""
    return Saving(
        **{
            "output_dir": folder,
            "sample_every_steps": 0,
            "evaluate_every_epochs": 0,
            "checkpoint_every_epochs": 0,
            **others,
        }
    )
