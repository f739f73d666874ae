"""Kernels, GB and TFLOP of the models' steps are not above the committed figures: what costs 1 % more must say so."""

import json

import pytest

from tests.planner.step_counts import CASES, FILE, counted

MORE = 1.01  # Factor from which a figure is higher.


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if case.quick else pytest.mark.slow) for name, case in CASES.items()]
)
def test_a_step_takes_no_more_than_before(name: str) -> None:
    before, now = json.loads(FILE.read_text(encoding="utf-8"))[name], counted(name)._asdict()
    more = {what: (before[what], value) for what, value in now.items() if value > MORE * before[what]}
    assert not more, f"{name}: (before, now) {more}; if that is meant: python -m tests.planner.step_counts {name!r}"
    less = {what: (before[what], value) for what, value in now.items() if value * MORE < before[what]}
    assert not less, f"{name} takes less: {less}; keep that by: python -m tests.planner.step_counts {name!r}"


def test_memory_efficient_layers_move_no_more_than_plain_ones() -> None:
    """They recompute, and have to make up for it, compiled or not."""
    counts = json.loads(FILE.read_text(encoding="utf-8"))
    plain, eager, compiled = (
        counts[f"vae flux 512 x 8, {how}"]["gb"] for how in ("plain layers, eager", "eager", "compiled")
    )
    assert compiled < eager < plain
