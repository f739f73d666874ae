"""Plans, measures and trains a curve."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from curve.config import PlanCurve, TrainCurve
from curve.model import CurveRecipe, PointSource, read_points

from gputrain.data_in.split import digests
from gputrain.engine.run_folder import Run
from gputrain.hw.runtime import Runtime
from gputrain.planner.kind_work import (
    KindWork,
    PlannedTraining,
    PlanTarget,
    StageTraining,
    SyntheticWork,
    TrainingData,
    TrainingStart,
)


class CurveWork(KindWork[TrainCurve]):
    kind, item = "curve", "point"
    switches = (("fp32", {}, ""),)

    def open_data(self, settings: TrainCurve) -> "CurveData":
        return CurveData(read_points(settings.data.data_path))

    def target(self, settings: TrainCurve) -> PlanTarget:
        def build(runtime: Runtime, checkpointing: bool) -> CurveRecipe:
            return CurveRecipe(settings, runtime)

        def load(items: int = settings.schedule.global_batch_size) -> torch.Tensor:
            return torch.zeros(items, 2)

        return PlanTarget(build, load)

    def fallbacks(self, settings: TrainCurve, budget, found) -> dict[str, TrainCurve]:
        narrow = replace(settings, model=replace(settings.model, width=max(1, settings.model.width // 2)))
        return {**super().fallbacks(settings, budget, found), f"--width {narrow.model.width}": narrow}

    def planned(self, settings: PlanCurve) -> PlannedTraining:
        return PlannedTraining(self, settings, {"width": settings.model.width}, None)

    def synthetic(self, settings: TrainCurve, **options: Any) -> SyntheticWork:
        items, draws = settings.schedule.global_batch_size, torch.Generator().manual_seed(0)
        return SyntheticWork(
            title=f"{settings.model.width} wide, {settings.schedule.batch_size} points",
            recipe=partial(CurveRecipe, settings),
            batch=lambda: torch.rand(items, 2, generator=draws),
        )


@dataclass
class CurveData(TrainingData[TrainCurve]):
    points: list[list[float]]

    sizes = None

    def __len__(self) -> int:
        return len(self.points)

    def begin(self, settings: TrainCurve, run: Run, runtime: Runtime) -> TrainingStart[TrainCurve]:
        return TrainingStart(settings, digests(training=map(tuple, self.points)))

    def training(self, settings: TrainCurve, run: Run, runtime: Runtime) -> StageTraining:
        return StageTraining(CurveRecipe(settings, runtime, held_out=self.points), PointSource(self.points))
