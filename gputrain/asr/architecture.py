"""Architectures of recognisers: transformers' Wav2Vec2ForCTC at several sizes. Imports no torch."""

from collections.abc import Mapping
from typing import Any, Literal

from gputrain.errors import UserError
from gputrain.speech.config import STRIDE

RecogniserPreset = Literal["tiny", "base", "xls-r-300m", "xls-r-1b"]
AdapterKind = Literal["none", "lora", "attention"]

ADAPTER_WIDTH = 16  # Width of the attention adapters, as in MMS.
MODEL_TYPE = "wav2vec2"  # the `model_type` of their configurations
CONV_KERNELS, CONV_STRIDES = (10, 3, 3, 3, 3, 2, 2), (5, 2, 2, 2, 2, 2, 2)

# Sizes that the presets share: those of XLS-R, whose layer norms make it independent of padding. All dropouts are
# options of the training; masking and layer drop are drawn by the training step, not by the model.
SHARED: dict[str, Any] = {
    "feat_extract_norm": "layer",
    "do_stable_layer_norm": True,
    "conv_bias": True,
    "conv_kernel": CONV_KERNELS,
    "conv_stride": CONV_STRIDES,
    "ctc_zero_infinity": True,
    "activation_dropout": 0.0,
    "attention_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "hidden_dropout": 0.0,
    "layerdrop": 0.0,
    # The model has the vector that replaces masked frames only if this is above 0.
    "mask_time_prob": 0.05,
}
PRESETS: dict[RecogniserPreset, dict[str, Any]] = {
    # Rectifiers, and few channels where frames are many, make a step four times as fast on a CPU.
    "tiny": {
        "hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 768,
        "conv_dim": (16, 32, 64, 96, 128, 160, 192), "num_conv_pos_embeddings": 64,
        "hidden_act": "relu", "feat_extract_activation": "relu",
    },
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "xls-r-300m": {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096
    },
    "xls-r-1b": {
        "hidden_size": 1280, "num_hidden_layers": 48, "num_attention_heads": 16, "intermediate_size": 5120
    },
}  # fmt: skip


def preset_architecture(
    preset: RecogniserPreset, *, num_symbols: int, adapters: AdapterKind = "none"
) -> dict[str, Any]:
    """Returns the configuration of a preset in the form of transformers' `Wav2Vec2Config`."""
    return with_adapters({**SHARED, **PRESETS[preset], "vocab_size": num_symbols, "pad_token_id": 0}, adapters)


def with_adapters(architecture: Mapping[str, Any], adapters: AdapterKind) -> dict[str, Any]:
    """Returns a configuration whose model has the attention adapters, if they are asked for. Raises UserError if its
    encoder has no place for them."""
    if adapters != "attention":
        return dict(architecture)
    if not architecture.get("do_stable_layer_norm"):
        raise UserError(
            "attention adapters need an encoder with do_stable_layer_norm, such as XLS-R or MMS",
            hint="use --adapters lora",
        )
    return {**architecture, "adapter_attn_dim": architecture.get("adapter_attn_dim") or ADAPTER_WIDTH}


def check_model_type(model_type: object, source: str) -> None:
    """Raises UserError if a model is of another type than the one that is trained here."""
    if model_type != MODEL_TYPE:
        raise UserError(f"{source} is a model of type {model_type}", hint="use wav2vec 2.0, XLS-R or MMS")


def check_frames(architecture: Mapping[str, Any], source: str) -> None:
    """Raises UserError if a model's frames are not 320 samples apart, of the known length."""
    kernels, strides = (tuple(architecture.get(name, ())) for name in ("conv_kernel", "conv_stride"))
    if (kernels, strides) != (CONV_KERNELS, CONV_STRIDES):
        raise UserError(
            f"{source}: its frames are not {STRIDE} samples apart",
            hint="use a model with the convolutions of wav2vec 2.0",
        )
    if architecture.get("add_adapter"):
        raise UserError(
            f"{source}: has add_adapter, layers behind the encoder that make its frames longer than {STRIDE} samples; "
            "they are neither trained nor read",
            hint="use one that was trained with add_adapter=False, or begin with the model that was fine-tuned",
        )
