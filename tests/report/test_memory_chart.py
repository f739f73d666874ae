"""The chart of memory: sizes of its parts, on common scales, as SVG and as pixels."""

import re

import pytest

from gputrain.drawing import Line, Rectangle
from gputrain.report.memory_chart import (
    BAR,
    BUDGET_COLOUR,
    MARGIN,
    PART_COLOURS,
    WIDTH,
    MemoryBar,
    memory_bar,
    memory_bars,
)
from tests.command import gputrain_here
from tests.report.runs import PLAN

BARS = [
    MemoryBar("one", {"parameters": 1.0, "activations": 3.0}, budget_gb=8.0, measured_gb=4.5),
    MemoryBar("two & <three>", {"parameters": 2.0, "other": 4.0}),
]


def widths(colour: str) -> list[float]:
    """Returns the widths of the parts of this colour, without the legend."""
    return [
        shape.width
        for shape in memory_bars(BARS).shapes
        if isinstance(shape, Rectangle) and (shape.colour, shape.height) == (colour, BAR)
    ]


def lines(bars: list[MemoryBar]) -> list[Line]:
    return [shape for shape in memory_bars(bars).shapes if isinstance(shape, Line)]


def test_all_bars_have_one_scale():
    room = WIDTH - 2 * MARGIN  # It is 8 GB, the limit.
    assert widths(PART_COLOURS["parameters"]) == pytest.approx([room / 8, room / 4])
    assert widths(PART_COLOURS["activations"]) == pytest.approx([3 * room / 8])
    limit, measured = lines(BARS)
    assert (limit.x, limit.colour) == (MARGIN + room, BUDGET_COLOUR)
    assert measured.x == pytest.approx(MARGIN + room * 4.5 / 8)


def test_a_distant_limit_is_only_named():
    bar = MemoryBar("", {"parameters": 1.0}, budget_gb=80.0)
    assert lines([bar]) == []
    assert bar.words == "predicted peak 1.00 GB, of 80.0 GB that may be used"


def test_the_content_of_a_plan():
    bar = memory_bar("run", PLAN)
    assert bar is not None
    assert bar.words == "predicted peak 2.00 GB, measured peak 2.50 GB of the whole process, of 4.0 GB that may be used"
    on_gpu = {"settings": {"device": {"value": "cuda"}}, "measured": {"peak_gb": 2.5, "ratio": 1.25, "step": 2}}
    bar = memory_bar("run", PLAN | on_gpu)
    assert bar is not None
    assert bar.words == (
        "predicted peak 2.00 GB, measured peak 2.50 GB (1.250 of the prediction), of 4.0 GB that may be used"
    )
    for broken in (
        {},
        {"prediction": []},
        {"prediction": {"parts": {"parameters": "x"}}},
        {"prediction": {"parts": {}}},
    ):
        assert memory_bar("run", broken) is None


@pytest.mark.slow
def test_plan_draws_a_chart_for_each_card(tmp_path):
    done = gputrain_here(
        "plan", "train-vae", "--preset", "fast", "--image-size", 64, "--gpu", "t4", "--gpu", "rtx4090", "--json",
        "--chart", tmp_path / "chart.svg",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "chart.svg").read_text()
    assert re.findall(r">(t4|rtx4090), image size 64", text) == ["t4", "rtx4090"]
    peaks = [float(gb) for gb in re.findall(r'"predicted_peak_gb": ([\d.]+)', done.stdout)]
    assert [float(gb) for gb in re.findall(r">[^<]*predicted peak ([\d.]+) GB", text)] == pytest.approx(
        peaks, abs=0.006
    )
