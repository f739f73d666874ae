"""The start of an autoencoder that trains from scratch: a linear code of the pictures, fitted in seconds.

From random weights an autoencoder learns for hours what a linear transform does at once: to keep the colours and the
coarse detail of each block of pixels. So a small chain of convolutions with the autoencoder's own geometry is fitted to
crops of the training pictures, and is then written into the weights of the autoencoder. Before the first step the
autoencoder computes that code; everything else about it, its layers and its tensors' names, stays as it is.

How the weights carry a linear signal c past the norms and activations:
- along the residual path it is a channel that no residual branch adds to;
- at the end of encoder and decoder, where a GroupNorm and a SiLU stand in the way, it is the pair of channels (c, -c)
  in a group whose other channels are the constants K and -K. The mean of the group is 0, and its standard deviation
  hardly depends on c, so the norm is a constant factor; and silu(a) - silu(-a) = a.

Shapes: B items, S signals, H x W pixels, h x w latent positions.
"""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gputrain.engine.data import Sample
from gputrain.formatting import counted
from gputrain.vae.architecture import VaeArchitecture
from gputrain.vae.config import TrainVae
from gputrain.vae.dataset import CropDataset, Picture, to_unit
from gputrain.vae.model import Attention, AutoencoderKL, Downsample, ResnetBlock, Upsample

log = logging.getLogger(__name__)

# Signals are this much larger inside the autoencoder, so that the first steps of training disturb them less.
SCALE = 16.0
CONSTANT = 16.0 * SCALE  # K: a colour of 1 changes the factor of the norm by 0.2 %.
LATENT_STD = 4.0  # Standard deviation of the means of the latents.
LOGVAR = -5.0  # Initial log-variance of the latents: a standard deviation of 0.08.
PICTURES = 32  # Pictures that the code is fitted to.
TILES = 4  # Tiles along each side of a crop.
STARTED = 64  # Tiles that the layers are set to in closed form; all are used by the steps that follow.
STEPS = 120
BATCH = 8
LEARNING_RATE = 3e-3
WARMUP = 20


