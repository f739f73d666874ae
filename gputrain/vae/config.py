"""Every knob of the image VAE, and the architectures behind its presets. Imports no torch."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from gputrain.config import Kind, assemble, config, opt
from gputrain.engine.schedule import Saving, Schedule
from gputrain.errors import UserError
from gputrain.hw.plan import Cards, Hardware
from gputrain.hw.probe import usable_cores

Preset = Literal["flux", "sd", "lite", "fast"]
AdversarialLoss = Literal["hinge", "least-squares"]
SMALLEST_DISCRIMINATED = 24  # pixels a side, of which PatchDiscriminator's five convolutions leave a single patch


@dataclass(frozen=True)
class Architecture:
    """Shape of an AutoencoderKL, under the names of diffusers' config.json."""

    block_out_channels: tuple[int, ...]
    latent_channels: int
    layers_per_block: int = 2
    norm_num_groups: int = 32
    mid_block_add_attention: bool = True
    use_quant_conv: bool = False
    use_post_quant_conv: bool = False
    in_channels: int = 3
    out_channels: int = 3

    @property
    def downsampling(self) -> int:
        """Pixels of a picture a side of a latent: each block but the last halves the size."""
        return 1 << (len(self.block_out_channels) - 1)


# Each has four channels or more to a group: with one, a norm would erase a picture's brightness and contrast.
PRESETS: dict[Preset, Architecture] = {
    # The autoencoder of FLUX.1, 83.8 M parameters.
    "flux": Architecture((128, 256, 512, 512), latent_channels=16),
    # The autoencoder of Stable Diffusion 1 and 2, 83.7 M.
    "sd": Architecture((128, 256, 512, 512), latent_channels=4, use_quant_conv=True, use_post_quant_conv=True),
    # A third of flux's arithmetic, 53.9 M; no attention, so that cost grows with the area alone.
    "lite": Architecture((64, 128, 256, 512), latent_channels=16, mid_block_add_attention=False, norm_num_groups=16),
    # A twelfth of flux's arithmetic, 13.5 M.
    "fast": Architecture((32, 64, 128, 256), latent_channels=16, mid_block_add_attention=False, norm_num_groups=8),
}


@config(panel="Data")
class Data:
    data_path: Path = opt(help="A prepared folder, or any folder tree of pictures.")
    image_size: int = opt(default=256, help="Side of a training crop, in pixels.", min=16)
    resolution_schedule: str = opt(
        default="",
        help="Sizes to train at one after the other, SIZE:EPOCHS or SIZE:EPOCHS:BATCH, such as 512:25,1024:50,2048:25. "
        "Without BATCH it follows the size: batch_size at 1024, twice that at 512, a quarter at 2048.",
    )
    held_out_share: float = opt(default=0.05, help="Share of the pictures kept for evaluation.", min=0.0, max=0.5)
    horizontal_flip: bool = opt(default=True, help="Mirror every other crop.")
    data_in_memory: bool | None = opt(
        default=None,
        help="Keep decoded pictures in the RAM of each worker; auto: if they fit into a quarter of the free RAM.",
    )


@config(panel="Model")
class Model:
    preset: Preset = opt(default="flux", help="Architecture: flux 84 M, sd 84 M, lite 54 M, fast 13 M parameters.")
    channels: tuple[int, ...] = opt(default=(), help="Channels of the blocks instead of the preset's.", min=1)
    z_channels: int = opt(default=0, help="Channels of the latents instead of the preset's.", min=0)
    gradient_checkpointing: bool | None = opt(
        default=None, help="Recompute blocks in backward: less memory, more time; without a word the planner decides."
    )
    lean: bool = opt(
        default=True, help="Repeat norms and activations in backward instead of keeping them: a quarter of the memory."
    )
    init_from: Path | None = opt(
        default=None,
        help="Begin with the weights of a diffusers folder, a .safetensors file of SD or FLUX, or a run of gputrain.",
    )
    train_part: Literal["all", "decoder"] = opt(
        default="all", help="What learns: all, or the decoder alone, which leaves the latents (and their KL) alone."
    )


