"""Loads a trained autoencoder from a run folder, a checkpoint, or an exported diffusers folder."""

from dataclasses import dataclass
from pathlib import Path

import torch

from gputrain.engine import checkpoint
from gputrain.engine.checkpoint import load_trained
from gputrain.errors import UserError
from gputrain.vae.config import TrainVae
from gputrain.vae.diffusers_folder import CONFIG, load_diffusers
from gputrain.vae.latents import LatentSource
from gputrain.vae.tiny import Autoencoder, autoencoder_class, is_tiny, load_tiny


@dataclass(frozen=True)
class LoadedVae:
    """An autoencoder ready for inference."""

    model: Autoencoder  # EMA weights if the run has them; in eval mode, without gradients
    settings: TrainVae | None  # settings of the run; None for an exported folder
    step: int  # number of optimizer steps; 0 for an exported folder
    latents: LatentSource | None = None  # the pretrained model that a run began with


def load_model(path: Path, device: torch.device) -> LoadedVae:
    """Loads a model for inference. Raises UserError if it doesn't exist, is damaged or is of another kind."""
    if not path.exists():
        raise UserError(f"{path}: no such file or folder", hint="--model takes a run folder, a checkpoint or an export")
    if not (path / CONFIG).is_file() and (path / "vae" / CONFIG).is_file():
        path = path / "vae"  # A pipeline of diffusers.
    if is_tiny(path):
        return LoadedVae(_ready(load_tiny(path), device), None, 0)
    if (path / CONFIG).is_file():
        return LoadedVae(_ready(load_diffusers(path)[0], device), None, 0)
    source, content = checkpoint.find_named(path, "vae", ["autoencoder"])
    settings = checkpoint.saved_settings(TrainVae, content, source)
    model = autoencoder_class(settings)(settings.architecture)
    load_trained(model, content, "autoencoder", str(source))
    latents = LatentSource.of_facts(content.get("facts", {}), source)
    return LoadedVae(_ready(model, device), settings, content["progress"]["step"], latents)


def _ready(model: Autoencoder, device: torch.device) -> Autoencoder:
    return model.to(device).eval().requires_grad_(False)
