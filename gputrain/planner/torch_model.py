"""Copies of torch and transformers models for prediction and measurement."""

import copy
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from gputrain.errors import UserError, first_line

M = TypeVar("M", bound=nn.Module)
LOCKS = (type(threading.Lock()), type(threading.RLock()))

# Options of transformers models that draw random numbers in Python or choose by value. None of them makes a step
# larger, so that a prediction without them is an upper bound.
OFF = {
    "layerdrop": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
}


def on_meta(model: nn.Module) -> Any:
    """Returns a copy on the meta device, in training mode, without random choices."""
    refuse_unpredictable(model)
    return without_random_choices(copy_with(model, lambda tensor: torch.empty_like(tensor, device="meta"))).train()


def copy_with(model: M, replace: Callable[[Tensor], Tensor]) -> M:
    """Returns a copy of the model with every tensor replaced: parameters, buffers and those in plain attributes.

    Locks are shared. Raises UserError for a module that cannot be copied.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for leaf in tree_leaves(vars(module)):
            if isinstance(leaf, nn.Parameter):
                memo[id(leaf)] = nn.Parameter(replace(leaf.detach()), leaf.requires_grad)
            elif isinstance(leaf, Tensor):  # Some are recomputed in every step, as by the old weight norm.
                memo[id(leaf)] = replace(leaf.detach())
            elif isinstance(leaf, LOCKS):
                memo[id(leaf)] = leaf
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise UserError(
            f"{type(model).__name__} cannot be copied: {first_line(error)}",
            hint="keep objects that cannot be copied, and tensors in objects of your own, out of its modules",
        ) from error


def refuse_unpredictable(model: nn.Module) -> None:
    """Raises UserError for the first module whose step cannot run on fake tensors, and names it."""
    for name, module in model.named_modules():
        where = f"{name or 'the model'}, a {type(module).__name__},"
        trainable = [p for p in module.parameters(recurse=False) if p.requires_grad]
        if isinstance(module, torch.jit.ScriptModule):
            raise UserError(f"{where} is compiled by torch.jit", hint="pass the module that it was compiled from")
        if any(is_lazy(p) for p in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            raise UserError(f"{where} has weights without a shape", hint="run a batch through the model first")
        if getattr(module, "sparse", False) and isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and trainable:
            raise UserError(f"{where} gives sparse gradients, which no fused optimizer takes", hint="use sparse=False")
        if any(p.is_complex() for p in trainable):
            raise UserError(
                f"{where} has complex weights, which no fused optimizer takes",
                hint="keep them as real ones with a last axis of two, and use torch.view_as_complex",
            )


def without_random_choices(model: nn.Module) -> nn.Module:
    """Switches the options in `OFF` off in this model."""
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            for name, value in OFF.items():
                if isinstance(getattr(holder, name, None), (int, float)):
                    setattr(holder, name, value)
    return model


def can_checkpoint(model: nn.Module) -> bool:
    return hasattr(model, "gradient_checkpointing_enable") and bool(
        getattr(model, "supports_gradient_checkpointing", True)
    )


def checkpoint_blocks(model: Any) -> None:
    """Enables gradient checkpointing in a transformers model. The method's name changed in version 5.

    Raises UserError if the model has none.
    """
    if not can_checkpoint(model):
        raise UserError(
            f"{type(model).__name__} has no gradient checkpointing that can be enabled",
            hint="build the model with its own checkpointing on, and leave checkpointing out here",
        )
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
