"""Every knob of the voice. Imports no torch."""

from pathlib import Path
from typing import Any, ClassVar, Literal

from gputrain.config import assemble, config, opt
from gputrain.errors import UserError
from gputrain.hw.plan import Cards, Hardware
from gputrain.schedule import LearningRateSchedule, Saving, Schedule
from gputrain.tts.architecture import Preset

SEGMENT_FRAMES = 32  # that the decoder learns from at once, and the discriminators judge

# What other trainers of voices call them (Coqui, and the configurations written for it): as a key and as a flag.
SPELLINGS = {
    "data_path": "data_dir",
    "lr": "learning_rate",
    "epochs": "num_epochs",
    "gradient_clip_val": "gradient_clip",
    "grad_clip": "gradient_clip",
    "num_loader_workers": "num_workers",
    "log_interval": "log_freq",
    "print_step": "log_freq",
    "save_interval": "checkpoint_steps",
    "save_step": "checkpoint_steps",
    "eval_interval": "evaluate_steps",
    "save_n_checkpoints": "keep_checkpoints",
    "save_best_after": "best_after",
    "test_delay_epochs": "samples_after_epochs",
    "torch_compile": "use_torch_compile",
    "tf32": "enable_tf32",
}


@config(panel="Data")
class Data:
    data_dir: Path = opt(help="Folder that `prepare-data --kind voice` has filled.")
    batch_seconds: float = opt(
        default=0.0, help="Sound of a batch at the most, in seconds, padding included; 0: by batch_room.", min=0
    )
    batch_room: float = opt(
        default=1.5, help="Sound of a batch at the most, in that of batch_size clips of average length.", min=1
    )
    max_padding: float = opt(
        default=0.02, help="Share of the frames of batches that may be padding; more fills batches of few clips more.",
        min=0.001, max=0.5,
    )  # fmt: skip
    held_out_share: float = opt(default=0.02, help="Share of the clips kept for evaluation.", min=0.0, max=0.5)
    eval_clips: int = opt(default=64, help="Held-out clips that are measured while it trains, at the most.", min=1)
    eval_batch_size: int = opt(default=16, help="Clips spoken at once in an evaluation.", min=1)
    test_sentences: tuple[str, ...] = opt(
        default=(),
        help="Text to speak for samples/; may be repeated. Without it, the texts of held-out clips are spoken.",
        separator="",
    )
    num_audio_samples: int = opt(default=4, help="Texts that are spoken for samples/, at the most.", min=0)


@config(panel="Model")
class Model:
    preset: Preset = opt(
        default="medium",
        help="high: VITS, 83 M with its discriminators; medium: Piper's size; fast: a multi-band decoder, the quickest "
        "to speak.",
    )
    gradient_checkpointing: bool | None = opt(
        default=None, help="Recompute blocks in backward: less memory, more time; without a word the planner decides."
    )
    encoder_dropout: float = opt(default=0.1, help="Dropout of the text encoder.", min=0, max=0.9)
    duration_dropout: float = opt(default=0.5, help="Dropout of the duration predictor.", min=0, max=0.9)
    discriminator_channels: int = opt(
        default=32, help="Channels of the discriminators' first layers; a multiple of 8.", min=8
    )
    init_from: Path | None = opt(
        default=None,
        help="Begin with the weights of a run or checkpoint, or of Piper's or Coqui's, of any language: what fits is "
        "taken.",
    )

    def __post_init__(self) -> None:
        if self.discriminator_channels % 8:
            raise UserError(
                f"discriminator_channels {self.discriminator_channels} is no multiple of 8", hint="32 is VITS's"
            )


@config(panel="Losses")
class Losses:
    mel_weight: float = opt(default=45.0, help="Weight of the difference of log-mels.", min=0)
    kl_weight: float = opt(default=1.0, help="Weight of the divergence of sound and text.", min=0)
    duration_weight: float = opt(default=1.0, help="Weight of the durations' likelihood.", min=0)


