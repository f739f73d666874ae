"""Settings that models of sound share: the spectrogram, Fourier transforms, and how recordings are prepared.

Imports no torch.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from gputrain.config import advanced, changed, config, file_key, opt
from gputrain.engine.schedule import Saving, Schedule
from gputrain.errors import UserError

F0Method = Literal["auto", "parselmouth", "pyworld", "swift-f0"]


@dataclass(frozen=True)
class Resolution:
    """Sizes of a short-time Fourier transform, in samples."""

    fft_size: int
    hop_size: int
    win_length: int


def resolutions(of: object, *names: str) -> tuple[Resolution, ...]:
    """Returns the resolutions given by three fields of `of`: lists of transform, hop and window sizes.

    Raises UserError if the lists differ in length or a window is longer than its transform.
    """
    lists = [getattr(of, name) for name in names]
    if len(set(map(len, lists))) > 1:
        raise UserError(f"{', '.join(names)} differ in length", hint="give each transform a hop and a window")
    for fft_size, _, win_length in zip(*lists, strict=True):
        if win_length > fft_size:
            raise UserError(
                f"{names[2]}: a window of {win_length} samples in a transform of {fft_size}",
                hint="no window is longer than its transform",
            )
    return tuple(Resolution(*row) for row in zip(*lists, strict=True))


def check_hifigan_sizes(sizes: Any, *, samples: int = 1, with_samples: str = "") -> None:
    """Raises UserError for lists of different lengths, kernels that are even or leave gaps, widths that cannot be
    halved in each stage, and stages that do not make `mel.hop_size` samples of a frame, `samples` of each of theirs."""
    for first, second in (
        ("upsample_rates", "upsample_kernel_sizes"),
        ("resblock_kernel_sizes", "resblock_dilation_sizes"),
    ):
        if len(getattr(sizes, first)) != len(getattr(sizes, second)):
            raise UserError(f"{first} and {second} differ in length", hint="give each stage one of both")
    for kernel, rate in zip(sizes.upsample_kernel_sizes, sizes.upsample_rates, strict=True):
        if kernel < rate:
            raise UserError(
                f"an upsample kernel of {kernel} for a rate of {rate} leaves gaps", hint="use twice the rate"
            )
    check_odd(sizes, "resblock_kernel_sizes")
    check_multiple(sizes, "upsample_initial_channel", 1 << len(sizes.upsample_rates))
    made = samples * math.prod(sizes.upsample_rates)
    if made != sizes.mel.hop_size:
        raise UserError(
            f"upsample_rates{with_samples} make {made} samples of a frame, and hop_size is {sizes.mel.hop_size}",
            hint="choose upsample_rates whose product is hop_size",
        )


def check_odd(sizes: Any, name: str) -> None:
    """Raises UserError if a kernel is even."""
    value = getattr(sizes, name)
    if any(kernel % 2 == 0 for kernel in (value if isinstance(value, tuple) else (value,))):
        raise UserError(f"{name} {value} has an even kernel", hint="use odd ones, such as 3, 5 or 7")


def check_multiple(sizes: Any, name: str, divisor: int) -> None:
    """Raises UserError if a size is not a multiple of the divisor."""
    if getattr(sizes, name) % divisor:
        raise UserError(
            f"{name} {getattr(sizes, name)} is not a multiple of {divisor}", hint=f"use a multiple of {divisor}"
        )


@dataclass(frozen=True)
class Mel:
    """A log-mel spectrogram: Hann window, magnitude, Slaney's filter bank, natural logarithm. Rates and frequencies in
    Hz, sizes in samples."""

    sampling_rate: int = 44100
    num_mels: int = 128
    hop_size: int = 512
    win_size: int = 2048
    n_fft: int = 2048
    fmin: float = 40.0
    fmax: float = 16000.0


@config(panel="Run folder")
class SoundSaving(Saving):
    """Intervals in steps, because recordings make epochs of very different lengths."""

    checkpoint_every_epochs: int = changed(Saving, "checkpoint_every_epochs", default=0)
    checkpoint_every_steps: int = changed(Saving, "checkpoint_every_steps", default=-1)
    evaluate_every_epochs: int = changed(Saving, "evaluate_every_epochs", default=0, level="advanced")
    evaluate_every_steps: int = changed(Saving, "evaluate_every_steps", default=1000, level="common")
    sample_every_steps: int = changed(Saving, "sample_every_steps", default=1000)


@config(panel="Sound, with --kind vocoder, tts or asr")
class Sound:
    """Settings of the preparation of recordings."""

    audio_sample_rate: int | None = opt(
        default=None,
        help="Sampling rate, in Hz. Default: 44100 for a vocoder, 22050 for a voice, 16000 for a recogniser.",
        min=8000,
        max=192000,
    )
    hop_size: int = advanced(default=512, help="Samples from one frame to the next.", min=16)
    f0_method: F0Method = advanced(
        default="auto", help="Pitch tracker. auto: parselmouth if it is installed (gputrain[f0]), else pyworld."
    )
    f0_min: float = advanced(default=40.0, help="Lowest pitch that is tracked, in Hz.", min=10)
    f0_max: float = advanced(default=1100.0, help="Highest pitch that is tracked, in Hz.", min=20)
    trim_db: float | None = opt(
        default=None,
        help="Trim ends so many dB below the loudest part. 0 is off, the default but for a voice: 40.",
        min=0,
    )
    loudness_db: float = opt(
        default=0.0,
        help="Root mean square of each file, in dB; 0 is off. It is scaled to it, relative to full scale, such as -20.",
        min=-60,
        max=0,
    )

    def __post_init__(self) -> None:
        if self.f0_min >= self.f0_max:
            raise UserError(
                f"f0_min {self.f0_min:g} and f0_max {self.f0_max:g} Hz leave no pitch between them",
                hint="40 and 1100 hold most voices",
            )


@config(panel="Evaluation")
class ClipEvaluation:
    max_clips: int = opt(default=1000, help="Maximum number of clips. For all kinds of model but vae.", min=1)


@config(panel="Training")
class AdversarialSchedule(Schedule):
    """The schedule of a generator of sound and its discriminators."""

    usual_discriminator_rate: ClassVar[float] = 1.0  # Relative to learning_rate.
    beta1: float = file_key(default=0.8, help="AdamW's decay rate of the mean gradient.", min=0, max=0.9999)
    beta2: float = file_key(default=0.99, help="AdamW's decay rate of the mean squared gradient.", min=0, max=0.999999)
    discriminator_learning_rate: float = advanced(
        default=0.0, help="Learning rate of the discriminators. 0: learning_rate, or half of it for a voice.", min=0
    )
    discriminator_beta1: float | None = file_key(
        default=None, help="beta1 of the discriminators; default: beta1.", min=0, max=0.9999
    )
    discriminator_beta2: float | None = file_key(
        default=None, help="beta2 of the discriminators; default: beta2.", min=0, max=0.999999
    )

    @property
    def betas(self) -> tuple[float, float]:
        return self.beta1, self.beta2

    @property
    def discriminator_betas(self) -> tuple[float, float]:
        first, second = self.discriminator_beta1, self.discriminator_beta2
        return self.beta1 if first is None else first, self.beta2 if second is None else second

    @property
    def discriminator_rate(self) -> float:
        """Returns the learning rate of the discriminators relative to `learning_rate`."""
        ratio = self.discriminator_learning_rate / self.learning_rate if self.learning_rate else 0.0
        return ratio or self.usual_discriminator_rate
