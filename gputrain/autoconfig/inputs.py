"""Inputs for any torch model, guessed from its signature, its configuration and the data: shapes without values.

Shapes: B items, L samples of a wave, T frames, M channels of a frame, C channels, H height, W width, N tokens.
"""

import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from gputrain.autoconfig.dataset import SAMPLING_RATE, DatasetProfile, TensorShape, leaves
from gputrain.errors import UserError

MakeBatch = Callable[[int, float], Any]  # (items, seconds of each; 0 if items have no length) -> batch


class BatchGuess(NamedTuple):
    """A function that makes batches, and a description of them."""

    make: MakeBatch
    description: str


TOKENS = 512  # Length of a text, if neither the data nor the model determines it.
FRAMES_PER_SECOND = 100  # Frame rate of a log-mel spectrogram with a hop of 10 ms, as in speech models.
# Parts of a composite configuration, in which a setting of a kind of input is looked up before the whole.
OF_TEXT, OF_PICTURES, OF_SOUND = ("text_config",), ("vision_config", "encoder"), ("audio_config", "encoder")
OF_DECODER = ("decoder", "text_config")
INPUTS = {  # Name of an input: the kind of data that it is made of, and the part of a composite model that takes it.
    "input_ids": ("tensors", "text_config"),
    "pixel_values": ("pictures", "vision_config"),
    "input_values": ("audio", "audio_config"),
    "input_features": ("audio", "audio_config"),
}


# -------------------------------------------------------------------------------------------------------- loss


def output_loss(model: Any, batch: Any) -> Tensor:
    """Returns the model's own loss if it returns one; else a scalar that is as expensive as a usual loss: the mean
    log-probability of all logits if there are any, otherwise the mean square of every output.

    A mapping is passed as keywords if the model takes these names, and a list as separate arguments. Raises UserError
    if no output has a gradient."""
    if isinstance(batch, Mapping) and Signature.of(model).takes(batch):
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
    found = [leaf for leaf in _tensors(out) if leaf.is_floating_point() and leaf.requires_grad]
    if not found:
        raise UserError(f"{type(model).__name__} returns nothing that has a gradient", hint="pass loss=")
    return torch.stack([leaf.float().square().mean() for leaf in found]).sum()


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    inside = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, (list, tuple)) else ()
    return [tensor for part in inside for tensor in _tensors(part)]


# --------------------------------------------------------------------------------------------------- signature


@dataclass(frozen=True)
class Signature:
    """The inputs of a model's forward by name."""

    names: tuple[str, ...]  # All that can be passed by name.
    required: tuple[str, ...]  # Those without a default.
    positional: int  # Arguments that can be passed without a name, up to the first whose default is not None.
    any_name: bool

    @classmethod
    def of(cls, model: Any) -> "Signature":
        """Returns the signature of a model, or of the one that a wrapper of torch or PEFT passes its inputs to."""
        model = getattr(model, "_orig_mod", model)
        model = model.module if isinstance(model, nn.DataParallel) else model
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        found = list(inspect.signature(model.forward if isinstance(model, nn.Module) else model).parameters.values())
        plain = [
            parameter
            for parameter in found
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        data = itertools.takewhile(lambda parameter: parameter.default in (parameter.empty, None), plain)
        several = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in found)
        return cls(
            tuple(
                parameter.name
                for parameter in found
                if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            ),
            tuple(
                parameter.name
                for parameter in found
                if parameter.default is parameter.empty and "VAR" not in parameter.kind.name
            ),
            sys.maxsize if several else len(list(data)),
            any(parameter.kind is parameter.VAR_KEYWORD for parameter in found),
        )

    def takes(self, names: Iterable[str]) -> bool:
        return self.any_name or set(names) <= set(self.names)


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


