"""The autoencoder of latent diffusion models (arXiv:2112.10752), with the layers and tensor names of stock diffusers.

Shape suffixes: B items, C channels, H and W pixels, h and w latent pixels (H / 8 and W / 8 with four blocks),
L latent channels, K channels out of a convolution, T = h * w tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from gputrain.engine.recipe import at_least_fp32
from gputrain.hw.runtime import Runtime
from gputrain.vae.architecture import VaeArchitecture
from gputrain.vae.attention import attention
from gputrain.vae.memory_efficient_layers import (
    Features,
    compute_dtype,
    memory_format,
    norm_silu_conv,
)
from gputrain.vae.norm_arithmetic import EAGER, Arithmetic

EPS = 1e-6  # epsilon of every GroupNorm


def upsample_conv(x_BChw: Tensor, conv: nn.Conv2d) -> Features:
    """Returns `conv` of `x_BChw` with each pixel repeated twice along height and width: (B, K, 2h, 2w), K channels out.

    It takes four ninths of the FLOPs, and the doubled picture is never made: each of the four output pixels of an input
    pixel depends on 2x2 input pixels, so the operation is a transposed convolution of the small picture with stride 2
    and a 4x4 kernel. It applies autocast itself and keeps the memory format. The dtype is that of `norm_silu_conv`.
    """
    out_BKHW = _upsample_conv(x_BChw, conv.weight, compute_dtype(x_BChw), memory_format(x_BChw))
    return Features(out_BKHW, conv.bias)


class _UpsampleConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BChw: Tensor, weight_KC33: Tensor, dtype: torch.dtype, memory_format: torch.memory_format
    ) -> Tensor:
        ctx.save_for_backward(x_BChw, weight_KC33)
        ctx.dtype, ctx.memory_format = dtype, memory_format
        return F.conv_transpose2d(x_BChw.to(dtype), _doubled(weight_KC33).to(dtype), stride=2, padding=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BKHW: Tensor) -> tuple[Tensor | None, ...]:
        x_BChw, weight_KC33 = ctx.saved_tensors
        grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(
            grad_BKHW.contiguous(memory_format=ctx.memory_format),
            x_BChw.to(ctx.dtype),
            _doubled(weight_KC33).to(ctx.dtype),
            [weight_KC33.shape[0]],
            stride=[2, 2],
            padding=[1, 1],
            dilation=[1, 1],
            transposed=True,
            output_padding=[0, 0],
            groups=1,
            output_mask=[*ctx.needs_input_grad[:2], False],
        )
        return grad_x, None if grad_weight is None else _undoubled(grad_weight), None, None


_upsample_conv: Callable[..., Tensor] = _UpsampleConv.apply


# Rows 2i and 2i + 1 of a doubled picture repeat row i. Three taps at row 2i read rows i - 1, i and i of the small one,
# which are two taps (first, second + third); at row 2i + 1 they read rows i, i and i + 1: (first + second, third). The
# same holds for columns. The kernel of a transposed convolution has these taps in reverse, odd and even rows in turns.
def _doubled(weight_KC33: Tensor) -> Tensor:
    """Returns the kernel (C, K, 4, 4) of the transposed convolution, in fp32 or fp64: the sums over windows of 2x2
    taps, in reverse."""
    taps_CK33 = at_least_fp32(weight_KC33).transpose(0, 1)
    return F.avg_pool2d(taps_CK33.flip(2, 3), 2, stride=1, padding=1, divisor_override=1)


def _undoubled(grad_CK44: Tensor) -> Tensor:
    """Returns the gradient of the 3x3 kernel from that of `_doubled`, (K, C, 3, 3) in fp32 or fp64."""
    grad_CK33 = F.avg_pool2d(at_least_fp32(grad_CK44), 2, stride=1, divisor_override=1)
    return grad_CK33.flip(2, 3).transpose(0, 1)


class Moments(NamedTuple):
    """Mean and log-variance of the Gaussian over latents, in fp32 or fp64."""

    mean_BLhw: Tensor
    logvar_BLhw: Tensor


class AutoencoderKL(nn.Module):
    """Encodes pictures in [-1, 1] to a Gaussian over latents, and decodes latents to pictures.

    With `checkpointing`, a residual block keeps only its input for the backward pass and is recomputed there: five
    eighths of the activations' memory, for up to a third more time. Without `recompute_norms`, autograd stores the
    inputs of norms and activations, as in stock diffusers: the same result for four times the memory.
    """

    def __init__(
        self, architecture: VaeArchitecture, *, checkpointing: bool = False, recompute_norms: bool = True
    ) -> None:
        super().__init__()
        self.architecture = architecture
        self.checkpointing, self.recompute_norms = checkpointing, recompute_norms
        latent = architecture.latent_channels
        self.encoder = Encoder(architecture)
        self.decoder = Decoder(architecture)
        self.quant_conv = nn.Conv2d(2 * latent, 2 * latent, 1) if architecture.use_quant_conv else nn.Identity()
        self.post_quant_conv = nn.Conv2d(latent, latent, 1) if architecture.use_post_quant_conv else nn.Identity()
        self.use(EAGER if recompute_norms else None)

    def use(self, arithmetic: Arithmetic | None) -> None:
        """Runs memory-efficient layers with this arithmetic; None: plain layers."""
        for module in self.modules():
            if isinstance(module, Layer):
                module.arithmetic = arithmetic

    def encode(self, images_BCHW: Tensor) -> Moments:
        """Returns the distribution of the latents. H and W are multiples of `architecture.downsampling`."""
        moments_BLhw = self.quant_conv(self.encoder(images_BCHW, self.checkpointing))
        moments_BLhw = moments_BLhw.to(torch.promote_types(moments_BLhw.dtype, torch.float32))
        mean_BLhw, logvar_BLhw = moments_BLhw.chunk(2, dim=1)
        return Moments(mean_BLhw, logvar_BLhw.clamp(-30.0, 20.0))

    def decode(self, latents_BLhw: Tensor) -> Tensor:
        """Returns pictures (B, C, H, W) in about [-1, 1], in the autocast dtype."""
        images_BCHW: Tensor = self.decoder(self.post_quant_conv(latents_BLhw), self.checkpointing)
        return images_BCHW


def blocks(model: AutoencoderKL) -> list[nn.Module]:
    """Returns the blocks between the first and the last convolution of encoder and decoder, in order of execution."""
    coders = (coder for coder in (model.encoder, model.decoder) if isinstance(coder, (Encoder, Decoder)))
    return [block for coder in coders for block in (*coder.blocks(), coder.head)]


def compile_layers(model: AutoencoderKL, runtime: Runtime) -> None:
    """Compiles the elementwise functions between the convolutions, and plain layers block by block; without effect if
    the runtime does not compile."""
    if not model.recompute_norms:
        runtime.compile_modules(blocks(model))
    elif runtime.plan.compile.value:
        model.use(Arithmetic.compiled(runtime.compile))


class Encoder(nn.Module):
    """Maps pictures to the mean and log-variance of their latents, concatenated along the channels."""

    def __init__(self, architecture: VaeArchitecture) -> None:
        super().__init__()
        widths, groups = architecture.block_out_channels, architecture.norm_num_groups
        self.conv_in = nn.Conv2d(architecture.in_channels, widths[0], 3, padding=1)
        self.down_blocks = nn.ModuleList()
        for level, (width_in, width) in enumerate(pairwise((widths[0], *widths))):
            resnets = _resnets(architecture.layers_per_block, width_in, width, groups)
            downsamplers = [Downsample(width)] if level < len(widths) - 1 else []
            self.down_blocks.append(_named(resnets=resnets, downsamplers=downsamplers))
        self.mid_block = _middle(widths[-1], groups, architecture.mid_block_add_attention)
        self.conv_norm_out = nn.GroupNorm(groups, widths[-1], eps=EPS)
        self.conv_out = nn.Conv2d(widths[-1], 2 * architecture.latent_channels, 3, padding=1)
        self.head = Head()

    def blocks(self) -> Iterator[nn.Module]:
        for stage in self.down_blocks:
            yield from _stage_blocks(stage)
        yield from _middle_blocks(self.mid_block)

    def forward(self, images_BCHW: Tensor, checkpointing: bool) -> Tensor:
        features = _run(self.blocks(), self.head.convolved(images_BCHW, self.conv_in, padding=1), checkpointing)
        moments_BLhw: Tensor = self.head(features, self.conv_norm_out, self.conv_out)
        return moments_BLhw


class Decoder(nn.Module):
    """Maps latents to pictures; each level but the last doubles the size."""

    def __init__(self, architecture: VaeArchitecture) -> None:
        super().__init__()
        widths, groups = architecture.decoder_widths[::-1], architecture.norm_num_groups
        self.conv_in = nn.Conv2d(architecture.latent_channels, widths[0], 3, padding=1)
        self.mid_block = _middle(widths[0], groups, architecture.mid_block_add_attention)
        self.up_blocks = nn.ModuleList()
        for level, (width_in, width) in enumerate(pairwise((widths[0], *widths))):
            resnets = _resnets(architecture.layers_per_block + 1, width_in, width, groups)
            upsamplers = [Upsample(width)] if level < len(widths) - 1 else []
            self.up_blocks.append(_named(resnets=resnets, upsamplers=upsamplers))
        self.conv_norm_out = nn.GroupNorm(groups, widths[-1], eps=EPS)
        self.conv_out = nn.Conv2d(widths[-1], architecture.out_channels, 3, padding=1)
        self.head = Head()

    def blocks(self) -> Iterator[nn.Module]:
        yield from _middle_blocks(self.mid_block)
        for stage in self.up_blocks:
            yield from _stage_blocks(stage)

    def forward(self, latents_BLhw: Tensor, checkpointing: bool) -> Tensor:
        features = _run(self.blocks(), self.head.convolved(latents_BLhw, self.conv_in, padding=1), checkpointing)
        images_BCHW: Tensor = self.head(features, self.conv_norm_out, self.conv_out)
        return images_BCHW


class Layer(nn.Module):
    """A part that runs either memory-efficient or plain layers, and takes and returns features."""

    arithmetic: Arithmetic | None = EAGER  # None: plain layers

    def convolved(self, x_BCHW: Tensor, conv: nn.Conv2d, **options: int) -> Features:
        """Returns a convolution, whose bias memory-efficient layers leave to the norm after it."""
        later = self.arithmetic is not None
        out_BKHW = F.conv2d(x_BCHW, conv.weight, None if later else conv.bias, **options)
        return Features(out_BKHW, conv.bias if later else None)


class ResnetBlock(Layer):
    """Returns x + conv(silu(norm(conv(silu(norm(x)))))), with a 1x1 convolution of x if the width changes."""

    def __init__(self, width_in: int, width: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, width_in, eps=EPS)
        self.conv1 = nn.Conv2d(width_in, width, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, width, eps=EPS)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(width_in, width, 1) if width_in != width else nn.Identity()

    def forward(self, features: Features) -> Features:
        if not self.arithmetic:
            x_BCHW, _ = features
            hidden_BCHW: Tensor = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x_BCHW))))))
            shortcut_BCHW: Tensor = self.conv_shortcut(x_BCHW)
            return Features(shortcut_BCHW + hidden_BCHW)
        hidden, features = norm_silu_conv(features, self.norm1, self.conv1, self.arithmetic)
        hidden, _ = norm_silu_conv(hidden, self.norm2, self.conv2, self.arithmetic)
        return self._shortcut(features).plus(hidden)

    def _shortcut(self, features: Features) -> Features:
        if not isinstance(self.conv_shortcut, nn.Conv2d):
            return features
        x_BCHW, offset_C = features
        shortcut = self.convolved(x_BCHW, self.conv_shortcut)
        if offset_C is None or shortcut.offset_C is None:
            return shortcut
        # Of the offset, which is the same at each pixel, a 1x1 convolution is a product with a matrix.
        return Features(shortcut.x_BCHW, shortcut.offset_C + (self.conv_shortcut.weight[:, :, 0, 0] * offset_C).sum(1))


class Attention(Layer):
    """Returns x + attention(norm(x)) over all pixels, with a single head as wide as x (arXiv:1706.03762)."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.group_norm = nn.GroupNorm(groups, width, eps=EPS)
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(width, width)
        self.to_v = nn.Linear(width, width)
        self.to_out = nn.ModuleList([nn.Linear(width, width)])

    def forward(self, features: Features) -> Features:
        x_BCHW = features.added()
        # The norm's fp32 output is cast once: autocast would cast it, and keep it, for each of the three products.
        normed_BTC = self.group_norm(x_BCHW.flatten(2)).to(compute_dtype(x_BCHW)).transpose(1, 2)
        q_BTC, k_BTC, v_BTC = (to(normed_BTC) for to in (self.to_q, self.to_k, self.to_v))
        scores = self.arithmetic.scores if self.arithmetic else None
        out_BTC: Tensor = self.to_out[0](attention(q_BTC, k_BTC, v_BTC, scores))
        # The sum has the memory format of its first term.
        return Features(x_BCHW + out_BTC.transpose(1, 2).view(x_BCHW.shape))


