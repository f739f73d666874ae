"""Tiny recognisers with random weights, in the forms in which trained ones are read."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from gputrain.asr import architecture
from gputrain.asr.architecture import preset_architecture
from gputrain.asr.model import build_recogniser
from gputrain.engine import checkpoint
from gputrain.speech.text.vocabulary import Vocabulary
from tests.toy import whole_checkpoint

VOCABULARY = Vocabulary("en", ("<pad>", "<unk>", "|", *"'abcdefghijklmnopqrstuvwxyz"))
SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "conv_dim": (8,) * 7, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip


@contextmanager
def small_preset() -> Iterator[None]:
    """Has the preset "tiny" be a model of 20 thousand weights in the block."""
    whole = architecture.PRESETS["tiny"]
    architecture.PRESETS["tiny"] = {**whole, **SIZES}
    try:
        yield
    finally:
        architecture.PRESETS["tiny"] = whole


def tiny_architecture(vocabulary: Vocabulary = VOCABULARY, **changes: Any) -> dict[str, Any]:
    """Returns the architecture of a model with 20 thousand weights."""
    whole = preset_architecture("tiny", num_symbols=len(vocabulary.symbols))
    return {**whole, **SIZES, "pad_token_id": vocabulary.blank, **changes}


def tiny_model(vocabulary: Vocabulary = VOCABULARY, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    model = build_recogniser(tiny_architecture(vocabulary, **changes))
    with torch.no_grad():  # The head's random logits are so close together that rounding could decide between symbols.
        model.lm_head.weight.mul_(20)
    return model.eval()


def transformers_folder(
    folder: Path, vocabulary: Vocabulary = VOCABULARY, *, normalizes: bool = True, **changes: Any
) -> Path:
    """Writes a tiny model as a folder of transformers, with its tokenizer and its feature extractor."""
    tiny_model(vocabulary, **changes).save_pretrained(folder)
    ids = {symbol: number for number, symbol in enumerate(vocabulary.symbols)}
    (folder / "vocab.json").write_text(json.dumps(ids))
    tokens = {
        "tokenizer_class": "Wav2Vec2CTCTokenizer", "pad_token": vocabulary.symbols[vocabulary.blank],
        "unk_token": "<unk>", "word_delimiter_token": "|", "bos_token": None, "eos_token": None,
        "do_lower_case": False,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    features = {
        "feature_extractor_type": "Wav2Vec2FeatureExtractor", "feature_size": 1, "sampling_rate": 16000,
        "padding_value": 0.0, "do_normalize": normalizes, "return_attention_mask": True,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(features))
    return folder


MMS_SYMBOLS = {
    "eng": "'abcdefghijklmnopqrstuvwxyz",
    "rus": "абвгдежзиклмнопрстуфхцчшщыэюя",
    "uzb-script_latin": "abdefghijklmno",
}


def mms_folder(
    folder: Path, *, adapters: Sequence[str] = (), language: str | None = None, form: str = "safetensors",
    main: str = "eng", languages: Sequence[str] = tuple(MMS_SYMBOLS),
) -> Path:  # fmt: skip
    """Writes a tiny model as a folder of MMS: a vocabulary of several languages, the adapters and heads of some of
    them, and main weights of one."""
    symbols = {name: ("<pad>", "<s>", "</s>", "<unk>", "|", *MMS_SYMBOLS[name]) for name in MMS_SYMBOLS}
    made = {
        name: tiny_model(Vocabulary("und", symbols[name], 0, 3, 4), seed, adapter_attn_dim=4)
        for seed, name in enumerate(dict.fromkeys((main, *adapters)))
    }
    folder = transformers_folder(folder, adapter_attn_dim=4)
    made[main].save_pretrained(folder)
    for name in adapters:
        weights = {key: tensor.detach().clone() for key, tensor in made[name]._get_adapters().items()}
        if form == "safetensors":
            save_file(weights, folder / f"adapter.{name}.safetensors")
        else:
            torch.save(weights, folder / f"adapter.{name}.{form}")
    ids = {name: {symbol: number for number, symbol in enumerate(symbols[name])} for name in languages}
    (folder / "vocab.json").write_text(json.dumps(ids))
    change_json(folder / "tokenizer_config.json", target_lang=language)
    return folder


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def written_by_transformers(folder: Path, wave: np.ndarray, language: str | None = None) -> str:
    """Returns a wave's text by transformers' model and processor, with the adapter of a language if one is named."""
    from transformers import AutoModelForCTC, Wav2Vec2Processor

    model = AutoModelForCTC.from_pretrained(folder).eval()
    processor = Wav2Vec2Processor.from_pretrained(folder)
    if language is not None:
        processor.tokenizer.set_target_lang(language)
        model.load_adapter(language)
    with torch.no_grad():
        inputs = processor(wave, sampling_rate=16000, return_tensors="pt")
        ids = model(**inputs).logits.argmax(dim=-1)
    return " ".join(processor.batch_decode(ids)[0].split())


def in_cache_of_hub(cache: Path, name: str, folder: Path) -> Path:
    """Copies a folder of transformers to where huggingface_hub keeps the model that has the given name. Returns the
    snapshot."""
    model, commit = cache / f"models--{name.replace('/', '--')}", "0123456789" * 4
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    return Path(shutil.copytree(folder, model / "snapshots" / commit))


def run_folder(
    folder: Path, vocabulary: Vocabulary = VOCABULARY, *, normalizes: bool = True, seed: int = 0, **changes: Any
) -> Path:
    """Writes a tiny model as the run folder of a training."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "text": vocabulary.to_json(), "sampling_rate": 16000, "hop_size": 320, "normalizes": normalizes,
        "architecture": tiny_architecture(vocabulary, **changes),
    }  # fmt: skip
    (folder / "config.yaml").write_text("kind: asr\n")
    modules = {"recogniser": tiny_model(vocabulary, seed, **changes).state_dict()}
    checkpoint.save(folder, whole_checkpoint(kind="asr", facts=facts, modules=modules))
    return folder
