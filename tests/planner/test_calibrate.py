"""Calibration: the line through what was measured, the search that agrees with it, the child, the cache."""

import dataclasses
import json
import sys
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from gputrain.bench.runner import NotMeasured
from gputrain.engine.recipe import phases_of
from gputrain.engine.schedule import Schedule
from gputrain.hw.plan import Hardware, Plan, Setting, decide
from gputrain.hw.probe import Machine
from gputrain.planner import microbatch
from gputrain.planner.calibrate import MARGIN, Calibration, calibrate, measure_in_child, measure_sizes
from gputrain.planner.calibration_cache import CalibrationCache, CalibrationProbe
from gputrain.planner.microbatch import MemoryBudget, MemoryModel
from gputrain.planner.resident import MeasuredPeak, ResidentStep, metered
from gputrain.planner.roofline import LAUNCH_SECONDS, DeviceRates, KernelCost, StepCost
from gputrain.planner.spec import PlanTarget
from gputrain.stored import from_json
from tests.toy import ITEMS, ToyRecipe, cpu_runtime

GPU = Machine(
    system="Linux", cpu_cores=8, gpu="Card", gpu_memory_gb=24, compute_capability=(8, 9), triton=True,
    compiled_capabilities=("sm_89",), cuda="13.0", compiler="g++", torch="2.13",
)  # fmt: skip
PREDICTED = MemoryModel(
    fixed={"parameters": 1.0, "activations": 0.25, "workspace": 0.25},
    item={"parameters": 0.0, "activations": 2.0, "workspace": 1.0},
    item_flops=1e12,
)  # peaks: 4.5 GB, 7.5, 10.5, 13.5


def plan(**wishes: object) -> Plan:
    return decide(GPU, Hardware(use_torch_compile=False, **wishes))


def probe(items: int, gb: float, **others: object) -> CalibrationProbe:
    values = {"checkpointing": False, "allocated_gb": gb, "reserved_gb": gb, "budget_gb": 20.0, "fits": True}
    return CalibrationProbe(items, **{**values, **others})


def calibration_of(
    *probes: CalibrationProbe, budget_gb: float = 20.0, predicted: MemoryModel = PREDICTED
) -> Calibration:
    return Calibration(lambda checkpointing: predicted, plan(), MemoryBudget(budget_gb), list(probes))


# ---------------------------------------------------------------------------------------------------- lines


def test_a_line_through_two_measurements():
    found = calibration_of(probe(1, 5.0), probe(4, 17.0)).memory_model(False)
    assert [found.peak_gb(items) for items in (1, 2, 4)] == pytest.approx([5.0, 9.0, 17.0])
    assert found.item["activations"] == pytest.approx(2.0 * 4 / 3)  # the slope is 4 and not 3
    assert found.fixed["parameters"] == 1.0  # It is known.
    assert found.fixed["workspace"] == pytest.approx(5.0 - 4.0 - 1.25)
    assert (found.item_flops, found.cost) == (1e12, None)


def test_one_measurement_scales_the_prediction():
    calibrated = calibration_of(probe(2, 9.0))  # 7.5 GB are predicted.
    assert calibrated.memory_model(False).peak_gb(2) == pytest.approx(9.0)
    assert sum(calibrated.memory_model(False).item.values()) == pytest.approx(3.0 * 1.2)
    assert calibrated.factor(2, checkpointing=False) == pytest.approx(1.2)
    assert calibrated.memory_model(True) is PREDICTED  # Nothing was measured with checkpointing.
    assert calibrated.factor(2, checkpointing=True) == 1.0


def test_what_did_not_fit_takes_the_whole_budget_at_least():
    refused = probe(4, 3.0, fits=False)
    found = calibration_of(probe(1, 5.0), probe(2, 6.0), refused).memory_model(False)
    assert found.peak_gb(4) == pytest.approx(20.0)  # steeper than 5, 6, 8
    assert found.peak_gb(1) == pytest.approx(5.0)
    found = calibration_of(probe(1, 5.0), probe(2, 12.0), refused).memory_model(False)
    assert found.peak_gb(4) == pytest.approx(26.0)  # the line through those that fit is steeper


def test_a_probe_under_another_budget():
    """A probe that fitted applies to any budget that is at least its memory; one that did not, to smaller budgets."""
    fitted, refused = probe(4, 10.0, reserved_gb=12.0), probe(8, 0.0, fits=False)
    assert [fitted.applies_to(gb) for gb in (11.9, 12.0, 30.0)] == [False, True, True]
    assert [refused.applies_to(gb) for gb in (10.0, 20.0, 20.1)] == [True, True, False]
    assert calibration_of(fitted, refused, budget_gb=11.0).measured_gb(False) == {8: 11.0}
    assert calibration_of(fitted, refused, budget_gb=30.0).measured_gb(False) == {4: 10.0}
    assert calibration_of(fitted, refused, budget_gb=30.0).measured_gb(True) == {}


