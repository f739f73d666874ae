"""The recogniser: transformers' Wav2Vec2ForCTC, whose forward pass is run layer by layer as a training step needs it.

The arithmetic is that of transformers. Differences are in what is computed at all and when: masked and dropped parts
are given by the caller, the feature encoder keeps no graph unless it trains, padding is set to zero without a device
sync, no attention mask is made for clips of equal length, on a CPU the convolutions have channels last, and the weight
of the positional convolution is computed once for all micro-batches of a step.

Shapes: B clips, L samples, T frames, C channels, V symbols.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gputrain.speech.config import FIELD, STRIDE

NORMALIZING_EPSILON = 1e-7  # As in transformers' Wav2Vec2FeatureExtractor.


@dataclass(frozen=True)
class ForwardOptions:
    """Options of a forward pass: what it leaves out, masks, and keeps for the backward pass."""

    mask_BT: Tensor | None = None  # Frames that are replaced by the model's mask vector.
    dropped_layers: frozenset[int] = frozenset()
    checkpoints: bool = False  # True: layers are recomputed in the backward pass.
    trains_features: bool = False  # True: the feature encoder is part of the graph.
    trains_encoder: bool = True  # False: only the head is part of the graph.


EVERYTHING = ForwardOptions()


def build_recogniser(architecture: Mapping[str, Any]) -> Any:
    """Returns a recogniser with random weights, in training mode. `architecture` has the fields of transformers'
    configuration."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(**{**architecture, "attn_implementation": "sdpa"})
    with quiet_transformers():
        return Wav2Vec2ForCTC(config).train()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Has transformers log errors only in the block, and draw no progress bars."""
    from transformers.utils import logging

    before, draws = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if draws:
            logging.enable_progress_bar()


def uses_attention_mask(model: Any) -> bool:
    """Returns True if padding may be masked. Models with feat_extract_norm "group" normalise the first layer over the
    time of a clip, padding included, and were trained without a mask."""
    return bool(model.config.feat_extract_norm == "layer")


def frame_counts(samples: Tensor) -> Tensor:
    """Returns the frames of clips with so many samples, elementwise."""
    return (samples - FIELD) // STRIDE + 1


def cropped(wave_BL: Tensor, frames: int) -> Tensor:
    """Returns the samples of waves that make so many frames."""
    return wave_BL[:, : (frames - 1) * STRIDE + FIELD]


def normalized(wave_BL: Tensor, samples_B: Tensor) -> Tensor:
    """Returns waves of zero mean and unit variance over the samples of each clip, and zero beyond its end."""
    inside_BL = torch.arange(wave_BL.shape[1], device=wave_BL.device) < samples_B[:, None]
    count_B1 = samples_B[:, None].to(wave_BL.dtype)
    centred_BL = (wave_BL - (wave_BL * inside_BL).sum(1, keepdim=True) / count_B1) * inside_BL
    variance_B1 = centred_BL.square().sum(1, keepdim=True) / count_B1
    return centred_BL / (variance_B1 + NORMALIZING_EPSILON).sqrt()


def logits(model: Any, wave_BL: Tensor, frames_B: Tensor | None, options: ForwardOptions = EVERYTHING) -> Tensor:
    """Returns the logits (B, T, V). `frames_B` are the frames of each clip if some are padded, otherwise None."""
    with nullcontext() if options.trains_encoder else torch.no_grad():
        hidden_BTC = encode(model, wave_BL, frames_B, options)
    made: Tensor = model.lm_head(model.dropout(hidden_BTC))
    return made


def encode(model: Any, wave_BL: Tensor, frames_B: Tensor | None, options: ForwardOptions) -> Tensor:
    """Returns what the head reads, (B, T, C)."""
    encoder, is_stable = model.wav2vec2.encoder, model.config.do_stable_layer_norm
    hidden_BTC = _projected(model.wav2vec2, wave_BL, options)
    mask_B11T = None
    if options.mask_BT is not None:
        masked = options.mask_BT[:, :, None]
        hidden_BTC = torch.where(masked, model.wav2vec2.masked_spec_embed.to(hidden_BTC.dtype), hidden_BTC)
    if frames_B is not None:
        inside_BT = torch.arange(hidden_BTC.shape[1], device=hidden_BTC.device) < frames_B[:, None]
        hidden_BTC = hidden_BTC.masked_fill(~inside_BT[:, :, None], 0)
        mask_B11T = inside_BT[:, None, None]
    hidden_BTC = hidden_BTC + _positions(encoder.pos_conv_embed, hidden_BTC)
    if not is_stable:
        hidden_BTC = encoder.layer_norm(hidden_BTC)
    hidden_BTC = encoder.dropout(hidden_BTC)
    for number, layer in enumerate(encoder.layers):
        if number not in options.dropped_layers:
            forward: Callable[[Tensor], Tensor] = functools.partial(_layer_output, layer, mask_B11T)
            if options.checkpoints and torch.is_grad_enabled():
                hidden_BTC = checkpoint(forward, hidden_BTC, use_reentrant=False)
            else:
                hidden_BTC = forward(hidden_BTC)
    if is_stable:
        hidden_BTC = encoder.layer_norm(hidden_BTC)
    return hidden_BTC


def _projected(base: Any, wave_BL: Tensor, options: ForwardOptions) -> Tensor:
    """Returns the features of the waves, projected to the encoder's width."""
    with nullcontext() if options.trains_features else torch.no_grad():
        features_BCT = wave_BL[:, None]
        for layer in base.feature_extractor.conv_layers:
            features_BCT = layer(features_BCT)
    hidden_BTC: Tensor = base.feature_projection(features_BCT.transpose(1, 2))[0]
    return hidden_BTC


