"""Real steps on the CPU, whose memory is compared with predictions."""

from gputrain.engine.memory_check import MeasuredPeak
from gputrain.engine.step import drop_gradients
from gputrain.planner.resident import ResidentStep, allocate_gradients, tensors_of, watched_peak


def measured_peak_gb(resident: ResidentStep, items: int) -> float:
    """Returns the peak of a micro-batch through every group, with all gradients of the group allocated before."""
    found, micro_batch = MeasuredPeak(), resident.micro_batch(items)
    for group in resident.recipe.step_groups:
        for phase in group.phases:
            allocate_gradients(phase)
        with watched_peak(found, tensors_of(resident.recipe, resident.batch)):
            resident.add_gradients(group, micro_batch)
        drop_gradients(group)
    return found.allocated_gb
