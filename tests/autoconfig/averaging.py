"""What two processes of `create_optimal_config` exchange in a group that another library has connected."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gputrain.autoconfig.recovery import average_over_processes, check_agreement
from gputrain.engine.distributed import RankGroup
from gputrain.errors import UserError
from tests.autoconfig.two_gpus import configuration


class TwoBranches(nn.Module):
    """Two layers, of which a process may use one, a layer that none uses, and a count."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2, bias=False).double(), nn.Linear(2, 2, bias=False)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("count", torch.tensor(7 - rank))
        self.first.weight.grad = torch.full((2, 3), 1.0 + 2 * rank).double()
        if rank:
            self.second.weight.grad = torch.full((2, 2), 3.0)


def exchanged(rank: int) -> dict[str, Any]:
    """Returns the gradients of a model that two processes have averaged, and why plans that differ are refused."""
    model, refused = TwoBranches(rank), ""
    with RankGroup.of_connected(2) as group:
        average_over_processes(group, model)
        check_agreement(group, configuration(2))
        try:
            check_agreement(group, replace(configuration(2), max_duration_seconds=1.0 + rank))
        except UserError as error:
            refused = error.message
    assert torch.distributed.is_initialized()  # The connection of the other library is still open.
    found = {"first": model.first.weight.grad, "second": model.second.weight.grad, "count": model.count}
    return {**found, "unused": model.unused.weight.grad, "refused": refused}
