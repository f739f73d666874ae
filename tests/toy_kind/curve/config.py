"""Options of the commands of a curve. Imports no torch."""

from pathlib import Path
from typing import ClassVar

from gputrain.config import config, opt
from gputrain.engine.schedule import Saving, Schedule
from gputrain.hw.plan import Cards, Hardware


@config(panel="Data")
class Data:
    data_path: Path = opt(default=Path("points"), help="Folder that `prepare-data --kind curve` has filled.")


@config(panel="Model")
class Model:
    width: int = opt(default=16, help="Width of the hidden layer.", min=1)
    gradient_checkpointing: bool | None = opt(default=None, help="Has no effect on a curve.")


@config()
class TrainCurve:
    kind: ClassVar[str] = "curve"

    data: Data = Data()
    model: Model = Model()
    schedule: Schedule = Schedule()
    saving: Saving = Saving()
    hardware: Hardware = Hardware()


@config()
class PlanCurve(TrainCurve):
    cards: Cards = Cards()


@config(panel="Points, with --kind curve")
class Points:
    decimals: int = opt(default=6, help="Decimals of the prepared points.", min=0, max=9)


@config(panel="Evaluation")
class CurveEvaluation:
    max_points: int = opt(default=1000, help="Maximum number of points to evaluate.", min=1)


@config(panel="Curve")
class Trace:
    model: Path = opt(help="A run folder of train-curve.")
    at: float = opt(default=0.0, help="The x whose y is printed.")
