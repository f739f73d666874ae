"""A tiny decoder for the latents of another autoencoder, as diffusers' AutoencoderTiny (github.com/madebyollin/taesd).

Plain convolutions and ReLUs, all of one width, take a few per cent of an AutoencoderKL's FLOPs. A run trains the tiny
decoder on the latents of a frozen encoder, and a tiny encoder to make the same latents, because the stock class has
both. Latents are those that a pipeline hands to its denoiser: normalised by the factors of their autoencoder.

Shapes: B items, C channels of a picture, H x W pixels, L latent channels, h x w latent positions.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gputrain.engine.checkpoint import load_weights, refuse_nonfinite
from gputrain.errors import UserError
from gputrain.serialization import from_json
from gputrain.vae.architecture import VaeArchitecture
from gputrain.vae.config import TrainVae
from gputrain.vae.diffusers_folder import CONFIG, WEIGHTS, read_weights, write_folder
from gputrain.vae.latents import FAMILIES, LatentScaling
from gputrain.vae.model import AutoencoderKL, Moments
from gputrain.weights import read_safetensors

CLASS_NAME = "AutoencoderTiny"
WIDTH, BLOCKS = 64, 3  # Those of the published models, which have four levels.
RANGE = 3.0  # The decoder squashes latents into (-RANGE, RANGE), in units of about their standard deviation.
ENCODER = ("encoder.", "quant_conv.")  # Beginnings of the names of tensors that make latents.
FACTOR = "latents_factor_L"  # Name of a tensor that only runs with a tiny decoder have.
CERTAIN = -30.0  # Log-variance of latents that are exact.


@dataclass(frozen=True)
class TinyArchitecture:
    """Architecture of an AutoencoderTiny, with the field names of diffusers' config.json and its defaults."""

    in_channels: int = 3
    out_channels: int = 3
    encoder_block_out_channels: tuple[int, ...] = (WIDTH,) * 4
    decoder_block_out_channels: tuple[int, ...] = (WIDTH,) * 4
    latent_channels: int = 4
    num_encoder_blocks: tuple[int, ...] = (1, BLOCKS, BLOCKS, BLOCKS)
    num_decoder_blocks: tuple[int, ...] = (BLOCKS, BLOCKS, BLOCKS, 1)
    patch_statistics: ClassVar[bool] = False  # As of other architectures.

    @classmethod
    def for_latents_of(cls, teacher: VaeArchitecture) -> "TinyArchitecture":
        levels = len(teacher.block_out_channels)
        widths, deep = (WIDTH,) * levels, (BLOCKS,) * (levels - 1)
        channels = (teacher.in_channels, teacher.out_channels)
        return cls(*channels, widths, widths, teacher.latent_channels, (1, *deep), (*deep, 1))

    @property
    def downsampling(self) -> int:
        return 1 << (len(self.num_encoder_blocks) - 1)


