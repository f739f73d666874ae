"""Models of transformers: their folders, and what is read from them.

A published name becomes a folder first, which has the same files. Models of many languages, as those of MMS, have one
vocabulary a language, and the weights of its adapters and of its head in `adapter.LANGUAGE.safetensors`. The main
weights have those of one language, English unless they were saved anew.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from gputrain.asr import model as networks
from gputrain.asr.architecture import (
    FAMILIES,
    FEATURES,
    PRESETS,
    SHARED,
    check_frames,
    family_of,
    reads_features,
)
from gputrain.asr.config import PUBLISHED
from gputrain.asr.tokenizer import StockTokenizer, format_languages, read_json, read_tokenizer
from gputrain.engine import checkpoint
from gputrain.errors import UserError, first_line
from gputrain.fetch.names import local_path
from gputrain.speech.frames import ENCODER_RATE
from gputrain.speech.text.vocabulary import Vocabulary
from gputrain.weights import is_safetensors, log_unused, other_file, read_weights_file

log = logging.getLogger(__name__)

CONFIG, PREPROCESSOR, PROCESSOR = "config.json", "preprocessor_config.json", "processor_config.json"
ADAPTER = re.compile(r"adapter\.([\w.-]+)\.(?:safetensors|bin)")
MAIN_LANGUAGE = "eng"  # That of the main weights of MMS, as transformers' Wav2Vec2ForCTC takes them.
# The CTC models of omniASR, as transformers 5.24 and later write them, are XLS-R by other names of fields and tensors.
OMNIASR = "omniasr_ctc"
OMNIASR_TENSORS = {
    r"^model\.audio_tower\.subsampling\.conv_layers\.": "wav2vec2.feature_extractor.conv_layers.",
    r"^model\.audio_tower\.subsampling\.": "wav2vec2.feature_projection.",
    r"^model\.audio_tower\.encode_positions\.conv\.weight": (
        "wav2vec2.encoder.pos_conv_embed.conv.parametrizations.weight.original1"
    ),
    r"^model\.audio_tower\.encode_positions\.": "wav2vec2.encoder.pos_conv_embed.",
    r"^model\.audio_tower\.": "wav2vec2.encoder.",
    r"^ctc_head\.": "lm_head.",
}
OMNIASR_SYMBOLS = 10288
OF_FAIRSEQ2 = re.compile(r"omniasr[-_](ctc|llm|w2v)[-_]", re.IGNORECASE)


@dataclass(frozen=True)
class StockRecogniser:
    """A model of transformers, of which everything but the weights has been read."""

    name: str  # the one that the user gave
    folder: Path
    architecture: dict[str, Any]  # the fields of its configuration
    vocabulary: Vocabulary | None  # None if it has no tokenizer, as one that was never fine-tuned
    language: str | None  # the one whose adapter is loaded
    normalizes: bool  # True: it reads waves of zero mean and unit variance.
    of_omniasr: bool = False  # True: its files have the names of omniASR, and become a wav2vec2.

    def check_weights(self) -> None:
        """Raises UserError if there are no weights, or a file of another kind stands in their place."""
        files = [self.folder / file for file in PUBLISHED.whole if (self.folder / file).is_file()]
        if not files:
            raise UserError(f"{self.name}: no weights in it", hint="copy model.safetensors or pytorch_model.bin there")
        for file in files:
            is_index = file.suffix == ".json"  # It names the files of weights that were split.
            if not (is_index or is_safetensors(file)) and (error := other_file(file, "weights of transformers")):
                raise error

    def load(self) -> tuple[Any, list[str]]:
        """Returns its model on the CPU in fp32, and the tensors that the files lack, which are random. Raises
        UserError if weights are missing or damaged."""
        config_class, model_class = networks.stock_classes(family_of(self.architecture))
        self.check_weights()
        try:
            with networks.quiet_transformers():
                if self.of_omniasr:
                    return _load_omniasr(self.architecture, self.folder)
                config = config_class.from_pretrained(str(self.folder))
                config.vocab_size = config.vocab_size or 1  # One that was only pretrained may have none.
                model, found = model_class.from_pretrained(
                    str(self.folder), config=config, attn_implementation=networks.attention_of(model_class),
                    dtype=torch.float32, output_loading_info=True,
                )  # fmt: skip
                missing = list(found["missing_keys"])
                log_unused(self.name, found["unexpected_keys"])
                if self.language is not None:
                    model.load_adapter(self.language)
                    log.info("%s: with the adapter and the head of %s", self.name, self.language)
                    missing = [name for name in missing if "adapter_layer" not in name and "lm_head" not in name]
        except Exception as error:  # Damaged files raise errors of many kinds.
            if "ignore_mismatched_sizes" in str(error):
                raise UserError(
                    f"{self.name}: its weights have other shapes than {CONFIG} says",
                    hint=f"copy {CONFIG} and the weights from one model",
                ) from None
            no_file = isinstance(error, UnpicklingError) or "Unable to load weights" in str(error)
            why = "no file of torch.save" if no_file else first_line(error)
            raise UserError(
                f"{self.name}: its weights cannot be read: {why}", hint="copy or download them again"
            ) from None
        return model.float().train(), [name for name in missing if "masked_spec_embed" not in name]


def local_recogniser(name: str | Path, *, weights: bool = True) -> Path:
    """Returns the local path of a recogniser that is named by its path or by a published name. Without `weights`, those
    of a published one are not fetched. Raises UserError if there is none."""
    path = Path(name)
    if OF_FAIRSEQ2.search(path.name) and (path.suffix == ".pt" or str(name).lower().startswith("facebook/")):
        raise UserError(
            f"{name}: the weights of omniASR in the form of fairseq2, which transformers does not read",
            hint="name the same model in the form of transformers 5.24, such as hf-audio/omniasr-ctc-300m-v2",
        )
    return local_path(name, PUBLISHED, weights=weights)


def is_pretrained(path: Path) -> bool:
    """Returns True if a path leads to a model of transformers, and not to a run or a checkpoint of train-asr: to a
    folder with a configuration, or a file in it."""
    path = _folder_of_file(path)
    if path.is_dir():
        return (path / CONFIG).is_file() and not checkpoint.newest_first(path)
    return ADAPTER.fullmatch(path.name) is not None


def _folder_of_file(path: Path) -> Path:
    """Returns the folder of a file of transformers, such as the weights, which is named instead; other paths as they
    are."""
    named = path.suffix in (".safetensors", ".bin", ".json") and path.is_file() and (path.parent / CONFIG).is_file()
    return path.parent if named else path


def open_pretrained(path: Path, name: str = "") -> StockRecogniser:
    """Reads all of a model of transformers but its weights. `name` is the one that messages give it.

    Raises UserError if there is none, it is of another type, or its language cannot be told.
    """
    folder, language = _located(path)
    name = name or str(path)
    content = read_json(folder / CONFIG)
    of_omniasr = content.get("model_type") == OMNIASR
    if (model_type := content.get("model_type", "unknown")) not in (*FAMILIES, OMNIASR):
        raise UserError(
            f"{name} is a model of type {model_type}", hint="use wav2vec2, XLS-R, MMS, w2v-BERT 2.0 or omniASR-CTC"
        )
    try:
        content = _xls_r_of(content) if of_omniasr else content
        config_class, _ = networks.stock_classes(family_of(content))
        stored = config_class(**content) if of_omniasr else config_class.from_pretrained(str(folder))
        architecture = stored.to_dict()
    except Exception as error:  # The configuration of transformers raises errors of many kinds.
        raise UserError(
            f"{folder / CONFIG}: not a configuration of {model_type}: {first_line(error)}", hint="copy it again"
        ) from None
    check_frames(architecture, name)
    # The tokenizer of omniASR writes pieces of words besides letters: its symbols and its head are not read.
    fine_tuned = (tokenizer := None if of_omniasr else read_tokenizer(folder)) is not None
    normalizes = _normalizes(name, folder, of_features=reads_features(architecture), fine_tuned=fine_tuned)
    vocabulary = None
    if tokenizer is not None:
        language = _language_of(name, folder, tokenizer, language, architecture)
        rows = architecture["vocab_size"] if language is None else _rows_of_adapter(folder, language)
        at = language or tokenizer.target_language
        if language is not None and not tokenizer.fits(at, rows):
            raise UserError(
                f"{name}: the adapter of {language} writes {rows} symbols, and {tokenizer.path.name} has "
                f"{tokenizer.rows_of(at)} of that language",
                hint="copy both from one model",
            )
        vocabulary = tokenizer.vocabulary(at, rows, architecture.get("pad_token_id"))
    elif language is not None:
        raise UserError(f"{name}: the folder has no vocab.json", hint="copy the tokenizer's files there, too")
    return StockRecogniser(name, folder, architecture, vocabulary, language, normalizes, of_omniasr)


def _xls_r_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration of the wav2vec2 that computes the same as an omniASR-CTC."""
    audio = content.get("audio_config") or {}
    return {
        **SHARED, **PRESETS["xls-r-300m"], **audio, "model_type": "wav2vec2",
        "feat_extract_activation": audio.get("hidden_act", "gelu"),
        "vocab_size": content.get("vocab_size", OMNIASR_SYMBOLS), "pad_token_id": content.get("blank_token_id", 0),
    }  # fmt: skip


