"""Options of the image VAE. Imports no torch."""

from pathlib import Path
from typing import ClassVar, Literal

from gputrain.config import ModelName, advanced, changed, config, file_key, opt
from gputrain.engine.schedule import (
    CHECKPOINTING_HELP,
    DISCRIMINATOR_START_HELP,
    PUBLISHED_NAME,
    SEVERAL,
    Saving,
    Schedule,
)
from gputrain.errors import UserError
from gputrain.fetch.names import TRAINED_HELP, TrainedModel
from gputrain.hw.plan import DeviceName, Hardware
from gputrain.kinds import EXCLUDE_HELP, PublishedFiles
from gputrain.planner.kind_work import plan_settings
from gputrain.vae.architecture import VaeArchitecture, VaePreset, vae_architecture

# Names that scripts written for earlier VAE trainers use.
SPELLINGS = {"checkpoint_freq": "checkpoint_every_epochs", "save_samples_freq": "sample_every_steps"}

PictureFormat = Literal["png", "jpeg", "webp"]
PRESET_HELP = "flux, flux2, sd, lite or fast. flux, flux2 and sd have 84 M parameters, lite 54 M, fast 13 M."
CHANNELS_HELP = "Channels of a picture. 1: grayscale; 3: colours over white; 4: colours with transparency."
SMALLEST_DISCRIMINATED = 24  # Pixels a side: PatchDiscriminator's five convolutions reduce them to a single patch.

# Folders of diffusers, of an autoencoder or a pipeline, and otherwise single files of weights.
PUBLISHED = PublishedFiles(
    whole=("diffusion_pytorch_model.safetensors",), needed=("config.json",),
    single=("*.safetensors", "*.ckpt", "*.bin", "*.pt"), folders=("", "vae"), example="stabilityai/sd-vae-ft-mse",
    kind="vae",
)  # fmt: skip
MEASURES = PublishedFiles(single=("*.safetensors", "*.pth", "*.pt"), kind="measure")  # Networks of LPIPS and rFID.


def check_channels(image_channels: int) -> None:
    """Raises UserError for a number of channels that no picture has."""
    if image_channels not in (1, 3, 4):
        raise UserError(
            f"image_channels is {image_channels}, expected 1, 3 or 4", hint="1 is grayscale, 4 has transparency"
        )


@config(panel="Data")
class Data:
    data_path: tuple[Path, ...] = opt(
        default=(Path("./data/train"),),
        separator="",
        help="Folder of pictures, prepared or not. Or anything else that prepare-data reads." + SEVERAL,
    )
    exclude: tuple[str, ...] = advanced(default=(), separator="", help=EXCLUDE_HELP)
    image_size: int = opt(default=256, help="Side of a training crop, in pixels.", min=16)
    image_channels: int = advanced(default=3, help=CHANNELS_HELP, min=1, max=4)
    held_out_share: float = opt(default=0.05, help="Share kept for evaluation.", min=0.0, max=0.5)
    sample_pictures: tuple[Path, ...] = advanced(
        default=(), help="Pictures of your own that the samples show instead of held-out ones, always the same."
    )
    horizontal_flip: bool = advanced(default=True, help="Mirror crops horizontally with a probability of 0.5.")

    def __post_init__(self) -> None:
        check_channels(self.image_channels)


@config(panel="Model")
class Model:
    preset: VaePreset = opt(default="flux", help=PRESET_HELP)
    channels: tuple[int, ...] = advanced(default=(), help="Channels of the blocks; default: the preset's.", min=1)
    decoder_channels: tuple[int, ...] = advanced(
        default=(),
        help="Channels of the decoder's blocks, from the picture to the latents. Default: those of the encoder; with "
        "others, exports are an AutoencoderKLFlux2.",
        min=1,
    )
    z_channels: int = opt(default=0, help="Channels of the latents; 0: the preset's.", min=0)
    gradient_checkpointing: bool | None = advanced(default=None, help=CHECKPOINTING_HELP)
    recompute_norms: bool = advanced(
        default=True,
        help="Recompute norms and activations in backward. It takes a quarter of the memory of storing them.",
    )
    start: Literal["linear", "random"] = advanced(
        default="linear",
        help="Start from scratch. linear: as a linear code that is fitted to the pictures in seconds; random: random "
        "weights.",
    )
    init_from: ModelName | None = opt(
        default=None,
        help="Model to start from. A diffusers folder, a .safetensors file of SD or FLUX, a run" + PUBLISHED_NAME,
    )
    train_part: Literal["all", "decoder"] = opt(
        default="all",
        help="Part to train: all or decoder. decoder keeps the latents (and their KL) unchanged.",
    )

    def __post_init__(self) -> None:
        if self.init_from is not None and self.start != "linear":
            raise UserError(
                f"start {self.start} has no effect with init_from", hint="drop --start, or drop --init-from"
            )


