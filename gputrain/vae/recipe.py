"""Training recipe of the image VAE: an autoencoder, and a discriminator if adversarial_weight is set.

Shapes: B items, C channels of a picture, H x W pixels, L latent channels, h x w latent positions.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gputrain.engine import gan
from gputrain.engine.cast_once import WeightSlot, layer_weights, weights_cast_once
from gputrain.engine.checkpoint import load_weights
from gputrain.engine.distributed import BatchDraws
from gputrain.engine.optim import Ema, adamw
from gputrain.engine.recipe import BatchStat, ChainGradients, Phase, StepGroup, Term, Yielded
from gputrain.hw.runtime import Runtime
from gputrain.planner.kind_work import PlanTarget
from gputrain.planner.memory.predict import step_flops
from gputrain.samples import Report
from gputrain.vae import losses
from gputrain.vae.config import TrainVae
from gputrain.vae.data import Picture, as_rgb, centre_crop, to_unit
from gputrain.vae.evaluate import readable_crops, reconstruction_figures, reconstruction_sheet
from gputrain.vae.linear_start import signals_of
from gputrain.vae.losses import Lpips, PatchDiscriminator, crop, crop_corners
from gputrain.vae.memory_efficient_layers import Features
from gputrain.vae.model import AutoencoderKL, Upsample, blocks
from gputrain.vae.norm_arithmetic import Arithmetic
from gputrain.vae.reconstruct import reconstruct

SAMPLES = 8  # number of pictures on a sheet of samples
EVALUATED = 64  # maximum number of pictures evaluated during training
# The first steps move the mean colours up and down by several levels, because Adam changes all weights that they depend
# on in the same direction. The average over a hundred steps has none of it.
LEAST_DECAY = 0.99  # Decay of the EMA in the first steps from good weights.


@dataclass(frozen=True)
class VaeBatch:
    """The crops of a step, or a part of them."""

    images_BCHW: Tensor  # uint8
    noise_BLhw: Tensor  # noise of the latents
    # With simultaneous steps, the autoencoder's phase stores its pictures here for the discriminator's phase.
    made_BCHW: Tensor | None
    top_B: Tensor | None  # corners of the crops for LPIPS; None: it compares whole pictures
    left_B: Tensor | None
    global_items: int  # Pictures of the whole batch, over all micro-batches and ranks: the divisor of every loss.


class VaeRecipe:
    """Phases: the autoencoder, then the discriminator, which scores the pictures of the autoencoder's phase; with
    alternating steps the discriminator comes first, and scores pictures of the same weights."""

    kind, unit = "vae", "images"

    def __init__(
        self, settings: TrainVae, runtime: Runtime, held_out: list[Picture], lpips: Lpips | None = None
    ) -> None:
        """`lpips` is the perceptual loss, or None if the settings do not use it."""
        self.settings, self.losses, self.runtime = settings, settings.losses, runtime
        self.held_out = held_out
        self._flops: dict[tuple[bool, bool], int] = {}  # FLOPs of one item, by active losses.
        torch.manual_seed(settings.schedule.seed)
        self.autoencoder = build_autoencoder(settings, runtime)
        block, channels = blocks(self.autoencoder)[0], settings.architecture.block_out_channels[0]
        runtime.verify_layout(type(block).__name__, lambda x_BCHW: block(Features(x_BCHW)).added(), channels)
        self.modules: dict[str, nn.Module] = {"autoencoder": self.autoencoder}
        learning: tuple[nn.Module, ...] = (self.autoencoder,)
        if settings.model.train_part != "all":
            learning = (self.autoencoder.decoder, self.autoencoder.post_quant_conv)
        optimizer = self._adamw(learning, betas=(0.9, 0.999))
        autoencoder = Phase("autoencoder", learning, optimizer, self.update_adaptive_weight)
        # The kernels of upsampling layers are summed before they are cast.
        slots = layer_weights([self.autoencoder], [m for m in self.autoencoder.modules() if isinstance(m, Upsample)])
        of_discriminator: list[WeightSlot] = []
        if self.losses.adversarial_weight:
            discriminator = self._begin_discriminator()
            of_discriminator = layer_weights([self.discriminator])
        cast_once = functools.partial(weights_cast_once, [*slots, *of_discriminator], runtime.dtype)
        self.step_groups = [StepGroup((autoencoder,), self.autoencoder_loss, cast_once, self._active)]
        if self.losses.adversarial_weight:
            if self.losses.step_order == "alternating":
                group = StepGroup((discriminator,), self.discriminator_loss, cast_once, self._active)
                self.step_groups.insert(0, group)
            else:
                cast_once = functools.partial(weights_cast_once, of_discriminator, runtime.dtype)
                group = StepGroup((discriminator,), self.discriminator_loss, cast_once, self._active)
                self.step_groups.append(group)
        if settings.schedule.ema_decay:
            average = build_autoencoder(settings, runtime)
            least_decay = LEAST_DECAY if has_good_start(settings) else 0.0
            schedule = settings.schedule
            self.ema = Ema(self.autoencoder, average, schedule.ema_decay, least_decay)
            self.modules["ema"] = self.ema
        self.lpips = lpips
        if lpips is not None:
            runtime.place(lpips)
        compile_layers(self.autoencoder, runtime)
        self.structural = runtime.compile(losses.structural)

    def _begin_discriminator(self) -> Phase:
        self.discriminator = PatchDiscriminator(
            self.losses.discriminator_norm, self.losses.discriminator_channels, self.settings.data.image_channels
        )
        self.balance = gan.Balance(self.losses.adaptive_weight_limit).to(self.runtime.device)
        self.runtime.place(self.discriminator)
        self.runtime.compile_modules([self.discriminator])
        self.modules |= {"discriminator": self.discriminator, "balance": self.balance}
        modules = (self.discriminator,)
        optimizer = self._adamw(modules, betas=(0.5, 0.9))
        return Phase("discriminator", modules, optimizer, self.update_logit_averages)

    def _adamw(self, modules: tuple[nn.Module, ...], betas: tuple[float, float]) -> torch.optim.Optimizer:
        schedule = self.settings.schedule
        return adamw(
            [parameter for module in modules for parameter in module.parameters()],
            learning_rate=schedule.learning_rate,
            weight_decay=schedule.weight_decay,
            betas=betas,
        )

    def start_from(self, weights: dict[str, Tensor]) -> None:
        """Initialises the autoencoder, and the EMA of its weights, with these weights."""
        load_weights(self.autoencoder, weights, "the given autoencoder")
        if self.settings.schedule.ema_decay:
            self.ema.restart(self.autoencoder)

    def prepare(self, loaded: Tensor, step: int) -> VaeBatch:
        device = self.runtime.device
        images_BCHW = loaded.to(device, non_blocking=True).contiguous(memory_format=self.runtime.memory_format)
        schedule = self.settings.schedule
        draws = BatchDraws.of_step(
            schedule.seed, step, device, len(loaded), whole=schedule.global_batch_size, ranks=self.runtime.ranks
        )
        side = loaded.shape[-1] // self.settings.architecture.downsampling
        noise_BLhw = draws.normal(self.settings.architecture.latent_channels, side, side, dtype=self.dtype)
        keeps_made = self._discriminator_learns(step) and self.losses.step_order == "simultaneous"
        made_BCHW = noise_BLhw.new_empty(images_BCHW.shape) if keeps_made else None
        top_B = left_B = None
        if self.lpips is not None and 0 < self.losses.lpips_crop < loaded.shape[-1]:
            height, width = loaded.shape[-2:]
            corners = crop_corners(draws.whole, height, width, self.losses.lpips_crop, draws.generator)
            top_B, left_B = map(draws.kept, corners)
        return VaeBatch(images_BCHW, noise_BLhw, made_BCHW, top_B, left_B, draws.whole)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights: fp32, or fp64 in tests that must exclude rounding."""
        return self.autoencoder.encoder.conv_norm_out.weight.dtype  # A norm's weights are never cast.

    def size(self, batch: VaeBatch) -> int:
        return len(batch.images_BCHW)

    def flops(self, batch: VaeBatch, step: int) -> float:
        active = self._active(step)
        if active not in self._flops:
            self._flops[active] = item_flops(self.settings, step)
        return float(self._flops[active] * self.size(batch))

    def peak_memory_step(self, step: int) -> int:
        """Returns a step at which the discriminator is trained and the adversarial loss is applied."""
        starts = self.losses.discriminator_start + self.losses.discriminator_warmup_steps
        return max(step, starts) if self.losses.adversarial_weight else step

    def split(self, batch: VaeBatch, parts: int) -> list[VaeBatch]:
        images, noise = batch.images_BCHW.tensor_split(parts), batch.noise_BLhw.tensor_split(parts)
        made, top, left = (
            (None,) * parts if tensor is None else tensor.tensor_split(parts)
            for tensor in (batch.made_BCHW, batch.top_B, batch.left_B)
        )
        pieces = zip(images, noise, made, top, left, strict=True)
        return [VaeBatch(*piece, batch.global_items) for piece in pieces]

    def _discriminator_learns(self, step: int) -> bool:
        return self.losses.adversarial_weight > 0 and step >= self.losses.discriminator_start

    def _adversarial_loss_is_on(self, step: int) -> bool:
        return self._discriminator_learns(step - self.losses.discriminator_warmup_steps)

    def _active(self, step: int) -> tuple[bool, bool]:
        """Returns whether the discriminator learns, and the autoencoder from it: all that losses take from the step."""
        return self._discriminator_learns(step), self._adversarial_loss_is_on(step)

    def autoencoder_loss(self, batch: VaeBatch, step: int) -> Iterator[Yielded]:
        """Yields the losses of the autoencoder. Its three graphs (losses on the picture, decoder, encoder) are
        back-propagated one after the other, and each is freed before the next."""
        images_BCHW = to_unit(batch.images_BCHW).to(self.dtype)
        with torch.set_grad_enabled(self.settings.model.train_part == "all"):
            moments = self.autoencoder.encode(images_BCHW)
        mean_BLhw, logvar_BLhw = (moment.detach().requires_grad_() for moment in moments)
        # No variable holds the latents beyond the decoding: its graph keeps what the gradients need of them.
        decoded_BCHW = self.autoencoder.decode(sampled(mean_BLhw, logvar_BLhw, batch))
        made_BCHW = gan.at_least_fp32(decoded_BCHW.detach()).requires_grad_()
        if batch.made_BCHW is not None:
            batch.made_BCHW.copy_(made_BCHW.detach())

        yield from self._picture_terms(made_BCHW, images_BCHW, batch)
        gradient_BCHW = _gradient(made_BCHW)
        if self._adversarial_loss_is_on(step):
            scored_BCHW = made_BCHW.detach().requires_grad_()
            logits = self.discriminator(scored_BCHW)
            yield Term(
                "adversarial", gan.generator_loss(self.losses.adversarial_loss, logits).sum() / batch.global_items
            )
            adversarial_BCHW = _gradient(scored_BCHW)
            yield BatchStat("squares_of_others", gradient_BCHW.square().sum())
            yield BatchStat("squares_of_adversary", adversarial_BCHW.square().sum())
            weight = self.losses.adversarial_weight * self.balance.weight
            gradient_BCHW = gradient_BCHW + weight * adversarial_BCHW
        yield ChainGradients((decoded_BCHW,), (gradient_BCHW.to(decoded_BCHW.dtype),))

        if self.settings.model.train_part != "all":
            return
        values = images_BCHW[0].numel()
        kl = losses.kl_divergence(mean_BLhw, logvar_BLhw, values).sum() / batch.global_items
        yield Term("kl", kl, weight=self.losses.kl_weight)
        yield ChainGradients(tuple(moments), (_gradient(mean_BLhw), _gradient(logvar_BLhw)))

    def _picture_terms(self, made_BCHW: Tensor, images_BCHW: Tensor, batch: VaeBatch) -> Iterator[Term]:
        kind, weight = self.losses.reconstruction_loss, self.losses.reconstruction_weight
        if weight:
            yield Term(kind, losses.pixel_distance(kind, made_BCHW, images_BCHW).sum() / batch.global_items, weight)
        weight = self.losses.perceptual_weight
        if self.lpips is not None:
            if batch.top_B is not None and batch.left_B is not None:
                made_BCHW, images_BCHW = (
                    crop(pictures, batch.top_B, batch.left_B, self.losses.lpips_crop)
                    for pictures in (made_BCHW, images_BCHW)
                )
            yield Term("lpips", self.lpips(as_rgb(made_BCHW), as_rgb(images_BCHW)).sum() / batch.global_items, weight)
        elif weight:
            yield Term("structural", self.structural(made_BCHW, images_BCHW).sum() / batch.global_items, weight)

    def update_adaptive_weight(self, statistics: dict[str, Tensor], finite: Tensor) -> None:
        if statistics:
            self.balance.measure(statistics["squares_of_others"], statistics["squares_of_adversary"], finite)

    def discriminator_loss(self, batch: VaeBatch, step: int) -> Iterator[Yielded]:
        if not self._discriminator_learns(step):
            return
        images_BCHW = to_unit(batch.images_BCHW).to(self.dtype)
        if batch.made_BCHW is not None:
            made_BCHW = batch.made_BCHW
        else:  # With alternating steps, the autoencoder's phase makes these pictures once more.
            with torch.no_grad():
                latents_BLhw = sampled(*self.autoencoder.encode(images_BCHW), batch)
                made_BCHW = gan.at_least_fp32(self.autoencoder.decode(latents_BLhw))
        # In one pass, whose weights are cast and whose kernels are launched once.
        logits = self.discriminator(torch.cat([images_BCHW, made_BCHW.to(self.dtype)]))
        real, fake = logits.split(len(images_BCHW))
        yield BatchStat("real_logits", gan.per_item(real.detach()).sum() / batch.global_items)
        yield BatchStat("fake_logits", gan.per_item(fake.detach()).sum() / batch.global_items)
        value_B = gan.discriminator_loss(self.losses.adversarial_loss, real, fake)
        if self.losses.lecam_weight:
            value_B = value_B + self.losses.lecam_weight * self.balance.lecam(real, fake)
        yield Term("real_fake", value_B.sum() / batch.global_items)

    def update_logit_averages(self, statistics: dict[str, Tensor], finite: Tensor) -> None:
        self.balance.observe(statistics["real_logits"], statistics["fake_logits"], finite)
        self.discriminator.refresh_spectral_norms()

    def average(self, step: int) -> None:
        if self.settings.schedule.ema_decay:
            self.ema.update(self.autoencoder, step)

    @property
    def best_model(self) -> AutoencoderKL:
        """The EMA of the autoencoder, or the autoencoder itself if the EMA is off."""
        return self.ema.average if self.settings.schedule.ema_decay else self.autoencoder

    @functools.cached_property
    def held_out_crops(self) -> list[Tensor]:
        """Held-out crops, decoded once: metrics stay comparable, and pictures that disappear later cause no error."""
        chosen = self.held_out[:EVALUATED]
        data = self.settings.data
        return list(readable_crops(chosen, data.image_size, data.image_channels))

    @functools.cached_property
    def sample_crops(self) -> list[Tensor]:
        """Centre crops of the pictures that the user chose for the samples. Raises UserError if one is unreadable."""
        data = self.settings.data
        return [centre_crop(path, data.image_size, data.image_channels) for path in data.sample_pictures]

    def sample(self) -> Report:
        """Returns a sheet of crops, held-out or the user's, and their reconstructions."""
        own = self.sample_crops
        crops = own or self.held_out_crops[:SAMPLES]
        if not crops:
            return Report()
        with self.runtime.autocast():
            made = [reconstruct(self.best_model, crop, self.runtime.device, crop.shape[-1]) for crop in crops]
        return Report(
            pictures={
                "reconstructions": reconstruction_sheet(
                    crops, made, title="own pictures" if own else "held-out pictures"
                )
            }
        )

    def evaluate(self) -> Report:
        with self.runtime.autocast():
            figures = reconstruction_figures(self.best_model, self.held_out_crops, self.runtime.device)
        return Report({**figures.scalars, "score": figures.scalars["psnr_db"]})


