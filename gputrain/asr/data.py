"""The data of a recogniser's training: prepared speech in buckets; and its architecture and initial weights, from a
preset, a folder of transformers, the Hub, or a run.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gputrain.asr.architecture import MODEL_TYPE, check_model_type, preset_architecture, with_adapters
from gputrain.asr.config import PUBLISHED, PlannedSpeech, TrainAsr
from gputrain.asr.evaluate import HeldOutSpeech
from gputrain.asr.load import load_run
from gputrain.asr.pretrained import is_pretrained, open_pretrained
from gputrain.asr.recipe import RecogniserRecipe
from gputrain.engine import checkpoint
from gputrain.engine.checkpoint import load_weights, refuse_nonfinite
from gputrain.engine.run_folder import Run
from gputrain.errors import UserError
from gputrain.fetch.names import local_path, refuse_graph
from gputrain.files import write_text
from gputrain.hw.runtime import Runtime
from gputrain.planner.kind_work import TrainingStart
from gputrain.speech.buckets import Buckets, ClipBatch, ClipSize, Speech, buckets_of, open_speech
from gputrain.speech.config import ENCODER_RATE, STRIDE
from gputrain.speech.text.vocabulary import ABSENT, Vocabulary, match_symbols
from gputrain.speech.training import SpeechTraining, size_of_clip, synthetic_bucket

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class UtteranceFacts:
    """Properties of the speech and the model that memory depends on."""

    clip: ClipSize
    architecture: dict[str, Any]  # fields of transformers' Wav2Vec2Config


def architecture_of(settings: TrainAsr, facts: UtteranceFacts) -> dict[str, Any]:
    """Returns the architecture of settings that a fallback may have changed."""
    if settings.model.init_from:
        return facts.architecture
    return recogniser_architecture(settings, None, facts.architecture["vocab_size"])


def open_training_speech(settings: TrainAsr) -> Speech:
    return open_speech(settings.data.data_path, settings.data.held_out_share, "asr")


def fill_buckets(settings: TrainAsr, speech: Speech) -> Buckets:
    """Returns buckets that contain about the same amount of audio."""
    schedule = settings.schedule
    return buckets_of(speech, settings.data, STRIDE, schedule.batch_size, schedule.seed)


@dataclass
class AsrTraining(SpeechTraining[TrainAsr]):
    """The speech of a recogniser's training."""

    normalizes: bool  # True if waves are normalised before the model reads them.

    @classmethod
    def of(cls, settings: TrainAsr) -> "AsrTraining":
        """Opens the speech of a training. Raises UserError if it cannot be used."""
        speech = open_training_speech(settings)
        vocabulary, buckets = speech.store.format.vocabulary, fill_buckets(settings, speech)
        architecture = recogniser_architecture(settings, vocabulary, len(vocabulary.symbols))
        facts = UtteranceFacts(buckets.largest_average, architecture)
        return cls(speech, buckets, facts, initial_normalizes(settings))

    def facts(self, run: Run) -> dict[str, Any]:
        if run.resumed:  # The model to initialise from may be gone.
            self.normalizes = bool(run.resumed["facts"]["normalizes"])
        return {
            "text": self.speech.store.format.vocabulary.to_json(),
            "sampling_rate": ENCODER_RATE,
            "hop_size": STRIDE,
            "architecture": self.sizes.architecture,
            "normalizes": self.normalizes,
        }

    def begin(self, settings: TrainAsr, run: Run, runtime: Runtime) -> TrainingStart[TrainAsr]:
        start = super().begin(settings, run, runtime)
        if run.group.leads:
            path = run.folder / ARCHITECTURE
            try:
                write_text(path, json.dumps(self.sizes.architecture, indent=1) + "\n")
            except OSError as error:
                log.warning("%s cannot be written (%s)", path, error.strerror)
        return start

    def described(self, settings: TrainAsr) -> str:
        return settings.model.init_from or settings.model.preset

    def advise(self, settings: TrainAsr, hours: float) -> None:
        if not settings.model.init_from and settings.model.preset not in ("tiny", "base"):
            log.warning(
                "%s begins with random weights: --init-from its pretrained model, a folder or a name on the Hugging "
                "Face Hub, reaches low error rates with a thousandth of the speech",
                settings.model.preset,
            )

    def recipe(self, settings: TrainAsr, runtime: Runtime) -> RecogniserRecipe:
        sizes, held_out = self.sizes, HeldOutSpeech(self.speech, settings, normalizes=self.normalizes)
        return RecogniserRecipe(settings, sizes.architecture, sizes.clip, runtime, held_out, normalizes=self.normalizes)

    def start(self, recipe: RecogniserRecipe) -> bool:
        if path := recipe.settings.model.init_from:
            init_weights(recipe, path, self.speech.store.format.vocabulary)
        return bool(path)


