"""Optimizer state divided among the ranks: ZeRO, stage 1 (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054).

Every rank keeps the optimizer state of its own parameters, steps only these, and then sends them to the others. A step
is the same as without, since no optimizer here mixes parameters. Checkpoints hold the whole state, so that any number
of ranks can continue, divided or not.
"""

from dataclasses import dataclass, field

from torch import nn

from gputrain.engine.checkpoint import Content
from gputrain.engine.distributed import RankGroup
from gputrain.engine.recipe import Phase


@dataclass
class OptimizerShards:
    """Which rank steps which parameter. Without a division, all methods leave everything as it is."""

    group: RankGroup
    divides: bool = False  # True if the state is divided.
    known: dict[str, dict[nn.Parameter, int]] = field(default_factory=dict)  # Owners of the parameters, by phase.

    def owners(self, phase: Phase) -> dict[nn.Parameter, int]:
        """Returns the rank of every parameter of a phase, in the optimizer's order; ranks own about equal sizes."""
        if phase.name not in self.known:
            sizes, owners = [0] * self.group.ranks.count, {}
            for parameter in (p for group in phase.optimizer.param_groups for p in group["params"]):
                owners[parameter] = sizes.index(min(sizes))
                sizes[owners[parameter]] += parameter.numel()
            self.known[phase.name] = owners
        return self.known[phase.name]

    def keep_own_gradients(self, phase: Phase) -> None:
        """Drops the gradients of parameters that other ranks step: optimizers skip parameters without a gradient."""
        if self.divides:
            for parameter, owner in self.owners(phase).items():
                if owner != self.group.ranks.index:
                    parameter.grad = None

    def exchange_weights(self, phase: Phase) -> None:
        """Copies every parameter from the rank that has stepped it to all others."""
        if self.divides:
            for rank in range(self.group.ranks.count):
                mine = [parameter for parameter, owner in self.owners(phase).items() if owner == rank]
                self.group.make_equal(mine, source=rank)

    def own_part(self, phase: Phase, saved: Content) -> Content:
        """Returns a checkpoint's optimizer state with this rank's parameters only."""
        if not self.divides:
            return saved
        owners = list(self.owners(phase).values())
        own = {index: state for index, state in saved["state"].items() if owners[index] == self.group.ranks.index}
        return {**saved, "state": own}

    def whole_state(self, phase: Phase) -> Content:
        """Returns the whole state of an optimizer on the leader, and this rank's part elsewhere. All ranks call it."""
        own: Content = phase.optimizer.state_dict()
        if not self.divides:
            return own
        parts = self.group.to_leader(own["state"])
        return {**own, "state": dict(sorted(pair for part in parts for pair in part.items()))}
