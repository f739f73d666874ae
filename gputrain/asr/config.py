"""Options of the commands of a recogniser. Imports no torch."""

import json
from pathlib import Path
from typing import ClassVar, Literal

from gputrain.asr.architecture import AdapterKind, RecogniserPreset
from gputrain.audio.config import SoundSaving
from gputrain.config import ModelName, advanced, changed, config, file_key, opt
from gputrain.engine.schedule import (
    CHECKPOINTING_HELP,
    PUBLISHED_NAME,
    SEVERAL,
    LearningRateSchedule,
    Schedule,
)
from gputrain.errors import UserError
from gputrain.fetch.names import TRAINED_HELP, TrainedModel
from gputrain.hw.plan import DeviceName, Hardware
from gputrain.kinds import PublishedFiles
from gputrain.planner.kind_work import plan_settings
from gputrain.speech.config import CLIPS_HELP, SpeechData

TranscriptFormat = Literal["txt", "srt", "vtt"]
FROM_SCRATCH_RATE, FINE_TUNING_RATE = 1e-3, 3e-4


def adapters_of(folder: Path) -> list[str]:
    """Returns the names of the files with the weights of the language that a tokenizer of transformers is set to."""
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        language = settings.get("target_lang")
    except (OSError, ValueError, AttributeError):  # Reading the model says what is wrong.
        return []
    return [f"adapter.{language}.{ending}" for ending in ("safetensors", "bin")] if isinstance(language, str) else []


# Of transformers. Models of many languages have the weights of each in a file of its own.
PUBLISHED = PublishedFiles(
    whole=("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"),
    needed=("config.json",),
    beside=(
        "vocab.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
        "preprocessor_config.json", "processor_config.json",
    ),
    parts=("adapter.*.safetensors", "adapter.*.bin"), further=adapters_of, example="facebook/wav2vec2-xls-r-300m",
    kind="asr",
)  # fmt: skip


@config(panel="Data")
class Data(SpeechData):
    data_path: tuple[Path, ...] = changed(
        SpeechData, "data_path", help="Folder of `prepare-data --kind asr`." + SEVERAL
    )
    held_out_share: float = changed(SpeechData, "held_out_share", default=0.05)
    eval_clips: int = changed(SpeechData, "eval_clips", default=200)
    eval_batch_size: int = advanced(default=16, help="Clips transcribed at once in an evaluation.", min=1)


@config(panel="Model")
class Model:
    preset: RecogniserPreset = opt(
        default="xls-r-300m",
        help="Size without init_from. tiny (2 M weights), base (94 M) or one of the sizes of "
        "XLS-R, from random weights.",
    )
    init_from: ModelName = opt(
        default=ModelName(),
        help="Model to start from. A folder of transformers, a run or a checkpoint"
        + PUBLISHED_NAME
        + " Symbols keep their weights.",
    )
    adapters: AdapterKind = opt(
        default="none",
        help="Train only head and lora or attention. lora: low-rank matrices of the attention; attention: adapters "
        "as in MMS.",
    )
    lora_rank: int = opt(default=16, help="Rank of the low-rank matrices.", min=1, max=256)
    gradient_checkpointing: bool | None = advanced(default=None, help=CHECKPOINTING_HELP)
    freeze_feature_encoder: bool | None = opt(
        default=None,
        help="Keep the convolutions as they are. They read the waves; default: unless a tiny or base model is new.",
    )
    freeze_encoder_steps: int = opt(default=0, help="First steps in which only the head trains.", min=0)
    hidden_dropout: float = advanced(default=0.0, help="Dropout of the encoder's layers.", min=0, max=0.9)
    layer_drop: float = advanced(default=0.0, help="Probability that a step leaves out a layer.", min=0, max=0.9)

    @property
    def trains_features(self) -> bool:
        """True if the convolutions of the feature encoder are trained."""
        anew = not self.init_from and self.preset in ("tiny", "base")
        frozen = not anew if self.freeze_feature_encoder is None else self.freeze_feature_encoder
        return self.adapters == "none" and not frozen

    def __post_init__(self) -> None:
        if self.lora_rank != type(self).lora_rank and self.adapters != "lora":
            raise UserError(
                f"lora_rank {self.lora_rank} has no effect with adapters {self.adapters}", hint="use --adapters lora"
            )
        if self.freeze_feature_encoder is False and self.adapters != "none":
            raise UserError(
                f"the feature encoder is always frozen with adapters {self.adapters}",
                hint="drop --no-freeze-feature-encoder",
            )


