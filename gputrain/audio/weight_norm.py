"""Convolutions with weight or spectral normalisation, whose weights can be computed once for a whole step."""

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gputrain.engine.optim import WeightSlot, layer_weights, weights_cast_once

CONVOLUTIONS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: F.conv1d,
    nn.Conv2d: F.conv2d,
    nn.ConvTranspose1d: F.conv_transpose1d,
}


class WeightNormed(nn.Module):
    """A convolution whose weight has the direction of `weight_v` and the norms of `weight_g`, both trained (Salimans
    and Kingma 2016, arXiv:1602.07868). The weight is computed in every forward pass, or once within
    `cached_weights`."""

    def __init__(self, conv: nn.Conv1d | nn.Conv2d | nn.ConvTranspose1d) -> None:
        super().__init__()
        named: dict[str, Any] = {name: getattr(conv, name) for name in ("stride", "padding", "dilation", "groups")}
        if isinstance(conv, nn.ConvTranspose1d):
            named["output_padding"] = conv.output_padding
        self.convolve = functools.partial(CONVOLUTIONS[type(conv)], **named)
        self.bias = conv.bias
        self.weight_g = nn.Parameter(row_norms(conv.weight.detach()))
        self.weight_v = conv.weight
        self.made: Tensor | None = None

    def compute_weight(self) -> Tensor:
        """Computes the weight by the function behind torch.nn.utils.weight_norm, whose backward pass is one kernel. It
        always returns a contiguous weight, so a channels_last weight is passed in the order of its memory."""
        if not _is_channels_last(self.weight_v):
            return torch._weight_norm(self.weight_v, self.weight_g, 0)
        weight_KHWC = torch._weight_norm(self.weight_v.permute(0, 2, 3, 1), self.weight_g, 0)
        return weight_KHWC.permute(0, 3, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.compute_weight() if self.made is None else self.made
        return self.convolve(x, weight, self.bias)


class SpectralNormed(WeightNormed):
    """A convolution whose weight is divided by its largest singular value (Miyato et al. 2018, arXiv:1802.05957).

    Power iteration estimates the value; every call of `iterate` is one or more steps of it. (Steps in every forward
    pass, as is common, would make the weights depend on how a batch is split.)
    """

    weight_u: Tensor
    weight_v: Tensor

    def __init__(self, conv: nn.Conv1d) -> None:
        super().__init__(conv)
        del self.weight_g, self.weight_v
        self.weight_orig = conv.weight
        self.register_buffer("weight_u", F.normalize(torch.randn(len(conv.weight)), dim=0))
        self.register_buffer("weight_v", torch.zeros(conv.weight[0].numel()))
        self.iterate(steps=15)

    @torch.no_grad()
    def iterate(self, steps: int = 1) -> None:
        matrix = self.weight_orig.flatten(1)
        for _ in range(steps):
            self.weight_v.copy_(F.normalize(matrix.T @ self.weight_u, dim=0))
            self.weight_u.copy_(F.normalize(matrix @ self.weight_v, dim=0))

    def compute_weight(self) -> Tensor:
        with torch.autocast(self.weight_orig.device.type, enabled=False):
            return self.weight_orig / (self.weight_u @ self.weight_orig.flatten(1) @ self.weight_v)


@contextmanager
def cached_weights(*modules: nn.Module) -> Iterator[None]:
    """Computes the weights of the weight-normed convolutions of `modules` once for all forward passes in the block.

    The gradients of all micro-batches and loss terms are summed on these weights, and are propagated to weight_g and
    weight_v when the block is left. They are dropped if an error leaves it."""
    layers = [layer for module in modules for layer in module.modules() if isinstance(layer, WeightNormed)]
    weights = [layer.compute_weight() for layer in layers]
    leaves = [weight.detach().requires_grad_(weight.requires_grad) for weight in weights]
    for layer, leaf in zip(layers, leaves, strict=True):
        layer.made = leaf
    try:
        yield
        reached = [(weight, leaf.grad) for weight, leaf in zip(weights, leaves, strict=True) if leaf.grad is not None]
        if reached:
            torch.autograd.backward([weight for weight, _ in reached], [gradient for _, gradient in reached])
    finally:
        for layer in layers:
            layer.made = None


@contextmanager
def shared_weights(
    *modules: nn.Module, dtype: torch.dtype, without_autocast: Collection[nn.Module] = ()
) -> Iterator[None]:
    """Computes weights once, as `cached_weights`, and casts them once to `dtype`, the format of autocast, together
    with those of plain layers. `without_autocast` are parts of `modules` that compute without autocast."""
    left_out = {part for module in without_autocast for part in module.modules()}
    normed = [
        layer
        for module in modules
        for layer in module.modules()
        if isinstance(layer, WeightNormed) and layer not in left_out
    ]
    with cached_weights(*modules):
        slots = [WeightSlot(layer, "made") for layer in normed]
        slots += [WeightSlot(layer, "bias") for layer in normed if layer.bias is not None]
        with weights_cast_once([*layer_weights(modules, without_autocast), *slots], dtype):
            yield


def gradient_leaves(module: nn.Module) -> list[Tensor]:
    """Returns the tensors that collect a module's gradients: its trained parameters, and weights computed once."""
    made = [layer.made for layer in module.modules() if isinstance(layer, WeightNormed) and layer.made is not None]
    return [leaf for leaf in (*module.parameters(), *made) if leaf.requires_grad]


def detached_weights(module: nn.Module) -> dict[str, Tensor]:
    """Returns the module's parameters, and weights computed once, by name and without gradients, in the form that
    torch.func.functional_call takes."""
    weights = {name: parameter.detach() for name, parameter in module.named_parameters()}
    for name, layer in module.named_modules():
        if isinstance(layer, WeightNormed) and layer.made is not None:
            weights[f"{name}.made"] = layer.made.detach()
    return weights


def _is_channels_last(weight: Tensor) -> bool:
    """Returns True if a weight has exactly the strides of channels_last; a contiguous one of one channel has not."""
    if weight.ndim != 4:
        return False
    _, C, H, W = weight.shape
    return weight.stride() == (H * W * C, 1, W * C, C)


def row_norms(weight: Tensor) -> Tensor:
    """Returns the norm of each row with all dimensions kept, such as (rows, 1, 1)."""
    lengths: Tensor = torch.linalg.vector_norm(weight, dim=tuple(range(1, weight.ndim)), keepdim=True)
    return lengths
