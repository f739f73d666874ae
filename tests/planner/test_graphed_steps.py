"""The plan and the predicted time of steps that are launched as CUDA graphs."""

from dataclasses import replace

import pytest

from gputrain.engine.schedule import Schedule
from gputrain.hw.plan import Hardware, decide
from gputrain.planner.microbatch import MARGIN, MemoryBudget, MemoryModel
from gputrain.planner.model_planner import plan_step
from gputrain.planner.roofline import GRAPH_NODE_BYTES, DeviceRates, GraphCost, KernelCost, StepCost, by_operator
from gputrain.planner.step_memory import predict_step
from gputrain.tts.recipe import plan_target
from gputrain.vocoder.plan import SPEC
from tests.hw.test_plan import machine
from tests.planner.step_counts import of_vocoder, plan_of
from tests.tts.test_recipe import CLIP, settings_of, shape
from tests.vocoder.conftest import TINY

RATES = DeviceRates(1e14, 1e13, 1e12, multiprocessors=100, launch_seconds=4e-6, least_seconds=2e-6)
SHORT = KernelCost("mul", 1000, 1e6, 0.0, 0.0, 1.0, False)  # Its launches take 2 ms of a GPU and 4 ms of a processor.
REPLAYED = replace(SHORT, graph="step")
COST = StepCost((REPLAYED,), (REPLAYED,), 8, (SHORT, REPLAYED))


def test_a_replayed_kernel_takes_its_own_time():
    """Four parts and two updates of 1000 kernels, of which one update is launched by the processor alone."""
    alone, replayed = (COST.seconds(RATES, 8, 4, graphs=graphs) for graphs in (False, True))
    assert alone == pytest.approx(6 * 4e-3, rel=1e-3)
    assert replayed == pytest.approx(4e-3 + 5 * 2e-3, rel=2e-3)
    large = KernelCost("mm", 1, 0.0, 1e12, 0.0, 1.0, True, graph="step")
    cost = StepCost((large,), (large,), 8)
    assert cost.seconds(RATES, 8, 1, graphs=True) == pytest.approx(cost.seconds(RATES, 8, 1), rel=1e-3)
    assert COST.graph_gb(8, 4) == pytest.approx(5000 * GRAPH_NODE_BYTES / 1e9)


TWO_THOUSAND = StepCost((REPLAYED,), (REPLAYED,), 8, (REPLAYED,))


def planned(budget_gb: float, micro_batch: int = 0, batch: int = 8, cost: StepCost = TWO_THOUSAND, **wishes):
    """Each item takes 1 GB; a graph of 2000 kernels takes 0.13 GB."""
    model = MemoryModel({"a": 1.0}, {"a": 1.0}, 1e12, cost)
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


def test_whoever_asks_for_graphs_gets_them_and_nobody_else():
    """One product of 10 ms takes as long with graphs as without; the launches of short kernels take twice as long."""
    for kernel, seconds in ((KernelCost("mm", 1, 0.0, 1e12, 0.0, 1.0, True), 0.01), (SHORT, 4e-3)):
        held = replace(kernel, graph="step")
        for wish in (False, True):
            plan, found = planned(1e3, cost=StepCost((held,), (held,), 8), use_cuda_graphs=wish)
            assert plan.cuda_graphs.value is wish
            expected = 2e-3 if wish and kernel is SHORT else seconds
            assert found.predicted_seconds_per_step == pytest.approx(expected, rel=2e-3)


def test_graphs_hold_few_micro_batches():
    assert planned(1e3, micro_batch=1, batch=16)[0].cuda_graphs.value is True
    plan, found = planned(1e3, micro_batch=1, batch=17)
    assert plan.cuda_graphs.value is False
    assert plan.cuda_graphs.reason == "asked for, but a graph of 17 micro-batches would have too many kernels"
    assert found.predicted_seconds_per_step == pytest.approx(18 * 4e-3, rel=1e-3)


def test_of_the_update_muons_matrices_alone_can_be_a_graph():
    """A step copies its batch (seven tensors at least), and launches a graph of gradients and one for each Muon."""
    muon = {"generator_optimizer": "muon", "discriminator_optimizer": "adamw"}
    options = {name: value for name, value in TINY.items() if name not in ("plan", "device", "log_freq", "num_workers")}
    settings, spec = of_vocoder(**{**options, "discriminators": "fast_mpd", **muon})
    found = predict_step(spec.target(settings), plan_of(settings, spec), micro_batch_size=2)
    assert spec is SPEC
    assert {kernel.graph for kernel in found.micro_batch} == {"step"}
    assert {"baddbmm", "bmm"} & {kernel.name for kernel in found.update if kernel.graph}
    assert not {"baddbmm", "bmm"} & {kernel.name for kernel in found.update if not kernel.graph}
    assert 7 + 2 + 4 <= found.graph.step_launches <= 12 + 2 + 4
    assert (found.graph.part_launches, found.graph.part_gb) == (0, 0.0)


PART = replace(SHORT, graph="part")


def test_a_graph_of_a_part_holds_one_micro_batch():
    """Its kernels are those of a single micro-batch, however many there are, and its memory grows with the items."""
    cost = StepCost((SHORT, PART), (SHORT, PART), 8, (SHORT,), GraphCost(0, 5, 0.1), GraphCost(0, 5, 0.8))
    assert cost.graph_gb(8, 4) == pytest.approx(1000 * GRAPH_NODE_BYTES / 1e9 + 0.8)
    assert cost.graph_gb(4, 4) == pytest.approx(1000 * GRAPH_NODE_BYTES / 1e9 + 0.4)
    assert cost.can_be_graphed(1000)
    assert not COST.can_be_graphed(1000)
    assert (cost.host_launches(8, 4), cost.totals(8, 4).kernels) == (4 * 1000 + 1000 + 4 * 5, 9000)
    rows = by_operator((*cost.many, *cost.update), RATES, graphs=True)
    assert [(row.launches, row.graphed) for row in rows] == [(3000, 1000)]
    # The processor needs 4 ms for 1000 launches and then 1 ms for the graph's; the GPU is done with those 2 ms later.
    assert cost.seconds(RATES, 8, 1, graphs=True) == pytest.approx(6e-3 + 4e-3, rel=2e-3)


@pytest.mark.slow
def test_the_voices_segments_can_be_a_graph():
    """The decoder's and the discriminators' convolutions are in it; the layers of whole clips are not."""
    plan = decide(machine("H100"), Hardware(use_cuda_graphs=True), fixed_shapes=False, fixed_part=True)
    found = predict_step(plan_target(settings_of(batch_size=2), shape(), CLIP), plan, micro_batch_size=2)
    inside = {kernel.name for kernel in found.micro_batch if kernel.graph == "part"}
    outside = {kernel.name for kernel in found.micro_batch if not kernel.graph}
    assert {"real_pass", "made_pass", "WaveDecoder", "convolution"} <= inside
    assert {"EncoderLayer", "Coupling", "PosteriorEncoder", "transform"} <= outside
    assert not {"EncoderLayer", "Coupling", "real_pass"} & (inside & outside)
    assert {kernel.graph for kernel in found.micro_batch} == {"", "part"}
    assert not any(kernel.graph for kernel in found.update)
    # Segments, recordings, the replay, the sums, and zeros for the gradients.
    assert found.graph.step_launches == 0
    assert 4 < found.graph.part_launches < 20
    assert 0 < found.graph.part_gb < found.allocated_gb