def _guess(tree: Any, made: Mapping[str, "Made"] | None = None) -> BatchGuess:
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
        f"{name}{': ' if made_input.text else ''}{made_input.text}" for name, made_input in made.items()
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
    signature = Signature.of(model)
    if profile.kind == "audio":
        rate = round(profile.item_bytes / 4 / float(profile.seconds.mean()))
        wave = Made(lambda B, seconds: _floats(B, round(seconds * rate)), f"waves at {rate} Hz")
        beside = {name: leaf for name, leaf in (profile.widest or {}).items() if name in signature.names}
        missing = [name for name in signature.required if name not in beside]
        if len(missing) == 1 and beside:
            return [_guess(beside, {missing[0]: wave}), BatchGuess(wave.make, wave.text)]
        return [BatchGuess(wave.make, wave.text)]
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
    others = sorted(set(named) - set(taken), key=lambda name: -sum(leaf.bytes for leaf in leaves(named[name])))
    if taken and not missing:
        return [_guess(taken)]
    if len(missing) > 1 or (missing and not others):
        raise UserError(
            f"{type(model).__name__} takes {', '.join(signature.required)}, and the items of the dataset have "
            f"{', '.join(named)}",
            hint="give the items the names that forward has, or pass batch=",
        )
    if taken:
        return [_guess({**taken, missing[0]: named[others[0]]})]
    return [_guess(named), _guess(named[others[0]])]


# -------------------------------------------------------------------------------------- batches of transformers


class Made(NamedTuple):
    """An input that the dataset does not have by name, made of the model's configuration."""

    make: Callable[[int, float], Any]
    text: str = ""


def _of_transformer(model: Any, profile: DatasetProfile) -> list[BatchGuess]:
    signature, config = Signature.of(model), model.config
    trees = [profile.widest, *([profile.largest] if profile.largest != profile.widest else [])]
    found = []
    for tree in trees:
        data = _accepted(tree, signature)
        made = _missing_inputs(model, config, signature, data, profile)
        if "return_loss" in signature.names:
            made["return_loss"] = Made(lambda B, seconds: True)
        wanted = _targets(config, signature, data)
        unmasked = {name: leaf for name, leaf in data.items() if not name.endswith("mask")}
        found += [_guess(data, {**made, **wanted})]
        found += [_guess(unmasked, {**made, **wanted})] if unmasked != data else []
        decoder = _decoder_inputs(config, signature, data)
        # A model may choose by the values of labels (DeBERTa), or make a mask of its own by those of the inputs.
        for inputs in [unmasked, *([data] if unmasked != data else [])]:
            unlabelled = {name: leaf for name, leaf in inputs.items() if name != "labels"}
            if decoder or unlabelled != inputs:
                found.append(_guess(unlabelled, {**made, **decoder}))
    return found


def _accepted(tree: Any, signature: Signature) -> dict[str, Any]:
    """Returns the tensors of an item that the model takes by name; transformers' collators call label labels."""
    if not isinstance(tree, Mapping):
        return {}
    named = {"labels" if name in ("label", "label_ids") else name: leaf for name, leaf in tree.items()}
    return {name: leaf for name, leaf in named.items() if name in signature.names and isinstance(leaf, TensorShape)}


def _missing_inputs(
    model: Any, config: Any, signature: Signature, data: dict[str, Any], profile: DatasetProfile
) -> dict[str, Made]:
    """Returns the inputs that the model needs and the dataset does not have by name.

    Raises UserError if they are of another kind than the data, or cannot be made.
    """
    present = [name for name in data if name in INPUTS]
    raw = [name for name in INPUTS if name in signature.names and INPUTS[name][0] == profile.kind and name not in data]
    if profile.kind == "audio" and len(raw) > 1:
        raw = raw[:1] if _setting(config, "conv_dim", OF_SOUND) else raw[1:]
    main = model.main_input_name
    kinds = {INPUTS[name][0] for name in present}
    needed: list[str] = []
    if not present and main not in data:
        needed = [main] if main in INPUTS or not raw else raw[:1]
        for part in ("text_config", "vision_config", "audio_config"):
            needed += [n for n in INPUTS if hasattr(config, part) and INPUTS[n][1] == part and n in signature.names][:1]
        needed += [name for name in signature.required if name in INPUTS]
    elif present and profile.kind not in kinds and profile.kind != "tensors":
        needed = raw[:1]
    needed = list(dict.fromkeys(needed))
    if any(name not in MAKERS for name in needed):
        raise UserError(f"{type(model).__name__}: {', '.join(needed)} cannot be guessed", hint="pass batch=")
    if needed and profile.kind not in {INPUTS[name][0] for name in needed}:
        raise UserError(
            f"{type(model).__name__} takes {' and '.join(needed)}, and the dataset contains {profile.kind}",
            hint="pass a dataset of its items, or batch=",
        )
    return {name: MAKERS[name](config, profile) for name in needed}


