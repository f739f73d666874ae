"""Inputs for any torch model, guessed from its signature, its configuration and the data: shapes without values.

Shapes: B items, L samples of a wave, T frames, M channels of a frame, C channels, H height, W width, N tokens.
"""

import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves

from gputrain.autoconfig.dataset import SAMPLING_RATE, DatasetProfile, TensorShape, leaves
from gputrain.errors import UserError

MakeBatch = Callable[[int, float], Any]  # (items, seconds of each; 0 if items have no length) -> batch


class BatchGuess(NamedTuple):
    """A function that makes batches, or one of their inputs, and a description of these."""

    make: MakeBatch
    description: str = ""


INPUTS = {"input_values": "audio", "input_features": "audio", "pixel_values": "pictures"}  # Made of such data.


# -------------------------------------------------------------------------------------------------------- loss


def output_loss(model: Any, batch: Any) -> Tensor:
    """Returns the model's own loss if it returns one; else a scalar that is as expensive as a usual loss: the mean
    log-probability of all logits if there are any, otherwise the mean square of every output.

    A mapping is passed as keywords if the model takes these names, and a list as separate arguments. Raises UserError
    if no output has a gradient."""
    if isinstance(batch, Mapping) and Signature(model).takes(batch):
        out = model(**batch)
    else:
        out = model(*batch) if isinstance(batch, (list, tuple)) else model(batch)
    loss, logits = (
        out.get(name) if isinstance(out, Mapping) else getattr(out, name, None) for name in ("loss", "logits")
    )
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss.float().reshape(())
    if isinstance(logits, Tensor):
        return -torch.log_softmax(logits.float(), -1).mean()
    tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    found = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.requires_grad]
    if not found:
        raise UserError(f"{type(model).__name__} returns nothing that has a gradient", hint="pass loss=")
    return torch.stack([leaf.float().square().mean() for leaf in found]).sum()


# --------------------------------------------------------------------------------------------------- signature


