"""The recogniser: transformers' Wav2Vec2ForCTC or Wav2Vec2BertForCTC, whose forward pass is run layer by layer as a
training step needs it.

The arithmetic is that of transformers. Differences are in what is computed at all and when: masked and dropped parts
are given by the caller, the feature encoder keeps no graph unless it trains, padding is set to zero without a device
sync, no attention mask is made for clips of equal length, on a CPU the convolutions have channels last, and the weight
of the positional convolution is computed once for all micro-batches of a step.

Shapes: B clips, L samples, T frames, C channels, V symbols. What an encoder reads, `sound_BX`, is waves (B, L) or, for
w2v-BERT, features (B, T, C).
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gputrain.asr.architecture import FAMILIES, RecogniserFamily, family_of
from gputrain.asr.features import features_of
from gputrain.speech.frames import FIELD, STRIDE, encoder_frames

NORMALIZING_EPSILON = 1e-7  # As in transformers' Wav2Vec2FeatureExtractor.


@dataclass(frozen=True)
class ForwardOptions:
    """Options of a forward pass: what it leaves out, masks, and keeps for the backward pass."""

    mask_BT: Tensor | None = None  # Frames that are replaced by the model's mask vector.
    mask_BC: Tensor | None = None  # Channels that are set to zero.
    dropped_layers: frozenset[int] = frozenset()
    checkpoints: bool = False  # True: layers are recomputed in the backward pass.
    trains_features: bool = False  # True: the feature encoder is part of the graph.
    trains_encoder: bool = True  # False: only the head is part of the graph.


EVERYTHING = ForwardOptions()

# Added to the scores of padding in an attention with positions. It fits all data types of an autocast, and its
# exponential is zero in each of them.
FORBIDDEN = torch.finfo(torch.float16).min


def build_recogniser(architecture: Mapping[str, Any]) -> Any:
    """Returns a recogniser with random weights, in training mode. `architecture` has the fields of transformers'
    configuration."""
    config_class, model_class = stock_classes(family_of(architecture))
    config = config_class(**{**architecture, "attn_implementation": attention_of(model_class)})
    with quiet_transformers():
        return model_class(config).train()


def stock_classes(family: RecogniserFamily) -> tuple[Any, Any]:
    """Returns the configuration and the model of transformers."""
    import transformers

    return getattr(transformers, family.config_class), getattr(transformers, family.model_class)


def attention_of(model_class: Any) -> str:
    """Returns the fastest implementation of attention; that of w2v-BERT is a new one in version 5 of transformers."""
    return "sdpa" if model_class._supports_sdpa else "eager"


def family(model: Any) -> RecogniserFamily:
    return FAMILIES[model.config.model_type]


def base_of(model: Any) -> Any:
    """Returns the part of a recogniser that is not its head."""
    return getattr(model, family(model).base)


def has_features(model: Any) -> bool:
    """Returns True for w2v-BERT, which reads log-mel features; the others read waves."""
    return not hasattr(base_of(model), "feature_extractor")


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
    return has_features(model) or bool(model.config.feat_extract_norm == "layer")


def frame_counts(samples: Tensor, field: int = FIELD) -> Tensor:
    """Returns the frames of clips with so many samples, elementwise, each of `field` samples."""
    return (samples - field) // STRIDE + 1


def sound_of(model: Any, wave_BL: Tensor, samples: Sequence[int], samples_B: Tensor, *, normalizes: bool) -> Tensor:
    """Returns what the encoder reads of clips in [-1, 1], which are zero beyond their ends. The numbers of samples are
    given on the host and on the device, so that nothing waits for them."""
    if has_features(model):
        return features_of(wave_BL, samples)
    return normalized(wave_BL, samples_B) if normalizes else wave_BL


def frames_of(sound_BX: Tensor) -> int:
    """Returns the number of frames that an encoder makes of what it reads."""
    return sound_BX.shape[1] if sound_BX.ndim == 3 else encoder_frames(sound_BX.shape[1])


def cropped(sound_BX: Tensor, frames: int) -> Tensor:
    """Returns the part of what an encoder reads that makes so many frames."""
    return sound_BX[:, : frames if sound_BX.ndim == 3 else (frames - 1) * STRIDE + FIELD]


def normalized(wave_BL: Tensor, samples_B: Tensor) -> Tensor:
    """Returns waves of zero mean and unit variance over the samples of each clip, and zero beyond its end."""
    inside_BL = torch.arange(wave_BL.shape[1], device=wave_BL.device) < samples_B[:, None]
    count_B1 = samples_B[:, None].to(wave_BL.dtype)
    centred_BL = (wave_BL - (wave_BL * inside_BL).sum(1, keepdim=True) / count_B1) * inside_BL
    variance_B1 = centred_BL.square().sum(1, keepdim=True) / count_B1
    return centred_BL / (variance_B1 + NORMALIZING_EPSILON).sqrt()


def logits(model: Any, sound_BX: Tensor, frames_B: Tensor | None, options: ForwardOptions = EVERYTHING) -> Tensor:
    """Returns the logits (B, T, V). `frames_B` are the frames of each clip if some are padded, otherwise None."""
    keeps_graph = nullcontext() if options.trains_encoder else torch.no_grad()
    with keeps_graph:
        hidden_BTC = encode(model, sound_BX, frames_B, options)
    made: Tensor = model.lm_head(model.dropout(hidden_BTC))
    return made


def encode(model: Any, sound_BX: Tensor, frames_B: Tensor | None, options: ForwardOptions) -> Tensor:
    """Returns what the head reads, (B, T, C)."""
    base, layers = base_of(model), _conformer_layers if has_features(model) else _transformer_layers
    hidden_BTC = _projected(base, sound_BX, options)
    inside_BT = None
    if options.mask_BT is not None:
        masked = options.mask_BT[:, :, None]
        hidden_BTC = torch.where(masked, base.masked_spec_embed.to(hidden_BTC.dtype), hidden_BTC)
    if options.mask_BC is not None:
        hidden_BTC = hidden_BTC.masked_fill(options.mask_BC[:, None], 0)
    if frames_B is not None:
        inside_BT = torch.arange(hidden_BTC.shape[1], device=hidden_BTC.device) < frames_B[:, None]
        hidden_BTC = hidden_BTC.masked_fill(~inside_BT[:, :, None], 0)
    return layers(model, hidden_BTC, inside_BT, options)


def _transformer_layers(model: Any, hidden_BTC: Tensor, inside_BT: Tensor | None, options: ForwardOptions) -> Tensor:
    encoder = model.wav2vec2.encoder
    mask_B11T = None if inside_BT is None else inside_BT[:, None, None]
    hidden_BTC = hidden_BTC + _positions(encoder.pos_conv_embed, hidden_BTC)
    if not model.config.do_stable_layer_norm:
        hidden_BTC = encoder.layer_norm(hidden_BTC)
    hidden_BTC = encoder.dropout(hidden_BTC)
    hidden_BTC = _through_layers(encoder.layers, hidden_BTC, options, attention_mask=mask_B11T)
    if model.config.do_stable_layer_norm:
        hidden_BTC = encoder.layer_norm(hidden_BTC)
    return hidden_BTC


def _conformer_layers(model: Any, hidden_BTC: Tensor, inside_BT: Tensor | None, options: ForwardOptions) -> Tensor:
    """Runs the layers of w2v-BERT: each attends with positions of its own, and convolves to the left only."""
    encoder, mask_B11T, positions = model.wav2vec2_bert.encoder, None, None
    if inside_BT is not None:
        scores_BT = hidden_BTC.new_zeros(inside_BT.shape).masked_fill(~inside_BT, FORBIDDEN)
        mask_B11T = scores_BT[:, None, None]
    hidden_BTC = encoder.dropout(hidden_BTC)
    if encoder.embed_positions is not None:
        encoder.embed_positions.cached_sequence_length = None  # It may be kept in another data type or device.
        positions = encoder.embed_positions(hidden_BTC)
    return _through_layers(
        encoder.layers,
        hidden_BTC,
        options,
        attention_mask=mask_B11T,
        relative_position_embeddings=positions,
        conv_attention_mask=inside_BT,
    )


def _projected(base: Any, sound_BX: Tensor, options: ForwardOptions) -> Tensor:
    """Returns the features of the sound, projected to the encoder's width."""
    features_BTC = sound_BX
    if features_BTC.ndim == 2:
        with nullcontext() if options.trains_features else torch.no_grad():
            features_BCT = sound_BX[:, None]
            for layer in base.feature_extractor.conv_layers:
                features_BCT = layer(features_BCT)
        features_BTC = features_BCT.transpose(1, 2)
    hidden_BTC: Tensor = base.feature_projection(features_BTC)[0]
    return hidden_BTC


def _through_layers(layers: Any, hidden_BTC: Tensor, options: ForwardOptions, **named: Any) -> Tensor:
    for number, layer in enumerate(layers):
        if number not in options.dropped_layers:
            forward: Callable[[Tensor], Tensor] = functools.partial(_layer_output, layer, **named)
            if options.checkpoints and torch.is_grad_enabled():
                hidden_BTC = checkpoint(forward, hidden_BTC, use_reentrant=False)
            else:
                hidden_BTC = forward(hidden_BTC)
    return hidden_BTC


def _layer_output(layer: Any, hidden_BTC: Tensor, **named: Any) -> Tensor:
    output = layer(hidden_BTC, **named)
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
    is left. They are dropped if an error leaves it. w2v-BERT has no such convolution."""
    if has_features(model):
        yield
        return
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
    names = family(model)
    for layer in base_of(model).encoder.layers:
        attention = getattr(layer, names.attention)
        for name in names.projections:
            setattr(attention, name, LoraLinear(getattr(attention, name), rank))


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
