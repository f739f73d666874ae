"""Architecture and initial weights of a training: from a preset, a folder of transformers, the Hub, or a run."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gputrain.asr.architecture import preset_architecture, reads_features, with_adapters
from gputrain.asr.config import TrainAsr
from gputrain.asr.load import load_run
from gputrain.asr.pretrained import is_pretrained, local_recogniser, open_pretrained
from gputrain.asr.recipe import RecogniserRecipe
from gputrain.engine import checkpoint
from gputrain.engine.checkpoint import load_weights, refuse_nonfinite
from gputrain.engine.run_folder import write_text
from gputrain.errors import UserError
from gputrain.fetch.names import refuse_graph
from gputrain.speech.text.vocabulary import ABSENT, Vocabulary, match_symbols

log = logging.getLogger(__name__)

HEAD = "lm_head."
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
        architecture = kept
    elif not options.init_from:
        architecture = preset_architecture(options.preset, num_symbols=num_symbols, adapters=options.adapter_sizes)
    else:
        architecture = with_adapters(_initial_architecture(options.init_from), options.adapter_sizes)
    if reads_features(architecture):
        if options.freeze_feature_encoder is not None:
            raise UserError(
                f"freeze_feature_encoder has no effect: {options.init_from or 'the model'} reads log-mel features, and "
                "has no convolutions that read waves",
                hint="drop the option",
            )
        architecture = {**architecture, "conformer_conv_dropout": options.hidden_dropout}
    whole = {
        **architecture,
        "vocab_size": num_symbols,
        "pad_token_id": vocabulary.blank if vocabulary else 0,
        "hidden_dropout": options.hidden_dropout,
        "attention_dropout": options.attention_dropout,
        "final_dropout": options.final_dropout,
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


def save_architecture(folder: Path, architecture: Mapping[str, Any]) -> None:
    try:
        write_text(folder / ARCHITECTURE, json.dumps(architecture, indent=1) + "\n")
    except OSError as error:
        log.warning("%s cannot be written (%s)", folder / ARCHITECTURE, error.strerror)


def is_own(path: Path) -> bool:
    """Returns True if a path leads to a run or a checkpoint of train-asr."""
    refuse_graph(path)
    return not is_pretrained(path) and (path.is_file() or bool(checkpoint.newest_first(path)))


def _initial_architecture(name: str) -> dict[str, Any]:
    """Reads the architecture of a model. Of a published one, the weights are not fetched: a plan needs none."""
    path = local_recogniser(name, weights=False)
    found = load_run(path).model.config.to_dict() if is_own(path) else open_pretrained(path, name).architecture
    return dict(_plain(found))


def _plain(architecture: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in architecture.items() if name not in NO_ARCHITECTURE}


def initial_normalizes(settings: TrainAsr) -> bool:
    """Returns True if the model to initialise from reads waves of zero mean and unit variance, as a new one does.

    Raises UserError if there is no such model, or its folder has no weights.
    """
    name = settings.model.init_from
    if not name or saved_architecture(settings) is not None:  # The checkpoint of a resumed run tells.
        return True
    path = local_recogniser(name)
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
    path = local_recogniser(name)
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
    missing = [key for key in own if key not in taken and not key.startswith(HEAD) and _is_of_base(key)]
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


def _is_of_base(name: str) -> bool:
    """Returns True for tensors that a model to initialise from has: those that are neither adapters nor the mask."""
    return not any(part in name for part in ("lora_", "adapter_layer", "masked_spec_embed"))


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
