"""The training recipe of the vocoder: a generator and its discriminators.

Shapes: B items, 1 channel, T samples, M mel bands, F frames; W = B + E generated waves, of which E = 3 S are additional
ones of the S items that pc_aug shifts.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gputrain.audio import losses
from gputrain.audio.config import Mel
from gputrain.audio.discriminators import DiscriminatorGroup
from gputrain.audio.f0 import interpolated
from gputrain.audio.mel import frequency_ticks, log_mel, mel_decades
from gputrain.audio.store import Pitch, Wave
from gputrain.audio.weight_norm import WeightNormed, shared_weights
from gputrain.drawing import spectrogram_picture, with_axes
from gputrain.engine.checkpoint import format_list
from gputrain.engine.distributed import BatchDraws
from gputrain.engine.gan import at_least_fp32
from gputrain.engine.muon import muon_with_adamw
from gputrain.engine.optim import Ema, adamw
from gputrain.engine.recipe import ChainGradients, Phase, StepGroup, Yielded
from gputrain.hw.runtime import Runtime
from gputrain.planner.kind_work import PlanTarget
from gputrain.planner.memory.predict import step_flops
from gputrain.samples import Report, Sheet, SheetCell, SoundSample
from gputrain.vocoder import augment
from gputrain.vocoder.augment import EACH, Shifts, draw_semitones, make_shifted, shifted_places
from gputrain.vocoder.config import OptimizerName, TrainVocoder
from gputrain.vocoder.discriminators import KINDS, FastDiscriminator
from gputrain.vocoder.evaluate import Excerpts, evaluate_generator, warn_of_faults
from gputrain.vocoder.generator import Generator, Noise, draw_noise
from gputrain.vocoder.load import Weights, frozen_parameters
from gputrain.weights import log_unused

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class VocoderBatch:
    real_B1T: Tensor
    mel_BMF: Tensor  # Input of the generator.
    target_BMF: Tensor  # Target of the mel loss, with higher frequencies.
    f0_BF: Tensor
    noise: Noise
    shifts: Shifts
    whole: int  # Items in the whole batch.
    whole_shifted: int

    def part(self, first: int, stop: int) -> "VocoderBatch":
        parts = {name: getattr(self, name)[first:stop] for name in ("real_B1T", "mel_BMF", "target_BMF", "f0_BF")}
        noise = Noise(*(tensor[first:stop] for tensor in self.noise))
        return replace(self, **parts, noise=noise, shifts=self.shifts.part(first, stop))


class VocoderRecipe:
    """Trains the generator and the discriminators in one step group, with the same waves and discriminator outputs, or,
    with alternating steps, in a group each."""

    kind, unit = "vocoder", "crops"

    def __init__(self, settings: TrainVocoder, runtime: Runtime, held_out: Excerpts | None = None) -> None:
        """`held_out` are the clips of evaluations and samples during training."""
        self.settings, self.losses, self.runtime, self.held_out = settings, settings.losses, runtime, held_out
        self.mel, self.loss_mel = settings.spectrogram.mel, settings.loss_mel
        schedule = settings.schedule
        torch.manual_seed(schedule.seed)
        self.generator = build_generator(settings, runtime)
        sizes = settings.discriminators
        self.by_kind: dict[str, DiscriminatorGroup] = {kind: KINDS[kind](sizes) for kind in sizes.discriminators}
        self.discriminators = runtime.place(nn.ModuleDict(self.by_kind))
        self.modules: dict[str, nn.Module] = {"generator": self.generator, "discriminators": self.discriminators}
        if schedule.ema_decay:
            average = build_generator(settings, runtime)
            self.ema = Ema(self.generator, average, schedule.ema_decay)
            self.modules["ema"] = self.ema
        self._flops: dict[tuple[bool, bool], float] = {}  # FLOPs of one item, by the active phases.
        frozen = functools.partial(frozen_parameters, settings.model.frozen_params)
        optimizer = self._optimizer(self.generator, schedule.generator_optimizer, schedule.weight_decay, schedule.betas)
        generator = Phase("generator", (self.generator,), optimizer, frozen=frozen({"generator": self.generator}))
        optimizer = self._optimizer(
            self.discriminators, schedule.discriminator_optimizer, schedule.discriminator_weight_decay,
            schedule.discriminator_betas,
        )  # fmt: skip
        discriminator = Phase(
            "discriminator", (self.discriminators,), optimizer, self.refresh_spectral_norms,
            schedule.discriminator_rate, frozen(self.by_kind),
        )  # fmt: skip
        shared = (self.generator, self.discriminators)
        weights_once = functools.partial(
            shared_weights, *shared, dtype=runtime.dtype, without_autocast=self.generator.computing_in_fp32(),
            stacked=runtime.kernel_device == "cuda",
        )  # fmt: skip
        step_group = functools.partial(StepGroup, step_context=weights_once, graph_key=self._active)
        self.step_groups = [step_group((generator, discriminator), self.loss)]
        if self.losses.step_order == "alternating":
            self.step_groups = [
                step_group((discriminator,), self.discriminator_loss), step_group((generator,), self.generator_loss),
            ]  # fmt: skip
        if runtime.plan.compile.value and runtime.kernel_device == "cuda":
            for part in (*self.generator.modules(), *self.discriminators.modules()):
                if isinstance(part, WeightNormed):
                    part.known_shapes = True
                elif isinstance(part, FastDiscriminator):
                    part.compute_by_rows()
        # It is compiled for crops; clips of other lengths run uncompiled.
        self.synthesise = runtime.compile(self.generator.forward)
        # Every discriminator is compiled on its own, with its losses, because their terms are computed one by one.
        self.passes = losses.DiscriminatorPasses.compiled(runtime.compile)
        # The spectra of each resolution have another shape.
        self.spectral_distance = runtime.compile(losses.spectral_distance, any_shape=True)

    def _optimizer(
        self, module: nn.Module, name: OptimizerName, weight_decay: float, betas: tuple[float, float]
    ) -> torch.optim.Optimizer:
        rate = self.settings.schedule.learning_rate
        if name == "muon":
            return muon_with_adamw(
                [module], learning_rate=rate, weight_decay=weight_decay, betas=betas,
                product_dtype=self.runtime.product_dtype,
            )  # fmt: skip
        return adamw(module.parameters(), learning_rate=rate, weight_decay=weight_decay, betas=betas)

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the weights: fp32, or fp64 in tests without rounding."""
        return self.generator.conv_pre.weight_v.dtype

    def start_from(self, weights: Weights) -> None:
        """Loads pretrained weights. Raises UserError if they belong to another architecture."""
        strict = self.settings.model.finetune_strict_shapes
        reinitialised = weights.fit("generator", self.generator, strict_shapes=strict)
        for kind in weights.discriminators.keys() & self.by_kind.keys():
            reinitialised += weights.fit(kind, self.by_kind[kind], strict_shapes=strict)
        reinitialised += [f"all of {kind}" for kind in self.by_kind if kind not in weights.discriminators]
        log_unused(weights.source, sorted(weights.discriminators.keys() - self.by_kind.keys()))
        if reinitialised:
            log.warning("%s: reinitialised: %s", weights.source, format_list(reinitialised))
        if self.settings.schedule.ema_decay:
            self.ema.restart(self.generator)

    def prepare(self, loaded: tuple[Tensor, Tensor], step: int) -> VocoderBatch:
        """Returns a batch of samples (int16) and pitches, longer than the crop if key_aug may play it faster."""
        data, schedule, device = self.settings.data, self.settings.schedule, self.runtime.device
        draws = BatchDraws.of_step(
            schedule.seed, step, device, len(loaded[0]), whole=schedule.global_batch_size, ranks=self.runtime.ranks
        )
        wave_BT, f0_BF = (tensor.to(device, non_blocking=True).to(self.dtype) for tensor in loaded)
        wave_BT = wave_BT / 32768
        if data.key_aug:
            how = (data.crop_mel_frames, data.key_aug_prob, data.aug_min, data.aug_max)
            wave_BT, f0_BF = augment.change_key(wave_BT, f0_BF, *how, draws)
        if data.volume_aug:
            wave_BT = augment.change_volume(wave_BT, data.volume_aug_prob, draws)
        frames = f0_BF.shape[1]
        shifts = self._draw_shifts(draws.whole, frames, draws.generator)
        return VocoderBatch(
            real_B1T=wave_BT[:, None],
            mel_BMF=log_mel(wave_BT, self.mel),
            target_BMF=log_mel(wave_BT, self.loss_mel),
            f0_BF=f0_BF,
            noise=Noise(*map(draws.kept, self._draw_noise(draws.whole, frames, draws.generator))),
            shifts=shifts.part(draws.rows[0].start, draws.rows[0].stop),
            whole=draws.whole,
            whole_shifted=len(shifts.places),
        )

    def _draw_shifts(self, items: int, frames: int, draws: torch.Generator) -> Shifts:
        count = math.ceil(items * self.losses.pc_aug_rate) if self.losses.pc_aug else 0
        once_S1, half_S1 = (by.to(self.dtype) for by in draw_semitones(count, self.losses.pc_aug_key, draws))
        noise = self._draw_noise(EACH * count, frames, draws)
        return Shifts(*shifted_places(items, count, draws.device), once_S1, half_S1, noise)

    def _draw_noise(self, items: int, frames: int, draws: torch.Generator) -> Noise:
        return Noise(*(t.to(self.dtype) for t in draw_noise(self.settings.architecture, items, frames, draws)))

    def size(self, batch: VocoderBatch) -> int:
        return len(batch.real_B1T)

    def flops(self, batch: VocoderBatch, step: int) -> float:
        active = self._active(step)
        if active not in self._flops:
            self._flops[active] = step_flops(target(self.settings), step) / self.settings.schedule.global_batch_size
        return self._flops[active] * self.size(batch)

    def peak_memory_step(self, step: int) -> int:
        """Returns a step at which both the generator and the discriminators are trained."""
        return max(step, self.losses.discriminator_start, self.losses.discriminator_only_steps)

    def split(self, batch: VocoderBatch, parts: int) -> list[VocoderBatch]:
        """Returns parts whose sizes differ by at most one, the largest first."""
        ends = [math.ceil(self.size(batch) * part / parts) for part in range(parts + 1)]
        return [batch.part(first, stop) for first, stop in pairwise(ends)]

    def _learns(self, step: int) -> bool:
        return step >= self.losses.discriminator_only_steps

    def _discriminator_learns(self, step: int) -> bool:
        return step >= self.losses.discriminator_start

    def _active(self, step: int) -> tuple[bool, bool]:
        """Returns whether the generator and the discriminators learn: all that the loss takes from the step."""
        return self._learns(step), self._discriminator_learns(step)

    def loss(self, batch: VocoderBatch, step: int) -> Iterator[Yielded]:
        """Yields terms with gradients of the generated waves or of a discriminator; the last item chains those of the
        waves to the generator."""
        if not self._learns(step):
            yield from self.discriminator_loss(batch, step)
            return
        yield from self._generated_terms(batch, step, losses.adversarial_terms)

    def discriminator_loss(self, batch: VocoderBatch, step: int) -> Iterator[Yielded]:
        """Yields the terms of the discriminators alone."""
        if self._discriminator_learns(step):
            with torch.no_grad():
                waves_W1T = at_least_fp32(self._make(batch))
            yield from losses.discriminator_terms(*self._compared(batch, waves_W1T), passes=self._used_passes)

    def generator_loss(self, batch: VocoderBatch, step: int) -> Iterator[Yielded]:
        """Yields the terms of the generator alone, whose waves are generated again, with a graph."""
        if self._learns(step):
            yield from self._generated_terms(batch, step, losses.generator_terms)

    def _generated_terms(
        self, batch: VocoderBatch, step: int, adversarial: Callable[..., Iterator[Yielded]]
    ) -> Iterator[Yielded]:
        """Yields the terms of generated waves, on a detached copy that collects their gradients, and chains these."""
        waves_W1T = self._make(batch)
        made_W1T = at_least_fp32(waves_W1T.detach()).requires_grad_()
        yield from self._reconstruction_terms(made_W1T, batch)
        if self._discriminator_learns(step):
            yield from adversarial(*self._compared(batch, made_W1T), passes=self._used_passes)
        assert made_W1T.grad is not None
        yield ChainGradients((waves_W1T,), (made_W1T.grad.to(waves_W1T.dtype),))

    def _compared(self, batch: VocoderBatch, waves_W1T: Tensor) -> tuple[Any, ...]:
        """Returns the discriminators, real and generated waves, and the numbers of both in the whole batch."""
        return self.by_kind, batch.real_B1T, waves_W1T, batch.whole, batch.whole + EACH * batch.whole_shifted

    @property
    def _used_passes(self) -> losses.DiscriminatorPasses | None:
        return self.passes if self.runtime.plan.compile.value else None

    def _make(self, batch: VocoderBatch) -> Tensor:
        if not batch.shifts.places:
            made_B1T: Tensor = self.synthesise(batch.mel_BMF, batch.f0_BF, batch.noise)
            return made_B1T
        given = (batch.mel_BMF, batch.f0_BF, batch.noise, batch.shifts, self.generator.m_source.rate_hz / 2)
        return make_shifted(self.synthesise, functools.partial(log_mel, mel=self.mel), *given)

    def _reconstruction_terms(self, made_W1T: Tensor, batch: VocoderBatch) -> Iterator[Yielded]:
        """Yields the distances to the recordings, and between items that are shifted twice and once."""
        items, shifted = self.size(batch), len(batch.shifts.places)
        paired_B1T, once_S1T, _, twice_S1T = made_W1T.tensor_split([items, items + shifted, items + 2 * shifted])
        real_B1T, target_BMF, whole = batch.real_B1T, batch.target_BMF, batch.whole + batch.whole_shifted
        if batch.whole_shifted:  # Every part yields the term, whether or not some of its own items are shifted.
            yield losses.pitch_shift_term(twice_S1T, once_S1T, batch.whole_shifted)
        if shifted:
            paired_B1T, real_B1T = torch.cat([paired_B1T, twice_S1T]), torch.cat([real_B1T, once_S1T])
            target_BMF = torch.cat([target_BMF, log_mel(once_S1T.squeeze(1), self.loss_mel)])
        yield losses.mel_term(self.loss_mel, paired_B1T, target_BMF, whole, self.losses.lab_aux_melloss)
        yield from losses.stft_terms(
            self.losses.stft, paired_B1T, real_B1T, whole, self.losses.lab_aux_stftloss, distance=self.spectral_distance
        )

    def refresh_spectral_norms(self, statistics: dict[str, Tensor], finite: Tensor) -> None:
        for discriminators in self.by_kind.values():
            discriminators.refresh_spectral_norms()

    def average(self, step: int) -> None:
        if self.settings.schedule.ema_decay:
            self.ema.update(self.generator, step)

    @property
    def best_model(self) -> Generator:
        """Returns the EMA generator, or the trained one without EMA."""
        return self.ema.average if self.settings.schedule.ema_decay else self.generator

    def sample(self) -> Report:
        if self.held_out is None:
            return Report()
        with self.runtime.autocast():
            return sample_clips(self.best_model, self.held_out, self.settings, self.runtime.device)

    def evaluate(self) -> Report:
        assert self.held_out is not None
        form = self.held_out.store.format
        figures = evaluate_generator(
            self.best_model, self.held_out, self.runtime.device, f0_method=form.f0_method, f0_min=form.f0_min,
            f0_max=form.f0_max, loss_mel=self.loss_mel, quick=True, autocast=self.runtime.autocast,
        )  # fmt: skip
        warn_of_faults(figures.scalars)
        return Report(figures.scalars)


