"""Numbers that every version of torch and numpy and every CPU makes alike: raw words of PCG64, which numpy guarantees
not to change (NEP 19), and integer arithmetic."""

import zlib

import numpy as np
import torch
from torch import Tensor, nn

from gputrain.audio.weight_norm import SpectralNormed, WeightNormed, row_norms


def uniform(name: str, *shape: int) -> Tensor:
    """Returns float64 numbers in [-1, 1) that depend only on `name`, and have at most 30 significant bits."""
    count = int(np.prod(shape, dtype=np.int64))
    words = np.random.PCG64(np.random.SeedSequence(zlib.crc32(name.encode()))).random_raw(count)
    return torch.from_numpy((words >> np.uint64(34)).astype(np.float64) * 2.0**-29 - 1).reshape(shape)


def normal_like(name: str, tensor: Tensor) -> Tensor:
    """Returns numbers with the shape of `tensor`, about normally distributed: each is a sum of twelve uniform ones,
    which is exact in float64."""
    return 0.5 * uniform(name, 12, *tensor.shape).sum(dim=0)


@torch.no_grad()
def set_weights(modules: dict[str, nn.Module]) -> None:
    """Replaces the random initial weights, which differ in the last bits from CPU to CPU."""
    for place, module in modules.items():
        if place == "ema":
            continue
        for name, parameter in module.named_parameters():
            drawn = uniform(f"{place}.{name}", *parameter.shape)
            if parameter.ndim > 1:
                parameter.copy_(drawn * (3 / parameter[0].numel()) ** 0.5)
            else:
                is_gain = bool((parameter == 1).all())
                parameter.copy_(1 + 0.1 * drawn if is_gain else 0.1 * drawn)
        for layer in module.modules():
            if isinstance(layer, SpectralNormed):
                layer.weight_u.fill_(len(layer.weight_u) ** -0.5)
                layer.iterate(steps=15)
            elif isinstance(layer, WeightNormed):
                layer.weight_g.copy_(row_norms(layer.weight_v))