@config(panel="Losses")
class Losses:
    reconstruction_loss: Literal["l1", "l2"] = opt(default="l1", help="Distance of the pixels.")
    reconstruction_weight: float = opt(default=1.0, help="Weight of the distance of the pixels.", min=0)
    kl_weight: float = opt(
        default=1e-6, help="Weight of the latents' KL divergence from a normal distribution, a pixel value.", min=0
    )
    perceptual_weight: float = opt(default=1.0, help="Weight of the perceptual loss; 0 is off.", min=0)
    perceptual_loss: Literal["structural", "lpips"] = opt(
        default="structural",
        help="structural (MS-SSIM and multi-scale gradients) needs no weights; lpips is VGG16's, from lpips_weights.",
    )
    lpips_weights: tuple[Path, ...] = opt(
        default=(), help="Files of LPIPS: torchvision's vgg16-397923af.pth and the lpips package's vgg.pth."
    )
    lpips_sha256: tuple[str, ...] = opt(default=(), help="SHA-256 of lpips_weights that are not the published files.")
    lpips_crop: int = opt(default=256, help="LPIPS looks at a random part of this many pixels a side; 0 at all.", min=0)
    adversarial_weight: float = opt(default=0.0, help="Weight of the adversary (PatchGAN); 0 is off.", min=0)
    adversarial_loss: AdversarialLoss = opt(default="hinge", help="Loss of the adversary.")
    discriminator_norm: Literal["group", "spectral"] = opt(default="group", help="Normalisation in the discriminator.")
    discriminator_channels: int = opt(
        default=64, help="Channels of the discriminator's first layer; a multiple of 16.", min=16
    )
    discriminator_start: int = opt(default=5000, help="Step at which the discriminator begins to learn.", min=0)
    discriminator_warmup_steps: int = opt(
        default=1000, help="Steps that it learns before the autoencoder hears of it.", min=0
    )
    adaptive_weight_limit: float = opt(
        default=10.0, help="Largest factor that balances the adversary with the other losses; 0 fixes it at 1.", min=0
    )
    lecam_weight: float = opt(default=0.0, help="Weight of LeCam regularisation, for few pictures; 0 is off.", min=0)

    def __post_init__(self) -> None:
        if self.sees and not self.lpips_weights:
            raise UserError(
                "perceptual_loss lpips needs lpips_weights",
                hint="--lpips-weights vgg16-397923af.pth,vgg.pth (of torchvision and of the package lpips); "
                "--perceptual-loss structural needs none",
            )
        if 0 < self.lpips_crop < 32:
            raise UserError(f"lpips_crop {self.lpips_crop} is too small for VGG16", hint="use 32 or more, or 0 for all")
        if self.discriminator_channels % 16:
            raise UserError(
                f"discriminator_channels {self.discriminator_channels} is no multiple of 16",
                hint=f"use {self.discriminator_channels // 16 * 16 + 16}",
            )

    @property
    def sees(self) -> bool:
        """Whether LPIPS is among the losses."""
        return self.perceptual_loss == "lpips" and self.perceptual_weight > 0

    @property
    def in_words(self) -> str:
        """Each loss with its weight."""
        return (
            f"{self.reconstruction_loss} {self.reconstruction_weight:g}, {self.perceptual_loss} "
            f"{self.perceptual_weight:g}, kl {self.kl_weight:g}, adversarial {self.adversarial_weight:g}"
        )


@config()
class TrainVae:
    kind: ClassVar[Kind] = "vae"

    data: Data
    model: Model = Model()
    losses: Losses = Losses()
    schedule: Schedule = Schedule()
    saving: Saving = Saving()
    hardware: Hardware = Hardware()

    def __post_init__(self) -> None:
        if self.data.resolution_schedule:
            self._check_schedule()
        for size in {stage.data.image_size for stage in self.stages}:
            multiple = self.architecture.downsampling
            if size % multiple:
                below = size // multiple * multiple
                raise UserError(
                    f"image_size {size} cannot be divided by {multiple}, the number of pixels a latent stands for",
                    hint=f"use {below or multiple} or {below + multiple}",
                )
            if self.losses.adversarial_weight and size < SMALLEST_DISCRIMINATED:
                raise UserError(
                    f"image_size {size} is smaller than what the discriminator needs, {SMALLEST_DISCRIMINATED} pixels",
                    hint=f"use {SMALLEST_DISCRIMINATED} or more, or train without it: --adversarial-weight 0",
                )

    def _check_schedule(self) -> None:
        for name, value, default in (
            ("image_size", self.data.image_size, Data.image_size),
            ("num_epochs", self.schedule.num_epochs, Schedule.num_epochs),
        ):
            if value != default:
                raise UserError(
                    f"{name} {value} and resolution_schedule contradict each other",
                    hint=f"drop {name}: the schedule names sizes and epochs",
                )

    @property
    def stages(self) -> tuple["TrainVae", ...]:
        """What to train one after the other: this, or its schedule with a size, epochs and batch to each stage."""
        if not self.data.resolution_schedule:
            return (self,)
        made = []
        for size, epochs, batch in parse_schedule(self.data.resolution_schedule, self.schedule.batch_size):
            data = replace(self.data, image_size=size, resolution_schedule="")
            micro_batch = math.ceil(self.schedule.micro_batch_size * batch / self.schedule.batch_size)  # as many parts
            schedule = replace(self.schedule, num_epochs=epochs, batch_size=batch, micro_batch_size=micro_batch)
            made.append(replace(self, data=data, schedule=schedule))
        return tuple(made)

    @property
    def architecture(self) -> Architecture:
        return architecture(self.model.preset, self.model.channels, self.model.z_channels)