def _targets(config: Any, signature: Signature, data: dict[str, Any]) -> dict[str, Made]:
    """Returns the labels of a model with a decoder, if the dataset has none; the decoder's inputs are made of them."""
    if {"labels", "decoder_input_ids"} & set(data) or "labels" not in signature.names:
        return {}
    decoder = list(_decoder_inputs(config, signature, data).values())
    return {"labels": decoder[0]} if decoder else {}


def _decoder_inputs(config: Any, signature: Signature, data: dict[str, Any]) -> dict[str, Made]:
    if not getattr(config, "is_encoder_decoder", False):
        return {}
    labels = data.get("labels")
    if "decoder_input_ids" not in signature.names:
        return {}
    source = data.get("input_ids")
    N = labels.shape[0] if labels and len(labels.shape) == 1 else 0
    N = N or _setting(config, "max_target_positions", OF_DECODER) or _setting(config, "max_text_positions", ())
    N = N or (source.shape[-1] if source else min(_positions(config, OF_DECODER), TOKENS))
    return {"decoder_input_ids": Made(lambda B, seconds: _ids(B, int(N)), f"{N} tokens")}


def _setting(config: Any, name: str, parts: tuple[str, ...]) -> Any:
    """Returns a setting of a part of the configuration that has it, else of the whole; None if there is none."""
    holders = [*(getattr(config, part, None) for part in parts), config]
    return next((value for holder in holders if (value := getattr(holder, name, None)) is not None), None)


def _positions(config: Any, parts: tuple[str, ...]) -> int:
    names = ("max_decoder_position_embeddings", "max_position_embeddings", "n_positions")
    found = [_setting(config, name, parts) for name in names]
    return int(next(filter(None, found), TOKENS))


def _tokens(config: Any, profile: DatasetProfile) -> Made:
    N = min(_positions(config, OF_TEXT), TOKENS)
    return Made(lambda B, seconds: _ids(B, N), f"{N} tokens")


def _pixels(config: Any, profile: DatasetProfile) -> Made:
    size = _setting(config, "image_size", OF_PICTURES)
    if not size:
        pictures = [leaf for leaf in leaves(profile.largest) if len(leaf.shape) == 3]
        size = max(pictures, key=lambda leaf: leaf.bytes).shape[-2:]
    H, W = (size, size) if isinstance(size, int) else tuple(size)
    C = _setting(config, "num_channels", OF_PICTURES) or 3
    return Made(lambda B, seconds: _floats(B, C, H, W), f"{C} x {H} x {W}")


def _wave(config: Any, profile: DatasetProfile) -> Made:
    M, T = _setting(config, "num_mel_bins", OF_SOUND), _setting(config, "max_length", OF_SOUND)
    if M and T and not _setting(config, "conv_dim", OF_SOUND):  # Spectrograms under the same name.
        return Made(lambda B, seconds: _floats(B, T, M), f"log-mel with {M} channels, always {T} frames")
    return Made(lambda B, seconds: _floats(B, round(seconds * SAMPLING_RATE)), "waves at 16 kHz")


def _features(config: Any, profile: DatasetProfile) -> Made:
    """Makes log-mel frames; a model of fixed length (30 s for Whisper) gets all of them."""
    part = getattr(config, "audio_config", None) or getattr(config, "encoder", None) or config
    whole_T = 2 * getattr(part, "max_source_positions", 0) if hasattr(part, "num_mel_bins") else 0
    wide_M = getattr(part, "feature_projection_input_dim", 0)  # Channels of two stacked frames.
    M = getattr(part, "num_mel_bins", 0) or wide_M
    M = M or getattr(part, "input_feat_per_channel", 0) * getattr(part, "input_channels", 1)
    if not M:
        raise UserError("input_features of this model cannot be guessed", hint="pass batch=")
    rate = FRAMES_PER_SECOND // 2 if wide_M else FRAMES_PER_SECOND

    def make(B: int, seconds: float) -> Tensor:
        return _floats(B, M, whole_T) if whole_T else _floats(B, round(seconds * rate), M)

    return Made(make, f"log-mel with {M} channels" + (f", always {whole_T} frames" if whole_T else ""))


MAKERS: dict[str, Callable[[Any, DatasetProfile], Made]] = {
    "input_ids": _tokens,
    "pixel_values": _pixels,
    "input_values": _wave,
    "input_features": _features,
}


def _floats(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def _ids(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.long, device="meta")
