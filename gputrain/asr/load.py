"""Loads recognisers from run folders, checkpoints and folders of transformers.

Shapes: F frames, V symbols.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gputrain.asr import model as networks
from gputrain.asr.architecture import check_frames
from gputrain.asr.lora import merged
from gputrain.engine import checkpoint
from gputrain.engine.checkpoint import load_weights, refuse_nonfinite, trained_weights
from gputrain.errors import UserError, first_line
from gputrain.speech.frames import ENCODER_RATE, FIELD
from gputrain.speech.text.vocabulary import Vocabulary

CONFIG, PREPROCESSOR, TOKENS = "config.json", "preprocessor_config.json", "vocab.json"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True)
class Recogniser:
    """A trained recogniser for use."""

    model: Any  # transformers' Wav2Vec2ForCTC, in evaluation mode
    vocabulary: Vocabulary
    sampling_rate: int  # Hz
    normalizes: bool  # True: it reads waves of zero mean and unit variance.
    source: str  # the file or folder that was read

    def log_probs(self, waves: Sequence[npt.NDArray[np.float32]]) -> list[Tensor]:
        """Returns for each wave the logarithms of the symbols' probabilities, float32 (F, V) on the CPU.

        F is the clip's own number of frames, 0 if it is shorter than a frame. Waves are computed as one batch if the
        model masks padding, otherwise one by one.
        """
        device = next(self.model.parameters()).device
        long_enough = [number for number, wave in enumerate(waves) if len(wave) >= FIELD]
        if networks.uses_attention_mask(self.model):
            batches = [long_enough] if long_enough else []
        else:
            batches = [[number] for number in long_enough]
        found = [torch.empty(0, self.model.config.vocab_size)] * len(waves)
        for members in batches:
            samples_B = torch.tensor([len(waves[number]) for number in members])
            wave_BL = torch.zeros(len(members), int(samples_B.max()))
            for row, number in enumerate(members):
                wave_BL[row, : len(waves[number])] = torch.from_numpy(np.asarray(waves[number], dtype=np.float32))
            log_probs_BTV = predict(self.model, wave_BL.to(device), samples_B.to(device), normalizes=self.normalizes)
            frames = networks.frame_counts(samples_B).tolist()
            for row, number in enumerate(members):
                found[number] = log_probs_BTV[row, : frames[row]].cpu()
        return found


def predict(model: Any, wave_BL: Tensor, samples_B: Tensor, *, normalizes: bool) -> Tensor:
    """Returns log-probabilities of the symbols, (B, T, V) in fp32, of waves in [-1, 1] that are zero beyond their ends.

    The model computes in the data type of its weights, or in that of an autocast around the call.
    """
    with networks.eval_mode(model):
        if normalizes:
            wave_BL = networks.normalized(wave_BL, samples_B)
        wave_BL = wave_BL.to(model.lm_head.weight.dtype)
        frames_B = networks.frame_counts(samples_B) if networks.uses_attention_mask(model) else None
        return torch.log_softmax(networks.logits(model, wave_BL, frames_B).float(), dim=-1)


def load_recogniser(path: Path, device: torch.device) -> Recogniser:
    """Loads a recogniser for inference. Raises UserError if it doesn't exist, is damaged or is of another kind."""
    if is_transformers_folder(path):
        model, vocabulary = read_transformers(str(path)), Vocabulary.from_transformers(path)
        if len(vocabulary.symbols) > model.config.vocab_size:
            raise UserError(
                f"{path}: {TOKENS} has {len(vocabulary.symbols)} symbols, and the model {model.config.vocab_size}",
                hint="copy the model's folder again",
            )
        loaded = Recogniser(model, vocabulary, ENCODER_RATE, normalizes_input(path), str(path))
    else:
        loaded = load_run(path)
    refuse_nonfinite(loaded.model.state_dict(), loaded.source)
    loaded.model.requires_grad_(False).eval().to(device)
    return loaded


def load_run(path: Path) -> Recogniser:
    """Loads the recogniser of a run or checkpoint on the CPU: its moving average if it has one, adapters merged."""
    source, content = checkpoint.find_named(path, "asr", ["recogniser"])
    facts = content["facts"]
    try:
        architecture, rate, normalizes = facts["architecture"], int(facts["sampling_rate"]), bool(facts["normalizes"])
        vocabulary = Vocabulary.from_json(facts["text"])
        model = networks.build_recogniser(architecture)
    except UserError as error:
        raise UserError(f"{source}: {error.message}", hint="take another one") from None
    except Exception as error:  # The configuration of transformers raises errors of many kinds.
        raise UserError(
            f"{source}: the checkpoint does not describe its model: {first_line(error)}", hint="take another one"
        ) from None
    load_weights(model, merged(trained_weights(content, "recogniser")), f"{source}: the checkpoint's recogniser")
    return Recogniser(model, vocabulary, rate, normalizes, str(source))


def is_transformers_folder(path: Path) -> bool:
    return path.is_dir() and (path / CONFIG).is_file() and any((path / name).is_file() for name in WEIGHTS)


def read_transformers(name: str) -> Any:
    """Returns a Wav2Vec2ForCTC from a folder or, by its name, from the Hugging Face Hub, on the CPU in fp32.

    Layers that the model lacks are made anew. Raises UserError if it cannot be read or is of another type.
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig, Wav2Vec2ForCTC

    try:
        with networks.quiet_transformers():
            config = AutoConfig.from_pretrained(name)
            if config.model_type != "wav2vec2":
                raise UserError(f"{name} is a model of type {config.model_type}", hint="use wav2vec2, XLS-R or MMS")
            check_frames(config.to_dict(), name)
            model = Wav2Vec2ForCTC.from_pretrained(
                name, config=config, attn_implementation="sdpa", dtype=torch.float32
            )  # fmt: skip
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise UserError(
            f"{name} is neither a folder of transformers nor a model that can be read from the Hugging Face Hub: "
            f"{first_line(error)}",
            hint="name a folder with config.json and model.safetensors; without network, download it elsewhere first",
        ) from None
    return model.float().train()


def normalizes_input(folder: Path) -> bool:
    """Returns True if a model in a folder of transformers reads waves of zero mean and unit variance, the default."""
    try:
        content = json.loads((folder / PREPROCESSOR).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    return bool(content.get("do_normalize", True)) if isinstance(content, dict) else True