@config(panel="Training")
class VoiceSchedule(Schedule):
    batch_size: int = opt(default=32, help="Clips of a step, at the most; long ones count for more.", min=1)
    accumulation_steps: int = opt(default=1, help="A step learns from this many such batches.", min=1)
    num_epochs: int = opt(default=1000, help="Times to go through the data, at most; 0: num_steps counts alone.", min=0)
    learning_rate: float = opt(default=2e-4, help="Learning rate after the warm-up.", min=0)
    learning_rate_schedule: LearningRateSchedule = opt(
        default="exponential", help="Course of the learning rate after the warm-up; exponential: by gamma."
    )
    warmup_steps: int = opt(default=0, help="Steps over which the learning rate rises linearly.", min=0)
    weight_decay: float = opt(default=0.01, help="AdamW's decay of the weights (not of gains and biases).", min=0)
    beta1: float = opt(default=0.8, help="AdamW's decay of the mean gradient.", min=0, max=0.9999)
    beta2: float = opt(default=0.99, help="AdamW's decay of the mean squared gradient.", min=0, max=0.999999)
    gradient_clip: float = opt(default=0.0, help="Largest norm of a phase's gradient; 0 is off.", min=0)


@config(panel="Run folder")
class VoiceSaving(Saving):
    checkpoint_freq: int = opt(default=0, help="Epochs between kept checkpoints; 0 is off.", min=0)
    checkpoint_steps: int = opt(
        default=-1, help="Steps between kept checkpoints; -1: at every evaluation, 0 is off.", min=-1
    )
    evaluate_freq: int = opt(default=0, help="Epochs between evaluations on held-out data; 0 is off.", min=0)
    evaluate_steps: int = opt(default=1000, help="Steps between evaluations on held-out data; 0 is off.", min=0)
    save_samples_freq: int = opt(default=1000, help="Steps between samples; 0 is off.", min=0)


@config()
class TrainTts:
    spellings: ClassVar[dict[str, str]] = SPELLINGS

    data: Data
    model: Model = Model()
    losses: Losses = Losses()
    schedule: VoiceSchedule = VoiceSchedule()
    saving: VoiceSaving = VoiceSaving()
    hardware: Hardware = Hardware()


@config(panel="Data")
class PlannedData(Data):
    data_dir: Path = opt(default=Path("."), help="Not looked at: a plan needs no data.")


@config(panel="Speech")
class PlannedSpeech:
    clip_seconds: float = opt(default=5.0, help="Average length of the clips.", min=0.5)
    symbols_a_second: float = opt(default=30.0, help="Symbols spoken in a second, with those between them.", min=1)
    num_symbols: int = opt(default=64, help="Different symbols.", min=4)
    num_speakers: int = opt(default=1, help="Speakers.", min=1)
    sampling_rate: int = opt(default=22050, help="Rate of the sound, in Hz.", min=8000)


@config()
class PlanTts(TrainTts):
    """The options of train-tts, and for which speech and cards."""

    data: PlannedData = PlannedData()
    speech: PlannedSpeech = PlannedSpeech()
    cards: Cards = Cards()


@config(panel="Benchmark")
class BenchTts:
    preset: Preset = opt(default="medium", help="As in train-tts.")
    batch_size: int = opt(default=16, help="Clips of a step.", min=1)
    clip_seconds: float = opt(default=5.0, help="Length of each.", min=0.5)
    micro_batch_size: int = opt(default=0, help="Clips on the device at once, if less than batch_size.", min=0)
    discriminator_channels: int = opt(default=32, help="As in train-tts.", min=8)
    warmup_steps: int = opt(default=3, help="Steps before the timed ones.", min=1)
    steps: int = opt(default=10, help="Timed steps of a row; the median counts.", min=1)
    row_minutes: float = opt(default=10, help="Minutes after which a row is given up.", min=0.01)
    output_dir: Path = opt(default=Path("."), help="Folder for the JSON and the chart.")
    device: Literal["auto", "cuda", "cpu"] = opt(default="auto", help="Where to compute; auto takes the GPU if any.")

    def __post_init__(self) -> None:
        assemble(TrainTts, self.training())  # refuses what train-tts refuses

    def training(self) -> dict[str, Any]:
        """The options of the train-tts that is measured; it has the defaults of the rest."""
        names = ("preset", "batch_size", "micro_batch_size", "discriminator_channels", "device")
        return {"data_dir": ".", **{name: getattr(self, name) for name in names}}
