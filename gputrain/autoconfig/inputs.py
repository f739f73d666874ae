"""Inputs for any torch model, guessed from its configuration and the data: shapes without values.

Shapes: B items, L samples of a wave, T frames, M channels of a frame, C channels, H height, W width, N tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gputrain.autoconfig.dataset import SAMPLING_RATE, DatasetProfile, TensorShape
from gputrain.errors import UserError

MakeBatch = Callable[[int, float], Any]  # (items, seconds of each; 0 if items have no length) -> batch


TOKENS = 512  # Length of a text, if the data does not determine it.
FRAMES_PER_SECOND = 100  # Frame rate of a log-mel spectrogram with a hop of 10 ms, as in speech models.


@dataclass(frozen=True)
class ModelProfile:
    """The weights of a model, and the memory of the weights, their gradients and the optimizer, in GB."""

    name: str
    parameters: int
    trainable: int
    weights_gb: float
    gradients_gb: float
    optimizer_gb: float
    predicted_gb: dict[str, float]  # Peak of a training step by its batch, such as "1 item of 8.0 s".


def profile_weights(model: nn.Module, moments: int = 2, predicted_gb: dict[str, float] | None = None) -> ModelProfile:
    """Returns the profile of a model. `moments`: tensors that the optimizer keeps for each trainable one."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    trainable_gb = sum(p.numel() * p.element_size() for p in trainable) / 1e9
    return ModelProfile(
        name=type(model).__name__,
        parameters=sum(p.numel() for p in model.parameters()),
        trainable=sum(p.numel() for p in trainable),
        weights_gb=sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())) / 1e9,
        gradients_gb=trainable_gb,
        optimizer_gb=moments * trainable_gb,
        predicted_gb=predicted_gb or {},
    )


# -------------------------------------------------------------------------------------------------------- loss


def output_loss(model: Any, batch: Any) -> Tensor:
    """Returns a scalar that is as expensive as a usual loss: the mean log-probability of all logits if there are any,
    otherwise the mean square of every output. Raises UserError if no output has a gradient."""
    out = model(**batch) if isinstance(batch, Mapping) else model(batch)
    logits = out.get("logits") if isinstance(out, Mapping) else getattr(out, "logits", None)
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


# ------------------------------------------------------------------------------------------------------- batch


def batch_maker(model: nn.Module, profile: DatasetProfile) -> tuple[MakeBatch, str]:
    """Returns a function that makes a batch for the model on the meta device, and a description of the batch.

    A model of transformers names its main input; another one gets the dataset's items. There are no masks, because
    models choose by their values. Raises UserError if neither determines the batch.
    """
    name = getattr(model, "main_input_name", None)
    config = getattr(model, "config", None)
    if name is None or config is None:
        return _of_data(profile)
    tree = profile.largest
    if isinstance(tree, Mapping) and isinstance(tree.get(name), TensorShape):
        leaf = tree[name]
        return lambda items, seconds: {name: _empty(leaf, items)}, f"{name} {leaf.shape}, as the items of the dataset"
    maker = {
        "input_values": _wave, "input_features": _features, "pixel_values": _pixels, "input_ids": _tokens,
    }.get(name)  # fmt: skip
    if maker is None:
        raise UserError(f"{type(model).__name__}: {name} cannot be guessed", hint="pass batch=")
    needed = {"pixel_values": "pictures", "input_ids": "tensors"}.get(name, "audio")
    if profile.kind != needed:
        raise UserError(
            f"{type(model).__name__} takes {name}, and the dataset contains {profile.kind}",
            hint="pass a dataset of its items, or batch=",
        )
    return maker(config, profile)


def _of_data(profile: DatasetProfile) -> tuple[MakeBatch, str]:
    if profile.kind == "audio":
        rate = round(profile.item_bytes / 4 / float(profile.seconds.mean()))
        return lambda B, seconds: _floats(B, round(seconds * rate)), f"waves at {rate} Hz"
    tree = profile.largest
    first = tree[0] if isinstance(tree, list) else tree
    if isinstance(first, TensorShape):
        return lambda items, seconds: _empty(first, items), f"tensors {first.shape}, as the items of the dataset"
    leaves = {name: leaf for name, leaf in first.items() if isinstance(leaf, TensorShape)}
    shapes = ", ".join(f"{name} {leaf.shape}" for name, leaf in leaves.items())
    return lambda items, seconds: {name: _empty(leaf, items) for name, leaf in leaves.items()}, shapes


def _wave(config: Any, profile: DatasetProfile) -> tuple[MakeBatch, str]:
    def make(B: int, seconds: float) -> Any:
        return {"input_values": _floats(B, round(seconds * SAMPLING_RATE))}

    return make, "input_values, waves at 16 kHz"


def _features(config: Any, profile: DatasetProfile) -> tuple[MakeBatch, str]:
    """Makes log-mel frames; a model of fixed length (30 s for Whisper) gets all of them."""
    whole_T = 2 * getattr(config, "max_source_positions", 0) if hasattr(config, "num_mel_bins") else 0
    wide_M = getattr(config, "feature_projection_input_dim", 0)  # Channels of two stacked frames.
    M = getattr(config, "num_mel_bins", 0) or wide_M
    M = M or getattr(config, "input_feat_per_channel", 0) * getattr(config, "input_channels", 1)
    if not M:
        raise UserError("input_features of this model cannot be guessed", hint="pass batch=")
    rate = FRAMES_PER_SECOND // 2 if wide_M else FRAMES_PER_SECOND

    def make(B: int, seconds: float) -> Any:
        frames = (M, whole_T) if whole_T else (round(seconds * rate), M)
        return {"input_features": _floats(B, *frames), **_decoder(config, B)}

    return make, f"input_features, log-mel with {M} channels" + (f", always {whole_T} frames" if whole_T else "")


def _decoder(config: Any, B: int) -> dict[str, Tensor]:
    if not getattr(config, "is_encoder_decoder", False):
        return {}
    return {"decoder_input_ids": _ids(B, int(getattr(config, "max_target_positions", TOKENS)))}


def _pixels(config: Any, profile: DatasetProfile) -> tuple[MakeBatch, str]:
    size = getattr(config, "image_size", None) or profile.largest.shape[-2:]
    H, W = (size, size) if isinstance(size, int) else tuple(size)
    C = getattr(config, "num_channels", 3)
    return lambda B, seconds: {"pixel_values": _floats(B, C, H, W)}, f"pixel_values, {C} x {H} x {W}"


def _tokens(config: Any, profile: DatasetProfile) -> tuple[MakeBatch, str]:
    N = min(int(getattr(config, "max_position_embeddings", TOKENS)), TOKENS)
    return lambda B, seconds: {"input_ids": _ids(B, N), **_decoder(config, B)}, f"input_ids, {N} tokens"


def _floats(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def _ids(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.long, device="meta")


def _empty(leaf: TensorShape, items: int) -> Tensor:
    return torch.empty((items, *leaf.shape), dtype=getattr(torch, leaf.dtype), device="meta")
