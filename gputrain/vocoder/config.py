"""The options of the vocoder, under openvpi's names where openvpi has them. Imports no torch."""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

from gputrain.audio.config import (
    AdversarialSchedule,
    F0Method,
    Mel,
    Resolution,
    Sound,
    SoundSaving,
    check_hifigan_sizes,
    check_multiple,
    check_odd,
    resolutions,
)
from gputrain.config import ModelName, advanced, changed, config, file_key, opt
from gputrain.engine.schedule import (
    CHECKPOINTING_HELP,
    DISCRIMINATOR_START_HELP,
    PUBLISHED_NAME,
    SEVERAL,
)
from gputrain.errors import UserError
from gputrain.fetch.names import TRAINED_HELP, TrainedModel
from gputrain.hw.plan import DeviceName, Hardware
from gputrain.kinds import PublishedFiles
from gputrain.planner.kind_work import plan_settings

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


# Fields that are options, and keys of openvpi's config.json, of the same names.
SAME_OPTIONS = (
    "mini_nsf", "noise_sigma", "upsample_rates", "upsample_kernel_sizes", "upsample_initial_channel",
    "resblock_kernel_sizes",
)  # fmt: skip
STOCK_DILATIONS = 3  # Number of dilations of a residual block in openvpi's generator.


@dataclass(frozen=True)
class NsfHifiganArchitecture:
    """Sizes of an NSF-HiFiGAN generator. Raises UserError for invalid combinations."""

    mel: Mel = field(default_factory=Mel)
    upsample_rates: tuple[int, ...] = (8, 8, 2, 2, 2)
    upsample_kernel_sizes: tuple[int, ...] = (16, 16, 4, 4, 4)
    upsample_initial_channel: int = 512
    resblock_kernel_sizes: tuple[int, ...] = (3, 7, 11)
    resblock_dilation_sizes: tuple[tuple[int, ...], ...] = ((1, 3, 5), (1, 3, 5), (1, 3, 5))
    mini_nsf: bool = False
    noise_sigma: float = 0.0
    pc_aug: bool = False

    def __post_init__(self) -> None:
        check_hifigan_sizes(self)
        if self.mini_nsf and len(self.upsample_rates) < 2:
            raise UserError("mini_nsf needs two upsampling stages", hint="name more upsample_rates")

    @property
    def stock_faults(self) -> list[str]:
        """Returns the reasons why openvpi's own generator code cannot load these sizes; empty if it can.

        Its ResBlock1 always has three pairs of convolutions. Its transposed convolutions have no output padding, and
        its noise convolutions pad by half of their stride, so that with odd numbers the lengths of a stage and its
        source differ.
        """
        faults = [
            f"resblock_dilation_sizes has a block of {len(row)} dilations, and the stock ResBlock1 has three"
            for row in self.resblock_dilation_sizes
            if len(row) != STOCK_DILATIONS
        ][:1]
        for kernel, rate in zip(self.upsample_kernel_sizes, self.upsample_rates, strict=True):
            if (kernel - rate) % 2:
                faults.append(f"an upsample kernel of {kernel} for a rate of {rate}: their difference is odd")
        if not self.mini_nsf:
            strides = [math.prod(self.upsample_rates[stage:]) for stage in range(1, len(self.upsample_rates))]
            faults += [
                f"upsample_rates leave {stride} samples for each of stage {stage}, an odd number"
                for stage, stride in enumerate(strides, start=1)
                if stride % 2
            ]
        return faults


