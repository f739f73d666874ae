"""Architectures of the image VAE and its presets. Imports no torch."""

from dataclasses import dataclass, replace
from typing import Literal

from gputrain.errors import UserError

VaePreset = Literal["flux", "sd", "lite", "fast"]


@dataclass(frozen=True)
class VaeArchitecture:
    """Architecture of an AutoencoderKL, with the field names of diffusers' config.json."""

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
        """Pixels along each side of a picture for one latent position: each block but the last halves the size."""
        return 1 << (len(self.block_out_channels) - 1)


# Every group has four channels or more: with one channel, a norm would erase a picture's brightness and contrast.
PRESETS: dict[VaePreset, VaeArchitecture] = {
    # The autoencoder of FLUX.1 has 83.8 M parameters.
    "flux": VaeArchitecture((128, 256, 512, 512), latent_channels=16),
    # The autoencoder of Stable Diffusion 1 and 2 has 83.7 M parameters.
    "sd": VaeArchitecture((128, 256, 512, 512), latent_channels=4, use_quant_conv=True, use_post_quant_conv=True),
    # "lite" takes a third of flux's FLOPs and has 53.9 M parameters; without attention, cost is linear in the area.
    "lite": VaeArchitecture((64, 128, 256, 512), latent_channels=16, mid_block_add_attention=False, norm_num_groups=16),
    # "fast" takes a twelfth of flux's FLOPs and has 13.5 M parameters.
    "fast": VaeArchitecture((32, 64, 128, 256), latent_channels=16, mid_block_add_attention=False, norm_num_groups=8),
}


def vae_architecture(
    preset: VaePreset, channels: tuple[int, ...] = (), z_channels: int = 0, image_channels: int = 3
) -> VaeArchitecture:
    """Returns the architecture of a preset for pictures of `image_channels`, with other block `channels` or latent
    `z_channels` if they are given.

    Raises UserError for fewer than two blocks, and for channels that are not divisible into the preset's groups.
    """
    base = PRESETS[preset]
    made = replace(
        base,
        block_out_channels=channels or base.block_out_channels,
        latent_channels=z_channels or base.latent_channels,
        in_channels=image_channels,
        out_channels=image_channels,
    )
    if len(made.block_out_channels) < 2:
        raise UserError(
            f"channels {channels[0]}: an autoencoder needs at least two blocks", hint="such as 128,256,512,512"
        )
    for count in made.block_out_channels:
        if count % made.norm_num_groups:
            raise UserError(
                f"channels {','.join(map(str, channels))}: {count} is not divisible into {made.norm_num_groups} groups",
                hint=f"use multiples of {made.norm_num_groups}",
            )
    return made
