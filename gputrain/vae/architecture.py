"""Architectures of the image VAE and its presets. Imports no torch."""

from dataclasses import dataclass, replace
from typing import Literal

from gputrain.errors import UserError

VaePreset = Literal["flux", "flux2", "sd", "lite", "fast"]

PATCH = 2  # Latent positions along each side of a patch of an AutoencoderKLFlux2.


@dataclass(frozen=True)
class VaeArchitecture:
    """Architecture of an AutoencoderKL or AutoencoderKLFlux2, with the field names of diffusers' config.json.

    `patch_statistics`: an AutoencoderKLFlux2, whose latents a pipeline normalises in patches of 2x2 positions. Only
    that class has a decoder of other widths than the encoder's.
    """

    block_out_channels: tuple[int, ...]
    latent_channels: int
    layers_per_block: int = 2
    norm_num_groups: int = 32
    mid_block_add_attention: bool = True
    use_quant_conv: bool = False
    use_post_quant_conv: bool = False
    in_channels: int = 3
    out_channels: int = 3
    decoder_block_out_channels: tuple[int, ...] = ()  # From the picture to the latents; empty: block_out_channels.
    patch_statistics: bool = False

    def __post_init__(self) -> None:
        if self.decoder_block_out_channels == self.block_out_channels:  # There is one way to say it, so that == holds.
            object.__setattr__(self, "decoder_block_out_channels", ())
        if self.decoder_block_out_channels:
            object.__setattr__(self, "patch_statistics", True)

    @property
    def class_name(self) -> str:
        """The class of diffusers that has these layers and tensors."""
        return "AutoencoderKLFlux2" if self.patch_statistics else "AutoencoderKL"

    @property
    def decoder_widths(self) -> tuple[int, ...]:
        return self.decoder_block_out_channels or self.block_out_channels

    @property
    def multiple(self) -> int:
        """Pixels of which the side of a training picture is a multiple: those of a latent position, or of a patch."""
        return self.downsampling * (PATCH if self.patch_statistics else 1)

    @property
    def downsampling(self) -> int:
        """Pixels along each side of a picture for one latent position: each block but the last halves the size."""
        return 1 << (len(self.block_out_channels) - 1)


# Every group has four channels or more: with one channel, a norm would erase a picture's brightness and contrast.
PRESETS: dict[VaePreset, VaeArchitecture] = {
    # The autoencoder of FLUX.1 has 83.8 M parameters.
    "flux": VaeArchitecture((128, 256, 512, 512), latent_channels=16),
    # The autoencoder of FLUX.2 has 84.0 M parameters.
    "flux2": VaeArchitecture(
        (128, 256, 512, 512), latent_channels=32, use_quant_conv=True, use_post_quant_conv=True, patch_statistics=True
    ),
    # The autoencoder of Stable Diffusion 1 and 2 has 83.7 M parameters.
    "sd": VaeArchitecture((128, 256, 512, 512), latent_channels=4, use_quant_conv=True, use_post_quant_conv=True),
    # "lite" takes a third of flux's FLOPs and has 53.9 M parameters; without attention, cost is linear in the area.
    "lite": VaeArchitecture((64, 128, 256, 512), latent_channels=16, mid_block_add_attention=False, norm_num_groups=16),
    # "fast" takes a twelfth of flux's FLOPs and has 13.5 M parameters.
    "fast": VaeArchitecture((32, 64, 128, 256), latent_channels=16, mid_block_add_attention=False, norm_num_groups=8),
}


def vae_architecture(
    preset: VaePreset,
    channels: tuple[int, ...] = (),
    z_channels: int = 0,
    image_channels: int = 3,
    decoder_channels: tuple[int, ...] = (),
) -> VaeArchitecture:
    """Returns the architecture of a preset for pictures of `image_channels`, with other block `channels`, latent
    `z_channels` or `decoder_channels` of the decoder's blocks if they are given.

    Raises UserError for fewer than two blocks, another number of blocks in the decoder, and channels that are not
    divisible into the preset's groups.
    """
    base = PRESETS[preset]
    made = replace(
        base,
        block_out_channels=channels or base.block_out_channels,
        latent_channels=z_channels or base.latent_channels,
        in_channels=image_channels,
        out_channels=image_channels,
        decoder_block_out_channels=decoder_channels,
    )
    if len(made.block_out_channels) < 2:
        raise UserError(
            f"channels {channels[0]}: an autoencoder needs at least two blocks", hint="such as 128,256,512,512"
        )
    for name, counts in (("channels", made.block_out_channels), ("decoder_channels", decoder_channels)):
        for count in counts:
            if count % made.norm_num_groups:
                raise UserError(
                    f"{name} {','.join(map(str, counts))}: {count} is not divisible into {made.norm_num_groups} groups",
                    hint=f"use multiples of {made.norm_num_groups}",
                )
    if len(made.decoder_widths) != len(made.block_out_channels):
        raise UserError(
            f"decoder_channels has {len(decoder_channels)} blocks, and the encoder has {len(made.block_out_channels)}",
            hint="name as many, from the picture to the latents, such as 96,192,384,384",
        )
    return made