class TinyBlock(nn.Module):
    """Returns relu(x + three convolutions of x with ReLUs between)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        first, second, third = (nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        self.conv = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return torch.relu(self.conv(x_BCHW) + x_BCHW)


class TinyCoder(nn.Module):
    """Runs its layers one after the other; with `checkpointing`, blocks are recomputed in the backward pass."""

    def __init__(self, layers: Iterator[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def run(self, x_BCHW: Tensor, checkpointing: bool) -> Tensor:
        for layer in self.layers:
            if checkpointing and torch.is_grad_enabled() and isinstance(layer, TinyBlock):
                x_BCHW = checkpoint(layer, x_BCHW, use_reentrant=False, preserve_rng_state=False)
            else:
                x_BCHW = layer(x_BCHW)
        return x_BCHW


class TinyEncoder(TinyCoder):
    """Maps pictures in [-1, 1] to normalised latents."""

    def __init__(self, shape: TinyArchitecture) -> None:
        def layers() -> Iterator[nn.Module]:
            widths = shape.encoder_block_out_channels
            for level, (width, count) in enumerate(zip(widths, shape.num_encoder_blocks, strict=True)):
                if level:
                    yield nn.Conv2d(width, width, 3, padding=1, stride=2, bias=False)
                else:
                    yield nn.Conv2d(shape.in_channels, width, 3, padding=1)
                yield from (TinyBlock(width) for _ in range(count))
            yield nn.Conv2d(widths[-1], shape.latent_channels, 3, padding=1)

        super().__init__(layers())

    def forward(self, images_BCHW: Tensor, checkpointing: bool = False) -> Tensor:
        return self.run((images_BCHW + 1) / 2, checkpointing)


class TinyDecoder(TinyCoder):
    """Maps normalised latents to pictures in about [-1, 1]."""

    def __init__(self, shape: TinyArchitecture) -> None:
        def layers() -> Iterator[nn.Module]:
            widths = shape.decoder_block_out_channels
            yield from (nn.Conv2d(shape.latent_channels, widths[0], 3, padding=1), nn.ReLU())
            for level, (width, count) in enumerate(zip(widths, shape.num_decoder_blocks, strict=True), start=1):
                yield from (TinyBlock(width) for _ in range(count))
                if level < len(widths):
                    yield from (nn.Upsample(scale_factor=2), nn.Conv2d(width, width, 3, padding=1, bias=False))
            last = nn.Conv2d(widths[-1], shape.out_channels, 3, padding=1)
            nn.init.constant_(last.bias, 0.5)  # type: ignore[arg-type]  # It begins with gray instead of black pictures.
            yield last

        super().__init__(layers())

    def forward(self, latents_BLhw: Tensor, checkpointing: bool = False) -> Tensor:
        squashed_BLhw = torch.tanh(latents_BLhw / RANGE) * RANGE
        return self.run(squashed_BLhw, checkpointing) * 2 - 1


class AutoencoderTiny(nn.Module):
    """The stock class: what a run exports, and published models are. Its latents are exact, and normalised."""

    def __init__(self, architecture: TinyArchitecture) -> None:
        super().__init__()
        self.architecture = architecture
        self.encoder = TinyEncoder(architecture)
        self.decoder = TinyDecoder(architecture)

    def encode(self, images_BCHW: Tensor) -> Moments:
        latents_BLhw = self.encoder(images_BCHW).float()
        return Moments(latents_BLhw, torch.full_like(latents_BLhw, CERTAIN))

    def decode(self, latents_BLhw: Tensor) -> Tensor:
        images_BCHW: Tensor = self.decoder(latents_BLhw)
        return images_BCHW


Autoencoder = AutoencoderKL | AutoencoderTiny  # What evaluates and reconstructs.


class DistilledAutoencoder(AutoencoderKL):
    """A frozen encoder with a tiny decoder for its latents, which `encode` normalises, and a tiny encoder that learns
    to make the same latents."""

    def __init__(
        self, architecture: VaeArchitecture, *, checkpointing: bool = False, recompute_norms: bool = True
    ) -> None:
        super().__init__(architecture, checkpointing=checkpointing, recompute_norms=recompute_norms)
        self.tiny = TinyArchitecture.for_latents_of(architecture)
        self.decoder = TinyDecoder(self.tiny)  # type: ignore[assignment]
        self.post_quant_conv = nn.Identity()
        self.tiny_encoder = TinyEncoder(self.tiny)
        self.latents_shift_L: Tensor
        self.latents_factor_L: Tensor
        self.register_buffer("latents_shift_L", torch.zeros(architecture.latent_channels))
        self.register_buffer("latents_factor_L", torch.ones(architecture.latent_channels))

    def encode(self, images_BCHW: Tensor) -> Moments:
        mean_BLhw, logvar_BLhw = super().encode(images_BCHW)
        shift_L11, factor_L11 = (one_L[:, None, None] for one_L in (self.latents_shift_L, self.latents_factor_L))
        return Moments((mean_BLhw - shift_L11) * factor_L11, logvar_BLhw + 2 * factor_L11.log())

    def squared_distance(self, images_BCHW: Tensor, latents_BLhw: Tensor) -> Tensor:
        """Returns the mean squared distance (B) of the tiny encoder's latents from those of the frozen encoder."""
        made_BLhw: Tensor = self.tiny_encoder(images_BCHW, self.checkpointing)
        return (made_BLhw.to(latents_BLhw.dtype) - latents_BLhw).square().flatten(1).mean(1)

    def beginning(self, teacher: Mapping[str, Tensor], scaling: LatentScaling) -> dict[str, Tensor]:
        """Returns weights to begin with: the teacher's encoder with the factors of its latents, and the rest as it is.
        Those of another run with a tiny decoder are returned as they are."""
        if FACTOR in teacher:
            return dict(teacher)
        mine = self.state_dict()
        frozen = {name: one for name, one in teacher.items() if name.startswith(ENCODER)}
        shift_L, factor_L = (torch.ones_like(one) for one in (self.latents_shift_L, self.latents_factor_L))
        if scaling.latents_mean is not None and scaling.latents_std is not None:
            shift_L *= shift_L.new_tensor(scaling.latents_mean)
            factor_L /= factor_L.new_tensor(scaling.latents_std)
        else:
            shift_L *= scaling.shift_factor or 0.0
        factor_L *= scaling.scaling_factor or 1.0
        return {**mine, **frozen, "latents_shift_L": shift_L, "latents_factor_L": factor_L}

    def stock(self) -> AutoencoderTiny:
        """Returns the tiny encoder and decoder as the stock class."""
        made = AutoencoderTiny(self.tiny)
        made.encoder.load_state_dict(self.tiny_encoder.state_dict())
        made.decoder.load_state_dict(self.decoder.state_dict())
        return made.eval().requires_grad_(False)