# ------------------------------------------------------------------------------------------ speech that is not there


def facts_of(settings: TrainAsr, speech: PlannedSpeech, clip_seconds: float) -> UtteranceFacts:
    """Returns the facts of hypothetical speech whose clips have the given length."""
    frames, labels = clip_seconds * ENCODER_RATE / STRIDE, clip_seconds * speech.labels_a_second
    return UtteranceFacts(size_of_clip(frames, labels), recogniser_architecture(settings, None, speech.num_symbols))


def synthetic_batch(settings: TrainAsr, sizes: UtteranceFacts) -> list[ClipBatch]:
    """Returns a bucket of noise."""
    draws, clip = torch.Generator().manual_seed(0), sizes.clip
    wave_BT = 3000 * torch.randn(settings.schedule.global_batch_size, clip.frames * STRIDE, generator=draws)
    return synthetic_bucket(wave_BT, clip, sizes.architecture["vocab_size"], draws)


# --------------------------------------------------------------------------------------------- architecture and weights

HEAD = "lm_head."
NOT_IN_BASE = (HEAD, "lora_", "adapter_layer", "masked_spec_embed")  # Tensors that a model to start from may lack.
ARCHITECTURE = "architecture.json"  # File in a run folder.
# Fields of a configuration that describe a file and not the model.
NO_ARCHITECTURE = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}


def recogniser_architecture(settings: TrainAsr, vocabulary: Vocabulary | None, num_symbols: int) -> dict[str, Any]:
    """Returns the architecture of a training, with the dropouts of the settings.

    Reads the configuration that `init_from` names, but no weights. Raises UserError if it cannot be read, is not that
    of a recogniser with frames 320 samples apart, or a setting has no effect on it.
    """
    options = settings.model
    kept = saved_architecture(settings)
    if kept is not None:
        check_model_type(kept.get("model_type", MODEL_TYPE), f"the run in {settings.saving.output_dir}")
        architecture = kept
    elif not options.init_from:
        architecture = preset_architecture(options.preset, num_symbols=num_symbols, adapters=options.adapters)
    else:
        architecture = with_adapters(_initial_architecture(options.init_from), options.adapters)
    whole = {
        **architecture,
        "vocab_size": num_symbols,
        "pad_token_id": vocabulary.blank if vocabulary else 0,
        "hidden_dropout": options.hidden_dropout,
        "attention_dropout": 0.0,
        "final_dropout": 0.0,
        "activation_dropout": 0.0,
        "feat_proj_dropout": 0.0,
        "layerdrop": 0.0,
        "mask_time_prob": architecture.get("mask_time_prob") or 0.05,  # Above 0, the model has its mask vector.
    }
    plain: dict[str, Any] = json.loads(json.dumps(whole))  # In the form in which files give it back.
    return plain


