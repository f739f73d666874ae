"""Training recipe of the image VAE: an autoencoder, and a discriminator if adversarial_weight is set.

The losses are those of latent diffusion's autoencoder (Rombach et al. 2022, appendix G), which are VQGAN's (Esser et
al. 2021, section 3.2) with a KL divergence in the place of the codebook:

    autoencoder     reconstruction + perceptual + KL + adversarial, by an adaptive weight
    discriminator   real against reconstructed pictures, with LeCam regularisation if it is asked for

Shapes: B items, C channels of a picture, H x W pixels, L latent channels, h x w latent positions.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gputrain.engine.checkpoint import load_weights
from gputrain.engine.distributed import BatchDraws
from gputrain.engine.optim import Ema, WeightSlot, adamw, layer_weights, weights_cast_once
from gputrain.engine.recipe import BatchStat, ChainGradients, Phase, StepGroup, Term, Yielded, at_least_fp32, per_item
from gputrain.hw.runtime import Runtime
from gputrain.samples import Report
from gputrain.vae import losses
from gputrain.vae.config import TrainVae
from gputrain.vae.dataset import as_rgb, to_unit
from gputrain.vae.evaluate import HeldOutPictures
from gputrain.vae.linear_start import has_good_start
from gputrain.vae.losses import Lpips, PatchDiscriminator, crop, crop_corners
from gputrain.vae.memory_efficient_layers import Features
from gputrain.vae.model import AutoencoderKL, Upsample, blocks, compile_layers

# The first steps move the mean colours up and down by several levels, because Adam changes all weights that they depend
# on in the same direction. The average over a hundred steps has none of it.
LEAST_DECAY = 0.99  # Decay of the EMA in the first steps from good weights.
LPIPS_CROP = 256  # Pixels a side: VGG16 on whole pictures would take more memory than the autoencoder.


@dataclass(frozen=True)
class VaeBatch:
    """The crops of a step, or a part of them."""

    images_BCHW: Tensor  # uint8
    noise_BLhw: Tensor  # The noise by which latents are sampled.
    # Memory for the reconstructions, in which the autoencoder's phase leaves them for the discriminator's. That one
    # runs when the autoencoder has stepped: without them it would have to encode and decode once more, and would meet
    # pictures of other weights. None before the discriminator learns.
    made_BCHW: Tensor | None
    top_B: Tensor | None  # Corners of the crops for LPIPS; None: it compares whole pictures.
    left_B: Tensor | None
    global_items: int  # Pictures of the whole batch, over all micro-batches and ranks: the divisor of every loss.


class VaeRecipe:
    """Phases: the autoencoder, then the discriminator, which scores the pictures of the autoencoder's phase."""

    kind, unit = "vae", "images"

    def __init__(
        self,
        settings: TrainVae,
        runtime: Runtime,
        held_out: HeldOutPictures | None = None,
        lpips: Lpips | None = None,
        item_flops: Callable[[int], float] = lambda step: 0.0,
    ) -> None:
        """`lpips` is the perceptual loss, or None if the settings do not use it. `item_flops(step)` returns the FLOPs
        of one picture in a step, 0 if they are unknown."""
        self.settings, self.losses, self.runtime = settings, settings.losses, runtime
        self.held_out, self.item_flops = held_out, item_flops
        self._flops: dict[tuple[bool, bool], float] = {}  # FLOPs of one item, by active losses.
        # Weights by the names of the losses in the metrics.
        self.weights = {
            self.losses.reconstruction_loss: self.losses.reconstruction_weight,
            self.losses.perceptual_loss: self.losses.perceptual_weight,
            "kl": self.losses.kl_weight,
            "adversarial": self.losses.adversarial_weight,
            "lecam": self.losses.lecam_weight,
        }
        torch.manual_seed(settings.schedule.seed)
        self.autoencoder = build_autoencoder(settings, runtime)
        self._verify_layout()
        self.modules: dict[str, nn.Module] = {"autoencoder": self.autoencoder}
        self.step_groups = self._step_groups()
        if settings.schedule.ema_decay:
            least_decay = LEAST_DECAY if has_good_start(settings) else 0.0
            average = build_autoencoder(settings, runtime)
            self.ema = Ema(self.autoencoder, average, settings.schedule.ema_decay, least_decay)
            self.modules["ema"] = self.ema
        self.lpips = lpips
        if lpips is not None:
            runtime.place(lpips)
        compile_layers(self.autoencoder, runtime)
        self.structural = runtime.compile(losses.structural)

    def _verify_layout(self) -> None:
        """Tries whether a block keeps channels_last: one operation that does not would copy every picture twice."""
        block, channels = blocks(self.autoencoder)[0], self.settings.architecture.block_out_channels[0]
        self.runtime.verify_layout(type(block).__name__, lambda x_BCHW: block(Features(x_BCHW)).added(), channels)

    def _step_groups(self) -> list[StepGroup]:
        """Returns a group for each phase: while one group's loss runs, only its own modules require gradients, so that
        the adversarial loss computes none for the weights of the discriminator."""
        autoencoder = self.autoencoder
        learning: tuple[nn.Module, ...] = (autoencoder,)
        # An encoder that is given stays as it is, so that a denoiser that knows its latents can use the new decoder.
        if self.settings.model.train_part != "all":
            learning = (autoencoder.decoder, autoencoder.post_quant_conv)
        # The autoencoder has Adam's usual betas. VQGAN's, 0.5 and 0.9, are the discriminator's, whose target moves.
        phase = Phase("autoencoder", learning, self._adamw(learning, betas=(0.9, 0.999)), self.update_adaptive_weight)
        # The kernels of upsampling layers are summed before they are cast.
        weights = layer_weights([autoencoder], [m for m in autoencoder.modules() if isinstance(m, Upsample)])
        if not self.losses.adversarial_weight:
            return [self._step_group(phase, self.autoencoder_loss, weights)]

        self.discriminator = PatchDiscriminator(self.losses.discriminator_channels, self.settings.data.image_channels)
        self.balance = losses.Balance().to(self.runtime.device)
        self.runtime.place(self.discriminator)
        self.runtime.compile_modules([self.discriminator])
        self.modules |= {"discriminator": self.discriminator, "balance": self.balance}
        modules = (self.discriminator,)
        adversary = Phase("discriminator", modules, self._adamw(modules, betas=(0.5, 0.9)), self.update_logit_averages)
        of_adversary = layer_weights([self.discriminator])
        return [
            self._step_group(phase, self.autoencoder_loss, [*weights, *of_adversary]),
            self._step_group(adversary, self.discriminator_loss, of_adversary),
        ]

    def _step_group(
        self, phase: Phase, loss: Callable[[VaeBatch, int], Iterator[Yielded]], weights: list[WeightSlot]
    ) -> StepGroup:
        # Each weight is cast to 16 bits once a step, and not in each micro-batch.
        cast_once = functools.partial(weights_cast_once, weights, self.runtime.dtype)
        return StepGroup((phase,), loss, cast_once, self._active)

    def _adamw(self, modules: tuple[nn.Module, ...], betas: tuple[float, float]) -> torch.optim.Optimizer:
        schedule, weights = self.settings.schedule, [weight for module in modules for weight in module.parameters()]
        return adamw(weights, learning_rate=schedule.learning_rate, weight_decay=schedule.weight_decay, betas=betas)

    def start_from(self, weights: dict[str, Tensor]) -> None:
        """Initialises the autoencoder, and the EMA of its weights, with these weights."""
        load_weights(self.autoencoder, weights, "the given autoencoder")
        if self.settings.schedule.ema_decay:
            self.ema.restart(self.autoencoder)

    def prepare(self, loaded: Tensor, step: int) -> VaeBatch:
        """Returns the batch with what is random in it. All of that is drawn for the whole batch at once, from the seed
        and the step: so it is the same however the batch is divided into micro-batches and ranks."""
        schedule, device = self.settings.schedule, self.runtime.device
        images_BCHW = loaded.to(device, non_blocking=True).contiguous(memory_format=self.runtime.memory_format)
        draws = BatchDraws.of_step(
            schedule.seed, step, device, len(loaded), global_items=schedule.global_batch_size, ranks=self.runtime.ranks
        )
        side = loaded.shape[-1] // self.settings.architecture.downsampling
        noise_BLhw = draws.normal(self.settings.architecture.latent_channels, side, side, dtype=self.dtype)
        made_BCHW = noise_BLhw.new_empty(images_BCHW.shape) if self._discriminator_learns(step) else None
        top_B = left_B = None
        if self.lpips is not None and loaded.shape[-1] > LPIPS_CROP:
            height, width = loaded.shape[-2:]
            corners = crop_corners(draws.global_items, height, width, LPIPS_CROP, draws.generator)
            top_B, left_B = map(draws.kept, corners)
        return VaeBatch(images_BCHW, noise_BLhw, made_BCHW, top_B, left_B, draws.global_items)

    # ------------------------------------------------------------------------------------------------------- one step

    def autoencoder_loss(self, batch: VaeBatch, step: int) -> Iterator[Yielded]:
        """Yields the losses of the autoencoder.

        Each is a sum over pictures, divided by the count of the whole batch. So micro-batches of 3, 3 and 2 add up to
        the mean over 8, and their gradients to its gradient.

        Encoder, decoder and losses on the picture are three graphs, which detached copies of the moments and of the
        picture keep apart. They are back-propagated from the last to the first, and each is freed before the next: the
        activations of LPIPS and of the discriminator never stand in memory with each other, and what the losses leave
        on a copy is carried on through the decoder once, and through the encoder once.
        """
        images_BCHW = to_unit(batch.images_BCHW).to(self.dtype)
        trains_encoder = self.settings.model.train_part == "all"
        # An encoder that is not trained keeps no activations. The decoder still learns from sampled latents, not means.
        with torch.set_grad_enabled(trains_encoder):
            moments = self.autoencoder.encode(images_BCHW)
        # On these leaves, the gradients of the decoder and of the KL divergence add up before they reach the encoder.
        mean_BLhw, logvar_BLhw = (moment.detach().requires_grad_() for moment in moments)
        # No variable holds the latents beyond the decoding: its graph keeps what the gradients need of them.
        decoded_BCHW = self.autoencoder.decode(sampled(mean_BLhw, logvar_BLhw, batch.noise_BLhw))
        # The leaf of all losses on the picture, in fp32: in bf16, the difference of close levels would have a few bits.
        made_BCHW = at_least_fp32(decoded_BCHW.detach()).requires_grad_()
        if batch.made_BCHW is not None:
            batch.made_BCHW.copy_(made_BCHW.detach())

        yield from self.picture_terms(made_BCHW, images_BCHW, batch)
        gradient_BCHW = _gradient(made_BCHW)
        if self._autoencoder_meets_adversary(step):
            # The discriminator scores a copy of its own, so that its gradient is measured, and weighted, by itself. Its
            # weights require no gradients in this group.
            scored_BCHW = made_BCHW.detach().requires_grad_()
            logits = self.discriminator(scored_BCHW)
            loss_B = losses.generator_loss(logits)
            yield Term("adversarial", loss_B.sum() / batch.global_items)  # Its gradient is weighted below.
            adversarial_BCHW = _gradient(scored_BCHW)
            # VQGAN's adaptive weight is |gradient of the other losses| / |gradient of the adversarial one|, here on the
            # picture. A ratio over a micro-batch would depend on the split: the squares are summed over the whole
            # batch, and the ratio weights the next step, in which it is a constant. Before the first ratio it is 0, and
            # a step with a non-finite gradient leaves it as it was.
            yield BatchStat("squares_of_others", gradient_BCHW.square().sum())
            yield BatchStat("squares_of_adversary", adversarial_BCHW.square().sum())
            weight = self.weights["adversarial"] * self.balance.weight
            gradient_BCHW = gradient_BCHW + weight * adversarial_BCHW
        yield ChainGradients((decoded_BCHW,), (gradient_BCHW.to(decoded_BCHW.dtype),))

        if not trains_encoder:
            return
        # The KL divergence is divided by the values of a picture, over which the other losses are means: so its weight
        # means the same at any size. Its gradient joins the decoder's on the moments.
        values = images_BCHW[0].numel()
        kl = losses.kl_divergence(mean_BLhw, logvar_BLhw, values).sum() / batch.global_items
        yield Term("kl", kl, self.weights["kl"])
        yield ChainGradients(tuple(moments), (_gradient(mean_BLhw), _gradient(logvar_BLhw)))

    def picture_terms(self, made_BCHW: Tensor, images_BCHW: Tensor, batch: VaeBatch) -> Iterator[Term]:
        """Yields the distances of reconstructions and pictures. A further one is another Term here."""
        pixels, perceptual = self.losses.reconstruction_loss, self.losses.perceptual_loss
        if self.weights[pixels]:
            distance_B = losses.pixel_distance(pixels, made_BCHW, images_BCHW)
            yield Term(pixels, distance_B.sum() / batch.global_items, self.weights[pixels])
        if self.lpips is not None:
            if batch.top_B is not None and batch.left_B is not None:
                # The corners came with the batch: a picture has the same crop in any micro-batch.
                made_BCHW, images_BCHW = (
                    crop(pictures, batch.top_B, batch.left_B, LPIPS_CROP) for pictures in (made_BCHW, images_BCHW)
                )
            distance_B = self.lpips(as_rgb(made_BCHW), as_rgb(images_BCHW))
            yield Term(perceptual, distance_B.sum() / batch.global_items, self.weights[perceptual])
        elif self.weights[perceptual]:
            distance_B = self.structural(made_BCHW, images_BCHW)
            yield Term(perceptual, distance_B.sum() / batch.global_items, self.weights[perceptual])

    def update_adaptive_weight(self, statistics: dict[str, Tensor], finite: Tensor) -> None:
        if statistics:
            self.balance.measure(statistics["squares_of_others"], statistics["squares_of_adversary"], finite)

    def discriminator_loss(self, batch: VaeBatch, step: int) -> Iterator[Yielded]:
        """Yields the loss of the discriminator on pictures and on the reconstructions of the autoencoder's phase."""
        if batch.made_BCHW is None:
            return
        images_BCHW = to_unit(batch.images_BCHW).to(self.dtype)
        # The reconstructions are values that the autoencoder's phase has kept, without a graph: no gradient reaches the
        # autoencoder. Both are scored in one pass, whose weights are cast and whose kernels are launched once; as no
        # norm couples items, the logits are those of two passes.
        logits = self.discriminator(torch.cat([images_BCHW, batch.made_BCHW.to(self.dtype)]))
        real, fake = logits.split(len(images_BCHW))
        # LeCam's averages are over the whole batch, so each part yields its share of the mean.
        yield BatchStat("real_logits", per_item(real.detach()).sum() / batch.global_items)
        yield BatchStat("fake_logits", per_item(fake.detach()).sum() / batch.global_items)
        loss_B = losses.discriminator_loss(real, fake)
        if self.weights["lecam"]:  # It holds logits near the averages of earlier steps, which are constants.
            loss_B = loss_B + self.weights["lecam"] * self.balance.lecam(real, fake)
        yield Term("real_fake", loss_B.sum() / batch.global_items)

    def update_logit_averages(self, statistics: dict[str, Tensor], finite: Tensor) -> None:
        self.balance.observe(statistics["real_logits"], statistics["fake_logits"], finite)

    def _discriminator_learns(self, step: int) -> bool:
        return self.losses.adversarial_weight > 0 and step >= self.losses.discriminator_start

    def _autoencoder_meets_adversary(self, step: int) -> bool:
        """Returns whether the adversarial loss is applied: some steps after the discriminator has begun to learn, so
        that an untrained one does no harm."""
        return self._discriminator_learns(step - self.losses.discriminator_warmup_steps)

    def _active(self, step: int) -> tuple[bool, bool]:
        """Returns whether the discriminator learns, and the autoencoder from it: all that losses take from the step."""
        return self._discriminator_learns(step), self._autoencoder_meets_adversary(step)

    def average(self, step: int) -> None:
        if self.settings.schedule.ema_decay:
            self.ema.update(self.autoencoder, step)

    # ------------------------------------------------------------------------------------------- parts and their sizes

    def size(self, batch: VaeBatch) -> int:
        return len(batch.images_BCHW)

    def split(self, batch: VaeBatch, parts: int) -> list[VaeBatch]:
        """Returns parts whose sizes differ by at most one. Those of `made_BCHW` are views: what the autoencoder's phase
        writes into its parts, the discriminator's finds in its own, which may be others."""
        images, noise = batch.images_BCHW.tensor_split(parts), batch.noise_BLhw.tensor_split(parts)
        made, top, left = (
            (None,) * parts if tensor is None else tensor.tensor_split(parts)
            for tensor in (batch.made_BCHW, batch.top_B, batch.left_B)
        )
        pieces = zip(images, noise, made, top, left, strict=True)
        return [VaeBatch(*piece, batch.global_items) for piece in pieces]

    def flops(self, batch: VaeBatch, step: int) -> float:
        active = self._active(step)
        if active not in self._flops:
            self._flops[active] = self.item_flops(step)
        return self._flops[active] * self.size(batch)

    def peak_memory_step(self, step: int) -> int:
        """Returns a step at which the discriminator is trained and the adversarial loss is applied."""
        starts = self.losses.discriminator_start + self.losses.discriminator_warmup_steps
        return max(step, starts) if self.losses.adversarial_weight else step

    # --------------------------------------------------------------------------------------------- weights and results

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights: fp32, or fp64 in tests that must exclude rounding."""
        return self.autoencoder.encoder.conv_norm_out.weight.dtype  # A norm's weights are never cast.

    @property
    def best_model(self) -> AutoencoderKL:
        """The EMA of the autoencoder, or the autoencoder itself if the EMA is off."""
        return self.ema.average if self.settings.schedule.ema_decay else self.autoencoder

    def sample(self) -> Report:
        return self.held_out.sample(self.best_model, self.runtime) if self.held_out else Report()

    def evaluate(self) -> Report:
        assert self.held_out is not None
        return self.held_out.evaluate(self.best_model, self.runtime)


def build_autoencoder(settings: TrainVae, runtime: Runtime) -> AutoencoderKL:
    model = AutoencoderKL(
        settings.architecture,
        checkpointing=bool(settings.model.gradient_checkpointing),
        recompute_norms=settings.model.recompute_norms,
    )
    runtime.place(model)
    return model


def sampled(mean_BLhw: Tensor, logvar_BLhw: Tensor, noise_BLhw: Tensor) -> Tensor:
    """Returns latents drawn from the posterior."""
    return mean_BLhw + (0.5 * logvar_BLhw).exp() * noise_BLhw


def _gradient(leaf: Tensor) -> Tensor:
    """Returns the gradient accumulated on a detached copy; zeros if every loss on it is off."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