def build_generator(settings: TrainVocoder, runtime: Runtime) -> Generator:
    generator = Generator(settings.architecture, checkpointing=bool(settings.model.gradient_checkpointing))
    runtime.place(generator)
    return generator


def target(settings: TrainVocoder) -> PlanTarget:
    """Returns the training in the form that the memory planner takes."""

    def build(runtime: Runtime, checkpointing: bool) -> VocoderRecipe:
        model = replace(settings.model, gradient_checkpointing=checkpointing)
        return VocoderRecipe(replace(settings, model=model), runtime)

    def load(items: int = settings.schedule.global_batch_size) -> tuple[Tensor, Tensor]:
        frames = settings.data.frames_to_read
        samples = frames * settings.spectrogram.hop_size
        return torch.zeros(items, samples, dtype=torch.int16), torch.zeros(items, frames)

    def is_proportional(items: int) -> bool:
        return not settings.losses.pc_aug  # It shifts a share of the items, rounded up.

    return PlanTarget(
        build, load, is_proportional=is_proportional, global_batch_size=settings.schedule.global_batch_size
    )


CLIPS = 4
SECONDS = 4.0
DIFFERENCE_DECADES = 2.0  # Difference shown brightest: a factor of 100 in magnitude.


@torch.no_grad()
def sample_clips(
    generator: Generator, clips: Iterable[tuple[Wave, Pitch]], settings: TrainVocoder, device: torch.device
) -> Report:
    """Returns one picture of the spectrograms of the first CLIPS clips, and the synthesised audio of each."""
    mel = settings.spectrogram.mel
    frames = int(SECONDS * mel.sampling_rate / mel.hop_size)
    recorded, made = [], []
    for wave_T, f0_F in islice(clips, CLIPS):
        real_1T = torch.from_numpy(wave_T[: frames * mel.hop_size] / 32768).float().to(device)[None]
        f0_1F = torch.from_numpy(interpolated(f0_F[:frames])).to(device)[None]
        recorded.append(real_1T[0].cpu())
        made.append(generator(log_mel(real_1T, mel), f0_1F)[0, 0].float().cpu())
    picture = sheet(recorded, made, mel, settings.saving.mel_vmin, settings.saving.mel_vmax)
    sounds = {
        f"clip_{number}": SoundSample(made_T, mel.sampling_rate, f"held-out clip {number}", real_T)
        for number, (made_T, real_T) in enumerate(zip(made, recorded, strict=True), start=1)
    }
    return Report(pictures={"spectrograms": picture}, sounds=sounds)