def test_holes_count_where_segments_cannot_grow():
    calibrated = calibration_of(probe(4, 10.0, reserved_gb=12.0))
    assert calibrated.measured_gb(False) == {4: 10.0}
    calibrated.plan = replace(calibrated.plan, expandable_segments=Setting(False, "Windows"))
    assert calibrated.measured_gb(False) == {4: 12.0}


# -------------------------------------------------------------------------------------------------- decision


class Card:
    """Answers as a card would on which a step takes `fixed_gb` and `item_gb` for each item."""

    def __init__(self, fixed_gb: float, item_gb: float, budget_gb: float, leaner: float = 1.0) -> None:
        self.fixed_gb, self.item_gb, self.budget_gb, self.leaner = fixed_gb, item_gb, budget_gb, leaner
        self.asked: list[tuple[list[int], bool]] = []

    def peak_gb(self, items: int, checkpointing: bool = False) -> float:
        return self.fixed_gb + self.item_gb * items * (self.leaner if checkpointing else 1.0)

    def __call__(self, sizes: list[int], checkpointing: bool, seconds: float) -> list[CalibrationProbe]:
        self.asked.append((sizes, checkpointing))
        peaks = {items: self.peak_gb(items, checkpointing) for items in sizes}
        return [
            CalibrationProbe(items, checkpointing, min(gb, self.budget_gb), min(gb, self.budget_gb), self.budget_gb,
                  gb <= self.budget_gb)
            for items, gb in peaks.items()
        ]  # fmt: skip


def test_a_prediction_that_is_right_is_confirmed_in_one_call():
    card = Card(1.5, 3.0, budget_gb=14.5)
    calibrated = calibration_of(budget_gb=14.5)
    found = calibrate(calibrated, Schedule(batch_size=16), None, card)
    assert card.asked == [([1, 4], False)]
    assert (found.micro_batch_size, found.accumulation_steps, found.fits) == (4, 4, True)
    assert found.predicted_peak_gb == pytest.approx(13.5)
    assert calibrated.factor(4, checkpointing=False) == pytest.approx(1.0)
    assert calibrated.plan.micro_batch_size.value == 4
    assert calibrated.plan.micro_batch_size.reason.startswith("8 would take 25.5 GB")


def test_the_check_lowers_a_size_that_was_predicted_too_low():
    card = Card(1.5, 5.0, budget_gb=14.5)  # 4 take 21.5, 2 take 11.5
    calibrated = calibration_of(budget_gb=14.5)
    found = calibrate(calibrated, Schedule(batch_size=16), None, card)
    assert card.asked == [([1, 4], False), ([2], False)]
    assert (found.micro_batch_size, found.fits) == (2, True)
    assert found.predicted_peak_gb == pytest.approx(11.5)


def test_a_prediction_too_high_is_raised():
    card = Card(1.0, 1.5, budget_gb=14.5)
    found = calibrate(calibration_of(budget_gb=14.5), Schedule(batch_size=16), None, card)
    assert card.asked == [([1, 4], False), ([8], False)]
    assert found.micro_batch_size == 8


def test_a_size_that_was_asked_for_is_tried_and_kept():
    card = Card(1.5, 5.0, budget_gb=14.5)
    found = calibrate(calibration_of(budget_gb=14.5), Schedule(batch_size=16, micro_batch_size=5), False, card)
    assert card.asked == [([1, 5], False)]
    assert (found.micro_batch_size, found.fits) == (5, False)
    assert found.predicted_peak_gb >= 14.5


def test_checkpointing_once_the_measurement_asks_for_it():
    """Predicted to fit without; measured, it leaves the card idle, and is measured with it instead."""
    card = Card(1.5, 30.0, budget_gb=40.0, leaner=0.1)  # 1 takes 31.5 without, 8 take 25.5 with it
    small = KernelCost("small", 10_000, 0.0, 0.0, 0.0, 1.0, True)
    one, two = ((small, KernelCost("product", 1, 0.0, items * 1e12, 0.0, 1.0, True)) for items in (1, 2))
    predicted = replace(PREDICTED, cost=StepCost(one, two, 2))
    leaner = replace(predicted, item={kind: gb / 10 for kind, gb in predicted.item.items()})
    # The launches of a micro-batch take twice as long as the arithmetic of an item.
    rates = DeviceRates(2 * 1e12 / (10_000 * LAUNCH_SECONDS), 1e12, 1e12)
    budget = MemoryBudget(40.0, rates)
    calibrated = Calibration(lambda checkpointing: leaner if checkpointing else predicted, plan(), budget)
    found = calibrate(calibrated, Schedule(batch_size=8), None, card)
    assert card.asked[0] == ([1, 8], False)
    assert card.asked[-1][1] is True
    assert (found.micro_batch_size, found.checkpointing, found.fits) == (8, True, True)


