"""Loading the weights and the optimizers of a checkpoint into modules and optimizers."""

import logging
from collections.abc import Sequence

import torch
from torch import nn

from gputrain.engine.checkpoint import Content
from gputrain.errors import UserError

log = logging.getLogger(__name__)


def load_modules(modules: dict[str, nn.Module], states: dict[str, Content], owner: str = "the checkpoint") -> None:
    """Load a checkpoint's weights. Raises UserError, which names the `owner`, if they belong to other modules."""
    for name, module in modules.items():
        mine, theirs = module.state_dict(), states.get(name)
        if theirs is None:
            raise UserError(
                f"{owner} holds no {name}",
                hint="resume with the losses and averaging that it was trained with",
            )
        odd = list(mine.keys() ^ theirs.keys())
        odd += [key for key in mine.keys() & theirs.keys() if mine[key].shape != theirs[key].shape]
        if odd:
            raise UserError(
                f"{owner}'s {name} has another architecture: {len(odd)} tensors differ, such as {min(odd)}",
                hint="resume with the preset and sizes that it was trained with; they stand in its run's config.yaml",
            )
        module.load_state_dict(theirs)


def load_optimizer(name: str, optimizer: torch.optim.Optimizer, states: dict[str, Content]) -> None:
    """Load an optimizer's state; learning rates and decays come from the present configuration, not from the
    checkpoint.

    If the algorithm has changed, the optimizer starts without state, with a warning. Raises UserError if there is no
    state, or if it belongs to other parameters.
    """
    if name not in states:
        raise UserError(
            f"the checkpoint holds no optimizer of the {name}", hint="resume with the losses it was trained with"
        )
    saved, groups = states[name], optimizer.state_dict()["param_groups"]
    before, now = _algorithm(saved["param_groups"]), _algorithm(groups)
    if before != now:
        log.warning(
            "the %s was trained with %s and continues with %s: its weights are kept, and the gradient averages "
            "of %s are lost; the first hundred steps may be unstable", name, before, now, before,
        )  # fmt: skip
        return
    if [len(group["params"]) for group in saved["param_groups"]] != [len(group["params"]) for group in groups]:
        raise UserError(f"the checkpoint's optimizer of the {name} belongs to other parameters")
    optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})
    # Fused and foreach optimizers pair the elements of a parameter and its state by their positions in memory, and
    # the saved state has the memory format (channels_last or not) of the run that saved it.
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if value.shape == parameter.shape and value.stride() != parameter.stride():
                state[key] = torch.empty_like(parameter, requires_grad=False).copy_(value)


def _algorithm(groups: Sequence[Content]) -> str:
    return "Muon" if any("orthogonal" in group for group in groups) else "AdamW"
