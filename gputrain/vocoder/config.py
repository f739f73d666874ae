"""The options of the vocoder, under openvpi's names where openvpi has them. Imports no torch."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from gputrain.audio.config import (
    AdversarialSchedule,
    F0Method,
    Mel,
    Resolution,
    SoundSaving,
    check_multiple,
    check_odd,
    resolutions,
)
from gputrain.bench.options import BenchOptions, BenchSettings, MeasuredFile
from gputrain.config import ModelName, config, opt
from gputrain.engine.schedule import SEVERAL
from gputrain.errors import UserError
from gputrain.fetch.names import TrainedModel
from gputrain.hw.plan import Cards, DeviceName, Hardware
from gputrain.kinds import PublishedFiles
from gputrain.vocoder.architecture import SAME_OPTIONS, NsfHifiganArchitecture

DiscriminatorKind = Literal["msd", "mpd", "mrd", "fast_mpd", "fast_mrd"]
OptimizerName = Literal["adamw", "muon"]

SAMPLING_RATE = 44100  # Default, in Hz.
# Reason of the default precision.
FP32_BECAUSE = "openvpi warns against training its vocoders in bf16; --precision fp16 has loss scaling"

# openvpi's names of options that all our train commands have, valid in files and as flags.
SPELLINGS = {
    "ds_workers": "num_workers", "dataloader_prefetch_factor": "prefetch_factor", "max_updates": "num_steps",
    "accumulate_grad_batches": "accumulation_steps", "clip_grad_norm": "gradient_clip",
    "val_check_interval": "evaluate_every_steps", "log_interval": "log_every_steps",
    "num_ckpt_keep": "keep_checkpoints",
    "permanent_ckpt_start": "permanent_start", "permanent_ckpt_interval": "permanent_interval", "lr": "learning_rate",
    "min_lr": "min_learning_rate", "aux_step": "discriminator_start", "finetune_ckpt_path": "init_from",
}  # fmt: skip

# Of openvpi: the exported generator with its config.json, or a checkpoint of its trainer.
PUBLISHED = PublishedFiles(whole=("model.ckpt",), single=("*.ckpt",), beside=("config.json",), kind="vocoder")


@config(panel="Data")
class Data:
    data_path: tuple[Path, ...] = opt(
        help=f"Folder that `prepare-data --kind vocoder` has filled{SEVERAL}", separator=""
    )
    crop_mel_frames: int = opt(default=48, help="Frames of a training crop (hop_size samples each).", min=8)
    held_out_share: float = opt(default=0.05, help="Share of the clips held out for evaluation.", min=0.0, max=0.5)
    val_num: int = opt(default=0, help="Clips of each folder held out for evaluation; 0 uses held_out_share.", min=0)
    volume_aug: bool = opt(default=True, help="Change the loudness of crops.")
    volume_aug_prob: float = opt(default=0.5, help="Share of the crops whose loudness is changed.", min=0, max=1)
    key_aug: bool = opt(default=False, help="Play crops faster or slower, so that their pitch changes with them.")
    key_aug_prob: float = opt(default=0.5, help="Share of the crops that key_aug changes.", min=0, max=1)
    aug_min: float = opt(default=0.9, help="Slowest speed of key_aug.", min=0.25, max=1)
    aug_max: float = opt(default=1.4, help="Fastest speed of key_aug.", min=1, max=4)

    @property
    def frames_to_read(self) -> int:
        return math.ceil(self.crop_mel_frames * (self.aug_max if self.key_aug else 1))


@config(panel="Spectrogram")
class Spectrogram:
    audio_sample_rate: int = opt(default=44100, help="Rate of the sound, in Hz.", min=8000, max=192000)
    audio_num_mel_bins: int = opt(default=128, help="Mel bands.", min=8)
    hop_size: int = opt(default=512, help="Samples per frame.", min=16)
    fft_size: int = opt(default=2048, help="Samples of the Fourier transform.", min=64)
    win_size: int = opt(default=2048, help="Samples of the window of the Fourier transform.", min=64)
    fmin: float = opt(default=40.0, help="Lower end of the mel bands, in Hz.", min=0)
    fmax: float = opt(default=16000.0, help="Upper end of the mel bands, in Hz.", min=100)

    def __post_init__(self) -> None:
        if self.win_size > self.fft_size:
            raise UserError(f"win_size {self.win_size} is longer than fft_size {self.fft_size}", hint="make them equal")
        if self.hop_size > self.win_size:
            raise UserError(
                f"hop_size {self.hop_size} is longer than win_size {self.win_size}: frames would leave gaps",
                hint="a quarter of win_size is common",
            )
        if not self.fmin < self.fmax <= self.audio_sample_rate / 2:
            raise UserError(
                f"mel bands from {self.fmin:g} to {self.fmax:g} Hz do not fit below half of "
                f"{self.audio_sample_rate} Hz",
                hint=f"--fmax {min(16000, self.audio_sample_rate // 2)}",
            )

    @property
    def mel(self) -> Mel:
        return Mel(
            self.audio_sample_rate, self.audio_num_mel_bins, self.hop_size, self.win_size, self.fft_size, self.fmin,
            self.fmax,
        )  # fmt: skip


@config(panel="Model")
class Model:
    mini_nsf: bool = opt(default=False, help="Add one sine in one stage instead of nine harmonics in every stage.")
    noise_sigma: float = opt(
        default=0.0, help="Standard deviation of the noise added to the first features; 0 is off.", min=0
    )
    upsample_rates: tuple[int, ...] = opt(
        default=(8, 8, 2, 2, 2), help="Upsampling factors of the stages; their product is hop_size.", min=1
    )
    upsample_kernel_sizes: tuple[int, ...] = opt(
        default=(16, 16, 4, 4, 4), help="Kernel sizes of the upsampling stages.", min=1
    )
    upsample_initial_channel: int = opt(
        default=512, help="Channels before the first stage; each stage halves them.", min=1
    )
    resblock_kernel_sizes: tuple[int, ...] = opt(
        default=(3, 7, 11), help="Kernel sizes of the residual blocks of a stage.", min=1
    )
    resblock_dilation_sizes: str = opt(
        default="1,3,5;1,3,5;1,3,5", help="Dilations of each residual block, with semicolons between blocks."
    )
    gradient_checkpointing: bool | None = opt(
        default=None, help="Recompute residual blocks in the backward pass: less memory, more time (default: auto)."
    )
    init_from: ModelName | None = opt(
        default=None,
        help="Start from the weights of an openvpi model.ckpt or training checkpoint, of a run, or of a model that is "
        "named by `gputrain fetch --list` or as on the Hugging Face Hub.",
    )
    finetune_ignored_params: tuple[str, ...] = opt(
        default=(), help="Tensors of init_from to skip, by the prefixes of their names."
    )
    frozen_params: tuple[str, ...] = opt(
        default=(),
        help="Tensors that are not trained, by the prefixes of their names: discriminator.mpd, generator.ups.",
    )
    finetune_strict_shapes: bool = opt(
        default=True, help="Refuse init_from if shapes differ; off, such tensors are reinitialised."
    )

    @property
    def dilations(self) -> tuple[tuple[int, ...], ...]:
        try:
            return tuple(tuple(map(int, row.split(","))) for row in self.resblock_dilation_sizes.split(";"))
        except ValueError:
            raise UserError(
                f"resblock_dilation_sizes is {self.resblock_dilation_sizes!r}, expected lists of whole numbers",
                hint="such as 1,3,5;1,3,5;1,3,5 on the command line, [[1, 3, 5], [1, 3, 5], [1, 3, 5]] in YAML",
            ) from None


@config(panel="Discriminators")
class Discriminators:
    discriminators: tuple[DiscriminatorKind, ...] = opt(
        default=("fast_mrd", "fast_mpd"),
        help="Kinds: msd, mpd (HiFi-GAN), mrd (UnivNet), fast_mrd, fast_mpd (openvpi, a quarter of the cost).",
    )
    discriminator_periods: tuple[int, ...] = opt(default=(2, 3, 5, 7, 11), help="Periods of mpd and fast_mpd.", min=1)
    msd_channels: int = opt(default=128, help="Channels of msd's first layer; a multiple of 16.", min=16)
    mpd_channels: int = opt(default=32, help="Channels of mpd's first layer.", min=1)
    mrd_channels: int = opt(default=32, help="Channels of mrd.", min=1)
    mrd_fft_sizes: tuple[int, ...] = opt(default=(1024, 2048, 512), help="FFT sizes of mrd.", min=16)
    mrd_hop_sizes: tuple[int, ...] = opt(default=(120, 240, 50), help="Hop sizes of these transforms.", min=1)
    mrd_win_lengths: tuple[int, ...] = opt(default=(600, 1200, 240), help="Window lengths of these transforms.", min=1)
    fast_mpd_init_channel: int = opt(default=8, help="Channels of fast_mpd before its first stride.", min=1)
    fast_mpd_strides: tuple[int, ...] = opt(default=(4, 4, 4), help="Strides of fast_mpd's blocks.", min=1)
    fast_mpd_kernel_size: int = opt(default=11, help="Kernel size of fast_mpd's blocks, odd.", min=1)
    fast_mrd_init_channel: int = opt(default=8, help="Channels of fast_mrd before its first stride.", min=1)
    fast_mrd_strides: tuple[int, ...] = opt(default=(4, 2, 2), help="Strides of fast_mrd's blocks.", min=1)
    fast_mrd_fft_sizes: tuple[int, ...] = opt(default=(512, 1024, 2048), help="FFT sizes of fast_mrd.", min=16)
    fast_mrd_hop_sizes: tuple[int, ...] = opt(default=(64, 128, 256), help="Hop sizes of these transforms.", min=1)
    fast_mrd_win_lengths: tuple[int, ...] = opt(
        default=(512, 1024, 2048), help="Window lengths of these transforms.", min=1
    )

    def __post_init__(self) -> None:
        if not self.discriminators or len(set(self.discriminators)) != len(self.discriminators):
            raise UserError(
                f"discriminators {', '.join(self.discriminators) or 'are none'}: each may be named once, and "
                "at least one is needed",
                hint="such as fast_mrd,fast_mpd or msd,mpd",
            )
        check_multiple(self, "msd_channels", 16)
        check_odd(self, "fast_mpd_kernel_size")
        self.mrd_resolutions, self.fast_mrd_resolutions  # noqa: B018  # They raise if their lists differ.

    @property
    def mrd_resolutions(self) -> tuple[Resolution, ...]:
        return resolutions(self, "mrd_fft_sizes", "mrd_hop_sizes", "mrd_win_lengths")

    @property
    def fast_mrd_resolutions(self) -> tuple[Resolution, ...]:
        return resolutions(self, "fast_mrd_fft_sizes", "fast_mrd_hop_sizes", "fast_mrd_win_lengths")


@config(panel="Losses")
class Losses:
    lab_aux_melloss: float = opt(default=45.0, help="Weight of the log-mel loss.", min=0)
    fmax_for_loss: float = opt(
        default=0.0, help="Upper end of the mel bands of the loss, in Hz; 0 is half of the rate.", min=0
    )
    # With it, a step takes longer and teaches more (benchmarks/notes.md, "Learning races").
    use_stftloss: bool = opt(default=True, help="Add a multi-resolution STFT loss.")
    lab_aux_stftloss: float = opt(default=2.5, help="Weight of the STFT loss.", min=0)
    loss_fft_sizes: tuple[int, ...] = opt(
        default=(2048, 2048, 4096, 1024, 512, 256, 128, 1024), help="FFT sizes of the STFT loss.", min=16
    )
    loss_hop_sizes: tuple[int, ...] = opt(
        default=(512, 240, 480, 100, 50, 25, 12, 120), help="Hop sizes of these transforms.", min=1
    )
    loss_win_lengths: tuple[int, ...] = opt(
        default=(2048, 1200, 2400, 480, 240, 120, 60, 600), help="Window lengths of these transforms.", min=1
    )
    pc_aug: bool = opt(
        default=False, help="Train for synthesis at another pitch than that of the mel; needs mini_nsf and more time."
    )
    pc_aug_rate: float = opt(default=0.5, help="Share of the crops that pc_aug changes.", min=0.01, max=1)
    pc_aug_key: float = opt(default=5.0, help="Largest shift of pc_aug, in semitones.", min=0.01, max=24)
    discriminator_start: int = opt(
        default=0, help="Step at which the discriminators start; before, only mel and STFT losses are applied.", min=0
    )
    discriminator_only_steps: int = opt(
        default=-1,
        help="Number of first steps that train only the discriminators, for a pretrained generator; -1: 1000, at most "
        "a tenth of the training, if init_from holds only a generator, otherwise 0.",
        min=-1,
    )

    def __post_init__(self) -> None:
        if self.discriminator_start and self.discriminator_only_steps > 0:
            raise UserError(
                "discriminator_start and discriminator_only_steps contradict each other",
                hint="the first is for a new generator, the second for a pretrained one",
            )

    @property
    def stft(self) -> tuple[Resolution, ...]:
        return resolutions(self, "loss_fft_sizes", "loss_hop_sizes", "loss_win_lengths") if self.use_stftloss else ()


@config(panel="Training")
class VocoderSchedule(AdversarialSchedule):
    num_epochs: int = opt(default=0, help="Maximum number of epochs; 0: only num_steps limits the training.", min=0)
    num_steps: int = opt(default=100_000, help="Steps of the generator; 0: only num_epochs limits the training.", min=0)
    # Muon at this rate, without a warm-up, learns faster than AdamW (benchmarks/notes.md, "Learning races").
    learning_rate: float = opt(default=2e-4, help="Learning rate after the warm-up.", min=0)
    warmup_steps: int = opt(default=0, help="Steps over which the learning rate rises linearly.", min=0)
    generator_optimizer: OptimizerName = opt(default="muon", help="muon is Muon for matrices, AdamW for the rest.")
    discriminator_optimizer: OptimizerName = opt(
        default="muon", help="Optimizer of the discriminators, as generator_optimizer."
    )
    discriminator_weight_decay: float = opt(default=0.0, help="Weight decay of the discriminators.", min=0)


@config(panel="Run folder")
class VocoderSaving(SoundSaving):
    num_valid_plots: int = opt(
        default=8, help="Held-out clips that are evaluated; a few of them are saved as samples.", min=1
    )
    mel_vmin: float = opt(default=-6.0, help="Magnitude that pictures show black, as a power of ten.")
    mel_vmax: float = opt(default=1.5, help="Magnitude that pictures show brightest, as a power of ten.")


@config()
class TrainVocoder:
    kind: ClassVar[str] = "vocoder"
    spellings: ClassVar[dict[str, str]] = SPELLINGS
    removed: ClassVar[dict[str, object]] = {"step_order": "simultaneous"}

    data: Data
    spectrogram: Spectrogram = Spectrogram()
    model: Model = Model()
    discriminators: Discriminators = Discriminators()
    losses: Losses = Losses()
    schedule: VocoderSchedule = VocoderSchedule()
    saving: VocoderSaving = VocoderSaving()
    hardware: Hardware = Hardware()

    def __post_init__(self) -> None:
        self.architecture  # noqa: B018  # It raises if it is invalid.
        if self.losses.pc_aug and not self.model.mini_nsf:
            raise UserError(
                "pc_aug needs mini_nsf: the full source cannot produce the shifted pitches", hint="--mini-nsf"
            )
        if self.losses.fmax_for_loss > self.spectrogram.audio_sample_rate / 2:
            raise UserError(
                f"fmax_for_loss {self.losses.fmax_for_loss:g} Hz is above half of the sampling rate",
                hint="0 is half of the rate",
            )
        self._check_crop()

    def _check_crop(self) -> None:
        """Raises UserError if a crop is shorter than half a transform, by which its ends are reflected."""
        samples = self.data.crop_mel_frames * self.spectrogram.hop_size
        used = {"loss_fft_sizes": self.losses.stft}
        if "mrd" in self.discriminators.discriminators:
            used["mrd_fft_sizes"] = self.discriminators.mrd_resolutions
        if "fast_mrd" in self.discriminators.discriminators:
            used["fast_mrd_fft_sizes"] = self.discriminators.fast_mrd_resolutions
        for name, transforms in used.items():
            largest = max((one.fft_size for one in transforms), default=0)
            if samples <= largest // 2:
                frames = largest // 2 // self.spectrogram.hop_size + 1
                raise UserError(
                    f"a crop of {self.data.crop_mel_frames} frames, {samples} samples, is too short for the transform "
                    f"of {largest} samples in {name}",
                    hint=f"--crop-mel-frames {frames} or more, or a smaller transform",
                )

    @property
    def architecture(self) -> NsfHifiganArchitecture:
        return NsfHifiganArchitecture(
            mel=self.spectrogram.mel,
            resblock_dilation_sizes=self.model.dilations,
            pc_aug=self.losses.pc_aug,
            **{name: getattr(self.model, name) for name in SAME_OPTIONS},
        )

    @property
    def loss_mel(self) -> Mel:
        """Returns the mel of the loss, which has higher frequencies than the input of the generator."""
        fmax = self.losses.fmax_for_loss or self.spectrogram.audio_sample_rate / 2
        return replace(self.spectrogram.mel, fmax=fmax)

    @property
    def crop_seconds(self) -> float:
        return self.data.crop_mel_frames * self.spectrogram.hop_size / self.spectrogram.audio_sample_rate


@config(panel="Data")
class PlannedData(Data):
    data_path: tuple[Path, ...] = opt(
        default=(Path("."),), help="Data whose items are counted, to predict hours; not needed.", separator=""
    )


@config()
class PlanVocoder(TrainVocoder):
    """The options of train-vocoder, and the GPUs to plan for."""

    data: PlannedData = PlannedData()
    cards: Cards = Cards()


@config(panel="Evaluation")
class ExcerptEvaluation:
    clip_seconds: float = opt(
        default=10.0, help="Length of the beginning of each clip that a vocoder is evaluated on, in seconds.", min=0.5
    )


@config(panel="Vocoding")
class Vocode(TrainedModel):
    model: ModelName = opt(
        help="A run folder, a checkpoint, openvpi's model.ckpt with its config.json, or the name of a published one."
    )
    input: Path = opt(help="A recording, or mel and pitch (NAME.npz, NAME.mel.npy + NAME.f0.npy), or a folder of them.")
    output_dir: Path = opt(help="Folder for the output, 16-bit wav.")
    shift_semitones: float = opt(default=0.0, help="Shift of the pitch, in semitones.", min=-48, max=48)
    f0_method: F0Method = opt(default="auto", help="Pitch tracker for recordings, as in prepare-data.")
    f0_min: float = opt(default=40.0, help="Lowest pitch that is tracked, in Hz.", min=10)
    f0_max: float = opt(default=1100.0, help="Highest pitch that is tracked, in Hz.", min=20)
    chunk_seconds: float = opt(default=10.0, help="Seconds synthesised at once; fewer need less memory.", min=0.1)
    seed: int = opt(default=0, help="Seed of the noise of the source.", min=0)
    device: DeviceName = opt(default="auto", help="Device to compute on.")


@config(panel="Benchmark")
class BenchVocoder(BenchSettings):
    measured: ClassVar[type] = TrainVocoder

    upsample_initial_channel: int = opt(default=512, help="Channels before the first upsampling stage.", min=32)
    discriminators: tuple[str, ...] = opt(default=("fast_mrd", "fast_mpd"), help="As in train-vocoder.")
    discriminator_periods: tuple[int, ...] = opt(default=(2, 3, 5, 7, 11), help="Periods of mpd and fast_mpd.", min=1)
    mini_nsf: bool = opt(default=False, help="Use the mini source (one sine) instead of the full one.")
    crop_mel_frames: int = opt(default=48, help="Frames of a crop.", min=8)
    batch_size: int = opt(default=16, help="Crops per step.", min=1)
    micro_batch_size: int = opt(default=0, help="Crops per micro-batch, if fewer than batch_size.", min=0)
    optimizer: Literal["adamw", "muon"] = opt(
        default="muon", help="Optimizer of generator and discriminators; it beats --config if it is given."
    )
    bench: BenchOptions = BenchOptions()

    def training(self, file: MeasuredFile | None = None) -> dict[str, Any]:
        optimizers = dict.fromkeys(("generator_optimizer", "discriminator_optimizer"), self.optimizer)
        trained = super().training(file)
        return optimizers | trained if file and "optimizer" not in self.bench.flags else trained | optimizers