@config(panel="Losses")
class Losses:
    reconstruction_loss: Literal["l1", "l2"] = advanced(default="l1", help="Reconstruction loss between the pixels.")
    reconstruction_weight: float = advanced(default=1.0, help="Weight of the reconstruction loss.", min=0)
    kl_weight: float = opt(
        default=1e-6, help="Weight of the KL divergence. It is per pixel value, from N(0, 1).", min=0
    )
    perceptual_weight: float = opt(default=1.0, help="Weight of the perceptual loss; 0 is off.", min=0)
    perceptual_loss: Literal["structural", "lpips"] = opt(
        default="structural",
        help="structural or lpips. structural (MS-SSIM and multi-scale gradients) needs no weights, lpips needs "
        "lpips_weights.",
    )
    lpips_weights: tuple[ModelName, ...] = opt(
        default=(),
        help="lpips-vgg16,lpips-heads, or their files. They are torchvision's vgg16-397923af.pth and the lpips "
        "package's vgg.pth.",
    )
    adversarial_weight: float = opt(default=0.0, help="Weight of the adversarial loss; 0 is off. PatchGAN.", min=0)
    discriminator_channels: int = advanced(
        default=64, help="First channels of discriminators. A multiple of 16.", min=16
    )
    discriminator_start: int = advanced(default=5000, help=DISCRIMINATOR_START_HELP, min=0)
    discriminator_warmup_steps: int = advanced(
        default=1000, help="Training steps of the discriminator before the adversarial loss is applied.", min=0
    )
    lecam_weight: float = file_key(
        default=0.0, help="Weight of LeCam regularisation, for small data sets; 0 is off.", min=0
    )

    def __post_init__(self) -> None:
        if self.uses_lpips and not self.lpips_weights:
            raise UserError(
                "perceptual_loss lpips needs lpips_weights",
                hint="--lpips-weights lpips-vgg16,lpips-heads loads them; --perceptual-loss structural needs none",
            )
        if self.discriminator_channels % 16:
            raise UserError(
                f"discriminator_channels {self.discriminator_channels} is not a multiple of 16",
                hint=f"use {self.discriminator_channels // 16 * 16 + 16}",
            )

    @property
    def uses_lpips(self) -> bool:
        return self.perceptual_loss == "lpips" and self.perceptual_weight > 0

    @property
    def description(self) -> str:
        return (
            f"{self.reconstruction_loss} {self.reconstruction_weight:g}, {self.perceptual_loss} "
            f"{self.perceptual_weight:g}, kl {self.kl_weight:g}, adversarial {self.adversarial_weight:g}"
        )


@config()
class TrainVae:
    kind: ClassVar[str] = "vae"
    spellings: ClassVar[dict[str, str]] = SPELLINGS

    data: Data = Data()
    model: Model = Model()
    losses: Losses = Losses()
    schedule: Schedule = Schedule()
    saving: Saving = Saving()
    hardware: Hardware = Hardware()

    def __post_init__(self) -> None:
        size, multiple = self.data.image_size, self.architecture.multiple
        if size % multiple:
            below = size // multiple * multiple
            what = "side of a patch of latents" if self.architecture.patch_statistics else "downsampling factor"
            raise UserError(
                f"image_size {size} is not a multiple of {multiple}, the {what} of the autoencoder",
                hint=f"use {below} or {below + multiple}" if below else f"use {multiple} or a multiple of it",
            )
        if self.losses.adversarial_weight and size < SMALLEST_DISCRIMINATED:
            raise UserError(
                f"image_size {size} is too small for the discriminator: its minimum is {SMALLEST_DISCRIMINATED}",
                hint=f"use {SMALLEST_DISCRIMINATED} or more, or train without it: --adversarial-weight 0",
            )

    @property
    def architecture(self) -> VaeArchitecture:
        model = self.model
        return vae_architecture(
            model.preset, model.channels, model.z_channels, self.data.image_channels, model.decoder_channels
        )


PlanVae = plan_settings(TrainVae)


PICTURES = "Pictures, with --kind vae"


@config(panel=PICTURES)
class PictureLimits:
    min_size: int = advanced(default=32, help="Pictures with a shorter side, in pixels, are refused.", min=1)
    max_megapixels: float = advanced(default=200, help="Larger pictures are refused.", min=0.01)


@config(panel=PICTURES)
class VaePrepareConfig(PictureLimits):
    """The options that a prepared picture depends on, besides its source."""

    target_size: int = opt(default=1024, help="Side of prepared pictures, in pixels. A multiple of 8.", min=8)
    resize_mode: Literal["cover", "stretch"] = opt(
        default="cover", help="cover or stretch. cover: fill the square and crop; stretch: change the proportions."
    )
    format: PictureFormat = opt(default="png", help="Format: png, jpeg or webp.")
    image_channels: int = advanced(default=3, help=CHANNELS_HELP, min=1, max=4)

    def __post_init__(self) -> None:
        check_channels(self.image_channels)
        if self.image_channels == 4 and self.format == "jpeg":
            raise UserError("format jpeg has no transparency", hint="use --format png or webp for 4 channels")
        if self.target_size < 8 or self.target_size % 8:
            below = max(8, self.target_size // 8 * 8)
            raise UserError(
                f"target_size {self.target_size} is not a positive multiple of 8, as the models need",
                hint=f"use {below} or {below + 8}",
            )


@config(panel="Evaluation")
class PictureEvaluation:
    image_size: int | None = opt(
        default=None, help="Side of the centre crops of pictures. In pixels; default: that of the training.", min=16
    )
    max_pictures: int = opt(default=1000, help="Maximum number of pictures.", min=1)
    batch_size: int = opt(default=4, help="Pictures in a batch.", min=1)
    rfid_weights: ModelName | None = opt(
        default=None,
        help="Inception's weights, for rFID: inception-fid or file. The file is pt_inception-2015-12-05-6726825d.pth.",
    )


@config(panel="Reconstruction")
class Reconstruct(TrainedModel):
    model: ModelName = changed(TrainedModel, "model", help=TRAINED_HELP + " Or a folder of diffusers.")
    input: Path = opt(help="Picture, or folder tree of pictures.")
    output_dir: Path = opt(help="Folder for the reconstructions. sheet.html shows them beside the originals.")
    pictures: int = opt(default=0, help="Pictures of a folder, evenly spaced by name; 0: all.", min=0)
    max_side: int = opt(default=0, help="Longest side to scale down to, in pixels; 0: none.", min=0)
    tile_size: int = opt(default=512, help="Side of tiles of larger pictures, in pixels.", min=128)
    device: DeviceName = changed(Hardware, "device")