class LinearCode(nn.Module):
    """Convolutions with the geometry of an autoencoder, and nothing between them."""

    def __init__(self, signals: Sequence[int], channels: int) -> None:
        """`signals`: the number of signals after each halving of the size; the last are the latents. `channels` are
        those of a picture."""
        super().__init__()
        self.signals, self.channels = tuple(signals), channels
        widths = list(pairwise((channels, *signals)))
        self.down = [nn.Conv2d(wide, narrow, 3, stride=2) for wide, narrow in widths]
        conv = partial(nn.Conv2d, kernel_size=3, padding=1)
        self.code = conv(signals[-1], signals[-1])
        self.up = [conv(narrow, wide) for wide, narrow in reversed(widths)]
        self.out = conv(channels, channels)
        self.layers = nn.ModuleList([*self.down, self.code, *self.up, self.out])

    def encode(self, images_BCHW: Tensor) -> Tensor:
        x = images_BCHW
        for conv in self.down:
            x = conv(F.pad(x, (0, 1, 0, 1)))
        return x

    def decode(self, latents_BShw: Tensor) -> Tensor:
        x = self.code(latents_BShw)
        for conv in self.up:
            x = conv(F.interpolate(x, scale_factor=2.0))
        images_BCHW: Tensor = self.out(x)
        return images_BCHW

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return self.decode(self.encode(images_BCHW))

    @torch.no_grad()
    def start(self, images_BCHW: Tensor, generator: torch.Generator) -> None:
        """Sets each layer in closed form: those of the encoder to the principal components of blocks of 2 x 2, and
        those of the decoder to the least squares with which the signals before that layer of the encoder follow."""
        signals = [images_BCHW]
        for conv in self.down:
            blocks_BDT = F.unfold(signals[-1], 2, stride=2)
            # In fp64, which decomposes the covariance of flat pictures too.
            directions = torch.linalg.eigh(blocks_BDT.transpose(0, 1).flatten(1).cov().double())[1].T.flip(0)
            noise = torch.randn(conv.weight.shape, generator=generator)
            conv.weight.copy_(noise * 0.05 / conv.in_channels**0.5)
            bias_of(conv).zero_()
            chosen = directions[: conv.out_channels].unflatten(1, (conv.in_channels, 2, 2))
            conv.weight[: len(chosen)] = F.pad(chosen, (0, 1, 0, 1))
            signals.append(conv(F.pad(signals[-1], (0, 1, 0, 1))))
        x = _fit_layer(self.code, signals[-1], signals[-1])
        for conv, signal in zip(self.up, reversed(signals[:-1]), strict=True):
            x = _fit_layer(conv, F.interpolate(x, scale_factor=2.0), signal)
        _fit_layer(self.out, x, images_BCHW)

    def fit(self, images_BCHW: Tensor, seed: int) -> float:
        """Minimises the squared error of the reconstructions of these pictures. Returns its root mean square."""
        generator = torch.Generator().manual_seed(seed)
        self.start(images_BCHW[:: max(1, len(images_BCHW) // STARTED)], generator)
        images_BCHW = images_BCHW.contiguous(memory_format=torch.channels_last)  # A third faster.
        optimizer = torch.optim.Adam(self.parameters(), LEARNING_RATE, betas=(0.9, 0.99), fused=True)
        loss = torch.zeros(())
        for step in range(STEPS):
            share = min(1, (step + 1) / WARMUP) * (0.5 + 0.5 * math.cos(math.pi * step / STEPS))
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * share
            batch = images_BCHW[torch.randint(len(images_BCHW), (BATCH,), generator=generator)]
            loss = F.mse_loss(self(batch), batch)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
        self.normalize(images_BCHW)
        return float(loss.detach().sqrt())

    @torch.no_grad()
    def normalize(self, images_BCHW: Tensor) -> None:
        """Scales and shifts the latents to mean 0 and variance 1 over these pictures."""
        latents_BShw = self.encode(images_BCHW)
        std_S, mean_S = torch.std_mean(latents_BShw, dim=(0, 2, 3))
        std_S = std_S.clamp(min=1e-3)
        last = self.down[-1]
        last.weight.div_(std_S[:, None, None, None])
        bias_of(last).sub_(mean_S).div_(std_S)
        bias_of(self.code).add_(torch.einsum("oskl,s->o", self.code.weight, mean_S))
        self.code.weight.mul_(std_S[None, :, None, None])


def _fit_layer(conv: nn.Conv2d, x_BSHW: Tensor, target_BKHW: Tensor) -> Tensor:
    """Sets a 3x3 convolution by least squares, with a little weight decay. Returns its output."""
    columns_DN = F.unfold(x_BSHW, 3, padding=1).transpose(0, 1).flatten(1)
    columns_DN = F.pad(columns_DN, (0, 0, 0, 1), value=1.0)
    gram_DD = columns_DN @ columns_DN.T
    gram_DD.diagonal().add_(1e-4 * gram_DD.diagonal().mean())
    wanted_DK = columns_DN @ target_BKHW.transpose(0, 1).flatten(1).T
    found_DK = torch.linalg.solve(gram_DD.double(), wanted_DK.double())
    conv.weight.copy_(found_DK[:-1].T.view_as(conv.weight))
    bias_of(conv).copy_(found_DK[-1])
    output_BKHW: Tensor = conv(x_BSHW)
    return output_BKHW


def bias_of(layer: nn.Conv2d | nn.Linear) -> Tensor:
    assert layer.bias is not None
    return layer.bias


# ------------------------------------------------------------------------------------------------- channels


@dataclass(frozen=True)
class Pairs:
    """The places of signals as pairs of channels (c, -c) in the first groups of a layer, with constants around them."""

    width: int
    groups: int
    signals: int

    @property
    def group_width(self) -> int:
        return self.width // self.groups

    @property
    def in_group(self) -> int:
        """Signals of a group: at least half of its channels are constants."""
        return max(1, self.group_width // 4)

    @property
    def channels(self) -> list[int]:
        """All channels of the groups, which are set aside for signals and constants."""
        return list(range(-(-self.signals // self.in_group) * self.group_width))

    def pair(self, signal: int) -> tuple[int, int]:
        """Returns the channels of c and -c."""
        group, place = divmod(signal, self.in_group)
        first = group * self.group_width + 2 * place
        return first, first + 1

    @property
    def constants(self) -> dict[int, float]:
        """The constants by channel: as many times K as -K in each group, so that its mean is 0."""
        taken = {channel for signal in range(self.signals) for channel in self.pair(signal)}
        free = [channel for channel in self.channels if channel not in taken]
        return {channel: CONSTANT * (-1) ** number for number, channel in enumerate(free)}

    def std(self, signal: int) -> float:
        """Returns the standard deviation of the signal's group where the signals are zero."""
        group = self.pair(signal)[0] // self.group_width
        inside = [value for channel, value in self.constants.items() if channel // self.group_width == group]
        return CONSTANT * math.sqrt(len(inside) / self.group_width)


def signals_of(architecture: VaeArchitecture) -> tuple[int, ...]:
    """Returns the numbers of signals of a code for this architecture; empty if its norms have no place for one."""
    groups, channels = architecture.norm_num_groups, architecture.in_channels
    widths = tuple(map(min, architecture.block_out_channels, architecture.decoder_widths))
    if architecture.out_channels != channels or min(widths) // groups < 4:
        return ()
    # Half of the groups are set aside at most.
    colours, latents = (
        min(groups // 2 * Pairs(width, groups, 0).in_group for width in pair) for pair in (widths[:2], widths[-2:])
    )
    if colours < channels:
        return ()
    # A halving keeps half of the values, or more of gray, down to the number that colours have at the same size.
    inner = [
        min(channels << 2 * level, max(3, channels) << level, width // 2) for level, width in enumerate(widths[:-2], 1)
    ]
    return (*inner, min(architecture.latent_channels, latents))


def has_good_start(settings: TrainVae) -> bool:
    """Returns whether what learns begins with pretrained weights or a linear code, and not with random weights."""
    model = settings.model
    return model.init_from is not None or (model.start == "linear" and bool(signals_of(settings.architecture)))


# ---------------------------------------------------------------------------------------------------- weights


@torch.no_grad()
def write_code(code: LinearCode, autoencoder: AutoencoderKL) -> None:
    """Writes a linear code into the weights of a fresh autoencoder, which computes it from then on.

    Only the channels that carry signals are set, and the layers at both ends, which read nothing else; all other
    weights stay random.
    """
    groups, signals = autoencoder.architecture.norm_num_groups, code.signals[-1]
    encoder, decoder = autoencoder.encoder, autoencoder.decoder
    places = list(range(code.channels))
    colours = torch.eye(code.channels)[:, :, None, None]
    _set_rows(encoder.conv_in, places, places, SCALE * F.pad(colours, (1, 1, 1, 1)))
    latents = _carry(list(encoder.blocks()), code.down, groups)
    _read(encoder.conv_out, latents, LATENT_STD * torch.eye(signals)[:, :, None, None])
    means = autoencoder.architecture.latent_channels
    encoder.conv_out.weight[means:] = 0
    bias_of(encoder.conv_out)[means:] = LOGVAR

    places = list(range(signals))
    _set_rows(decoder.conv_in, places, places, SCALE / LATENT_STD * code.code.weight, SCALE * bias_of(code.code))
    _read(decoder.conv_out, _carry(list(decoder.blocks()), code.up, groups), code.out.weight, code.out.bias)
    for conv in (autoencoder.quant_conv, autoencoder.post_quant_conv):
        if isinstance(conv, nn.Conv2d):
            nn.init.dirac_(conv.weight)
            bias_of(conv).zero_()


def _carry(blocks: Sequence[nn.Module], code: Sequence[nn.Conv2d], groups: int) -> Pairs:
    """Writes the layers of the code into the resizing convolutions, and has the blocks between them pass the signals
    on: one channel each before the last resizing, a pair each after it. Returns the places of the pairs."""
    resizing = [block.conv for block in blocks if isinstance(block, (Downsample, Upsample))]
    layers = dict(zip(resizing, code, strict=True))
    signals, pairs = code[0].in_channels, None
    for block in blocks:
        if isinstance(block, (Downsample, Upsample)):
            conv, linear = block.conv, layers[block.conv]
            rows, columns = list(range(linear.out_channels)), list(range(signals))
            signals = linear.out_channels
            if conv is not resizing[-1]:
                _set_rows(conv, rows, columns, linear.weight, SCALE * bias_of(linear))
                continue
            pairs = Pairs(conv.out_channels, groups, signals)
            _clear(conv, pairs.channels)
            for sign, side in ((1, 0), (-1, 1)):
                rows = [pairs.pair(signal)[side] for signal in range(signals)]
                _set_rows(conv, rows, columns, sign * linear.weight, sign * SCALE * bias_of(linear))
            _set_constants(conv, pairs)
        elif isinstance(block, ResnetBlock):
            pairs = _pass_on(block, signals, pairs)
        elif isinstance(block, Attention):
            (out,) = block.to_out
            assert isinstance(out, nn.Linear)
            _clear(out, pairs.channels if pairs else list(range(signals)))
    assert pairs is not None
    return pairs


def _pass_on(block: ResnetBlock, signals: int, pairs: Pairs | None) -> Pairs | None:
    """Has the residual branch add nothing to the signals, and a convolution of the shortcut copy them. Returns the
    places of the pairs behind the block."""
    after = replace(pairs, width=block.conv2.out_channels) if pairs else None
    _clear(block.conv2, after.channels if after else list(range(signals)))
    if isinstance(block.conv_shortcut, nn.Conv2d):
        if pairs and after:
            _clear(block.conv_shortcut, after.channels)
            copied = [(pairs.pair(signal), after.pair(signal)) for signal in range(signals)]
            old, new = ([channel for both in places for channel in both] for places in zip(*copied, strict=True))
        else:
            old = new = list(range(signals))
        _set_rows(block.conv_shortcut, new, old, torch.eye(len(old))[:, :, None, None])
        if after:
            _set_constants(block.conv_shortcut, after)
    return after


def _read(conv: nn.Conv2d, pairs: Pairs, weight_OSkl: Tensor, bias_O: Tensor | None = None) -> None:
    """Has a convolution behind a norm and a SiLU compute a convolution of the signals, in its first rows."""
    rows, middle = slice(0, len(weight_OSkl)), slice(1, 2) if weight_OSkl.shape[-1] == 1 else slice(None)
    conv.weight[rows] = 0
    bias_of(conv)[rows] = 0 if bias_O is None else bias_O
    for signal in range(pairs.signals):
        for sign, channel in zip((1, -1), pairs.pair(signal), strict=True):
            conv.weight[rows, channel, middle, middle] = sign * pairs.std(signal) / SCALE * weight_OSkl[:, signal]


def _set_rows(
    conv: nn.Conv2d, rows: list[int], columns: list[int], weight_OSkl: Tensor, bias_O: Tensor | None = None
) -> None:
    """Has the rows of a convolution compute another one, of these columns of its input."""
    _clear(conv, rows)
    for row, weight_Skl in zip(rows, weight_OSkl, strict=True):
        conv.weight[row, columns] = weight_Skl
    if bias_O is not None:
        bias_of(conv)[rows] = bias_O


def _clear(layer: nn.Conv2d | nn.Linear, rows: list[int]) -> None:
    layer.weight[rows] = 0
    bias_of(layer)[rows] = 0


def _set_constants(conv: nn.Conv2d, pairs: Pairs) -> None:
    for channel, value in pairs.constants.items():
        bias_of(conv)[channel] = value


# ------------------------------------------------------------------------------------------------------ start


def fit_code(pictures: Sequence[Picture], architecture: VaeArchitecture, seed: int) -> LinearCode:
    """Returns a code for these pictures and an architecture that has a place for one."""
    began = time.perf_counter()
    tile = max(64, 8 * architecture.downsampling)
    count = min(PICTURES, len(pictures))
    chosen = [pictures[index * len(pictures) // count] for index in range(count)]
    crops = CropDataset(chosen, TILES * tile, seed, False, architecture.in_channels)
    images = torch.stack([crops[Sample(0, index)] for index in range(count)])
    tiles_BCHW = images.unfold(2, tile, tile).unfold(3, tile, tile).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
    code = LinearCode(signals_of(architecture), architecture.in_channels)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # Small convolutions take longer with several, above all on a busy machine.
    try:
        error = code.fit(to_unit(tiles_BCHW), seed)
    finally:
        torch.set_num_threads(threads)
    log.info(
        "start: a linear code of the pictures, %.1f dB (fitted to %s in %.0f s)",
        20 * math.log10(2 / error), counted(len(chosen), "picture"), time.perf_counter() - began,
    )  # fmt: skip
    return code