@given(
    fixed_gb=st.floats(0.1, 5),
    item_gb=st.floats(0.05, 5),
    factor=st.floats(0.3, 3),
    batch=st.integers(1, 64),
    budget_factor=st.floats(1.03, 40),
)
def test_any_prediction_ends_at_the_largest_size_that_fits(fixed_gb, item_gb, factor, batch, budget_factor):
    """And at one that was itself tried."""
    card = Card(fixed_gb, item_gb, budget_gb=(fixed_gb + item_gb) * budget_factor)
    predicted = MemoryModel(
        {"parameters": fixed_gb * factor, "workspace": 0.0}, {"parameters": 0.0, "workspace": item_gb * factor}, 1e12
    )
    calibrated = calibration_of(predicted=predicted, budget_gb=card.budget_gb)
    found = calibrate(calibrated, Schedule(batch_size=batch), False, card)
    sizes = [m for m in range(1, batch + 1) if batch % m == 0]
    assume(not any(card.peak_gb(m) * MARGIN == pytest.approx(card.budget_gb, rel=1e-6) for m in sizes))
    assert found.micro_batch_size == max(m for m in sizes if card.peak_gb(m) * MARGIN <= card.budget_gb)
    assert found.fits
    assert found.micro_batch_size in calibrated.measured_gb(False)
    assert len(card.asked) <= len(sizes)


def test_a_failure_is_one_warning_and_the_prediction_stands(caplog):
    def measure(sizes: list[int], checkpointing: bool, seconds: float) -> list[CalibrationProbe]:
        raise NotMeasured("the card is lost")

    calibrated = calibration_of(budget_gb=14.0)
    found = calibrate(calibrated, Schedule(batch_size=16), None, measure)
    assert found.micro_batch_size == 2  # 4 would take 13.5, and 14.2 with the margin of a prediction
    assert found.predicted_peak_gb == 7.5
    assert calibrated.failure == "the card is lost"
    assert [record.message for record in caplog.records] == [
        "the memory of a step could not be measured (the card is lost); the prediction stands"
    ]
    assert calibrated.to_json()["failure"] == "the card is lost"
    assert calibrated.measured_budget.margin == microbatch.MARGIN


def test_a_failure_on_the_way_keeps_what_was_found():
    card = Card(1.5, 5.0, budget_gb=14.5)

    def measure(sizes: list[int], checkpointing: bool, seconds: float) -> list[CalibrationProbe]:
        if card.asked:
            raise NotMeasured("no time was left")
        return card(sizes, checkpointing, seconds)

    calibrated = calibration_of(budget_gb=14.5)
    found = calibrate(calibrated, Schedule(batch_size=16), None, measure)
    assert found.micro_batch_size == 2  # The line from 6.5 to more than 14.5 GB says so; it is not measured.
    assert calibrated.measured_budget.margin == microbatch.MARGIN


# ----------------------------------------------------------------------------------------------------- child

TOY = PlanTarget(lambda runtime, checkpointing: ToyRecipe(Schedule()), lambda: ITEMS[:8])


def test_a_child_that_dies_or_hangs_says_why():
    def ask(program: str, seconds: float) -> list[CalibrationProbe]:
        return measure_in_child([sys.executable, "-c", program], plan(), 1.0, {}, [1], False, seconds)

    with pytest.raises(NotMeasured, match="the process was killed"):
        ask("import os; os.kill(os.getpid(), 9)", 20)
    began = time.monotonic()
    with pytest.raises(NotMeasured, match="stopped after"):
        ask("import time; time.sleep(60)", 0.5)
    assert time.monotonic() - began < 10
    with pytest.raises(NotMeasured, match="no time was left"):
        ask("", 0.0)


def test_the_child_gets_everything_that_it_needs():
    echo = "import sys, json; print(json.dumps({'reason': sys.argv[2]}))"
    with pytest.raises(NotMeasured) as raised:
        measure_in_child([sys.executable, "-c", echo], plan(), 7.5, {"model": "m"}, [1, 4], True, 20)
    settings = json.loads(str(raised.value))
    assert from_json(Plan, settings.pop("plan")) == plan()
    expected = {"model": "m", "device": "cuda", "budget_gb": 7.5, "sizes": [1, 4], "checkpointing": True}
    assert settings == expected