def has_good_start(settings: TrainVae) -> bool:
    """Returns whether what learns begins with pretrained weights or a linear code, and not with random weights."""
    model = settings.model
    return model.init_from is not None or (model.start == "linear" and bool(signals_of(settings.architecture)))


def build_autoencoder(settings: TrainVae, runtime: Runtime) -> AutoencoderKL:
    model = AutoencoderKL(
        settings.architecture,
        checkpointing=bool(settings.model.gradient_checkpointing),
        recompute_norms=settings.model.recompute_norms,
    )
    runtime.place(model)
    return model


def compile_layers(model: AutoencoderKL, runtime: Runtime) -> None:
    """Compiles the elementwise functions between the convolutions, and plain layers block by block; without effect if
    the runtime does not compile."""
    if not model.recompute_norms:
        runtime.compile_modules(blocks(model))
    elif runtime.plan.compile.value:
        model.use(Arithmetic.compiled(runtime.compile))


def plan_target(settings: TrainVae) -> PlanTarget:
    """Returns the training at one size in the form that the memory planner takes."""

    def build(runtime: Runtime, checkpointing: bool) -> VaeRecipe:
        model = replace(settings.model, gradient_checkpointing=checkpointing)
        lpips = Lpips.without_values() if settings.losses.uses_lpips else None
        return VaeRecipe(replace(settings, model=model), runtime, [], lpips)

    def load(items: int = settings.schedule.global_batch_size) -> torch.Tensor:
        size = settings.data.image_size
        return torch.zeros(items, settings.data.image_channels, size, size, dtype=torch.uint8)

    return PlanTarget(build, load)


def item_flops(settings: TrainVae, step: int) -> int:
    """Returns the FLOPs of one picture in a step. Recomputation in memory-efficient layers is not counted."""
    return step_flops(
        plan_target(replace(settings, model=replace(settings.model, recompute_norms=False))), step, items=1
    )


def sampled(mean_BLhw: Tensor, logvar_BLhw: Tensor, batch: VaeBatch) -> Tensor:
    """Returns latents drawn from the posterior, with the noise of the batch."""
    return mean_BLhw + (0.5 * logvar_BLhw).exp() * batch.noise_BLhw


def _gradient(leaf: Tensor) -> Tensor:
    """Returns the gradient accumulated on a detached copy; zeros if every loss on it is off."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