def _load_omniasr(architecture: dict[str, Any], folder: Path) -> tuple[Any, list[str]]:
    """Returns an omniASR-CTC as a wav2vec2, and the tensors that its files lack."""
    model, weights = networks.build_recogniser(architecture), dict[str, Tensor]()
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in read_weights_file(path).tensors.items():
            for pattern, other in OMNIASR_TENSORS.items():
                name = re.sub(pattern, other, name)
            weights[name] = tensor
    missing, unused = model.load_state_dict(weights, strict=False)
    log_unused(folder, unused)
    _set_norms(model.wav2vec2.encoder.pos_conv_embed.conv.parametrizations.weight)
    return model, [name for name in missing if not name.endswith(("weight.original0", "masked_spec_embed"))]


@torch.no_grad()
def _set_norms(weight: Any) -> None:
    """Sets the norms of a weight-normed convolution to those of its directions, which are the whole weight then."""
    weight.original0.copy_(torch.linalg.vector_norm(weight.original1, dim=(0, 1), keepdim=True))


def _located(path: Path) -> tuple[Path, str | None]:
    """Returns the folder of a model, and the language whose adapter is named."""
    language = None
    if not path.is_dir() and (adapter := ADAPTER.fullmatch(path.name)):
        path, language = path.parent, adapter[1]
    path = _folder_of_file(path)
    if not (path / CONFIG).is_file():
        raise UserError(
            f"{path} holds neither a run of train-asr nor a {CONFIG} of transformers",
            hint="name a run folder, or a folder with config.json and model.safetensors",
        )
    return path, language


