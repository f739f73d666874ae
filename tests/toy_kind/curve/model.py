"""The network, its points and its recipe. Shapes: B points, 1 coordinate."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from curve.config import TrainCurve
from torch import Tensor, nn

from gputrain.config import assemble
from gputrain.engine import checkpoint
from gputrain.engine.optim import adamw
from gputrain.engine.recipe import Phase, StepGroup, Term
from gputrain.hw.runtime import Runtime
from gputrain.samples import Report


@dataclass(frozen=True)
class PointBatch:
    x_B1: Tensor
    y_B1: Tensor
    whole: int


class PointSource:
    """Points as the engine's loader reads them."""

    item_bytes = 8

    def __init__(self, points: list[list[float]]) -> None:
        self.points = points

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, sample) -> Tensor:
        return torch.tensor(self.points[sample[1]])


def read_points(folder: Path) -> list[list[float]]:
    return json.loads((folder / "points.json").read_text())


def network(settings: TrainCurve) -> nn.Module:
    return nn.Sequential(nn.Linear(1, settings.model.width), nn.Tanh(), nn.Linear(settings.model.width, 1))


class CurveRecipe:
    kind, unit = "curve", "points"

    def __init__(self, settings: TrainCurve, runtime: Runtime, held_out: list[list[float]] | None = None) -> None:
        self.settings, self.runtime, self.held_out = settings, runtime, held_out or []
        torch.manual_seed(settings.schedule.seed)
        self.curve = runtime.place(network(settings))
        self.modules = {"curve": self.curve}
        optimizer = adamw(self.curve.parameters(), learning_rate=0.0, weight_decay=0.0, betas=(0.9, 0.999))
        self.step_groups = [StepGroup((Phase("curve", (self.curve,), optimizer),), self.loss)]

    def prepare(self, loaded: Tensor, step: int) -> PointBatch:
        x_B1, y_B1 = loaded.to(self.runtime.device).split(1, dim=1)
        return PointBatch(x_B1, y_B1, self.settings.schedule.global_batch_size)

    def size(self, batch: PointBatch) -> int:
        return len(batch.x_B1)

    def flops(self, batch: PointBatch, step: int) -> float:
        return 12.0 * self.settings.model.width * len(batch.x_B1)

    def peak_memory_step(self, step: int) -> int:
        return step

    def split(self, batch: PointBatch, parts: int) -> list[PointBatch]:
        pieces = zip(batch.x_B1.tensor_split(parts), batch.y_B1.tensor_split(parts), strict=True)
        return [PointBatch(x_B1, y_B1, batch.whole) for x_B1, y_B1 in pieces]

    def loss(self, batch: PointBatch, step: int) -> Iterator[Term]:
        yield Term("square", (self.curve(batch.x_B1) - batch.y_B1).square().sum() / batch.whole)

    def average(self, step: int) -> None:
        pass

    def sample(self) -> Report:
        return Report()

    def evaluate(self) -> Report:
        error = error_of(self.curve, self.held_out)
        return Report({"error": error, "score": -error})


def error_of(curve: nn.Module, points: list[list[float]]) -> float:
    """Returns the root mean square of the error."""
    x_B1, y_B1 = torch.tensor(points).split(1, dim=1)
    with torch.no_grad():
        return float((curve(x_B1) - y_B1).square().mean().sqrt())


def load_curve(run: Path) -> nn.Module:
    _, content = checkpoint.find_named(run, "curve")
    curve = network(assemble(TrainCurve, content["config"]))
    curve.load_state_dict(content["modules"]["curve"])
    return curve.eval()
