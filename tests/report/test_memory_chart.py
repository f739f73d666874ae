"""The chart of memory: sizes of its parts on the scale of the bar, as SVG."""

import xml.etree.ElementTree as ElementTree

import pytest

from gputrain.report.memory_chart import (
    BAR,
    BUDGET_COLOUR,
    MARGIN,
    MEASURED_COLOUR,
    PART_COLOURS,
    WIDTH,
    MemoryBar,
    memory_bar,
    memory_chart,
)
from tests.report.runs import PLAN

SVG = "{http://www.w3.org/2000/svg}"


def drawn(bar: MemoryBar) -> ElementTree.Element:
    return ElementTree.fromstring(memory_chart(bar))


def test_parts_and_limits_have_one_scale():
    bar = drawn(MemoryBar({"parameters": 1.0, "<other>": 3.0}, budget_gb=8.0, measured_gb=4.5))
    room = WIDTH - 2 * MARGIN  # It is 8 GB, the limit.
    parts = {part.attrib["fill"]: part for part in bar.iter(f"{SVG}rect") if part.attrib["height"] == str(BAR)}
    assert float(parts[PART_COLOURS["parameters"]].attrib["width"]) == pytest.approx(room / 8, abs=0.05)
    limit, measured = bar.iter(f"{SVG}line")
    assert (float(limit.attrib["x1"]), limit.attrib["stroke"]) == (MARGIN + room, BUDGET_COLOUR)
    assert float(measured.attrib["x1"]) == pytest.approx(MARGIN + room * 4.5 / 8, abs=0.05)
    assert [title.text for title in bar.iter(f"{SVG}title")] == ["parameters: 1 GB", "<other>: 3 GB"]
    texts = [text.text for text in bar.iter(f"{SVG}text")]
    assert texts[:4] == ["parameters 1 GB", "<other> 3 GB", "limit 8 GB", "measured 4.5 GB"]
    assert measured.attrib["stroke"] == MEASURED_COLOUR


def test_a_distant_limit_is_only_named():
    bar = MemoryBar({"parameters": 1.0}, budget_gb=80.0)
    assert list(drawn(bar).iter(f"{SVG}line")) == []
    assert bar.words == drawn(bar).attrib["aria-label"] == "predicted peak 1.00 GB, of 80.0 GB that may be used"


def test_the_content_of_a_plan():
    bar = memory_bar(PLAN)
    assert bar is not None
    assert bar.words == "predicted peak 2.00 GB, measured peak 2.50 GB of the whole process, of 4.0 GB that may be used"
    on_gpu = {"settings": {"device": {"value": "cuda"}}, "measured": {"peak_gb": 2.5, "ratio": 1.25, "step": 2}}
    bar = memory_bar(PLAN | on_gpu)
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
        assert memory_bar(broken) is None