def autoencoder_class(settings: TrainVae) -> type[AutoencoderKL]:
    """Returns the class of a run's model."""
    return DistilledAutoencoder if settings.model.train_part == "tiny-decoder" else AutoencoderKL


def export_tiny(model: DistilledAutoencoder, folder: Path) -> float:
    """Writes a folder that `AutoencoderTiny.from_pretrained` of stock diffusers loads, in fp32, and reads it back.

    Returns the largest difference of a decoded picture, zero up to rounding. Raises UserError if weights are not finite
    or the folder cannot be written, RuntimeError if what was read differs.
    """
    stock = model.stock().cpu().float()
    weights = {name: tensor.contiguous() for name, tensor in stock.state_dict().items()}
    refuse_nonfinite(weights, str(folder))
    factors = {"scaling_factor": 1.0, "shift_factor": 0.0}  # FLUX's and SD3's pipelines ask for a shift.
    write_folder(folder, {"_class_name": CLASS_NAME, **asdict(model.tiny), **factors}, {WEIGHTS: weights})
    return _difference(model, load_tiny(folder), folder)


def export_taesd(model: DistilledAutoencoder, folder: Path, scaling: LatentScaling | None) -> tuple[list[Path], float]:
    """Writes decoder and encoder with the names of ComfyUI's TAESD, whose decoder begins with a layer that clamps the
    latents, so that its layer N + 1 is diffusers' layer N. `scaling` is that of the latents' autoencoder.

    Returns the files, and what `export_tiny` returns, with its errors. Raises UserError for another number of levels.
    """
    if len(model.tiny.num_decoder_blocks) != len(TinyArchitecture.num_decoder_blocks):
        raise UserError("the small decoder of ComfyUI has four levels", hint="--format diffusers writes this one")
    family = next((family.taesd for family in FAMILIES if family.scaling == scaling), folder.resolve().name)
    stock = model.stock().cpu().float()
    weights = {part: getattr(stock, part).layers.state_dict() for part in ("decoder", "encoder")}
    for part, tensors in weights.items():
        refuse_nonfinite(tensors, f"{folder}: {part}")
    files = {part: folder / f"{family}_{part}.safetensors" for part in weights}
    written = {"decoder": _moved(weights["decoder"], 1), "encoder": weights["encoder"]}
    write_folder(folder, None, {files[part].name: written[part] for part in files})
    read = AutoencoderTiny(model.tiny)
    load_weights(read.decoder.layers, _moved(read_safetensors(files["decoder"]).tensors, -1), str(files["decoder"]))
    load_weights(read.encoder.layers, read_safetensors(files["encoder"]).tensors, str(files["encoder"]))
    return list(files.values()), _difference(model, read, folder)


def _moved(weights: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Returns tensors whose names begin with the number of a layer, with other numbers."""
    parts = {name: name.partition(".") for name in weights}
    return {f"{int(parts[name][0]) + layers}.{parts[name][2]}": one.contiguous() for name, one in weights.items()}


def _difference(model: DistilledAutoencoder, loaded: AutoencoderTiny, folder: Path) -> float:
    latents_BLhw = torch.randn(1, model.tiny.latent_channels, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        made_BCHW = model.decode(latents_BLhw.to(model.latents_shift_L)).float().cpu()
        difference = (made_BCHW - loaded.decode(latents_BLhw)).abs().max().item()
    if not difference < 0.05:  # The tolerance allows for TF32.
        raise RuntimeError(f"{folder}: a decoded picture differs by {difference:.3g} from the model's")
    return difference


def is_tiny(folder: Path) -> bool:
    """Returns whether a folder of diffusers has an AutoencoderTiny."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return bool(json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("_class_name") == CLASS_NAME)
    return False


def load_tiny(folder: Path) -> AutoencoderTiny:
    """Returns the AutoencoderTiny of a folder of diffusers, in fp32 on the CPU. Raises UserError if it is damaged, or
    has layers that are not supported."""
    path = folder / CONFIG
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for key, supported in (("act_fn", "relu"), ("upsample_fn", "nearest"), ("upsampling_scaling_factor", 2)):
        if config.get(key, supported) != supported:
            raise UserError(f"{path}: {key} is {config[key]!r}, but only {supported!r} is supported")
    try:
        shape = from_json(
            TinyArchitecture, {f.name: config[f.name] for f in fields(TinyArchitecture) if f.name in config}, "it"
        )
        model = AutoencoderTiny(shape)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"{path}: {error}", hint="use the file that belongs to the weights") from None
    weights = {name: one.float() for name, one in read_weights(folder / WEIGHTS).items()}
    load_weights(model, weights, str(folder / WEIGHTS))
    return model