@config(panel="Data")
class Data:
    data_path: tuple[Path, ...] = opt(help="Folder of `prepare-data --kind vocoder`." + SEVERAL, separator="")
    crop_mel_frames: int = opt(default=48, help="Frames of a training crop. A frame has hop_size samples.", min=8)
    held_out_share: float = opt(default=0.05, help="Share kept for evaluation.", min=0.0, max=0.5)
    val_num: int = advanced(
        default=0, help="Clips of each folder held out for evaluation; 0 uses held_out_share.", min=0
    )
    volume_aug: bool = advanced(default=True, help="Change the loudness of crops.")
    volume_aug_prob: float = file_key(default=0.5, help="Share of the crops whose loudness is changed.", min=0, max=1)
    key_aug: bool = advanced(default=False, help="Play crops faster or slower, so that their pitch changes with them.")
    key_aug_prob: float = file_key(default=0.5, help="Share of the crops that key_aug changes.", min=0, max=1)
    aug_min: float = file_key(default=0.9, help="Slowest speed of key_aug.", min=0.25, max=1)
    aug_max: float = file_key(default=1.4, help="Fastest speed of key_aug.", min=1, max=4)

    @property
    def frames_to_read(self) -> int:
        return math.ceil(self.crop_mel_frames * (self.aug_max if self.key_aug else 1))


@config(panel="Spectrogram")
class Spectrogram:
    audio_sample_rate: int = opt(default=44100, help="Sampling rate, in Hz.", min=8000, max=192000)
    audio_num_mel_bins: int = file_key(default=128, help="Mel bands.", min=8)
    hop_size: int = advanced(default=512, help="Samples from one frame to the next.", min=16)
    fft_size: int = file_key(default=2048, help="Samples of the Fourier transform.", min=64)
    win_size: int = file_key(default=2048, help="Samples of the window of the Fourier transform.", min=64)
    fmin: float = file_key(default=40.0, help="Lower end of the mel bands, in Hz.", min=0)
    fmax: float | None = file_key(
        default=None, help="Upper end of the mel bands, in Hz. Default: 16000, at most half of the rate.", min=100
    )

    def __post_init__(self) -> None:
        if self.win_size > self.fft_size:
            raise UserError(f"win_size {self.win_size} is longer than fft_size {self.fft_size}", hint="make them equal")
        if self.hop_size > self.win_size:
            raise UserError(
                f"hop_size {self.hop_size} is longer than win_size {self.win_size}: frames would leave gaps",
                hint="a quarter of win_size is common",
            )
        if not self.fmin < self.mel.fmax <= self.audio_sample_rate / 2:
            raise UserError(
                f"mel bands from {self.fmin:g} to {self.mel.fmax:g} Hz do not fit below half of "
                f"{self.audio_sample_rate} Hz",
                hint="leave fmax out",
            )

    @property
    def mel(self) -> Mel:
        highest = min(16000.0, self.audio_sample_rate / 2) if self.fmax is None else self.fmax
        return Mel(
            self.audio_sample_rate,
            self.audio_num_mel_bins,
            self.hop_size,
            self.win_size,
            self.fft_size,
            self.fmin,
            highest,
        )


@config(panel="Model")
class Model:
    mini_nsf: bool = opt(default=False, help="One sine, not nine harmonics. It is added in one stage, not in every.")
    noise_sigma: float = advanced(
        default=0.0, help="Standard deviation of the noise added to the first features; 0 is off.", min=0
    )
    upsample_rates: tuple[int, ...] = file_key(
        default=(8, 8, 2, 2, 2), help="Upsampling factors of the stages. Their product is hop_size.", min=1
    )
    upsample_kernel_sizes: tuple[int, ...] = file_key(
        default=(16, 16, 4, 4, 4), help="Kernel sizes of the upsampling stages.", min=1
    )
    upsample_initial_channel: int = opt(
        default=512, help="Channels before the first stage. Each stage halves them.", min=1
    )
    resblock_kernel_sizes: tuple[int, ...] = file_key(
        default=(3, 7, 11), help="Kernel sizes of the residual blocks of a stage.", min=1
    )
    resblock_dilation_sizes: str = file_key(
        default="1,3,5;1,3,5;1,3,5", help="Dilations of each residual block, with semicolons between blocks."
    )
    gradient_checkpointing: bool | None = advanced(default=None, help=CHECKPOINTING_HELP)
    init_from: ModelName | None = opt(
        default=None, help="Model to start from. An openvpi model.ckpt or training checkpoint, a run" + PUBLISHED_NAME
    )
    finetune_ignored_params: tuple[str, ...] = advanced(
        default=(), help="Tensors of init_from to skip, by the prefixes of their names."
    )
    frozen_params: tuple[str, ...] = advanced(
        default=(),
        help="Tensors that are not trained, by the prefixes of their names: discriminator.mpd, generator.ups.",
    )
    finetune_strict_shapes: bool = advanced(
        default=True, help="Refuse init_from if shapes differ. Otherwise, such tensors are reinitialised."
    )

    @property
    def dilations(self) -> tuple[tuple[int, ...], ...]:
        try:
            return tuple(tuple(map(int, row.split(","))) for row in self.resblock_dilation_sizes.split(";"))
        except ValueError:
            raise UserError(
                f"resblock_dilation_sizes is {self.resblock_dilation_sizes!r}, expected lists of whole numbers",
                hint="write it as [[1, 3, 5], [1, 3, 5], [1, 3, 5]]",
            ) from None


