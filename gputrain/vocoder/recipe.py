"""The training recipe of the vocoder: one GAN step of HiFi-GAN (Kong et al. 2020, arXiv:2010.05646), in its order.

    generate -> losses of the discriminators -> adversarial, feature matching -> mel -> STFT -> back to the generator

A part of a batch gives exactly its share of the gradient of the whole batch: every term is a sum over the part's items
divided by a count of the global batch (`global_items`), and noise is drawn for the global batch and split with it.

Shapes: B items, 1 channel, T samples, M mel bands, F frames; W generated waves, B unless pc_aug adds
some; P waves that are compared with a target, also B unless pc_aug adds some (augment.py).
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from gputrain.audio import losses
from gputrain.audio.discriminators import DiscriminatorGroup
from gputrain.audio.mel import log_mel
from gputrain.audio.weight_norm import shared_weights
from gputrain.engine.distributed import BatchDraws
from gputrain.engine.optim import Ema, adamw, muon_with_adamw
from gputrain.engine.recipe import ChainGradients, Phase, StepGroup, Term, Yielded, at_least_fp32
from gputrain.hw.runtime import Runtime
from gputrain.planner.kind_work import PlanTarget
from gputrain.planner.memory.predict import step_flops
from gputrain.samples import Report
from gputrain.vocoder import augment
from gputrain.vocoder.config import OptimizerName, TrainVocoder
from gputrain.vocoder.discriminators import KINDS
from gputrain.vocoder.evaluate import Excerpts
from gputrain.vocoder.generator import Generator, Noise, draw_noise
from gputrain.vocoder.load import frozen_parameters


@dataclass(frozen=True)
class VocoderBatch:
    real_B1T: Tensor
    mel_BMF: Tensor  # Input of the generator.
    target_BMF: Tensor  # Target of the mel loss, with higher frequencies.
    f0_BF: Tensor
    noise: Noise
    global_items: int  # Items of the whole batch, over all of its parts and all ranks.
    shifts: augment.Shifts  # The items that pc_aug also generates at other pitches; none by default.

    @property
    def global_waves(self) -> int:
        """Returns the number of generated waves in the whole batch."""
        return self.global_items + augment.EACH * self.shifts.global_count

    @property
    def global_pairs(self) -> int:
        """Returns the number of waves in the whole batch that are compared with a target."""
        return self.global_items + self.shifts.global_count

    def part(self, first: int, stop: int) -> "VocoderBatch":
        parts = {name: getattr(self, name)[first:stop] for name in ("real_B1T", "mel_BMF", "target_BMF", "f0_BF")}
        # The noise was drawn for the whole batch: an item has the same in any part. The counts of the batch stay.
        noise = Noise(*(tensor[first:stop] for tensor in self.noise))
        return replace(self, **parts, noise=noise, shifts=self.shifts.part(first, stop))


class VocoderRecipe:
    """Trains the generator and the discriminators in one step group, with the same waves and discriminator outputs."""

    kind, unit = "vocoder", "crops"

    def __init__(self, settings: TrainVocoder, runtime: Runtime, held_out: Excerpts | None = None) -> None:
        """`held_out` are the clips of evaluations and samples during training."""
        self.settings, self.loss_options, self.runtime, self.held_out = settings, settings.losses, runtime, held_out
        self.mel, self.loss_mel = settings.spectrogram.mel, settings.loss_mel
        # Weights by the names of the losses in the metrics. That of every discriminator's terms is 1.
        self.weights = {"mel": self.loss_options.lab_aux_melloss, "stft": self.loss_options.lab_aux_stftloss}
        schedule = settings.schedule
        # The first weights are a function of the seed, whatever was drawn before, as when data were opened.
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
        # One group of two phases, not two groups: both networks learn from the same waves, before either has stepped.
        self.step_groups = [self._step_group()]
        self._compile()

    def _step_group(self) -> StepGroup:
        schedule = self.settings.schedule
        # What is frozen gets no gradient, no step and no part in the norm by which gradients are clipped. Gradients
        # still pass through it: a frozen discriminator teaches the generator.
        frozen = functools.partial(frozen_parameters, self.settings.model.frozen_params)
        optimizer = self._optimizer(self.generator, schedule.generator_optimizer, schedule.weight_decay, schedule.betas)
        generator = Phase("generator", (self.generator,), optimizer, frozen=frozen({"generator": self.generator}))
        optimizer = self._optimizer(
            self.discriminators,
            schedule.discriminator_optimizer,
            schedule.discriminator_weight_decay,
            schedule.discriminator_betas,
        )
        discriminator = Phase(
            "discriminator",
            (self.discriminators,),
            optimizer,
            self.refresh_spectral_norms,
            schedule.discriminator_rate,
            frozen(self.by_kind),
        )
        # Weight normalisation is computed once a step, not in each of the passes and micro-batches.
        weights_once = functools.partial(
            shared_weights,
            self.generator,
            self.discriminators,
            dtype=self.runtime.dtype,
            without_autocast=self.generator.computing_in_fp32(),
        )
        return StepGroup((generator, discriminator), self.loss, weights_once, self._active)

    def _compile(self) -> None:
        runtime = self.runtime
        # It is compiled for crops; clips of other lengths run uncompiled.
        self.synthesise = runtime.compile(self.generator.forward)
        # Every discriminator is compiled on its own, with its losses, because their terms are computed one by one.
        self.passes = losses.DiscriminatorPasses.compiled(runtime.compile)

    def _optimizer(
        self, module: nn.Module, name: OptimizerName, weight_decay: float, betas: tuple[float, float]
    ) -> torch.optim.Optimizer:
        rate = self.settings.schedule.learning_rate
        if name == "muon":
            return muon_with_adamw(
                [module],
                learning_rate=rate,
                weight_decay=weight_decay,
                betas=betas,
                product_dtype=self.runtime.product_dtype,
            )
        return adamw(module.parameters(), learning_rate=rate, weight_decay=weight_decay, betas=betas)

    def prepare(self, loaded: tuple[Tensor, Tensor], step: int) -> VocoderBatch:
        """Returns a batch of samples (int16) and pitches, longer than the crop if key_aug may play it faster."""
        data, schedule, device = self.settings.data, self.settings.schedule, self.runtime.device
        draws = BatchDraws.of_step(
            schedule.seed,
            step,
            device,
            len(loaded[0]),
            global_items=schedule.global_batch_size,
            ranks=self.runtime.ranks,
        )
        wave_BT, f0_BF = (tensor.to(device, non_blocking=True).to(self.dtype) for tensor in loaded)
        wave_BT = wave_BT / 32768
        # Speed comes before loudness, because resampling may exceed the peak to which the loudness is limited. The mels
        # below are those of the changed wave, so that input and target agree.
        if data.key_aug:
            how = (data.crop_mel_frames, data.key_aug_prob, data.aug_min, data.aug_max)
            wave_BT, f0_BF = augment.change_key(wave_BT, f0_BF, *how, draws)
        if data.volume_aug:
            wave_BT = augment.change_volume(wave_BT, data.volume_aug_prob, draws)

        def drawn(items: int) -> Noise:
            made = draw_noise(self.settings.architecture, items, f0_BF.shape[1], draws.generator)
            return Noise(*(tensor.to(self.dtype) for tensor in made))

        # How many items are shifted depends on the global batch alone, not on the part of this rank: every split has
        # the same ones, and the divisors of the losses are known before any part is computed.
        count = math.ceil(draws.global_items * self.loss_options.pc_aug_rate) if self.loss_options.pc_aug else 0
        shifts = augment.draw_shifts(
            draws.global_items, count, self.loss_options.pc_aug_key, draws.generator, self.dtype, drawn
        )
        return VocoderBatch(
            real_B1T=wave_BT[:, None],
            mel_BMF=log_mel(wave_BT, self.mel),
            target_BMF=log_mel(wave_BT, self.loss_mel),
            f0_BF=f0_BF,
            noise=Noise(*map(draws.kept, drawn(draws.global_items))),
            global_items=draws.global_items,
            shifts=shifts.part(draws.rows[0].start, draws.rows[0].stop),
        )

    # ------------------------------------------------------------------------------------------------------- one step

    def loss(self, batch: VocoderBatch, step: int) -> Iterator[Yielded]:
        """Yields the terms of one GAN step, in which generator and discriminators learn from the same waves.

        Every loss is back-propagated as soon as it is yielded, onto a detached copy of the waves: so only one
        discriminator's graph is in memory at a time. Last, the gradient of the copy goes through the generator, once.
        """
        if not self._generator_learns(step):
            yield from self._discriminator_terms(batch, step)
            return
        waves_W1T = self.generate(batch)
        # A leaf: what is back-propagated into it stops there, so that the generator's graph is run through once and not
        # again for each of the losses. It is in fp32, as the sum of many small gradients would round in 16 bit.
        made_W1T = at_least_fp32(waves_W1T.detach()).requires_grad_()

        if self._discriminators_learn(step):
            # For each discriminator: its own loss of real and generated waves, then the generator's adversarial loss
            # and feature matching, which share the pass over generated waves. HiFi-GAN updates the discriminators
            # before it computes the generator's losses; here both see the discriminators of the step before, which
            # saves a pass over the generated waves. Losses of real waves and feature matching are divided by the items
            # of the global batch, those of generated waves by their number, of which pc_aug makes more.
            yield from losses.adversarial_terms(
                self.by_kind, batch.real_B1T, made_W1T, batch.global_items, batch.global_waves, passes=self.passes
            )

        # Each of these, too, is back-propagated as it is yielded, before the next spectrogram is computed.
        yield from self.reconstruction_terms(made_W1T, batch)

        # All terms above have been back-propagated by now, and the leaf holds the sum of their gradients.
        assert made_W1T.grad is not None
        yield ChainGradients((waves_W1T,), (made_W1T.grad.to(waves_W1T.dtype),))

    def _discriminator_terms(self, batch: VocoderBatch, step: int) -> Iterator[Term]:
        """Yields the terms of the discriminators alone, whose warm-up needs no graph of the waves."""
        if self._discriminators_learn(step):
            # Nothing trains the generator yet: without a graph, its activations need not stay for a backward pass.
            with torch.no_grad():
                made_W1T = at_least_fp32(self.generate(batch))
            yield from losses.discriminator_terms(
                self.by_kind, batch.real_B1T, made_W1T, batch.global_items, batch.global_waves, passes=self.passes
            )

    def reconstruction_terms(self, made_W1T: Tensor, batch: VocoderBatch) -> Iterator[Term]:
        """Yields the distances of generated waves to the recordings. A further one is another Term of the pairs here,
        divided by `batch.global_pairs`."""
        made_P1T, real_P1T, target_PMF = augment.compared_pairs(
            made_W1T, batch.real_B1T, batch.target_BMF, batch.shifts, self._loss_mel
        )

        # By default, the mel of the loss reaches up to half of the sampling rate, beyond the mel that the generator is
        # given: otherwise nothing but the discriminators and the STFT loss would measure what it makes above fmax.
        yield losses.mel_term(self.loss_mel, made_P1T, target_PMF, batch.global_pairs, self.weights["mel"])
        yield from losses.stft_terms(
            self.loss_options.stft, made_P1T, real_P1T, batch.global_pairs, self.weights["stft"]
        )

        if batch.shifts.global_count:  # Every part yields the term, whether or not some of its own items are shifted.
            yield losses.pitch_shift_term(*augment.shifted_pair(made_W1T, batch.shifts), batch.shifts.global_count)

    def generate(self, batch: VocoderBatch) -> Tensor:
        """Returns the generated waves, (W, 1, T): one for each item, then those that pc_aug adds."""
        if not batch.shifts.places:
            made_B1T: Tensor = self.synthesise(batch.mel_BMF, batch.f0_BF, batch.noise)
            return made_B1T
        to_mel, ceiling_hz = functools.partial(log_mel, mel=self.mel), self.generator.m_source.rate_hz / 2
        given = (batch.mel_BMF, batch.f0_BF, batch.noise, batch.shifts, ceiling_hz)
        return augment.make_shifted(self.synthesise, to_mel, *given)

    def _loss_mel(self, wave_B1T: Tensor) -> Tensor:
        return log_mel(wave_B1T.squeeze(1), self.loss_mel)

    def _generator_learns(self, step: int) -> bool:
        return step >= self.loss_options.discriminator_only_steps

    def _discriminators_learn(self, step: int) -> bool:
        return step >= self.loss_options.discriminator_start

    def _active(self, step: int) -> tuple[bool, bool]:
        """Returns whether the generator and the discriminators learn: all that the loss takes from the step."""
        return self._generator_learns(step), self._discriminators_learn(step)

    def refresh_spectral_norms(self, statistics: dict[str, Tensor], finite: Tensor) -> None:
        # Power iteration runs once a step. In every forward pass, as torch does it, the weights would depend on the
        # number of micro-batches.
        for discriminators in self.by_kind.values():
            discriminators.refresh_spectral_norms()

    def average(self, step: int) -> None:
        if self.settings.schedule.ema_decay:
            self.ema.update(self.generator, step)

    # ------------------------------------------------------------------------------------------- parts and their sizes

    def size(self, batch: VocoderBatch) -> int:
        return len(batch.real_B1T)

    def flops(self, batch: VocoderBatch, step: int) -> float:
        active = self._active(step)
        # They are counted on fake tensors, without a kernel, and once for each set of networks that learn.
        if active not in self._flops:
            self._flops[active] = step_flops(target(self.settings), step) / self.settings.schedule.global_batch_size
        return self._flops[active] * self.size(batch)

    def peak_memory_step(self, step: int) -> int:
        """Returns a step at which both the generator and the discriminators are trained."""
        # Before it, one of the networks keeps no gradients and runs without a graph, so that a plan would be too low.
        return max(step, self.loss_options.discriminator_start, self.loss_options.discriminator_only_steps)

    def split(self, batch: VocoderBatch, parts: int) -> list[VocoderBatch]:
        """Returns parts whose sizes differ by at most one, the largest first."""
        # Nearly equal sizes, because each other size would be compiled, and searched by cuDNN, once more.
        ends = [math.ceil(self.size(batch) * part / parts) for part in range(parts + 1)]
        return [batch.part(first, stop) for first, stop in pairwise(ends)]

    # --------------------------------------------------------------------------------------------- weights and results

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the weights: fp32, or fp64 in tests without rounding."""
        return self.generator.conv_pre.weight_v.dtype

    @property
    def best_model(self) -> Generator:
        """Returns the EMA generator, or the trained one without EMA."""
        return self.ema.average if self.settings.schedule.ema_decay else self.generator

    def sample(self) -> Report:
        if self.held_out is None:
            return Report()
        return self.held_out.sample(self.best_model, self.settings.saving, self.runtime)

    def evaluate(self) -> Report:
        assert self.held_out is not None
        return self.held_out.evaluate(self.best_model, self.loss_mel, self.runtime)


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

    # pc_aug shifts a share of the items, rounded up.
    return PlanTarget(build, load, proportional_up_to=0 if settings.losses.pc_aug else math.inf)