@config(panel="Data")
class PlannedData(Data):
    data_path: Path = opt(default=Path("."), help="Not looked at: a plan needs no data.")


@config()
class PlanVae(TrainVae):
    """The options of train-vae, and for which cards."""

    data: PlannedData = PlannedData()
    cards: Cards = Cards()


# Pictures of a step at some sizes, by those at 1024 pixels.
BATCH_BY_SIZE = {2048: 0.25, 1536: 0.5, 1024: 1.0, 768: 1.5, 0: 2.0}


def parse_schedule(text: str, batch_at_1024: int) -> list[tuple[int, int, int]]:
    """Sizes, epochs and batch sizes of "512:25,1024:50:12". Raises UserError if it is no such text."""
    stages = []
    for part in text.split(","):
        numbers = part.strip().split(":")
        if len(numbers) not in (2, 3) or not all(number.isascii() and number.isdigit() for number in numbers):
            raise UserError(
                f"resolution_schedule: {part.strip()!r} is not SIZE:EPOCHS or SIZE:EPOCHS:BATCH",
                hint="such as 512:25,1024:50,2048:25 (in YAML, in quotation marks)",
            )
        size, epochs, *batch = map(int, numbers)
        if size < 16 or epochs < 1 or batch == [0]:
            raise UserError(
                f"resolution_schedule: {part.strip()!r} asks for less than 16 pixels, 1 epoch or 1 picture",
                hint="such as 512:25,1024:50,2048:25",
            )
        share = next(share for least, share in BATCH_BY_SIZE.items() if size >= least)
        stages.append((size, epochs, batch[0] if batch else max(1, round(batch_at_1024 * share))))
    return stages


def architecture(preset: Preset, channels: tuple[int, ...] = (), z_channels: int = 0) -> Architecture:
    """A preset with other channels (of the blocks) or z_channels (of the latents), where they are given."""
    base = PRESETS[preset]
    made = replace(
        base,
        block_out_channels=channels or base.block_out_channels,
        latent_channels=z_channels or base.latent_channels,
    )
    if len(made.block_out_channels) < 2:
        raise UserError(
            f"channels {channels[0]}: one block makes no autoencoder", hint="name two or more, such as 128,256,512,512"
        )
    for count in made.block_out_channels:
        if count % made.norm_num_groups:
            raise UserError(
                f"channels {','.join(map(str, channels))}: {count} cannot be split into {made.norm_num_groups} groups",
                hint=f"use multiples of {made.norm_num_groups}",
            )
    return made


@config(panel="Preparation")
class PrepareData:
    input_dir: Path = opt(help="Folder tree of pictures; it is only read.")
    mode: Literal["preprocess", "validate"] = opt(default="preprocess", help="Make a prepared folder, or only check.")
    output_dir: Path | None = opt(default=None, help="Folder to fill with prepared pictures and their manifest.")
    output_file: Path | None = opt(default=None, help="JSON file for the report.")
    target_size: int = opt(default=1024, help="Side of the prepared pictures, in pixels.", min=8)
    resize_mode: Literal["cover", "contain", "stretch"] = opt(
        default="cover", help="Fill the square and crop, fit in and pad, or ignore the proportions."
    )
    format: Literal["png", "jpeg", "webp"] = opt(default="png", help="Format of the prepared pictures.")
    min_size: int = opt(default=32, help="Pictures with a shorter side than this many pixels are refused.", min=1)
    max_megapixels: float = opt(default=200, help="Pictures larger than this are refused.", min=0.01)
    num_workers: int = opt(default=-1, help="Processes at work; -1 takes all cores.", min=-1)

    def __post_init__(self) -> None:
        if self.mode == "preprocess" and self.output_dir is None:
            raise UserError("output_dir is missing", hint="say where the prepared pictures go: --output-dir FOLDER")
        if self.mode == "validate" and self.output_dir is not None:
            raise UserError(
                "mode validate writes no pictures", hint="drop --output-dir; --output-file takes the report"
            )

    def choices(self) -> dict[str, Any]:
        """The arguments of `prepare_images` beside the folders."""
        return {
            "target_size": self.target_size,
            "resize_mode": self.resize_mode,
            "format": self.format,
            **self.as_validation().choices(),
        }

    @property
    def processes(self) -> int:
        return usable_cores() if self.num_workers < 0 else self.num_workers

    def as_validation(self) -> "Validate":
        return Validate(
            input_dir=self.input_dir,
            output_file=self.output_file,
            min_size=self.min_size,
            max_megapixels=self.max_megapixels,
            num_workers=self.num_workers,
        )


