"""Options of the commands that serve several kinds of model. Imports no torch."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import ClassVar, Literal

from gputrain.asr.commands import LanguageModelOptions
from gputrain.audio.config import Sound
from gputrain.config import FORMER_KINDS, Kind, config, leaves, opt
from gputrain.errors import UserError
from gputrain.hw.plan import DeviceName
from gputrain.hw.probe import usable_cores
from gputrain.speech.prepare_config import LANGUAGE_HINTS, SpeechOptions
from gputrain.vae.config import PictureEvaluation, PictureLimits, VaePrepareConfig

VOICE_OPTIONS = frozenset(leaves(SpeechOptions)) - {"cue_gap"}
RECOGNISER_OPTIONS = frozenset(leaves(SpeechOptions)) - {"alphabet", "espeak_voice"}
# Options that only some kinds have. They would have no effect with others, so they are refused there.
PREPARATION_OPTIONS: Mapping[Kind, frozenset[str]] = {
    "vae": frozenset({"mode", "overwrite", *leaves(VaePrepareConfig)}),
    "vocoder": frozenset(leaves(Sound)),
    "tts": VOICE_OPTIONS | {"align_with", "audio_sample_rate", "trim_db", "loudness_db"},
    "asr": RECOGNISER_OPTIONS | {"align_with", "trim_db", "loudness_db"},
}
VALIDATION_OPTIONS: Mapping[Kind, frozenset[str]] = {
    "vae": frozenset(leaves(PictureLimits)),
    "vocoder": frozenset({"audio_sample_rate"}),
    "tts": VOICE_OPTIONS | {"audio_sample_rate", "check_with"},
    "asr": RECOGNISER_OPTIONS | {"check_with"},
}
EVALUATION_OPTIONS: Mapping[Kind, frozenset[str]] = {
    "vae": frozenset(leaves(PictureEvaluation)),
    "vocoder": frozenset({"max_clips", "clip_seconds"}),
    "tts": frozenset({"max_clips", "recogniser"}),
    "asr": frozenset({"max_clips", *leaves(LanguageModelOptions)}),
}
DATA_KINDS = "vae (pictures), vocoder (recordings), tts or asr (recordings with their texts)"


def refuse_others(settings: object, kind: Kind, options: Mapping[Kind, frozenset[str]], by: str) -> None:
    """Raises UserError if an option of another kind is given. `by` names what decided the kind, for the message."""
    known = leaves(type(settings))
    for name in sorted(frozenset[str]().union(*options.values()) - options[kind]):
        if known[name].value_in(settings) != known[name].default:
            raise UserError(f"{name} does nothing with {by}", hint=f"drop {known[name].flag}")


@config()
class DataSettings:
    """The options that both commands on data have."""

    input_dir: Path = opt(help="Folder tree of pictures or recordings; it is only read.")
    kind: Kind = opt(default="vae", help=f"Kind of model the data are for: {DATA_KINDS}.", former_values=FORMER_KINDS)
    output_file: Path | None = opt(default=None, help="JSON file for the report.")
    num_workers: int = opt(default=-1, help="Number of processes; -1: one for each core.", min=-1)

    @property
    def processes(self) -> int:
        return usable_cores() if self.num_workers < 0 else self.num_workers


@config(panel="Validation")
class ValidateSettings(DataSettings):
    input_dir: Path = opt(help="Folder of pictures or recordings, prepared or not.")
    audio_sample_rate: int | None = opt(
        default=None, help="Sampling rate of the training, in Hz; default: 44100 for vocoder, 22050 for tts.", min=8000
    )
    check_with: Path | None = opt(
        default=None, help="Recogniser of train-asr or transformers that reads every clip and lists texts that differ."
    )
    strict: bool = opt(default=False, help="Exit with 3 if a file is refused.")
    pictures: PictureLimits = PictureLimits()
    speech: SpeechOptions = SpeechOptions()

    def __post_init__(self) -> None:
        refuse_others(self, self.kind, VALIDATION_OPTIONS, f"--kind {self.kind}")


@config(panel="Preparation")
class PrepareSettings(DataSettings):
    mode: Literal["preprocess", "validate"] = opt(
        default="preprocess", help="Prepare the pictures, or only check them."
    )
    output_dir: Path | None = opt(default=None, help="Folder to fill with prepared data and their manifest.")
    overwrite: bool = opt(default=False, help="Replace pictures that the folder holds from other settings.")
    align_with: Path | None = opt(
        default=None,
        help="Recogniser of train-asr or transformers that cuts recordings longer than max_seconds between sentences.",
    )
    pictures: VaePrepareConfig = VaePrepareConfig()
    sound: Sound = Sound()
    speech: SpeechOptions = SpeechOptions()

    def __post_init__(self) -> None:
        refuse_others(self, self.kind, PREPARATION_OPTIONS, f"--kind {self.kind}")
        if self.kind in ("tts", "asr"):
            if self.speech.language is None:
                raise UserError("language is missing", hint=LANGUAGE_HINTS[self.kind])
            self.speech.language_for(self.kind)
        if self.mode == "preprocess" and self.output_dir is None:
            raise UserError("output_dir is missing", hint="name a folder for the prepared data: --output-dir FOLDER")
        if self.mode == "validate" and self.output_dir is not None:
            raise UserError(
                "mode validate writes no pictures", hint="drop --output-dir; --output-file takes the report"
            )

    def as_validation(self) -> ValidateSettings:
        """Returns the options of `validate` for the mode that only checks pictures."""
        shared = {field.name: getattr(self, field.name) for field in fields(DataSettings)}
        return ValidateSettings(**shared, pictures=self.pictures)


@config(panel="Evaluation")
class EvaluateSettings:
    spellings: ClassVar[dict[str, str]] = {"check_with": "recogniser"}

    model: Path = opt(help="A run folder, a checkpoint, or a model of diffusers, openvpi or transformers (CTC).")
    data_path: tuple[Path, ...] = opt(
        help="Folder of pictures, prepared or not; for the other kinds of model, a prepared folder; may be repeated.",
        separator="",
    )
    held_out_share: float | None = opt(
        default=None, help="Share of the data to evaluate; default: those that the run held out; 1: all.",
        min=0.0, max=1.0,
    )  # fmt: skip
    pictures: PictureEvaluation = PictureEvaluation()
    max_clips: int = opt(default=1000, help="Maximum number of clips, for all kinds of model but vae.", min=1)
    clip_seconds: float = opt(
        default=10.0, help="Length of the beginning of each clip that a vocoder is evaluated on, in seconds.", min=0.5
    )
    language_model: LanguageModelOptions = LanguageModelOptions()
    recogniser: Path | None = opt(
        default=None,
        help="Model that counts a voice's recognition errors: of train-asr, transformers (CTC) or faster-whisper.",
    )
    json: Path | None = opt(default=None, help="JSON file for the metrics.")
    device: DeviceName = opt(default="auto", help="Device to compute on.")


@config(panel="Export")
class ExportSettings:
    model: Path = opt(help="Run folder or checkpoint.")
    output_dir: Path = opt(help="Folder for the exported model.")
    data_path: Path | None = opt(
        default=None,
        help="Pictures that give the latents' scaling and shift factors (default: those of the run), or prepared "
        "speech on which an exported recogniser is compared (default: synthetic speech).",
    )
    device: DeviceName = opt(default="auto", help="Device to compute on.")
    format: Literal["auto", "diffusers", "openvpi", "onnx", "oudep", "piper", "transformers", "sherpa"] = opt(
        default="auto",
        help="Format to write; auto: diffusers for an image VAE, openvpi for a vocoder, piper for a voice, "
        "transformers for a recogniser.",
    )
    name: str = opt(
        default="", help="Name of the ONNX file and of the model in it; default: vocoder, voice or recogniser."
    )
    language_code: str = opt(
        default="",
        help="Language and country for Piper, such as kk_KZ, if they don't follow from the language of the texts.",
    )
    push_to_hub: str = opt(
        default="",
        help="Upload the exported files to this model of the Hugging Face Hub, USER/NAME, with a model card.",
    )
    private: bool = opt(default=False, help="Make a new model on the Hub private.")

    def __post_init__(self) -> None:
        if self.private and not self.push_to_hub:
            raise UserError("private has no effect without push_to_hub", hint="--push-to-hub USER/NAME")


@config(panel="Report")
class ReportSettings:
    runs: tuple[Path, ...] = opt(
        help="Run folders; several are compared with one another.", separator="", is_positional=True
    )
    output_file: Path = opt(default=Path("report.html"), help="HTML file to write.")


@config(panel="Demo")
class DemoSettings:
    output_dir: Path = opt(default=Path("demo"), help="Folder for data, run, export and reconstructions.")
    kind: Kind = opt(
        default="vae", help="Kind of model to train: vae (images), vocoder, tts (a voice) or asr (a recogniser).",
        former_values=FORMER_KINDS,
    )  # fmt: skip
