"""Options of the commands of a voice. Imports no torch."""

from pathlib import Path
from typing import ClassVar

from gputrain.audio.config import AdversarialSchedule, SoundSaving, check_multiple
from gputrain.config import ModelName, advanced, changed, config, file_key, opt
from gputrain.engine.schedule import (
    CHECKPOINTING_HELP,
    PUBLISHED_NAME,
    SEVERAL,
    LearningRateSchedule,
)
from gputrain.errors import UserError
from gputrain.fetch.names import TrainedModel
from gputrain.hw.plan import DeviceName, Hardware
from gputrain.kinds import PublishedFiles
from gputrain.planner.kind_work import plan_settings
from gputrain.speech.config import CLIPS_HELP, LEXICON_HELP, SpeechData
from gputrain.tts.architecture import VoicePreset

SEGMENT_FRAMES = 32  # The decoder is trained on segments of this length, and the discriminators see them.
STDOUT = Path("-")
PRIOR_STEPS = 2000  # benchmarks/notes.md, "Learning races"

# Aliases of keys and flags: the names that Coqui and the configurations written for it use.
SPELLINGS = {
    "data_dir": "data_path", "lr": "learning_rate", "epochs": "num_epochs", "gradient_clip_val": "gradient_clip",
    "grad_clip": "gradient_clip", "num_loader_workers": "num_workers", "log_interval": "log_every_steps",
    "print_step": "log_every_steps", "save_interval": "checkpoint_every_steps", "save_step": "checkpoint_every_steps",
    "eval_interval": "evaluate_every_steps", "save_n_checkpoints": "keep_checkpoints", "save_best_after": "best_after",
    "test_delay_epochs": "samples_after_epochs", "torch_compile": "use_torch_compile",
}  # fmt: skip

# Of Piper and Coqui, whose symbols and speakers are in files beside the checkpoint.
PUBLISHED = PublishedFiles(
    single=("best_model.pth", "*.ckpt", "*.pth"),
    beside=("config.json", "speakers.pth", "speakers.json", "speaker_ids.json"),
    example="piper-en-lessac-medium",
    kind="tts",
    only_to_start=True,
)


@config(panel="Data")
class Data(SpeechData):
    data_path: tuple[Path, ...] = changed(
        SpeechData, "data_path", help="Folder of `prepare-data --kind tts`." + SEVERAL
    )
    eval_batch_size: int = advanced(default=16, help="Clips synthesised at once in an evaluation.", min=1)
    test_sentences: tuple[str, ...] = opt(
        default=(), help="Text to speak in samples/; may be repeated. Default: texts of held-out clips.", separator=""
    )
    num_audio_samples: int = advanced(default=4, help="Maximum number of texts synthesised for samples/.", min=0)


@config(panel="Model")
class Model:
    preset: VoicePreset = opt(
        default="medium",
        help="high, medium or fast. high: VITS, 83 M parameters with its discriminators; medium: Piper's size; fast: a "
        "multi-band decoder, the fastest at inference.",
    )
    gradient_checkpointing: bool | None = advanced(default=None, help=CHECKPOINTING_HELP)
    encoder_dropout: float = advanced(default=0.1, help="Dropout of the text encoder.", min=0, max=0.9)
    duration_dropout: float = advanced(default=0.5, help="Dropout of the duration predictor.", min=0, max=0.9)
    discriminator_channels: int = advanced(default=32, help="First channels of discriminators. A multiple of 8.", min=8)
    init_from: ModelName | None = opt(
        default=None,
        help="Model to start from. A run or checkpoint, also of Piper or Coqui, of any language"
        + PUBLISHED_NAME
        + " Layers with other shapes are reinitialised.",
    )

    def __post_init__(self) -> None:
        check_multiple(self, "discriminator_channels", 8)


@config(panel="Evaluation")
class VoiceEvaluation:
    spellings: ClassVar[dict[str, str]] = {"check_with": "recogniser"}

    recogniser: ModelName | None = opt(
        default=None,
        help="Model that counts recognition errors of a voice. Of train-asr or transformers (CTC): its folder or its "
        "name on the Hugging Face Hub.",
    )


@config(panel="Losses")
class Losses:
    mel_weight: float = opt(default=45.0, help="Weight of the log-mel loss.", min=0)
    kl_weight: float = opt(default=1.0, help="Weight of the KL divergence. Of the posterior from the prior.", min=0)
    duration_weight: float = advanced(default=1.0, help="Weight of the duration loss (negative log-likelihood).", min=0)
    alignment_prior_steps: int | None = file_key(
        default=None,
        help="First steps in which alignments of an even pace are preferred, less with every step. Default: 2000, and "
        "0 with init_from.",
        min=0,
    )