def test_memory_that_runs_out_in_a_phase():
    resident = ResidentStep.of(TOY, cpu_runtime(), False)
    recipe = resident.recipe
    recipe.fail[("generator", 0)] = 2
    assert not resident.measured_peak(4).complete
    assert all(p.grad is None for phase in phases_of(recipe) for p in phase.parameters())
    two = resident.measured_peak(2)
    assert two.complete
    assert two.allocated_gb > 0


def test_a_single_item_that_does_not_fit_is_no_measurement():
    settings = {"plan": cpu_runtime().plan.to_json(), "sizes": [1, 2], "checkpointing": False}
    with pytest.raises(NotMeasured, match="a single item does not fit"):
        measure_sizes(TOY, {**settings, "budget_gb": 1e-6})
    found = measure_sizes(TOY, {**settings, "budget_gb": 1.0})["probes"]
    assert [one["items"] for one in found] == [1, 2]
    assert all(one["fits"] for one in found)


def test_the_meter_against_arithmetic():
    """8 MB are in memory, 3 of them are freed before the peak, at which there are two more tensors of 4 MB."""
    kept = torch.empty(5_000_064, dtype=torch.uint8)
    standing = [kept, torch.empty(3_000_064, dtype=torch.uint8)]
    found = MeasuredPeak()

    def work(held: list[torch.Tensor]) -> None:
        del held[1:]
        for _ in range(3):
            first = torch.zeros(1_000_064)
            second = first + 1
            del first, second
        torch.zeros(10)

    with metered(torch.device("cpu"), found, list(standing)):
        work(standing)
    rounded = 5_000_192 + 2 * 4_000_256
    assert found.allocated_gb == pytest.approx(rounded / 1e9, rel=1e-6)
    assert found.reserved_gb == found.allocated_gb
    with metered(torch.device("cpu"), found):
        torch.zeros(10)
    assert found.allocated_gb == pytest.approx(rounded / 1e9, rel=1e-6)  # the peak of both


# ----------------------------------------------------------------------------------------------------- cache


@pytest.fixture
def cache(tmp_path, monkeypatch) -> CalibrationCache:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    return CalibrationCache.of(GPU, plan(), {"model": {"size": (1, 2)}})


PROBES = [probe(1, 5.0), probe(4, 0.0, fits=False, checkpointing=True)]


def test_what_is_kept_is_found_again(cache, tmp_path):
    assert cache.load() == []
    cache.save(PROBES)
    assert cache.load() == PROBES
    assert [path.parent for path in tmp_path.rglob("*.json")] == [tmp_path / "gputrain" / "calibration"]
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", '{"key": {}, "probes": []}', "cut", "another", '"x"',
        "items", "missing", "further",
    ],
)  # fmt: skip
def test_a_damaged_file_is_ignored_and_rewritten(cache, text):
    cache.save(PROBES)
    whole = cache.path.read_text()
    values = {"cut": whole[:-20], "another": whole.replace('"Card"', '"Other"')}
    values["items"] = whole.replace('"items": 1', '"items": "one"')
    values["missing"] = whole.replace('"items": 1,', "")
    values["further"] = whole.replace('"items": 1,', '"items": 1, "more": 2,')
    damaged = values.get(text, text)
    assert damaged != whole
    cache.path.write_text(damaged)
    assert cache.load() == []
    cache.save(PROBES)
    assert cache.load() == PROBES


def test_a_folder_that_cannot_be_written_is_a_warning(cache, tmp_path, caplog):
    (tmp_path / "gputrain").write_text("")
    cache.save(PROBES)
    assert "the next run will measure again" in caplog.text
    assert cache.load() == []


@pytest.mark.parametrize(
    ("machine", "wishes", "facts"),
    [
        ({"gpu": "Other"}, {}, {}), ({"gpu_memory_gb": 12.0}, {}, {}), ({"torch": "2.14"}, {}, {}),
        ({}, {"mixed_precision": False}, {}), ({}, {"channels_last": False}, {}), ({}, {"enable_tf32": False}, {}),
        ({}, {}, {"model": 2}),
    ],
)  # fmt: skip
def test_another_card_torch_model_or_precision_has_another_file(cache, machine, wishes, facts):
    other = CalibrationCache.of(
        dataclasses.replace(GPU, **machine), plan(**wishes), {"model": {"size": (1, 2)}, **facts}
    )
    assert other.path != cache.path
    same = CalibrationCache.of(
        dataclasses.replace(GPU, gpu_free_gb=3.0), plan(num_workers=2), {"model": {"size": (1, 2)}}
    )
    assert same.path == cache.path