@config(panel="Masking")
class Masking:
    """SpecAugment (Park et al. 2019, arXiv:1904.08779) on the features, as in wav2vec 2.0."""

    mask_time_prob: float = opt(
        default=0.05, help="Share of masked frames; 0 is off. Overlaps of spans make it less.", min=0, max=1
    )
    mask_time_length: int = advanced(default=10, help="Frames of a masked span.", min=1)


@config(panel="Training")
class RecogniserSchedule(Schedule):
    batch_size: int = changed(Schedule, "batch_size", default=32, help=CLIPS_HELP)
    num_epochs: int = changed(Schedule, "num_epochs", default=30)
    learning_rate: float = changed(
        Schedule,
        "learning_rate",
        default=0.0,
        help=f"Highest learning rate; 0: auto. {FINE_TUNING_RATE:g} with init_from, else {FROM_SCRATCH_RATE:g}.",
    )
    learning_rate_schedule: LearningRateSchedule = changed(Schedule, "learning_rate_schedule", default="tri-stage")
    weight_decay: float = changed(Schedule, "weight_decay", default=0.005)
    beta1: float = file_key(default=0.9, help="AdamW's decay rate of the mean gradient.", min=0, max=0.9999)
    beta2: float = file_key(default=0.98, help="AdamW's decay rate of the mean squared gradient.", min=0, max=0.999999)
    ema_decay: float = changed(Schedule, "ema_decay", default=0.0)


@config(panel="Run folder")
class RecogniserSaving(SoundSaving):
    evaluate_every_steps: int = changed(SoundSaving, "evaluate_every_steps", default=500)


@config()
class TrainAsr:
    kind: ClassVar[str] = "asr"

    data: Data
    model: Model = Model()
    masking: Masking = Masking()
    schedule: RecogniserSchedule = RecogniserSchedule()
    saving: RecogniserSaving = RecogniserSaving()
    hardware: Hardware = Hardware()


@config(panel="Speech")
class PlannedSpeech:
    clip_seconds: float = opt(default=8.0, help="Length of clips. With data, their average is taken.", min=0.5)
    labels_a_second: float = opt(default=15.0, help="Letters and spaces in a second.", min=1)
    num_symbols: int = opt(default=32, help="Number of different symbols, with the blank.", min=4)


PlanAsr = plan_settings(TrainAsr, speech=PlannedSpeech)


@config(panel="Transcription")
class Transcribe(TrainedModel):
    model: ModelName = opt(
        help=TRAINED_HELP + " Of train-asr or transformers (Wav2Vec2ForCTC): its folder, its name "
        "on the Hugging Face Hub, or the file of a language's adapter in it."
    )
    input: Path = opt(help="Recording, or folder tree. Of any length, sampling rate and format.")
    json: Path | None = opt(
        default=None,
        help="JSON file for all recordings. A list of path, text, and words with start and end in seconds.",
    )
    output_dir: Path | None = opt(default=None, help="Folder of a file for each recording. And for each format.")
    formats: tuple[TranscriptFormat, ...] = opt(default=("srt",), help="Formats in output_dir: txt, srt, vtt.")
    chunk_seconds: float = opt(default=30.0, help="Seconds computed at once. Fewer need less memory.", min=1, max=600)
    overlap_seconds: float = opt(
        default=6.0, help="Seconds that neighbouring chunks share. Each gives its half.", min=0.1, max=60
    )
    device: DeviceName = changed(Hardware, "device")

    def __post_init__(self) -> None:
        if self.output_dir is None and self.formats != ("srt",):
            raise UserError("formats does nothing without output_dir", hint="give --output-dir FOLDER")
        if not self.formats:
            raise UserError("formats is empty", hint="give --formats txt,srt,vtt or some of them")
