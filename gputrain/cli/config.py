"""Commands that serve several kinds of model: their options, together. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from gputrain.config import config, leaves, opt
from gputrain.errors import UserError
from gputrain.tts.prepare_config import VoiceOptions
from gputrain.vae import config as vae_config
from gputrain.vae.config import PrepareData
from gputrain.vocoder.config import Sound

Kind = Literal["images", "vocoder", "voice"]
# What concerns one kind alone: with another it would do nothing, so it is refused.
OF_PREPARATION: Mapping[Kind, frozenset[str]] = {
    "images": frozenset({"mode", "target_size", "resize_mode", "format", "min_size", "max_megapixels"}),
    "vocoder": frozenset(leaves(Sound)),
    "voice": frozenset({*leaves(VoiceOptions), "audio_sample_rate", "trim_db", "loudness_db"}),
}
OF_VALIDATION: Mapping[Kind, frozenset[str]] = {
    "images": frozenset({"min_size", "max_megapixels"}),
    "vocoder": frozenset({"audio_sample_rate"}),
    "voice": frozenset({*leaves(VoiceOptions), "audio_sample_rate"}),
}
OF_EVALUATION: Mapping[Kind, frozenset[str]] = {
    "images": frozenset({"image_size", "max_pictures", "batch_size", "rfid_weights", "rfid_sha256"}),
    "vocoder": frozenset({"max_clips", "clip_seconds"}),
    "voice": frozenset({"max_clips", "recogniser"}),
}


def refuse_others(settings: object, kind: Kind, options: Mapping[Kind, frozenset[str]], by: str) -> None:
    """Raises UserError where an option of another kind is given, `by` what the kind is told."""
    known = leaves(type(settings))
    for name in sorted(frozenset[str]().union(*options.values()) - options[kind]):
        value: object = settings
        for step in known[name].path:
            value = getattr(value, step)
        if value != known[name].default:
            raise UserError(f"{name} does nothing with {by}", hint=f"drop {known[name].flag}")


def check_language(kind: Kind, voice: VoiceOptions) -> None:
    """Raises UserError where a voice is prepared without one."""
    if kind == "voice" and voice.language is None:
        raise UserError(
            "language is missing",
            hint="--language uz, en or ru; --language characters reads any other letter by letter",
        )


@config(panel="Preparation")
class Prepare(PrepareData):
    kind: Kind = opt(
        default="images",
        help="What is prepared: pictures for train-vae, recordings for a vocoder, or speech with its text for a voice.",
    )
    sound: Sound = Sound()
    voice: VoiceOptions = VoiceOptions()

    def __post_init__(self) -> None:
        refuse_others(self, self.kind, OF_PREPARATION, f"--kind {self.kind}")
        check_language(self.kind, self.voice)
        super().__post_init__()


@config(panel="Validation")
class Validate(vae_config.Validate):
    input_dir: Path = opt(help="Folder of pictures or recordings, prepared or not.")
    kind: Kind = opt(
        default="images",
        help="What it holds: pictures for train-vae, recordings for a vocoder, or speech with its text for a voice.",
    )
    audio_sample_rate: int | None = opt(
        default=None, help="Rate to train at, in Hz; without a word 44100 for a vocoder, 22050 for a voice.", min=8000
    )
    voice: VoiceOptions = VoiceOptions()

    def __post_init__(self) -> None:
        refuse_others(self, self.kind, OF_VALIDATION, f"--kind {self.kind}")


@config(panel="Evaluation")
class Evaluate(vae_config.Evaluate):
    model: Path = opt(help="A run folder, a checkpoint, or an exported model (of diffusers, or of openvpi).")
    data_path: Path = opt(help="Folder of pictures, prepared or not; for a vocoder or a voice, of prepared sound.")
    max_clips: int = opt(default=1000, help="Of a vocoder or a voice: measure on at most this many clips.", min=1)
    clip_seconds: float = opt(default=10.0, help="Of a vocoder: measure on the beginnings of clips.", min=0.5)
    recogniser: Path | None = opt(
        default=None, help="Of a voice: a folder with a model of faster-whisper, to count what is misheard."
    )


@config(panel="Export")
class Export(vae_config.Export):
    format: Literal["auto", "diffusers", "openvpi", "onnx", "piper"] = opt(
        default="auto", help="What should load it; auto: diffusers for a VAE, openvpi for a vocoder, piper for a voice."
    )
    name: str = opt(
        default="", help="Name of the ONNX file, and of what is in it; without a word `vocoder`, or `voice`."
    )
    language_code: str = opt(
        default="",
        help="Language and country that Piper is told, such as kk_KZ, where the texts of a voice do not tell them.",
    )


@config(panel="Demo")
class Demo(vae_config.Demo):
    kind: Kind = opt(default="images", help="What to show: the image VAE, the vocoder, or the voice.")


FORMATS: Mapping[Kind, tuple[str, ...]] = {
    "images": ("diffusers",), "vocoder": ("openvpi", "onnx"), "voice": ("piper",)
}  # fmt: skip
CALLED: Mapping[Kind, str] = {"images": "an image VAE", "vocoder": "a vocoder", "voice": "a voice"}


def format_of(settings: Export, kind: Kind) -> str:
    """The format to write. Raises UserError where it is of another kind of model."""
    known = FORMATS[kind]
    if settings.format not in ("auto", *known):
        raise UserError(
            f"{settings.model} is {CALLED[kind]}, which has no format {settings.format}",
            hint=f"use {' or '.join(known)}",
        )
    format = known[0] if settings.format == "auto" else settings.format
    if format not in ("onnx", "piper") and settings.name:
        raise UserError(f"name does nothing with format {format}", hint="drop --name")
    if format != "piper" and settings.language_code:
        raise UserError(f"language_code does nothing with format {format}", hint="drop --language-code")
    if kind != "images" and settings.data_path is not None:
        raise UserError(f"data_path does nothing with {CALLED[kind]}", hint="drop --data-path")
    if kind != "images" and settings.device == "cuda":
        raise UserError(f"{CALLED[kind]} is exported on the CPU", hint="drop --device")
    return format
