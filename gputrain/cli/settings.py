"""Options of the commands that serve several kinds of model. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from gputrain.audio.config import Sound
from gputrain.config import FORMER_KINDS, Kind, config, leaves, opt
from gputrain.errors import UserError
from gputrain.tts.prepare_config import VoiceOptions
from gputrain.vae import config as vae_config

# Options that only one kind has. They would have no effect with another kind, so they are refused there.
PREPARATION_OPTIONS: Mapping[Kind, frozenset[str]] = {
    "vae": frozenset({"mode", "target_size", "resize_mode", "format", "min_size", "max_megapixels"}),
    "vocoder": frozenset(leaves(Sound)),
    "tts": frozenset({*leaves(VoiceOptions), "audio_sample_rate", "trim_db", "loudness_db"}),
}
VALIDATION_OPTIONS: Mapping[Kind, frozenset[str]] = {
    "vae": frozenset({"min_size", "max_megapixels"}),
    "vocoder": frozenset({"audio_sample_rate"}),
    "tts": frozenset({*leaves(VoiceOptions), "audio_sample_rate"}),
}
EVALUATION_OPTIONS: Mapping[Kind, frozenset[str]] = {
    "vae": frozenset({"image_size", "max_pictures", "batch_size", "rfid_weights", "rfid_sha256"}),
    "vocoder": frozenset({"max_clips", "clip_seconds"}),
    "tts": frozenset({"max_clips", "recogniser"}),
}
DATA_KINDS = "vae (pictures), vocoder (recordings) or tts (recordings with their texts)"


def refuse_others(settings: object, kind: Kind, options: Mapping[Kind, frozenset[str]], by: str) -> None:
    """Raises UserError if an option of another kind is given. `by` names what decided the kind, for the message."""
    known = leaves(type(settings))
    for name in sorted(frozenset[str]().union(*options.values()) - options[kind]):
        value: object = settings
        for step in known[name].path:
            value = getattr(value, step)
        if value != known[name].default:
            raise UserError(f"{name} does nothing with {by}", hint=f"drop {known[name].flag}")


def check_language(kind: Kind, voice: VoiceOptions) -> None:
    """Raises UserError if speech is prepared without a language."""
    if kind == "tts" and voice.language is None:
        raise UserError(
            "language is missing",
            hint="--language uz, en or ru; --language characters reads any other letter by letter",
        )


@config(panel="Preparation")
class PrepareSettings(vae_config.PrepareData):
    input_dir: Path = opt(help="Folder tree of pictures or recordings; it is only read.")
    output_dir: Path | None = opt(default=None, help="Folder to fill with prepared data and their manifest.")
    kind: Kind = opt(default="vae", help=f"Kind of model to prepare for: {DATA_KINDS}.", former_values=FORMER_KINDS)
    sound: Sound = Sound()
    voice: VoiceOptions = VoiceOptions()

    def __post_init__(self) -> None:
        refuse_others(self, self.kind, PREPARATION_OPTIONS, f"--kind {self.kind}")
        check_language(self.kind, self.voice)
        super().__post_init__()


@config(panel="Validation")
class ValidateSettings(vae_config.Validate):
    input_dir: Path = opt(help="Folder of pictures or recordings, prepared or not.")
    kind: Kind = opt(default="vae", help=f"Kind of model the data are for: {DATA_KINDS}.", former_values=FORMER_KINDS)
    audio_sample_rate: int | None = opt(
        default=None, help="Sampling rate of the training, in Hz; default: 44100 for vocoder, 22050 for tts.", min=8000
    )
    voice: VoiceOptions = VoiceOptions()

    def __post_init__(self) -> None:
        refuse_others(self, self.kind, VALIDATION_OPTIONS, f"--kind {self.kind}")


@config(panel="Evaluation")
class EvaluateSettings(vae_config.Evaluate):
    model: Path = opt(help="A run folder, a checkpoint, or an exported model (of diffusers or openvpi).")
    data_path: Path = opt(help="Folder of pictures, prepared or not; for a vocoder or a voice, a prepared folder.")
    max_clips: int = opt(default=1000, help="Maximum number of clips, for a vocoder or a voice.", min=1)
    clip_seconds: float = opt(
        default=10.0, help="Length of the beginning of each clip that a vocoder is evaluated on, in seconds.", min=0.5
    )
    recogniser: Path | None = opt(
        default=None, help="Folder of a faster-whisper model, which counts a voice's recognition errors."
    )


@config(panel="Export")
class ExportSettings(vae_config.Export):
    format: Literal["auto", "diffusers", "openvpi", "onnx", "piper"] = opt(
        default="auto",
        help="Format to write; auto: diffusers for an image VAE, openvpi for a vocoder, piper for a voice.",
    )
    name: str = opt(default="", help="Name of the ONNX file and of the model in it; default: `vocoder` or `voice`.")
    language_code: str = opt(
        default="",
        help="Language and country for Piper, such as kk_KZ, if they don't follow from the language of the texts.",
    )


@config(panel="Demo")
class DemoSettings(vae_config.Demo):
    kind: Kind = opt(
        default="vae", help="Kind of model to train: vae (images), vocoder or tts (a voice).",
        former_values=FORMER_KINDS,
    )  # fmt: skip