@config(panel="Training")
class VoiceSchedule(AdversarialSchedule):
    batch_size: int = changed(AdversarialSchedule, "batch_size", default=32, help=CLIPS_HELP)
    num_epochs: int = changed(AdversarialSchedule, "num_epochs", default=1000)
    learning_rate: float = changed(AdversarialSchedule, "learning_rate", default=2e-4)
    learning_rate_schedule: LearningRateSchedule = changed(
        AdversarialSchedule, "learning_rate_schedule", default="exponential"
    )
    warmup_steps: int = changed(AdversarialSchedule, "warmup_steps", default=0)
    weight_decay: float = changed(AdversarialSchedule, "weight_decay", default=0.01)
    eps: float = file_key(
        default=1e-8, help="AdamW's addition to the root of the mean squared gradient.", min=1e-15, max=0.1
    )
    # Piper's rate and decay rates: the voice learns much faster than beside discriminators that learn as it does
    # (benchmarks/notes.md, "Learning races").
    usual_discriminator_rate: ClassVar[float] = 0.5
    discriminator_beta1: float | None = changed(AdversarialSchedule, "discriminator_beta1", default=0.5)
    discriminator_beta2: float | None = changed(AdversarialSchedule, "discriminator_beta2", default=0.9)
    gradient_clip: float = changed(AdversarialSchedule, "gradient_clip", default=0.0)


@config()
class TrainTts:
    kind: ClassVar[str] = "tts"
    spellings: ClassVar[dict[str, str]] = SPELLINGS

    data: Data
    model: Model = Model()
    losses: Losses = Losses()
    schedule: VoiceSchedule = VoiceSchedule()
    saving: SoundSaving = SoundSaving()
    hardware: Hardware = Hardware()

    @property
    def prior_steps(self) -> int:
        """The first steps with a prior of alignments; none by default for a voice that has learnt to align."""
        given = self.losses.alignment_prior_steps
        return (0 if self.model.init_from else PRIOR_STEPS) if given is None else given


@config(panel="Speech")
class PlannedSpeech:
    clip_seconds: float = opt(default=5.0, help="Length of clips. With data, their average is taken.", min=0.5)
    symbols_a_second: float = opt(default=30.0, help="Symbols in a second, with blanks.", min=1)
    num_symbols: int = opt(default=64, help="Number of different symbols.", min=4)
    num_speakers: int = opt(default=1, help="Number of speakers.", min=1)
    sampling_rate: int = opt(default=22050, help="Sampling rate, in Hz.", min=8000)


PlanTts = plan_settings(TrainTts, speech=PlannedSpeech)


@config(panel="Voice")
class SpeakingOptions:
    """Sampling options of inference; the defaults are Piper's."""

    length_scale: float = opt(default=1.0, help="Length of symbols, as a factor; more is slower.", min=0.1, max=10)
    noise_scale: float = opt(
        default=0.667, help="Deviation of latents; 0: the same sound. Standard deviation of the noise.", min=0, max=3
    )
    noise_w: float = opt(
        default=0.8, help="Deviation of durations; 0: the same rhythm. Standard deviation of the noise.", min=0, max=3
    )
    seed: int = opt(default=0, help="Seed of the noise.", min=0)


@config(panel="Speaking")
class Speak(TrainedModel):
    model: ModelName = opt(help="Run folder or checkpoint of train-tts.")
    text: str | None = opt(
        default=None, help="Text to speak; default: standard input. Each line as soon as it is read."
    )
    input_file: Path | None = opt(default=None, help="UTF-8 text file, one paragraph in a line.")
    output_file: Path | None = opt(
        default=None,
        help="Wav file; -: standard output. Of the whole text, or raw 16-bit samples, sentence by sentence.",
    )
    output_dir: Path | None = opt(default=None, help="Folder of a wav file for each line. 0001.wav, 0002.wav, ...")
    speaker: str = opt(default="", help="Name or number of the speaker; default: the first.")
    lexicon: Path | None = opt(default=None, help=LEXICON_HELP + " They are added to the voice's own.")
    sentence_silence: float = opt(default=0.2, help="Silence between sentences, in seconds.", min=0, max=60)
    sampling: SpeakingOptions = SpeakingOptions()
    device: DeviceName = changed(Hardware, "device")

    def __post_init__(self) -> None:
        if self.text is not None and self.input_file is not None:
            raise UserError("text and input_file are both given", hint="give one of them")
        if (self.output_file is None) == (self.output_dir is None):
            raise UserError(
                "output_file and output_dir are both given" if self.output_file else "no output_file is given",
                hint="give --output-file out.wav, --output-file - for standard output, or --output-dir FOLDER",
            )

    @property
    def has_whole_text(self) -> bool:
        """Returns whether all of the text is there before the first sentence is spoken."""
        return self.text is not None or self.input_file is not None

    @property
    def streams(self) -> bool:
        """Returns whether the sound goes to standard output."""
        return self.output_file == STDOUT