@config(panel="Validation")
class Validate:
    input_dir: Path = opt(help="Folder of pictures, prepared or not.")
    output_file: Path | None = opt(default=None, help="JSON file for the report.")
    min_size: int = opt(default=32, help="Pictures with a shorter side than this many pixels are reported.", min=1)
    max_megapixels: float = opt(default=200, help="Pictures larger than this are reported.", min=0.01)
    num_workers: int = opt(default=-1, help="Processes at work; -1 takes all cores.", min=-1)

    def choices(self) -> dict[str, Any]:
        """The arguments of `validate_images` beside the folder."""
        return {
            "min_size": self.min_size,
            "max_pixels": int(self.max_megapixels * 1e6),
            "num_workers": usable_cores() if self.num_workers < 0 else self.num_workers,
        }


@config(panel="Evaluation")
class Evaluate:
    model: Path = opt(help="A run folder, a checkpoint, or an exported diffusers folder.")
    data_path: Path = opt(help="Folder of pictures, prepared or not.")
    image_size: int | None = opt(
        default=None,
        help="Side of the centre crops to measure on, in pixels; without it, that of the training.",
        min=16,
    )
    held_out_share: float | None = opt(
        default=None, help="Share of the pictures to measure on; without it, what the run held out; 1 takes all.",
        min=0.0, max=1.0,
    )  # fmt: skip
    max_pictures: int = opt(default=1000, help="Measure on at most this many pictures.", min=1)
    batch_size: int = opt(default=4, help="Pictures at once.", min=1)
    rfid_weights: Path | None = opt(
        default=None,
        help="Also measure rFID, with Inception's weights in this file: pt_inception-2015-12-05-6726825d.pth.",
    )
    rfid_sha256: str = opt(default="", help="SHA-256 of rfid_weights, if it is not the published file.")
    json: Path | None = opt(default=None, help="Write the figures to this file too.")
    device: Literal["auto", "cuda", "cpu"] = opt(default="auto", help="Where to compute.")


@config(panel="Reconstruction")
class Reconstruct:
    model: Path = opt(help="A run folder, a checkpoint, or an exported diffusers folder.")
    input: Path = opt(help="A picture, or a folder tree of pictures.")
    output_dir: Path = opt(help="Folder for the reconstructions and sheet.png, which shows them side by side.")
    tile_size: int = opt(default=512, help="Larger pictures are computed in tiles of this many pixels.", min=128)
    device: Literal["auto", "cuda", "cpu"] = opt(default="auto", help="Where to compute.")


@config(panel="Export")
class Export:
    model: Path = opt(help="A run folder or a checkpoint.")
    output_dir: Path = opt(help="Folder to write.")
    data_path: Path | None = opt(
        default=None, help="Pictures to measure the latents' scaling and shift on; without it, those of the run."
    )
    device: Literal["auto", "cuda", "cpu"] = opt(default="auto", help="Where to compute.")


@config(panel="Demo")
class Demo:
    output_dir: Path = opt(default=Path("demo"), help="Folder for data, run, export and what was made.")


@config(panel="Benchmark")
class BenchVae:
    preset: Preset = opt(default="flux", help="Architecture: flux 84 M, sd 84 M, lite 54 M, fast 13 M parameters.")
    channels: tuple[int, ...] = opt(default=(), help="Channels of the blocks instead of the preset's.", min=1)
    image_size: int = opt(default=256, help="Side of a picture, in pixels.", min=16)
    batch_size: int = opt(default=16, help="Pictures of a step.", min=1)
    micro_batch_size: int = opt(default=0, help="Pictures on the device at once, if less than batch_size.", min=0)
    gradient_checkpointing: bool = opt(default=False, help="Recompute blocks in backward, in every row.")
    warmup_steps: int = opt(default=3, help="Steps before the timed ones.", min=1)
    steps: int = opt(default=10, help="Timed steps of a row; the median counts.", min=1)
    row_minutes: float = opt(default=10, help="Minutes after which a row is given up.", min=0.01)
    output_dir: Path = opt(default=Path("."), help="Folder for the JSON and the chart.")
    device: Literal["auto", "cuda", "cpu"] = opt(default="auto", help="Where to compute; auto takes the GPU if any.")

    def __post_init__(self) -> None:
        assemble(TrainVae, self.training())  # refuses what train-vae refuses

    def training(self) -> dict[str, Any]:
        """The options of the train-vae that is measured; it has the defaults of the rest."""
        return {
            "data_path": ".",
            "preset": self.preset,
            "channels": self.channels,
            "gradient_checkpointing": self.gradient_checkpointing,
            "image_size": self.image_size,
            "batch_size": self.batch_size,
            "micro_batch_size": self.micro_batch_size,
            "device": self.device,
        }