def saved_architecture(settings: TrainAsr) -> dict[str, Any] | None:
    """Returns the architecture of the run to resume, so that the model that it began with is not needed any more."""
    named, folder = settings.saving.resume_from, settings.saving.output_dir
    if named not in ("", "auto"):
        folder = Path(named) if Path(named).is_dir() else Path(named).parent
    if not named or not checkpoint.newest_first(folder):
        return None
    try:
        found = json.loads((folder / ARCHITECTURE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def is_own(path: Path) -> bool:
    """Returns True if a path leads to a run or a checkpoint of train-asr."""
    refuse_graph(path)
    return not is_pretrained(path) and (path.is_file() or bool(checkpoint.newest_first(path)))


def _initial_architecture(name: str) -> dict[str, Any]:
    """Reads the architecture of a model. Of a published one, the weights are not fetched: a plan needs none."""
    path = local_path(name, PUBLISHED, weights=False)
    found = load_run(path).model.config.to_dict() if is_own(path) else open_pretrained(path, name).architecture
    return {name: value for name, value in found.items() if name not in NO_ARCHITECTURE}


def initial_normalizes(settings: TrainAsr) -> bool:
    """Returns True if the model to initialise from reads waves of zero mean and unit variance, as a new one does.

    Raises UserError if there is no such model, or its folder has no weights.
    """
    name = settings.model.init_from
    if not name or saved_architecture(settings) is not None:  # The checkpoint of a resumed run tells.
        return True
    path = local_path(name, PUBLISHED)
    if is_own(path):
        return load_run(path).normalizes
    found = open_pretrained(path, name)
    found.check_weights()
    return found.normalizes


def init_weights(recipe: RecogniserRecipe, name: str, vocabulary: Vocabulary) -> None:
    """Copies the weights of a model into the recipe's. The head gets the rows of the symbols that both have; without a
    vocabulary or with other symbols it keeps its random ones.

    Raises UserError if there is no such model, or one of its weights is not finite.
    """
    lacking: list[str] = []
    known: Vocabulary | None
    path = local_path(name, PUBLISHED)
    if is_own(path):
        run = load_run(path)
        given, known = run.model, run.vocabulary
    else:
        found = open_pretrained(path, name)
        (given, lacking), known = found.load(), found.vocabulary
    weights = {key: tensor for key, tensor in given.state_dict().items() if key not in lacking}
    refuse_nonfinite(weights, name)
    own = recipe.model.state_dict()
    head = {key: tensor for key, tensor in weights.items() if key.startswith(HEAD)}
    taken = {key: tensor for key, tensor in weights.items() if key in own and key not in head}
    missing = [key for key in own if key not in taken and not any(part in key for part in NOT_IN_BASE)]
    odd = [key for key, tensor in taken.items() if own[key].shape != tensor.shape]
    if odd:
        raise UserError(f"{name}: {odd[0]} has another shape than its configuration says")
    added = _copy_head(own, head, known, vocabulary)
    load_weights(recipe.model, taken, name, strict=False)
    if recipe.settings.schedule.ema_decay:
        recipe.ema.restart(recipe.model)
    log.info("start: the weights of %s; %s", name, added)
    if head and known is None:
        log.warning("%s: its head is not used, since no vocab.json names its symbols", name)
    if missing:
        log.warning("%s: reinitialised: %d tensors, such as %s", name, len(missing), missing[0])


@torch.no_grad()
def _copy_head(
    own: Mapping[str, Tensor], head: Mapping[str, Tensor], known: Vocabulary | None, wanted: Vocabulary
) -> str:
    """Copies the head's rows of known symbols, in place. Returns which symbols are new, in words."""
    weight = head.get(f"{HEAD}weight")
    if known is None or weight is None or weight.shape[1:] != own[f"{HEAD}weight"].shape[1:]:
        return "its head begins with random weights, as the model has no vocabulary"
    match = match_symbols(known, wanted)
    for key, tensor in head.items():
        for row, old in enumerate(match.old_ids):
            if old != ABSENT and old < len(tensor):
                own[key][row] = tensor[old].to(own[key].device)
    if not match.added:
        return "all symbols keep their weights"
    named = " ".join(map(repr, match.added))
    return f"{len(match.added)} of {len(wanted.symbols)} symbols are new: {named}"