def sheet(real_waves: Sequence[Tensor], made_waves: Sequence[Tensor], mel: Mel, vmin: float, vmax: float) -> Sheet:
    """Returns spectrograms with a column for each clip (waves of T samples): from the top, the recording, the
    synthesised wave, and their difference, each with axes of frequency and time. Low frequencies are at the bottom.

    `vmin` and `vmax` are the mel magnitudes that are shown darkest and brightest, as powers of ten. The difference is
    that of these powers, from 0 to DIFFERENCE_DECADES.
    """

    def shown(values_MF: Tensor, low: float, high: float) -> Tensor:
        seconds = values_MF.shape[1] * mel.hop_size / mel.sampling_rate
        return with_axes(spectrogram_picture(values_MF, low, high), frequency_ticks(mel), seconds)

    real, made, differences = [], [], []
    for number, (real_T, made_T) in enumerate(zip(real_waves, made_waves, strict=True), start=1):
        real_MF, made_MF = (mel_decades(wave_T, mel) for wave_T in (real_T, made_T))
        difference_MF = (real_MF - made_MF).abs()
        real.append(SheetCell(shown(real_MF, vmin, vmax), f"clip {number}"))
        made.append(SheetCell(shown(made_MF, vmin, vmax)))
        words = f"{20 * float(difference_MF.mean()):.1f} dB apart"
        differences.append(SheetCell(shown(difference_MF, 0, DIFFERENCE_DECADES), words))
    return Sheet(("recording", "synthesised", "difference"), (real, made, differences), "mel spectrograms")