def _layer_output(layer: Any, mask_B11T: Tensor | None, hidden_BTC: Tensor) -> Tensor:
    output = layer(hidden_BTC, attention_mask=mask_B11T)
    made: Tensor = output[0] if isinstance(output, tuple) else output  # transformers before version 5 returns a tuple.
    return made


# -------------------------------------------------------------------------------------- the positional convolution


def _positions(embedding: Any, hidden_BTC: Tensor) -> Tensor:
    conv = embedding.conv
    weight = getattr(embedding, "made", None)
    weight = conv.weight if weight is None else weight
    positions_BCT = F.conv1d(hidden_BTC.transpose(1, 2), weight, conv.bias, padding=conv.padding, groups=conv.groups)
    made: Tensor = embedding.activation(embedding.padding(positions_BCT)).transpose(1, 2)
    return made


@contextmanager
def cached_position_weights(model: Any) -> Iterator[None]:
    """Computes the weight-normed weight of the positional convolution once for all forward passes in the block.

    The gradients of all micro-batches are summed on it, and are propagated to its norms and directions when the block
    is left. They are dropped if an error leaves it."""
    embedding = model.wav2vec2.encoder.pos_conv_embed
    weight = embedding.conv.weight
    leaf = weight.detach().requires_grad_(weight.requires_grad)
    embedding.made = leaf
    try:
        yield
        if leaf.grad is not None:
            torch.autograd.backward(weight, leaf.grad)
    finally:
        embedding.made = None


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Has the model compute without dropout and without a graph in the block."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


DOWN, UP = "lora_down", "lora_up"


class LoraLinear(nn.Linear):
    """A linear layer plus a trained product of two thin matrices, which begins at zero (Hu et al. 2021,
    arXiv:2106.09685). The layer's own tensors keep their names, so that a model without adapters loads them."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        like: dict[str, Any] = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        self.lora_down = nn.Parameter(torch.empty(rank, layer.in_features, **like))
        self.lora_up = nn.Parameter(torch.zeros(layer.out_features, rank, **like))
        nn.init.kaiming_uniform_(self.lora_down, a=5**0.5)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias) + F.linear(F.linear(input, self.lora_down), self.lora_up)


def add_lora(model: Any, rank: int) -> None:
    """Replaces the attention's projections of a recogniser by ones with adapters."""
    for layer in model.wav2vec2.encoder.layers:
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(layer.attention, name, LoraLinear(getattr(layer.attention, name), rank))


def lora_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if isinstance(module, LoraLinear):
            yield from (module.lora_down, module.lora_up)


def merged(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights of a model without adapters that computes the same."""
    plain = {name: tensor for name, tensor in weights.items() if not name.endswith((DOWN, UP))}
    for name, down in weights.items():
        if name.endswith(DOWN):
            layer = name.removesuffix(DOWN)
            weight = plain[f"{layer}weight"]
            product = weights[f"{layer}{UP}"].double() @ down.double()
            plain[f"{layer}weight"] = (weight.double() + product).to(weight.dtype)
    return plain
