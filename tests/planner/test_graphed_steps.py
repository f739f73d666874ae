"""The plan of steps that are launched as CUDA graphs."""

from gputrain.engine.schedule import Schedule
from gputrain.hw.plan import Hardware, decide
from gputrain.planner.memory.fit import MARGIN, MemoryBudget, MemoryModel
from gputrain.planner.model_planner import plan_step
from tests.hw.test_plan import machine


def planned(budget_gb: float, micro_batch: int = 0, batch: int = 8, **requested):
    """Weights take 2 GB, gradients 1 GB, and each item 1 GB."""
    fixed = {"parameters": 2.0, "gradients": 1.0, "activations": 0.0}
    model = MemoryModel(fixed, {"parameters": 0.0, "gradients": 0.0, "activations": 1.0}, 1e12)
    plan = decide(machine("H100"), Hardware(**{"use_cuda_graphs": True, **requested}))
    schedule = Schedule(batch_size=batch, micro_batch_size=micro_batch)
    return plan_step(plan, MemoryBudget(budget_gb), schedule, lambda _: model, False)


def test_graphs_are_planned_where_a_second_step_fits():
    """Beside 11 GB of a step stand 9 of another one, without the weights."""
    plan, _ = planned(11 * MARGIN + 9 + 0.01)
    assert plan.cuda_graphs.value is True
    plan, found = planned(11 * MARGIN + 9 - 0.01)
    assert plan.cuda_graphs.value is False
    assert plan.cuda_graphs.reason == "asked for, but beside the step, up to 9.0 GB for its graphs do not fit"
    assert found.micro_batch_size == 8
    assert planned(1e3, use_cuda_graphs=False)[0].cuda_graphs.value is False


def test_graphs_hold_few_micro_batches():
    assert planned(1e3, micro_batch=1, batch=16)[0].cuda_graphs.value is True
    plan, _ = planned(1e3, micro_batch=1, batch=17)
    assert plan.cuda_graphs.value is False
    assert plan.cuda_graphs.reason == "asked for, but a graph of 17 micro-batches would have too many kernels"
