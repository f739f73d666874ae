"""The image VAE as the engine trains it: an autoencoder, and an adversary if it is asked for.

Shapes: B items, C = 3 colours, H x W pixels, L latent channels, h x w latent positions.
"""

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from gputrain import gan
from gputrain.data import Stream, loader
from gputrain.hw.plan import decide
from gputrain.hw.probe import probe
from gputrain.hw.runtime import Runtime, apply
from gputrain.metrics import Report
from gputrain.optim import Ema, adamw
from gputrain.run import open_run
from gputrain.schedule import Course, begin
from gputrain.train import Carry, Phase, Statistic, Term, Yielded, train
from gputrain.vae import losses
from gputrain.vae.config import TrainVae
from gputrain.vae.data import CropDataset, Picture, Pictures, open_pictures, to_unit
from gputrain.vae.discriminator import PatchDiscriminator
from gputrain.vae.evaluate import measure, readable_crops, sheet
from gputrain.vae.model import AutoencoderKL, blocks
from gputrain.vae.reconstruct import reconstruct

log = logging.getLogger(__name__)

SAMPLES = 8  # pictures on a sheet of samples
EVALUATED = 64  # pictures of an evaluation while training


def train_vae(settings: TrainVae, console: Console) -> None:
    """Train in the run folder that the settings name, from the start or from a checkpoint."""
    plan = decide(probe(), settings.hardware)
    run = open_run(settings, settings.saving, kind=VaeRecipe.kind, command="gputrain train-vae")
    pictures = open_pictures(settings.data.data_path, held_out_share=settings.data.held_out_share)
    tell(settings, plan.to_json(), pictures)
    runtime = apply(plan)
    recipe = VaeRecipe(settings, runtime, pictures.held_out)
    start = begin(run.progress, len(pictures.train), new_stage=run.begins_new_stage)
    course = Course(settings.schedule, start)

    def open_batches(first: int, last: int) -> Iterator[Tensor]:
        stream = Stream(
            item_count=start.items,
            seed=settings.schedule.seed,
            batch_size=settings.schedule.whole_batch,
            start_sample=course.items_seen(first),
            stop_sample=course.items_seen(last),
        )
        crops = CropDataset(
            pictures.train, settings.data.image_size, settings.schedule.seed, settings.data.horizontal_flip
        )
        return loader(
            crops,
            stream,
            num_workers=int(plan.num_workers.value),
            prefetch=settings.hardware.prefetch_factor,
            pin_memory=runtime.device.type == "cuda",
            persistent=settings.hardware.persistent_workers,
        )

    train(recipe, open_batches, course, run, runtime, console)


@dataclass(frozen=True)
class VaeBatch:
    """Crops of a step, or a part of them."""

    images_BCHW: Tensor  # uint8
    noise_BLhw: Tensor  # of the latents
    made_BCHW: Tensor | None  # where the generator's phase leaves its pictures for the discriminator's
    whole: int  # pictures in the whole batch


