"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) of the attention's projections, and merging them.

Tensors of the model keep their names, and two are added to each adapted layer, so that a model without adapters loads
the same weights.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gputrain.asr import model as networks

DOWN, UP = "lora_down", "lora_up"


class LoraLinear(nn.Linear):
    """A linear layer plus a trained product of two thin matrices, which begins at zero."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        like: dict[str, Any] = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        self.lora_down = nn.Parameter(torch.empty(rank, layer.in_features, **like))
        self.lora_up = nn.Parameter(torch.zeros(layer.out_features, rank, **like))
        nn.init.kaiming_uniform_(self.lora_down, a=5**0.5)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias) + F.linear(F.linear(input, self.lora_down), self.lora_up)


def add_lora(model: Any, rank: int) -> None:
    """Replaces the attention's projections of a recogniser by ones with adapters."""
    family = networks.family(model)
    for layer in networks.base_of(model).encoder.layers:
        attention = getattr(layer, family.attention)
        for name in family.projections:
            setattr(attention, name, LoraLinear(getattr(attention, name), rank))


def lora_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if isinstance(module, LoraLinear):
            yield from (module.lora_down, module.lora_up)


def merged(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights of a model without adapters that computes the same."""
    plain = {name: tensor for name, tensor in weights.items() if not name.endswith((DOWN, UP))}
    for name, down in weights.items():
        if name.endswith(DOWN):
            layer = name.removesuffix(DOWN)
            weight = plain[f"{layer}weight"]
            product = weights[f"{layer}{UP}"].double() @ down.double()
            plain[f"{layer}weight"] = (weight.double() + product).to(weight.dtype)
    return plain