def _normalizes(name: str, folder: Path, *, of_features: bool, fine_tuned: bool) -> bool:
    """Returns True if the model reads waves of zero mean and unit variance, the default of transformers, or features,
    which always have them. Raises UserError if the settings of its feature extractor are damaged, or it reads another
    sampling rate or other features."""
    processor = read_json(folder / PROCESSOR) if (folder / PROCESSOR).is_file() else {}
    # Since version 5 of transformers, the settings are a part of processor_config.json, which then comes first.
    found = processor.get("feature_extractor", processor.get("audio_processor"))
    if not isinstance(found, dict):
        if not (folder / PREPROCESSOR).is_file():
            if fine_tuned and not of_features:
                log.warning("%s: no %s: waves are normalised, as is usual", name, PREPROCESSOR)
            return True
        found = read_json(folder / PREPROCESSOR)
    if (rate := found.get("sampling_rate", ENCODER_RATE)) != ENCODER_RATE:
        raise UserError(f"{name} reads {rate} samples a second", hint=f"use a model for {ENCODER_RATE} Hz")
    if not of_features:
        return bool(found.get("do_normalize", True))
    bins, stride = (found.get(key, usual) for key, usual in (("num_mel_bins", FEATURES // 2), ("stride", 2)))
    if (bins, stride) != (FEATURES // 2, 2):
        raise UserError(
            f"{name} reads {bins} bins of {stride} frames",
            hint=f"use a model that reads {FEATURES // 2} bins of 2 frames",
        )
    return True


# ---------------------------------------------------------------------------------------- models of many languages


def _adapters(folder: Path) -> dict[str, Path]:
    """Returns the files with the weights of each language; transformers prefers safetensors."""
    return {
        match[1]: path
        for ending in ("bin", "safetensors")
        for path in folder.glob(f"adapter.*.{ending}")
        if (match := ADAPTER.fullmatch(path.name))
    }


def _language_of(
    name: str, folder: Path, tokenizer: StockTokenizer, named: str | None, architecture: dict[str, Any]
) -> str | None:
    """Returns the language whose adapter is to be loaded, None if the main weights are those to use. Raises UserError
    if neither is right."""
    wanted = named or tokenizer.target_language
    own, head = tokenizer.rows_of(wanted), architecture["vocab_size"]  # Raises UserError if no language is chosen.
    if wanted is None:
        return None
    present = _adapters(folder)
    if wanted in present:
        if not architecture.get("adapter_attn_dim"):
            raise UserError(f"{name}: {CONFIG} has no adapter_attn_dim, so that no adapter fits", hint="copy it again")
        return wanted
    if named is None and not tokenizer.of_language:
        return None
    if named is None:  # The main weights are known to be of a language whose symbols alone are as many as their head's.
        sizes = [tokenizer.rows_of(language) for language in tokenizer.of_language]
        if len(sizes) == 1 and tokenizer.fits(wanted, head):
            return None
        if own == head and (wanted == MAIN_LANGUAGE or sizes.count(own) == 1):
            return None
    have = f"it has those of {format_languages(present, like=wanted)}" if present else "it has none"
    raise UserError(
        f"{name}: no adapter of {wanted}, and the head of the main weights may be that of another language",
        hint=f"copy adapter.{wanted}.safetensors there ({have}), or leave only the head's language in vocab.json",
    )


def _rows_of_adapter(folder: Path, language: str) -> int:
    """Returns the number of symbols that an adapter's head writes. Raises UserError if it cannot be read."""
    path = _adapters(folder)[language]
    try:
        weights = read_weights_file(path).tensors
        return len(weights["lm_head.weight"])
    except Exception as error:  # Damaged files raise errors of many kinds.
        raise UserError(
            f"{path}: not the adapter of a language: {first_line(error)}", hint="copy or download it again"
        ) from None
