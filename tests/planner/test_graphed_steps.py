"""The plan and the predicted time of steps that are launched as CUDA graphs."""

from dataclasses import replace

import pytest

from gputrain.engine.schedule import Schedule
from gputrain.hw.plan import Hardware, decide
from gputrain.planner.memory.fit import MARGIN, MemoryBudget, MemoryModel
from gputrain.planner.memory.predict import predict_step
from gputrain.planner.model_planner import plan_step
from gputrain.planner.time.roofline import GRAPH_NODE_BYTES, DeviceRates, GraphCost, KernelCost, StepCost, by_operator
from gputrain.vocoder.work import VocoderWork
from tests.hw.test_plan import machine
from tests.planner.step_counts import of_vocoder, plan_of
from tests.vocoder.conftest import TINY

RATES = DeviceRates(1e14, 1e13, 1e12, multiprocessors=100, launch_seconds=4e-6, least_seconds=2e-6)
SHORT = KernelCost("mul", 1000, 1e6, 0.0, 0.0, 1.0, False)  # Its launches take 2 ms of a GPU and 4 ms of a processor.
REPLAYED = replace(SHORT, graphed=True)
GRAPHS = GraphCost(launches=3, batch_gb=0.001)
COST = StepCost((REPLAYED,), (REPLAYED,), 8, (SHORT,), GRAPHS)


def test_a_replayed_kernel_takes_its_own_time():
    """Four parts and an update of 1000 kernels, of which the update is launched by the processor alone."""
    alone, replayed = (COST.seconds(RATES, 8, 4, graphs=graphs) for graphs in (False, True))
    assert alone == pytest.approx(5 * 4e-3, rel=1e-3)
    assert replayed == pytest.approx(4e-3 + 4 * 2e-3, rel=2e-3)
    large = KernelCost("mm", 1, 0.0, 1e12, 0.0, 1.0, True, graphed=True)
    cost = StepCost((large,), (large,), 8)
    assert cost.seconds(RATES, 8, 1, graphs=True) == pytest.approx(cost.seconds(RATES, 8, 1), rel=1e-3)
    assert COST.graph_gb(8, 4) == pytest.approx(4000 * GRAPH_NODE_BYTES / 1e9 + 0.001)
    assert (COST.host_launches(8, 4), COST.totals(8, 4).kernels) == (1000 + 3, 5000)
    rows = by_operator((*COST.many, *COST.update), RATES, graphs=True)
    assert [(row.launches, row.graphed) for row in rows] == [(2000, 1000)]


MANY = (replace(REPLAYED, launches=2000),)
TWO_THOUSAND = StepCost(MANY, MANY, 8, graphs=GRAPHS)


def planned(budget_gb: float, micro_batch: int = 0, batch: int = 8, cost: StepCost = TWO_THOUSAND, **wishes):
    """Each item takes 1 GB; a graph of 2000 kernels takes 0.13 GB."""
    fixed, item = {"gradients": 1.0, "activations": 0.0}, {"gradients": 0.0, "activations": 1.0}
    model = MemoryModel(fixed, item, 1e12, cost)
    plan = decide(machine("H100"), Hardware(**{"use_cuda_graphs": True, **wishes}))
    schedule = Schedule(batch_size=batch, micro_batch_size=micro_batch)
    return plan_step(plan, MemoryBudget(budget_gb, RATES), schedule, lambda _: model, False)


def test_graphs_are_planned_where_they_fit():
    plan, found = planned(9 * MARGIN + 0.14)
    assert plan.cuda_graphs.value is True
    assert found.predicted_seconds_per_step == pytest.approx(4e-3, rel=2e-3)
    plan, found = planned(9 * MARGIN + 0.12)
    assert plan.cuda_graphs.value is False
    assert plan.cuda_graphs.reason == "asked for, but beside the step, up to 0.1 GB for its graphs do not fit"
    assert found.predicted_seconds_per_step == pytest.approx(8e-3, rel=1e-3)
    assert found.micro_batch_size == 8


def test_eight_shapes_take_eight_graphs_and_a_pass_beside_them():
    """Beside 9 GB of a step stand as much of another one and 1 GB of gradients that all graphs write."""
    cost = StepCost(MANY, MANY, 8, graphs=replace(GRAPHS, shapes=8))
    needed_gb = 9 * MARGIN + 8 * (2000 * GRAPH_NODE_BYTES / 1e9 + 0.001) + 9 + 1
    assert planned(needed_gb + 0.01, cost=cost)[0].cuda_graphs.value is True
    assert planned(needed_gb - 0.01, cost=cost)[0].cuda_graphs.value is False


def test_a_recipe_without_graphs_says_so():
    plan, _ = planned(1e3, cost=StepCost(MANY, MANY, 8))
    assert plan.cuda_graphs.value is False
    assert plan.cuda_graphs.reason.startswith("asked for, but no graph holds several batches")


def test_whoever_asks_for_graphs_gets_them_and_nobody_else():
    """One product of 10 ms takes as long with graphs as without; the launches of short kernels take twice as long."""
    for kernel, seconds in ((KernelCost("mm", 1, 0.0, 1e12, 0.0, 1.0, True), 0.01), (SHORT, 4e-3)):
        held = replace(kernel, graphed=True)
        for wish in (False, True):
            plan, found = planned(1e3, cost=StepCost((held,), (held,), 8, graphs=GRAPHS), use_cuda_graphs=wish)
            assert plan.cuda_graphs.value is wish
            expected = 2e-3 if wish and kernel is SHORT else seconds
            assert found.predicted_seconds_per_step == pytest.approx(expected, rel=2e-3)


def test_graphs_hold_few_micro_batches():
    assert planned(1e3, micro_batch=1, batch=16)[0].cuda_graphs.value is True
    plan, found = planned(1e3, micro_batch=1, batch=17)
    assert plan.cuda_graphs.value is False
    assert plan.cuda_graphs.reason == "asked for, but a graph of 17 micro-batches would have too many kernels"
    assert found.predicted_seconds_per_step == pytest.approx(17 * 8e-3, rel=1e-3)


def test_the_gradients_of_a_step_can_be_a_graph():
    """A step copies its batch (seven tensors at least), launches a graph and copies its sums; the update is none."""
    muon = {"generator_optimizer": "muon", "discriminator_optimizer": "adamw"}
    options = {name: value for name, value in TINY.items() if name not in ("plan", "device", "log_freq", "num_workers")}
    settings, work = of_vocoder(**{**options, "discriminators": "fast_mpd", **muon})
    found = predict_step(work.target(settings), plan_of(settings, work), micro_batch_size=2)
    assert work == VocoderWork()
    assert all(kernel.graphed for kernel in found.micro_batch)
    assert not any(kernel.graphed for kernel in found.update)
    assert 7 + 2 <= found.graphs.launches <= 12 + 2