class Downsample(Layer):
    """A 3x3 convolution of stride 2, with one pixel of padding on the right and at the bottom only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, features: Features) -> Features:
        # Padding of two on all sides takes no copy of the picture, and gives another first row and first column.
        x_BChw, bias_C = self.convolved(features.added(), self.conv, stride=2, padding=2)
        return Features(x_BChw[:, :, 1:, 1:].contiguous(memory_format=memory_format(x_BChw)), bias_C)


class Upsample(Layer):
    """Repeats each pixel twice along height and width, then applies a 3x3 convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, features: Features) -> Features:
        x_BChw = features.added()
        if self.arithmetic:
            return upsample_conv(x_BChw, self.conv)
        return Features(self.conv(F.interpolate(x_BChw, scale_factor=2.0, mode="nearest")))


class Head(Layer):
    """Applies the norm, SiLU and convolution that end encoder and decoder. It is a module so that it can be compiled;
    the parameters stay in encoder and decoder, as in diffusers."""

    def forward(self, features: Features, norm: nn.GroupNorm, conv: nn.Conv2d) -> Tensor:
        if self.arithmetic:
            return norm_silu_conv(features, norm, conv, self.arithmetic)[0].added()
        out_BKHW: Tensor = conv(F.silu(norm(features.x_BCHW)))
        return out_BKHW


