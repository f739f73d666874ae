"""Loads recognisers from run folders, checkpoints and folders of transformers, and decodes what they put out.

Shapes: F frames, V symbols.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.typing import NDArray
from torch import Tensor

from gputrain.asr import model as networks
from gputrain.asr.architecture import MODEL_TYPE, check_model_type
from gputrain.asr.config import PUBLISHED
from gputrain.asr.pretrained import VOCABULARY, is_pretrained, open_pretrained
from gputrain.engine import checkpoint
from gputrain.engine.checkpoint import format_list, load_weights, refuse_nonfinite, trained_weights
from gputrain.errors import UserError, first_line
from gputrain.fetch.names import local_path
from gputrain.speech.config import ENCODER_RATE, FIELD, encoder_frames
from gputrain.speech.subtitles import TimedWord
from gputrain.speech.text.vocabulary import UNDETERMINED, Vocabulary


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
            samples = [len(waves[number]) for number in members]
            wave_BL = torch.zeros(len(members), max(samples))
            for row, number in enumerate(members):
                wave_BL[row, : len(waves[number])] = torch.from_numpy(np.asarray(waves[number], dtype=np.float32))
            log_probs_BTV = predict(self.model, wave_BL.to(device), samples, normalizes=self.normalizes)
            for row, number in enumerate(members):
                found[number] = log_probs_BTV[row, : encoder_frames(samples[row])].cpu()
        return found


def predict(model: Any, wave_BL: Tensor, samples: Sequence[int], *, normalizes: bool) -> Tensor:
    """Returns log-probabilities of the symbols, (B, T, V) in fp32, of waves in [-1, 1] that are zero beyond their ends.

    The model computes in the data type of its weights, or in that of an autocast around the call.
    """
    samples_B = torch.tensor(samples, device=wave_BL.device)
    if normalizes:
        wave_BL = networks.normalized(wave_BL, samples_B)
    is_padded = min(samples) < wave_BL.shape[1] and networks.uses_attention_mask(model)
    frames_B = networks.frame_counts(samples_B) if is_padded else None
    with networks.eval_mode(model):
        logits_BTV = networks.logits(model, wave_BL.to(model.lm_head.weight.dtype), frames_B)
        return torch.log_softmax(logits_BTV.float(), dim=-1)


def load_recogniser(name: str | Path, device: torch.device) -> Recogniser:
    """Loads a recogniser for inference: of a run, a checkpoint, or a folder of transformers, or a published one. Raises
    UserError if it doesn't exist, is damaged or is of another kind."""
    path = local_path(name, PUBLISHED)
    loaded = load_pretrained(path, str(name)) if is_pretrained(path) else load_run(path)
    refuse_nonfinite(loaded.model.state_dict(), loaded.source)
    loaded.model.requires_grad_(False).eval().to(device)
    return loaded


def load_pretrained(path: Path, name: str) -> Recogniser:
    """Loads a recogniser of transformers on the CPU. Raises UserError if it cannot be read, or is no recogniser yet."""
    found = open_pretrained(path, name)
    if found.vocabulary is None:
        raise UserError(
            f"{name}: no {VOCABULARY}, so that nothing tells which symbols its head writes",
            hint="copy the tokenizer's files there; train one that was only pretrained: train-asr --init-from",
        )
    model, missing = found.load()
    if missing:
        raise UserError(
            f"{name}: its weights lack {format_list(missing)}",
            hint="train one that was only pretrained: train-asr --init-from",
        )
    return Recogniser(model, found.vocabulary, ENCODER_RATE, found.normalizes, name)


def load_run(path: Path) -> Recogniser:
    """Loads the recogniser of a run or checkpoint on the CPU: its moving average if it has one, adapters merged."""
    source, content = checkpoint.find_named(path, "asr", ["recogniser"])
    facts = content["facts"]
    try:
        architecture, rate, normalizes = facts["architecture"], int(facts["sampling_rate"]), bool(facts["normalizes"])
        check_model_type(architecture.get("model_type", MODEL_TYPE), "the model")
        vocabulary = Vocabulary.from_json(facts["text"])
        model = networks.build_recogniser(architecture)
    except UserError as error:
        raise UserError(f"{source}: {error.message}", hint=error.hint) from None
    except Exception as error:  # The configuration of transformers raises errors of many kinds.
        raise UserError(
            f"{source}: the checkpoint does not describe its model: {first_line(error)}", hint="take another one"
        ) from None
    load_weights(
        model, networks.merged(trained_weights(content, "recogniser")), f"{source}: the checkpoint's recogniser"
    )
    return Recogniser(model, vocabulary, rate, normalizes, str(source))


# ------------------------------------------------------------------------------------------------------ greedy decoding


@dataclass(frozen=True)
class Spelled:
    """A symbol that was recognised, in the frames from `begin` to before `end`."""

    symbol: int
    begin: int
    end: int


def greedy_symbols(best_F: NDArray[np.integer[Any]], blank: int) -> list[Spelled]:
    """Returns the symbols of frames whose most probable ones are given: repeats are one symbol and blanks none (Graves
    et al. 2006, section 2)."""
    edges = [0, *(np.flatnonzero(np.diff(best_F)) + 1).tolist(), len(best_F)]
    return [
        Spelled(int(best_F[begin]), begin, end)
        for begin, end in pairwise(edges)
        if begin < end and best_F[begin] != blank
    ]


def greedy_text(log_probs_FV: NDArray[np.floating[Any]], vocabulary: Vocabulary) -> str:
    """Returns the text of log-probabilities or logits by greedy decoding."""
    symbols = greedy_symbols(log_probs_FV.argmax(axis=1), vocabulary.blank)
    return vocabulary.text_of([spelled.symbol for spelled in symbols])


def words_of(symbols: Sequence[Spelled], vocabulary: Vocabulary, frame_seconds: float) -> list[TimedWord]:
    """Returns the words between delimiters, with times."""
    words = []
    for between, group in groupby(symbols, key=lambda spelled: spelled.symbol == vocabulary.delimiter):
        letters = list(group)
        word = "" if between else vocabulary.text_of([letter.symbol for letter in letters]).strip()
        if word:
            words.append(TimedWord(word, letters[0].begin * frame_seconds, letters[-1].end * frame_seconds))
    return words


def comparable(read: str, vocabulary: Vocabulary) -> str:
    """Returns what was read as normalised texts are written. Recognisers of other programs may write capitals and
    punctuation; the others write nothing but normalised text."""
    return vocabulary.normalize(read) if vocabulary.language == UNDETERMINED else read
