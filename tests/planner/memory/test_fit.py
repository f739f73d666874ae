"""The pure planner: properties over any model and card, and a table of cards and workloads by arithmetic."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputrain.errors import UserError
from gputrain.planner.memory.fit import LEAST_GAIN, MARGIN, MemoryBudget, MemoryModel, budget_gb, fit
from gputrain.planner.time.roofline import DeviceRates, KernelCost, StepCost

RATES = DeviceRates(sixteen_bit_flops=1e14, fp32_flops=1e13, bytes_per_second=1e12, multiprocessors=100)


def memory_model(fixed: float, item: float, flops: float = 1e12, kernels: int = 0):
    """A model whose micro-batch is one kernel of arithmetic for every item, after many small ones."""
    small = KernelCost("small", kernels, 0.0, 0.0, 0.0, 1.0, True)
    one, two = ((small, KernelCost("product", 1, 0.0, items * flops, 0.0, 1.0, True)) for items in (1, 2))
    cost = StepCost(one, two, 2)
    return MemoryModel({"parameters": fixed, "activations": 0.0}, {"parameters": 0.0, "activations": item}, flops, cost)


def either(plain: MemoryModel, repeated: MemoryModel):
    return lambda checkpointing: repeated if checkpointing else plain


sizes_gb = st.floats(0.01, 50)
# Checkpointing takes less for an item and works a third more.
pairs = st.builds(
    lambda fixed, item, less, flops, kernels: (
        memory_model(fixed, item, flops, kernels),
        memory_model(fixed, item * less, flops * 4 / 3, kernels * 4 // 3),
    ),
    sizes_gb, sizes_gb, st.floats(0.05, 1.0), st.floats(1e9, 1e14), st.integers(0, 50_000),
)  # fmt: skip
known_rates = st.builds(lambda flops: dataclasses.replace(RATES, sixteen_bit_flops=flops), st.floats(1e12, 1e15))
rates = st.one_of(st.none(), known_rates)


@given(st.integers(1, 64), st.integers(1, 8), pairs, st.floats(0.5, 200), rates)
def test_the_batch_is_kept_exactly_and_nothing_goes_over_the_budget(each, ranks, pair, budget, rate):
    found = fit(each * ranks, either(*pair), MemoryBudget(budget, rate), ranks=ranks)
    assert found.micro_batch_size * found.accumulation_steps * ranks == each * ranks
    chosen = pair[found.checkpointing]
    assert found.predicted_peak_gb == pytest.approx(chosen.peak_gb(found.micro_batch_size))
    assert sum(found.parts.values()) == pytest.approx(found.predicted_peak_gb)
    assert found.fits == (found.predicted_peak_gb * MARGIN <= budget)
    if not found.fits:  # then nothing at all would have
        assert found.micro_batch_size == 1
        assert min(one.peak_gb(1) for one in pair) * MARGIN > budget * (1 - 1e-12)


@given(st.integers(1, 64), pairs, st.floats(0.5, 200), known_rates)
def test_no_other_choice_that_fits_is_faster_by_more_than_the_least_gain(batch, pair, gb, rates):
    budget = MemoryBudget(gb, rates)
    found = fit(batch, either(*pair), budget)
    fitting = [
        budget.seconds(model, size, batch)
        for model in pair
        for size in range(1, batch + 1)
        if batch % size == 0 and budget.fits(model, size)
    ]
    assert found.fits == bool(fitting)
    if fitting:
        assert found.predicted_seconds_per_step <= (1 + LEAST_GAIN) * min(fitting) * (1 + 1e-9)


@given(st.integers(1, 64), pairs, st.floats(0.5, 200), st.floats(1.0, 3.0), rates)
def test_more_memory_never_makes_a_step_slower(batch, pair, budget, more, rate):
    small, large = (fit(batch, either(*pair), MemoryBudget(gb, rate)) for gb in (budget, budget * more))
    assert large.fits >= small.fits
    if small.fits and rate:
        assert large.predicted_seconds_per_step <= (1 + LEAST_GAIN) * small.predicted_seconds_per_step * (1 + 1e-9)
    if small.fits and small.checkpointing == large.checkpointing:
        assert large.micro_batch_size >= small.micro_batch_size


@given(st.integers(1, 64), pairs, st.floats(0.5, 200), rates)
def test_checkpointing_only_where_it_is_faster_or_nothing_fits_without(batch, pair, budget, rate):
    budget = MemoryBudget(budget, rate)
    free, off = (fit(batch, either(*pair), budget, checkpointing=asked) for asked in (None, False))
    if free.checkpointing and off.fits:
        assert free.predicted_seconds_per_step < off.predicted_seconds_per_step
        assert "faster than" in free.settings["gradient_checkpointing"].reason
    if not free.checkpointing:
        assert free.micro_batch_size == off.micro_batch_size


@pytest.mark.parametrize(("item_gb", "checkpointed"), [(3.0, True), (9.0, False)])
def test_where_nothing_fits_the_least_memory_is_told(item_gb, checkpointed):
    found = fit(4, either(memory_model(1, 6), memory_model(1, item_gb)), MemoryBudget(2.0))
    assert (found.fits, found.micro_batch_size, found.checkpointing) == (False, 1, checkpointed)
    assert found.predicted_peak_gb == 1 + min(item_gb, 6)
    reason = "it takes less memory" if checkpointed else "nothing is predicted to be faster with it"
    assert found.settings["gradient_checkpointing"].reason == reason


@given(st.integers(1, 64), st.integers(1, 80), st.sampled_from([None, True, False]), pairs, st.floats(0.5, 200))
def test_a_wish_is_respected(batch, micro_batch, checkpointing, pair, budget):
    found = fit(batch, either(*pair), MemoryBudget(budget), micro_batch_size=micro_batch, checkpointing=checkpointing)
    assert found.micro_batch_size == min(micro_batch, batch)
    assert found.accumulation_steps == -(-batch // found.micro_batch_size)
    assert checkpointing in (None, found.checkpointing)


def test_the_largest_micro_batch_that_fits_even_if_another_is_predicted_to_be_as_fast():
    """An item is a hundredth of a second of arithmetic, and 1000 small kernels are launched in 4 ms: with 16 items at
    once, a step is predicted to take only 1.9 % longer than with 64."""
    one = memory_model(1, 0.1, flops=1e12, kernels=1000)
    for rates in (RATES, None):
        found = fit(64, lambda checkpointing: one, MemoryBudget(100, rates))
        assert (found.micro_batch_size, found.accumulation_steps) == (64, 1)
        assert found.settings["micro_batch_size"].reason == "the whole batch fits at once"
    assert fit(64, lambda checkpointing: one, MemoryBudget(5, RATES)).micro_batch_size == 32


def test_checkpointing_is_chosen_by_time():
    """Without it two items fit, which lose 20 ms of launches each time; with it all do, for a third more arithmetic."""
    plain, repeated = memory_model(1, 4, 1e12, 5000), memory_model(1, 0.1, 4 / 3 * 1e12, 6666)
    found = fit(16, either(plain, repeated), MemoryBudget(10, RATES))
    assert (found.micro_batch_size, found.checkpointing) == (16, True)
    slow, fast = 8 * (0.02 + 0.02), 6666 * 4e-6 + 16 * 4 / 3 * 0.01
    assert found.predicted_seconds_per_step == pytest.approx(fast, rel=1e-3)
    reason = f"it is predicted to be {slow / fast - 1:.0%} faster than the micro-batches that fit without it"
    assert found.settings["gradient_checkpointing"].reason == reason
    busy = memory_model(1, 4, 1e13, 5000)
    heavier = memory_model(1, 0.1, 4 / 3 * 1e13, 6666)
    assert not fit(16, either(busy, heavier), MemoryBudget(10, RATES)).checkpointing
    asked: list[bool] = []
    fit(16, lambda checkpointing: asked.append(checkpointing) or busy, MemoryBudget(10, RATES))
    assert asked == [False]  # Larger micro-batches save too little, so that the other step need not be predicted.


def test_reasons_say_what_the_next_size_would_take():
    found = fit(16, lambda checkpointing: memory_model(1, 2), MemoryBudget(10))
    setting = found.settings["micro_batch_size"]
    assert (setting.value, setting.cost) == (4, "a predicted peak of 9.0 GB")
    assert setting.reason == "8 would take 17.0 GB, more than the available 10.0 GB"
    assert found.settings["accumulation_steps"].value == 4
    near = fit(2, lambda checkpointing: memory_model(1, 4.4), MemoryBudget(10))
    assert near.settings["micro_batch_size"].reason == "2 would take 9.8 GB, too near to the available 10.0 GB"


def test_no_more_at_once_than_the_user_says():
    assert fit(64, lambda checkpointing: memory_model(1, 0.1), MemoryBudget(100), largest=16).micro_batch_size == 16


def test_the_margin_is_left_free():
    line = memory_model(1, 2)
    assert fit(16, lambda checkpointing: line, MemoryBudget(9.2)).micro_batch_size == 2
    exact = fit(16, lambda checkpointing: line, MemoryBudget(9.2, margin=1.0))
    assert (exact.micro_batch_size, exact.predicted_peak_gb) == (4, 9.0)


def test_the_line_through_one_and_two_items():
    line = MemoryModel.through({"parameters": 1.0, "activations": 2.5}, {"parameters": 1.0, "activations": 4.5}, 7e12)
    assert (line.peak_gb(1), line.peak_gb(2), line.peak_gb(8)) == (3.5, 5.5, 17.5)
    assert line.parts(8) == {"parameters": 1.0, "activations": 16.5}
    longer = MemoryModel.through({"activations": 2.5}, {"activations": 9.5}, 7e12, items=8)
    assert (longer.peak_gb(1), longer.peak_gb(5), longer.peak_gb(8)) == (2.5, 6.5, 9.5)


def test_ranks_that_cannot_share():
    with pytest.raises(UserError, match="3 ranks cannot share a batch of 16") as raised:
        fit(16, lambda checkpointing: memory_model(1, 1), MemoryBudget(10), ranks=3)
    assert raised.value.hint == "use a batch of 18"


@pytest.mark.parametrize(
    ("memory", "free", "limit", "budget"),
    [(32, 0, 0, 29.76), (32, 20, 0, 20), (32, 31, 0, 29.76), (32, 20, 16, 16), (32, 20, 24, 20)],
)
def test_budget(memory, free, limit, budget):
    assert budget_gb(memory, free, limit) == pytest.approx(budget)


@pytest.mark.parametrize(("limit", "share"), [(33, 0.9), (-1, 0.9), (0, 0.0), (0, 1.2), (0, float("nan"))])
def test_budgets_that_cannot_be(limit, share):
    with pytest.raises(UserError):
        budget_gb(32, 0, limit, share)


def test_a_model_whose_result_depends_on_the_micro_batch_gets_the_largest():
    models = {False: MemoryModel({"activations": 1.0}, {"activations": 1.0}, 1.0),
              True: MemoryModel({"activations": 1.0}, {"activations": 0.5}, 1.3)}  # fmt: skip
    budget = MemoryBudget(6.0, margin=1.0)
    plain = fit(12, models.__getitem__, budget)
    large = fit(12, models.__getitem__, budget, prefers_large=True)
    assert (plain.micro_batch_size, plain.checkpointing) == (4, False)
    assert (large.micro_batch_size, large.checkpointing) == (6, True)
    assert large.settings["gradient_checkpointing"].reason == "micro-batches of 6 fit with it, 4 without"
    assert fit(12, models.__getitem__, MemoryBudget(2.0, margin=1.0), smallest=2, checkpointing=False).fits is False
    assert fit(12, models.__getitem__, MemoryBudget(2.0, margin=1.0), smallest=2).micro_batch_size == 2


def test_the_line_may_begin_at_two_items():
    line = MemoryModel.through({"activations": 4.5}, {"activations": 8.5}, 1.0, items=4, first=2)
    assert (line.peak_gb(0), line.peak_gb(3)) == (0.5, 6.5)