@config(panel="Discriminators")
class Discriminators:
    discriminators: tuple[DiscriminatorKind, ...] = opt(
        default=("fast_mrd", "fast_mpd"),
        help="Kinds of discriminators. msd and mpd are HiFi-GAN's, mrd is UnivNet's; the fast ones are "
        "openvpi's, at a quarter of the cost.",
    )
    discriminator_periods: tuple[int, ...] = advanced(
        default=(2, 3, 5, 7, 11), help="Periods of mpd and fast_mpd.", min=1
    )
    msd_channels: int = file_key(default=128, help="Channels of msd's first layer. A multiple of 16.", min=16)
    mpd_channels: int = file_key(default=32, help="Channels of mpd's first layer.", min=1)
    mrd_channels: int = file_key(default=32, help="Channels of mrd.", min=1)
    mrd_fft_sizes: tuple[int, ...] = file_key(default=(1024, 2048, 512), help="FFT sizes of mrd.", min=16)
    mrd_hop_sizes: tuple[int, ...] = file_key(default=(120, 240, 50), help="Hop sizes of mrd.", min=1)
    mrd_win_lengths: tuple[int, ...] = file_key(default=(600, 1200, 240), help="Windows of mrd.", min=1)
    fast_mpd_init_channel: int = file_key(default=8, help="Channels of fast_mpd before its first stride.", min=1)
    fast_mpd_strides: tuple[int, ...] = file_key(default=(4, 4, 4), help="Strides of fast_mpd's blocks.", min=1)
    fast_mpd_kernel_size: int = file_key(default=11, help="Kernel size of fast_mpd's blocks, odd.", min=1)
    fast_mrd_init_channel: int = file_key(default=8, help="Channels of fast_mrd before its first stride.", min=1)
    fast_mrd_strides: tuple[int, ...] = file_key(default=(4, 2, 2), help="Strides of fast_mrd's blocks.", min=1)
    fast_mrd_fft_sizes: tuple[int, ...] = file_key(default=(512, 1024, 2048), help="FFT sizes of fast_mrd.", min=16)
    fast_mrd_hop_sizes: tuple[int, ...] = file_key(default=(64, 128, 256), help="Hop sizes of fast_mrd.", min=1)
    fast_mrd_win_lengths: tuple[int, ...] = file_key(default=(512, 1024, 2048), help="Windows of fast_mrd.", min=1)

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
    fmax_for_loss: float = file_key(
        default=0.0, help="Upper end of the mel bands of the loss, in Hz; 0 is half of the rate.", min=0
    )
    # With it, a step takes longer and teaches more (benchmarks/notes.md, "Learning races").
    use_stftloss: bool = advanced(default=True, help="Add a multi-resolution STFT loss.")
    lab_aux_stftloss: float = opt(default=2.5, help="Weight of the STFT loss.", min=0)
    loss_fft_sizes: tuple[int, ...] = file_key(
        default=(2048, 2048, 4096, 1024, 512, 256, 128, 1024), help="FFT sizes of the STFT loss.", min=16
    )
    loss_hop_sizes: tuple[int, ...] = file_key(
        default=(512, 240, 480, 100, 50, 25, 12, 120), help="Hop sizes of the STFT loss.", min=1
    )
    loss_win_lengths: tuple[int, ...] = file_key(
        default=(2048, 1200, 2400, 480, 240, 120, 60, 600), help="Windows of the STFT loss.", min=1
    )
    pc_aug: bool = advanced(
        default=False,
        help="Train for synthesis at another pitch than that of the mel. It needs mini_nsf and more time.",
    )
    pc_aug_rate: float = file_key(default=0.5, help="Share of the crops that pc_aug changes.", min=0.01, max=1)
    pc_aug_key: float = file_key(default=5.0, help="Largest shift of pc_aug, in semitones.", min=0.01, max=24)
    discriminator_start: int = advanced(default=0, help=DISCRIMINATOR_START_HELP, min=0)
    discriminator_only_steps: int = advanced(
        default=-1,
        help="First steps that train only the discriminators, for a pretrained generator. -1: 1000, at most a tenth of "
        "the training, if init_from holds only a generator, otherwise 0.",
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
    num_epochs: int = changed(AdversarialSchedule, "num_epochs", default=0, level="advanced")
    num_steps: int = changed(
        AdversarialSchedule, "num_steps", default=100_000, level="common", help="Steps of the generator. 0: no limit."
    )
    # Muon at this rate, without a warm-up, learns faster than AdamW (benchmarks/notes.md, "Learning races").
    learning_rate: float = changed(AdversarialSchedule, "learning_rate", default=2e-4)
    warmup_steps: int = changed(AdversarialSchedule, "warmup_steps", default=0)
    generator_optimizer: OptimizerName = opt(
        default="muon", help="muon or adamw. muon: Muon for matrices, AdamW for the rest."
    )
    discriminator_optimizer: OptimizerName = advanced(
        default="muon", help="Optimizer of the discriminators: muon or adamw."
    )
    discriminator_weight_decay: float = file_key(default=0.0, help="Weight decay of the discriminators.", min=0)


@config(panel="Run folder")
class VocoderSaving(SoundSaving):
    num_valid_plots: int = advanced(
        default=8, help="Held-out clips that are evaluated. A few of them are saved as samples.", min=1
    )
    mel_vmin: float = file_key(default=-6.0, help="Magnitude that pictures show black, a power of ten.")
    mel_vmax: float = file_key(default=1.5, help="Magnitude that pictures show brightest, a power of ten.")


@config()
class TrainVocoder:
    kind: ClassVar[str] = "vocoder"
    spellings: ClassVar[dict[str, str]] = SPELLINGS

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
            largest = max((transform.fft_size for transform in transforms), default=0)
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


PlanVocoder = plan_settings(TrainVocoder)


@config(panel="Evaluation")
class ExcerptEvaluation:
    clip_seconds: float = advanced(
        default=10.0, help="Seconds at the beginning of each clip that a vocoder is evaluated on.", min=0.5
    )


@config(panel="Vocoding")
class Vocode(TrainedModel):
    model: ModelName = changed(TrainedModel, "model", help=TRAINED_HELP + " Or openvpi's model.ckpt with config.json.")
    input: Path = opt(
        help="Recording, mel and pitch, or a folder. Mel and pitch are NAME.npz, or NAME.mel.npy + NAME.f0.npy."
    )
    output_dir: Path = opt(help="Folder for the output, 16-bit wav.")
    shift_semitones: float = opt(default=0.0, help="Shift of the pitch, in semitones.", min=-48, max=48)
    f0_method: F0Method = changed(Sound, "f0_method", level="common")
    f0_min: float = changed(Sound, "f0_min", level="common")
    f0_max: float = changed(Sound, "f0_max", level="common")
    chunk_seconds: float = opt(default=10.0, help="Seconds computed at once. Fewer need less memory.", min=0.1)
    seed: int = opt(default=0, help="Seed of the noise.", min=0)
    device: DeviceName = changed(Hardware, "device")
