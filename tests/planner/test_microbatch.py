"""The pure planner: properties over any model and card, and a table of cards and workloads by arithmetic."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputrain.errors import UserError
from gputrain.hw.gpus import find_gpu
from gputrain.planner.microbatch import MARGIN, OPERATOR_SECONDS, WORTHLESS, MemoryBudget, MemoryModel, budget_gb, fit


def memory_model(fixed: float, item: float, flops: float = 1e12, kernels: int = 0):
    return MemoryModel(
        {"parameters": fixed, "activations": 0.0}, {"parameters": 0.0, "activations": item}, flops, kernels
    )


def either(plain: MemoryModel, repeated: MemoryModel):
    return lambda checkpointing: repeated if checkpointing else plain


sizes_gb = st.floats(0.01, 50)
memory_models = st.builds(memory_model, sizes_gb, sizes_gb, st.floats(1e9, 1e14), st.integers(0, 50_000))
# Checkpointing takes less for an item and works a third more.
pairs = st.builds(
    lambda plain, less: (
        plain,
        dataclasses.replace(
            plain,
            item={kind: gb * less for kind, gb in plain.item.items()},
            item_flops=plain.item_flops * 4 / 3,
            kernels=plain.kernels * 4 // 3,
        ),
    ),
    memory_models,
    st.floats(0.05, 1.0),
)
rates = st.one_of(st.none(), st.floats(1e12, 1e15))


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


@given(st.integers(1, 64), pairs, st.floats(0.5, 200), st.floats(1.0, 3.0), rates)
def test_more_memory_never_gives_a_smaller_micro_batch(batch, pair, budget, more, rate):
    small, large = (fit(batch, either(*pair), MemoryBudget(gb, rate)) for gb in (budget, budget * more))
    assert large.fits >= small.fits
    assert not small.fits or large.micro_batch_size >= small.micro_batch_size


@given(st.integers(1, 64), pairs, st.floats(0.5, 200), rates)
def test_checkpointing_only_where_it_lets_more_through(batch, pair, budget, rate):
    budget = MemoryBudget(budget, rate)
    free, off = (fit(batch, either(*pair), budget, checkpointing=asked) for asked in (None, False))
    if free.checkpointing and off.fits:
        assert free.micro_batch_size > off.micro_batch_size
    if not free.checkpointing:
        assert free.micro_batch_size == off.micro_batch_size


@given(st.integers(1, 64), st.integers(1, 80), st.sampled_from([None, True, False]), pairs, st.floats(0.5, 200))
def test_a_wish_is_respected(batch, micro_batch, checkpointing, pair, budget):
    found = fit(batch, either(*pair), MemoryBudget(budget), micro_batch_size=micro_batch, checkpointing=checkpointing)
    assert found.micro_batch_size == min(micro_batch, batch)
    assert found.accumulation_steps == -(-batch // found.micro_batch_size)
    assert checkpointing in (None, found.checkpointing)


def test_the_smallest_micro_batch_that_keeps_the_card_at_work():
    """1000 operators lose 4 ms; a hundredth of a second of arithmetic an item wants 20 items to make that 2 %."""
    one = memory_model(1, 0.1, flops=1e12, kernels=1000)
    assert OPERATOR_SECONDS == 4e-6
    assert WORTHLESS == 0.02
    found = fit(64, lambda checkpointing: one, MemoryBudget(100, flops_per_second=1e14))
    assert found.micro_batch_size == 32  # the next divisor of 64 from 20 on
    assert found.least_seconds_per_step == pytest.approx(64 * 1e12 / 1e14)
    assert "keeps the device busy" in found.settings["micro_batch_size"].reason
    assert (
        fit(64, lambda checkpointing: one, MemoryBudget(100)).micro_batch_size == 64
    )  # All items, because the rate is not known.


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


def test_a_measured_prediction_needs_no_margin():
    line = memory_model(1, 2)
    assert fit(16, lambda checkpointing: line, MemoryBudget(9.2)).micro_batch_size == 2
    measured = fit(16, lambda checkpointing: line, MemoryBudget(9.2, calibration=1.01, margin=1.0))
    assert measured.micro_batch_size == 4
    assert measured.predicted_peak_gb == pytest.approx(9.09)


def test_the_line_through_one_and_two_items():
    line = MemoryModel.through(
        {"parameters": 1.0, "activations": 2.5}, {"parameters": 1.0, "activations": 4.5}, 7e12, 9
    )
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


# Without and with checkpointing, as predicted for bf16 or fp16 on Linux, with compile for the VAE (which a T4 would go
# without): `gputrain plan train-vae --image-size 1024 --batch-size 16 --vram-gb 400 --json`, and XLS-R on
# clips of 8 s (300M) and 30 s (1B) as in docs/planning.md.
WORKLOADS = {
    "flux 1024x16": (memory_model(1.63, 7.24, 4.14e13, 1593), memory_model(1.62, 5.28, 5.24e13, 2156), 16),
    "fast 1024x16": (memory_model(0.34, 2.12, 3.30e12, 1768), memory_model(0.34, 1.45, 4.25e12, 2056), 16),
    "XLS-R 300M, 8 s x 32": (memory_model(5.64, 0.44, 9.31e11, 2515), memory_model(5.62, 0.032, 1.19e12, 3379), 32),
    "XLS-R 1B, 30 s x 32": (memory_model(17.28, 4.10, 1.10e13, 4915), memory_model(17.26, 0.25, 1.44e13, 6643), 32),
}
CARDS = (
    "t4", "l4", "a10g", "rtx3060", "rtx3090", "rtx4090", "a100-40", "a100-80", "rtx5080", "rtx5090", "h100", "b200-192"
)  # fmt: skip
# Micro-batch for each card, negative with checkpointing, 0 where nothing fits.
TABLE = {
    "flux 1024x16": (1, 1, 2, 1, 1, 2, 4, 4, 1, 2, 8, 16),
    "fast 1024x16": (4, 8, 8, 4, 8, 8, 16, 16, 4, 8, 16, 16),
    "XLS-R 300M, 8 s x 32": (16, 32, 32, 8, 32, 32, 32, 32, 16, 32, 32, 32),
    "XLS-R 1B, 30 s x 32": (0, -1, -1, 0, -1, -1, 4, 8, 0, 2, 8, 32),
}


@pytest.mark.parametrize("workload", WORKLOADS)
def test_twelve_cards(workload):
    plain, repeated, batch = WORKLOADS[workload]
    chosen = []
    for name in CARDS:
        gpu = find_gpu(name)
        rate = gpu.flops_per_second("bf16") or gpu.flops_per_second("fp16")
        found = fit(batch, either(plain, repeated), MemoryBudget(budget_gb(gpu.memory_gb), rate))
        chosen.append((-1 if found.checkpointing else 1) * found.micro_batch_size if found.fits else 0)
    assert tuple(chosen) == TABLE[workload]