def _resnets(count: int, width_in: int, width: int, groups: int) -> list[nn.Module]:
    return [ResnetBlock(width_in if i == 0 else width, width, groups) for i in range(count)]


def _middle(width: int, groups: int, attention: bool) -> nn.ModuleDict:
    first = ResnetBlock(width, width, groups)
    attentions = [Attention(width, groups)] if attention else []
    return _named(resnets=[first, ResnetBlock(width, width, groups)], attentions=attentions)


def _named(**lists: Sequence[nn.Module]) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.ModuleList(modules) for name, modules in lists.items()})


def _middle_blocks(middle: nn.ModuleDict) -> Iterator[nn.Module]:
    first, last = middle["resnets"].children()
    return iter((first, *middle["attentions"].children(), last))


def _stage_blocks(stage: nn.Module) -> Iterator[nn.Module]:
    return (block for part in stage.children() for block in part.children())


def _run(blocks: Iterator[nn.Module], features: Features, checkpointing: bool) -> Features:
    for block in blocks:
        if checkpointing and torch.is_grad_enabled() and isinstance(block, ResnetBlock):
            run = partial(_run_block, block)
            features = checkpoint(run, *features, use_reentrant=False, preserve_rng_state=False)
        else:
            features = block(features)
    return features


def _run_block(block: nn.Module, x_BCHW: Tensor, offset_C: Tensor | None) -> Features:
    """Takes the features' tensors one by one, in which form checkpointing keeps them as autograd does."""
    features: Features = block(Features(x_BCHW, offset_C))
    return features
