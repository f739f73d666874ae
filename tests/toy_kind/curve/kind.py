"""The curve as the commands of gputrain know it. Imports no torch by itself."""

import csv
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from curve.config import CurveEvaluation, PlanCurve, Points, Trace, TrainCurve

from gputrain.config import leaves
from gputrain.kinds import (
    CommandOutput,
    DataCommand,
    DataWork,
    EvaluateCommand,
    Exported,
    Exporter,
    ModelKind,
    OwnCommand,
)


def work() -> Any:
    from curve.work import CurveWork

    return CurveWork()


@dataclass
class PointReport:
    input_dir: str
    points: int
    refused: list[Any] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_tables(folder: Path, decimals: int) -> list[list[float]]:
    """Returns the points of all tables in a folder, one a line."""
    rows = [row for path in sorted(folder.glob("*.csv")) for row in csv.reader(path.open())]
    return [[round(float(x), decimals), round(float(y), decimals)] for x, y in rows]


def prepare(settings: Any) -> DataWork:
    def run(input_dir: Path, output_dir: Path, config: Points, **shared: Any) -> PointReport:
        points = read_tables(input_dir, config.decimals)
        output_dir.mkdir()
        (output_dir / "points.json").write_text(json.dumps(points))
        return PointReport(str(input_dir), len(points))

    return DataWork(run, settings.points, lambda report: {"points": report.points})


def validate(settings: Any) -> DataWork:
    def run(input_dir: Path, config: None, **shared: Any) -> PointReport:
        return PointReport(str(input_dir), len(read_tables(input_dir, 9)))

    return DataWork(run, None, lambda report: {"points": report.points})


@dataclass
class CurveFigures:
    points: int
    scalars: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        return {"points": self.points, **self.scalars}


def evaluate(settings: Any, **shared: Any) -> CurveFigures:
    from curve.model import error_of, load_curve, read_points

    points = read_points(settings.data_path[0])[: settings.curve.max_points]
    return CurveFigures(len(points), {"error": error_of(load_curve(settings.path), points)})


def export(settings: Any, progress: Any) -> Exported:
    from curve.model import load_curve

    weights = {name: tensor.tolist() for name, tensor in load_curve(settings.path).state_dict().items()}
    settings.output_dir.mkdir()
    path = settings.output_dir / f"{settings.name or 'curve'}.json"
    path.write_text(json.dumps(weights))
    return Exported([path], {"tensors": len(weights)}, ["Read it with any JSON reader."])


def trace(settings: Trace, output: CommandOutput) -> None:
    import torch
    from curve.model import load_curve

    with torch.no_grad():
        output.data(f"{load_curve(settings.model)(torch.tensor([[settings.at]])).item():.6f}")


KIND = ModelKind(
    name="curve",
    title="a curve",
    panel="Curve",
    help="Train a curve through points.",
    bench_help="Time a step of train-curve.",
    train=TrainCurve,
    plan=PlanCurve,
    work=work,
    data="points",
    prepare=DataCommand(groups={"points": Points}, names=frozenset(leaves(Points)), work=prepare),
    validate=DataCommand(work=validate),
    evaluation=EvaluateCommand(
        groups={"curve": CurveEvaluation}, names=frozenset(leaves(CurveEvaluation)), items="points", run=evaluate
    ),
    exporters={"weights": Exporter(export, frozenset({"name"}))},
    commands=(OwnCommand("trace", Trace, "Print the y of a curve at an x.", trace),),
    use=("print a value", "trace", "--at", "0.5"),
    headlines=("error",),
)
