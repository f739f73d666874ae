"""Which kind of model a path holds."""

import json
from pathlib import Path
from pickle import UnpicklingError

from gputrain.cli.config import Kind
from gputrain.config import read_file

_KINDS: dict[str, Kind] = {"vocoder": "vocoder", "voice": "voice"}  # by what a checkpoint says


def kind_of(model: Path) -> Kind:
    """By what lies there: a run, a checkpoint, or a model in another program's format.

    Where nothing tells, a VAE, whose reader says what is wrong.
    """
    folder = model if model.is_dir() else model.parent
    if model.suffix == ".ckpt" or (model.is_dir() and (model / "model.ckpt").is_file()):
        return "vocoder"
    if (folder / "config.yaml").is_file():
        keys = read_file(folder / "config.yaml")
        return "vocoder" if "crop_mel_frames" in keys else "voice" if "data_dir" in keys else "images"
    if model.is_file() and model.suffix == ".pt":
        return _KINDS.get(_saved_kind(model), "images")
    try:
        told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "images"
    return "vocoder" if isinstance(told, dict) and "upsample_rates" in told else "images"


def _saved_kind(checkpoint: Path) -> str:
    """Nothing where it cannot be read: what reads it next says why."""
    import torch

    try:
        content = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, UnpicklingError):
        return ""
    return str(content.get("kind", "")) if isinstance(content, dict) else ""