class VaeRecipe:
    """Phases: the autoencoder, then the discriminator, which judges the pictures that the autoencoder has just made."""

    kind, unit = "vae", "images"

    def __init__(self, settings: TrainVae, runtime: Runtime, held_out: list[Picture]) -> None:
        self.settings, self.losses, self.runtime = settings, settings.losses, runtime
        self.held_out = held_out
        torch.manual_seed(settings.schedule.seed)
        self.autoencoder = build(settings, runtime)
        self.modules: dict[str, nn.Module] = {"autoencoder": self.autoencoder}
        self.phases = [
            Phase("autoencoder", (self.autoencoder,), self._adamw(self.autoencoder), self.autoencoder_loss, self.weigh)
        ]
        if self.losses.adversarial_weight:
            self.discriminator = PatchDiscriminator(self.losses.discriminator_norm, self.losses.discriminator_channels)
            self.balance = gan.Balance(self.losses.adaptive_weight_limit).to(runtime.device)
            runtime.place(self.discriminator)
            self.modules |= {"discriminator": self.discriminator, "balance": self.balance}
            optimizer = self._adamw(self.discriminator)
            self.phases.append(
                Phase("discriminator", (self.discriminator,), optimizer, self.discriminator_loss, self.settle)
            )
        if settings.schedule.ema_decay:
            average = build(settings, runtime)
            self.ema = Ema(self.autoencoder, average, settings.schedule.ema_decay)
            self.modules["ema"] = self.ema
        runtime.compile(blocks(self.autoencoder))

    def _adamw(self, module: nn.Module) -> torch.optim.Optimizer:
        schedule = self.settings.schedule
        return adamw(
            module.parameters(),
            learning_rate=schedule.learning_rate,
            weight_decay=schedule.weight_decay,
            betas=(0.5, 0.9) if module is not self.autoencoder else (0.9, 0.999),
        )

    def prepare(self, loaded: Tensor, step: int) -> VaeBatch:
        device = self.runtime.device
        images_BCHW = loaded.to(device, non_blocking=True).contiguous(memory_format=self.runtime.memory_format)
        generator = torch.Generator(device).manual_seed((self.settings.schedule.seed << 32) + step)
        side = loaded.shape[-1] // self.settings.architecture.downsampling
        shape = (len(loaded), self.settings.architecture.latent_channels, side, side)
        noise_BLhw = torch.randn(shape, generator=generator, device=device, dtype=self.dtype)
        made_BCHW = noise_BLhw.new_empty(images_BCHW.shape) if self._judges(step) else None
        return VaeBatch(images_BCHW, noise_BLhw, made_BCHW, len(loaded))

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights: fp32, or fp64 where a test wants to see through rounding."""
        return self.autoencoder.decoder.conv_in.weight.dtype

    def size(self, batch: VaeBatch) -> int:
        return len(batch.images_BCHW)

    def split(self, batch: VaeBatch, parts: int) -> list[VaeBatch]:
        images, noise = batch.images_BCHW.tensor_split(parts), batch.noise_BLhw.tensor_split(parts)
        made = [None] * parts if batch.made_BCHW is None else batch.made_BCHW.tensor_split(parts)
        return [VaeBatch(*part, batch.whole) for part in zip(images, noise, made, strict=True)]

    def _judges(self, step: int) -> bool:
        """Whether the discriminator learns in this step."""
        return self.losses.adversarial_weight > 0 and step >= self.losses.discriminator_start

    def _is_judged(self, step: int) -> bool:
        """Whether the autoencoder hears of the discriminator in this step."""
        return self._judges(step - self.losses.discriminator_warmup_steps)

    def autoencoder_loss(self, batch: VaeBatch, step: int) -> Iterator[Yielded]:
        """Three graphs, each freed before the next is needed: the losses on the picture, the decoder, the encoder."""
        images_BCHW = to_unit(batch.images_BCHW).to(self.dtype)
        moments = self.autoencoder.encode(images_BCHW)
        mean_BLhw, logvar_BLhw = (moment.detach().requires_grad_() for moment in moments)
        latents_BLhw = mean_BLhw + (0.5 * logvar_BLhw).exp() * batch.noise_BLhw
        decoded_BCHW = self.autoencoder.decode(latents_BLhw)
        made_BCHW = gan.exact(decoded_BCHW.detach()).requires_grad_()
        if batch.made_BCHW is not None:
            batch.made_BCHW.copy_(made_BCHW.detach())

        yield from self._picture_terms(made_BCHW, images_BCHW, batch.whole)
        gradient_BCHW = _gradient(made_BCHW)
        if self._is_judged(step):
            judged_BCHW = made_BCHW.detach().requires_grad_()
            logits = self.discriminator(judged_BCHW)
            yield Term("adversarial", gan.generator_loss(self.losses.adversarial_loss, logits).sum() / batch.whole)
            adversarial_BCHW = _gradient(judged_BCHW)
            yield Statistic("squares_of_others", gradient_BCHW.square().sum())
            yield Statistic("squares_of_adversary", adversarial_BCHW.square().sum())
            weight = self.losses.adversarial_weight * self.balance.weight
            gradient_BCHW = gradient_BCHW + weight * adversarial_BCHW
        yield Carry((decoded_BCHW,), (gradient_BCHW.to(decoded_BCHW.dtype),))

        values = images_BCHW[0].numel()
        kl = losses.kl_divergence(mean_BLhw, logvar_BLhw, values).sum() / batch.whole
        yield Term("kl", kl, weight=self.losses.kl_weight)
        yield Carry(tuple(moments), (_gradient(mean_BLhw), _gradient(logvar_BLhw)))

    def _picture_terms(self, made_BCHW: Tensor, images_BCHW: Tensor, whole: int) -> Iterator[Term]:
        kind, weight = self.losses.reconstruction_loss, self.losses.reconstruction_weight
        if weight:
            yield Term(kind, losses.pixel_distance(kind, made_BCHW, images_BCHW).sum() / whole, weight)
        if self.losses.perceptual_weight:
            value = losses.structural(made_BCHW, images_BCHW).sum() / whole
            yield Term("structural", value, self.losses.perceptual_weight)

    def weigh(self, statistics: dict[str, Tensor], finite: Tensor) -> None:
        if statistics:
            self.balance.measure(statistics["squares_of_others"], statistics["squares_of_adversary"], finite)

    def discriminator_loss(self, batch: VaeBatch, step: int) -> Iterator[Yielded]:
        if batch.made_BCHW is None:
            return
        real = self.discriminator(to_unit(batch.images_BCHW).to(self.dtype))
        fake = self.discriminator(batch.made_BCHW)
        yield Statistic("real_logits", gan.per_item(real.detach()).sum() / batch.whole)
        yield Statistic("fake_logits", gan.per_item(fake.detach()).sum() / batch.whole)
        value_B = gan.discriminator_loss(self.losses.adversarial_loss, real, fake)
        if self.losses.lecam_weight:
            value_B = value_B + self.losses.lecam_weight * self.balance.lecam(real, fake)
        yield Term("judgement", value_B.sum() / batch.whole)

    def settle(self, statistics: dict[str, Tensor], finite: Tensor) -> None:
        self.balance.observe(statistics["real_logits"], statistics["fake_logits"], finite)
        self.discriminator.refresh_spectral_norms()

    def average(self, step: int) -> None:
        if self.settings.schedule.ema_decay:
            self.ema.update(self.autoencoder, step)

    @property
    def best_model(self) -> AutoencoderKL:
        """The averaged autoencoder, or the trained one where averaging is off."""
        return self.ema.average if self.settings.schedule.ema_decay else self.autoencoder

    @functools.cached_property
    def held_out_crops(self) -> list[Tensor]:
        """Decoded once: the curves stay comparable, and a picture that goes missing later ends no run."""
        chosen = self.held_out[:EVALUATED]
        return list(readable_crops(chosen, self.settings.data.image_size, lambda done, total: None))

    def sample(self) -> Report:
        """Held-out crops and their reconstructions, side by side."""
        crops = self.held_out_crops[:SAMPLES]
        if not crops:
            return Report()
        with self.runtime.autocast():
            made = [reconstruct(self.best_model, crop, self.runtime.device, crop.shape[-1]) for crop in crops]
        return Report(pictures={"reconstructions": sheet(crops, made)})

    def evaluate(self) -> Report:
        with self.runtime.autocast():
            figures = measure(self.best_model, self.held_out_crops, self.runtime.device)
        return Report({**figures.scalars, "score": figures.scalars["psnr_db"]})


def build(settings: TrainVae, runtime: Runtime) -> AutoencoderKL:
    model = AutoencoderKL(settings.architecture, checkpointing=settings.model.gradient_checkpointing)
    runtime.place(model)
    return model


def _gradient(leaf: Tensor) -> Tensor:
    """What has gathered on a detached copy; nothing, where every loss on it is off."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def tell(settings: TrainVae, plan: dict[str, Any], pictures: Pictures) -> None:
    """Say in a few lines what is about to be trained, on what, and how."""
    for refused in pictures.refused:
        log.warning("%s: %s; left out", refused.path, refused.detail)
    if pictures.shared:
        log.warning("there is only one picture: figures on held-out pictures are figures on it")
    log.info("%d pictures to learn from, %d held out", len(pictures.train), len(pictures.held_out))
    schedule, loss = settings.schedule, settings.losses
    log.info(
        "model %s at %d px, %d images a step; losses: %s %g, structural %g, kl %g, adversarial %g",
        settings.model.preset, settings.data.image_size, schedule.whole_batch, loss.reconstruction_loss,
        loss.reconstruction_weight, loss.perceptual_weight, loss.kl_weight, loss.adversarial_weight,
    )  # fmt: skip
    for name, setting in plan.items():
        log.info("%s: %s (%s)", name, setting["value"], setting["reason"])