class Signature:
    """The inputs of a model's forward by name."""

    def __init__(self, model: Any) -> None:
        """Reads the signature of a model, or of the one that a wrapper of torch or PEFT passes its inputs to."""
        model = getattr(model, "_orig_mod", model)
        model = model.module if isinstance(model, nn.DataParallel) else model
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        found = list(inspect.signature(model.forward if isinstance(model, nn.Module) else model).parameters.values())
        by_place = [each for each in found if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        by_name = [each for each in found if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        kinds = {each.kind.name for each in found}
        self.names = {each.name for each in by_name}
        self.any_name = "VAR_KEYWORD" in kinds
        self.required = [each.name for each in found if each.default is each.empty and "VAR" not in each.kind.name]
        # Tensors that can be passed without a name stand before the first argument whose default is not None.
        tensors = itertools.takewhile(lambda each: each.default in (each.empty, None), by_place)
        self.positional = sys.maxsize if "VAR_POSITIONAL" in kinds else len(list(tensors))

    def takes(self, names: Iterable[str]) -> bool:
        return self.any_name or set(names) <= self.names


# ----------------------------------------------------------------------------------------------- batches of data


def batch_guesses(model: nn.Module, profile: DatasetProfile, *, own_loss: bool = False) -> list[BatchGuess]:
    """Returns functions that make batches for the model on the meta device, the most likely one first.

    The first with which the model runs is the right one: whether it takes labels and masks is not known beforehand.
    A model of transformers gets the inputs that its configuration and its signature name, with the sizes of the
    dataset; another one gets the dataset's items. `own_loss`: the user's loss takes a whole batch of the data first.
    Short tensors of integers have the values of the largest item. Raises UserError if the data do not suit the model.
    """
    whole = _whole_items(profile) if own_loss else []
    if getattr(model, "main_input_name", None) and getattr(model, "config", None):
        return [*whole, *_of_transformer(model, profile)]
    return [*whole, *_of_data(model, profile)]


def _whole_items(profile: DatasetProfile) -> list[BatchGuess]:
    """Returns all tensors of the items, as a DataLoader collates them."""
    tree = profile.widest
    if profile.kind == "audio" or isinstance(tree, TensorShape):
        return []
    named = {name: leaf for name, leaf in tree.items() if leaf is not None} if isinstance(tree, Mapping) else tree
    return [_guess(named)]


def _guess(tree: Any, made: Mapping[str, BatchGuess] | None = None) -> BatchGuess:
    """Returns batches of the tensors of a tree, and of others that are made by name."""
    made = made or {}

    def make(items: int, seconds: float) -> Any:
        if not isinstance(tree, Mapping):
            return [_filled(leaf, items) for leaf in tree] if isinstance(tree, list) else _filled(tree, items)
        found = {name: _filled(leaf, items, mask=name.endswith("attention_mask")) for name, leaf in tree.items()}
        return {**found, **{name: made_input.make(items, seconds) for name, made_input in made.items()}}

    if isinstance(tree, TensorShape):
        return BatchGuess(make, f"tensors {tree.shape}, as the items of the dataset")
    named = tree.items() if isinstance(tree, Mapping) else [(f"input {n}", leaf) for n, leaf in enumerate(tree, 1)]
    shapes = [f"{name} {leaf.shape}" for name, leaf in named if isinstance(leaf, TensorShape)]
    of_data = f"{', '.join(shapes)}, as the items of the dataset" if shapes else ""
    of_model = ", ".join(
        f"{name}{': ' if made_input.description else ''}{made_input.description}" for name, made_input in made.items()
    )
    return BatchGuess(make, "; ".join(filter(None, (of_data, of_model))))


def _filled(leaf: Any, items: int, *, mask: bool = False) -> Any:
    """Returns a batch of a tensor: of integers with their values if they are known, else on the meta device.

    In a `mask` the first of several items is shorter by one, as items of one batch differ in length: a mask that masks
    nothing takes less memory.
    """
    if isinstance(leaf, Mapping):
        return {name: _filled(part, items) for name, part in leaf.items()}
    if not isinstance(leaf, TensorShape):
        return leaf
    dtype = getattr(torch, leaf.dtype)
    if leaf.values is None:
        return torch.empty((items, *leaf.shape), dtype=dtype, device="meta")
    with unset_fake_temporarily():  # Fake tensors have no values.
        found = torch.as_tensor(leaf.values, dtype=dtype).expand(items, *leaf.shape).clone()
        if mask and items > 1 and leaf.shape and leaf.shape[-1] > 1:
            found[0, ..., -1] = 0
        return found


def _of_data(model: nn.Module, profile: DatasetProfile) -> list[BatchGuess]:
    signature = Signature(model)
    if profile.kind == "audio":
        rate = round(profile.item_bytes / 4 / float(profile.seconds.mean()))
        wave = BatchGuess(lambda B, seconds: _meta(B, round(seconds * rate)), f"waves at {rate} Hz")
        beside = {name: leaf for name, leaf in (profile.widest or {}).items() if name in signature.names}
        missing = [name for name in signature.required if name not in beside]
        if len(missing) == 1 and beside:
            return [_guess(beside, {missing[0]: wave}), wave]
        return [wave]
    tree = profile.widest
    if isinstance(tree, Mapping):
        return _of_named_items(model, signature, {name: leaf for name, leaf in tree.items() if leaf is not None})
    if not isinstance(tree, list):
        return [_guess(tree)]
    tensors = list(itertools.takewhile(lambda leaf: leaf is not None, tree))
    least = max(1, min(len(signature.required), len(tensors)))
    most = min(signature.positional, len(tensors))
    guesses = [tensors[:most]] if most > least else []
    return [*map(_guess, guesses), _guess(tensors[0] if least == 1 else tensors[:least])]


def _of_named_items(model: nn.Module, signature: Signature, named: dict[str, Any]) -> list[BatchGuess]:
    """Returns the tensors that the model takes by name; else all of them as one argument, or the largest alone."""
    taken = {name: leaf for name, leaf in named.items() if signature.takes([name])}
    missing = [name for name in signature.required if name not in taken]
    if taken and not missing:
        return [_guess(taken)]
    if taken or len(missing) > 1:
        raise UserError(
            f"{type(model).__name__} takes {', '.join(signature.required)}, and the items of the dataset have "
            f"{', '.join(named)}",
            hint="give the items the names that forward has, or pass batch=",
        )
    largest = max(named.values(), key=lambda leaf: sum(part.bytes for part in leaves(leaf)))
    return [_guess(named), _guess(largest)]


# -------------------------------------------------------------------------------------- batches of transformers


def _of_transformer(model: Any, profile: DatasetProfile) -> list[BatchGuess]:
    """Returns batches of the tensors that the model takes by name, with those that its processor makes of sounds and
    pictures. Raises UserError if there are none."""
    signature = Signature(model)
    data = _accepted(profile.widest, signature)
    raw = [name for name, kind in INPUTS.items() if kind == profile.kind and name in signature.names]
    made = {} if not raw or data.keys() & set(raw) else {raw[0]: _made(raw[0], model, profile)}
    if not data and not made:
        raise UserError(
            f"{type(model).__name__} takes {model.main_input_name}, and the dataset contains {profile.kind}",
            hint="pass a dataset of its items (texts are tokenized before), or batch=",
        )
    if "return_loss" in signature.names:
        made["return_loss"] = BatchGuess(lambda B, seconds: True)
    most_tokens = getattr(model.config, "max_target_positions", 0)
    labelled = dict(made)
    if raw and most_tokens and "labels" in signature.names and "labels" not in data:  # The decoder needs them.
        labelled["labels"] = BatchGuess(
            lambda B, seconds: _meta(B, most_tokens, dtype=torch.long), f"{most_tokens} tokens"
        )
    guesses = [_guess(data, labelled)]
    # A model may choose by the values of masks and labels (DeBERTa), which are not kept of long ones.
    for left_out in (("mask",), ("mask", "labels"), ("labels",)):
        tree = {name: leaf for name, leaf in data.items() if not name.endswith(left_out)}
        if tree != data:
            guesses.append(_guess(tree, labelled if "labels" not in left_out else made))
    return guesses


def _accepted(tree: Any, signature: Signature) -> dict[str, Any]:
    """Returns the tensors of an item that the model takes by name; transformers' collators call label labels."""
    if not isinstance(tree, Mapping):
        return {}
    named = {"labels" if name in ("label", "label_ids") else name: leaf for name, leaf in tree.items()}
    return {name: leaf for name, leaf in named.items() if name in signature.names and isinstance(leaf, TensorShape)}


def _made(name: str, model: Any, profile: DatasetProfile) -> BatchGuess:
    """Returns what the processor of a model makes of sounds and pictures: waves at 16 kHz, log-mel of fixed length, or
    pictures of the size in the configuration, else of their own."""
    if name == "input_values":
        return BatchGuess(lambda B, seconds: _meta(B, round(seconds * SAMPLING_RATE)), "waves at 16 kHz")
    if name == "input_features":
        M, T = (_setting(model.config, each) or 0 for each in ("num_mel_bins", "max_source_positions"))
        if not M or not T:
            raise UserError(f"{name} of {type(model).__name__} cannot be guessed", hint="pass batch=")
        # Whisper's encoder halves the frames of 30 s.
        return BatchGuess(lambda B, seconds: _meta(B, M, 2 * T), f"log-mel with {M} channels, always {2 * T} frames")
    size = _setting(model.config, "image_size")
    if not size:
        pictures = [leaf for leaf in leaves(profile.widest) if len(leaf.shape) == 3]
        size = max(pictures, key=lambda leaf: leaf.bytes).shape[-2:]
    H, W = (size, size) if isinstance(size, int) else tuple(size)
    C = _setting(model.config, "num_channels") or 3
    return BatchGuess(lambda B, seconds: _meta(B, C, H, W), f"{C} x {H} x {W}")


def _setting(config: Any, name: str) -> Any:
    """Returns a setting of the part of a composite configuration that has it, else of the whole; None without one."""
    parts = [getattr(config, part, None) for part in ("vision_config", "audio_config", "encoder")]
    return next((value for part in (*parts, config) if (value := getattr(part, name, None)) is not None), None)


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
