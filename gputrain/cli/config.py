"""Commands that serve several kinds of model: their options, together. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from gputrain.config import config, leaves, opt
from gputrain.errors import UserError
from gputrain.vae import config as vae_config
from gputrain.vae.config import PrepareData
from gputrain.vocoder.config import Sound

Kind = Literal["images", "vocoder"]
# What concerns one kind alone: with another it would do nothing, so it is refused.
OF_PREPARATION: Mapping[Kind, frozenset[str]] = {
    "images": frozenset({"mode", "target_size", "resize_mode", "format", "min_size", "max_megapixels"}),
    "vocoder": frozenset(leaves(Sound)),
}
OF_VALIDATION: Mapping[Kind, frozenset[str]] = {
    "images": frozenset({"min_size", "max_megapixels"}),
    "vocoder": frozenset({"audio_sample_rate"}),
}
OF_EVALUATION: Mapping[Kind, frozenset[str]] = {
    "images": frozenset({"image_size", "max_pictures", "batch_size", "rfid_weights", "rfid_sha256"}),
    "vocoder": frozenset({"max_clips", "clip_seconds"}),
}


def refuse_others(settings: object, kind: Kind, options: Mapping[Kind, frozenset[str]], by: str) -> None:
    """Raises UserError where an option of another kind is given, `by` what the kind is told."""
    known = leaves(type(settings))
    for name in sorted({name for other, names in options.items() if other != kind for name in names}):
        value: object = settings
        for step in known[name].path:
            value = getattr(value, step)
        if value != known[name].default:
            raise UserError(f"{name} does nothing with {by}", hint=f"drop {known[name].flag}")


@config(panel="Preparation")
class Prepare(PrepareData):
    kind: Kind = opt(default="images", help="What is prepared: pictures for train-vae, or recordings for a vocoder.")
    sound: Sound = Sound()

    def __post_init__(self) -> None:
        refuse_others(self, self.kind, OF_PREPARATION, f"--kind {self.kind}")
        super().__post_init__()


@config(panel="Validation")
class Validate(vae_config.Validate):
    input_dir: Path = opt(help="Folder of pictures or recordings, prepared or not.")
    kind: Kind = opt(default="images", help="What it holds: pictures for train-vae, or recordings for a vocoder.")
    audio_sample_rate: int = opt(default=44100, help="Rate that a vocoder is to be trained at, in Hz.", min=8000)

    def __post_init__(self) -> None:
        refuse_others(self, self.kind, OF_VALIDATION, f"--kind {self.kind}")


@config(panel="Evaluation")
class Evaluate(vae_config.Evaluate):
    model: Path = opt(help="A run folder, a checkpoint, or an exported model (of diffusers, or of openvpi).")
    data_path: Path = opt(help="Folder of pictures, prepared or not; for a vocoder, of prepared sound.")
    max_clips: int = opt(default=1000, help="Of a vocoder: measure on at most this many clips.", min=1)
    clip_seconds: float = opt(default=10.0, help="Of a vocoder: measure on the beginnings of clips.", min=0.5)


@config(panel="Export")
class Export(vae_config.Export):
    format: Literal["auto", "diffusers", "openvpi", "onnx"] = opt(
        default="auto", help="What should load it; auto: diffusers for a VAE, openvpi for a vocoder."
    )
    name: str = opt(default="vocoder", help="Name of the ONNX file, and of the voice in its vocoder.yaml.")


@config(panel="Demo")
class Demo(vae_config.Demo):
    kind: Kind = opt(default="images", help="What to show: the image VAE, or the vocoder.")


FORMATS: Mapping[Kind, tuple[str, ...]] = {"images": ("diffusers",), "vocoder": ("openvpi", "onnx")}


def format_of(settings: Export, kind: Kind) -> str:
    """The format to write. Raises UserError where it is of another kind of model."""
    known = FORMATS[kind]
    if settings.format not in ("auto", *known):
        model = "an image VAE" if kind == "images" else "a vocoder"
        raise UserError(
            f"{settings.model} is {model}, which has no format {settings.format}", hint=f"use {' or '.join(known)}"
        )
    format = known[0] if settings.format == "auto" else settings.format
    if format != "onnx" and settings.name != "vocoder":
        raise UserError(f"name does nothing with format {format}", hint="drop --name")
    if kind == "vocoder" and settings.data_path is not None:
        raise UserError("data_path does nothing with a vocoder", hint="drop --data-path")
    if kind == "vocoder" and settings.device == "cuda":
        raise UserError("a vocoder is exported on the CPU", hint="drop --device")
    return format
