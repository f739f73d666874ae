"""Muon for matrices with AdamW for everything else, as one optimizer that `train.update` can drive.

Shapes: K matrices of one shape stacked, R rows, C columns, and `...` further dimensions of a weight.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gputrain.engine.optim import StepCounts, begin_adamw, step_adamw
from gputrain.engine.out_of_memory import retried_once

# The quintic of https://kellerjordan.github.io/posts/muon/: after five rounds singular values lie near 0.7 to 1.2.
LINEAR, CUBIC, QUINTIC = 3.4445, -4.7750, 2.0315
LEAST_NORM = 1e-7
# A stack of this many numbers takes 10 bytes each at the peak with bf16 products and 16 with fp32: 0.16 or 0.25 GB.
STACKED_NUMBERS = 15 << 20
# Names in torch.nn.utils.weight_norm and torch.nn.utils.parametrizations.weight_norm.
GAINS = ("weight_g", "original0")


def muon_with_adamw(
    modules: Iterable[nn.Module],
    *,
    learning_rate: float,
    weight_decay: float,
    momentum: float = 0.95,
    betas: tuple[float, float] = (0.8, 0.99),
    product_dtype: torch.dtype | None = None,
) -> "Muon":
    """Returns Muon for weights of two or more dimensions except embeddings and weight-norm gains, which AdamW updates
    together with biases.

    Weights that Muon updates are decayed, the others are not. `product_dtype` is passed on to Muon.
    """
    matrices: dict[nn.Parameter, None] = {}
    rest: dict[nn.Parameter, None] = {}
    for module in modules:
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False):
                plain = parameter.ndim < 2 or isinstance(part, nn.Embedding) or name in GAINS
                (rest if plain else matrices)[parameter] = None
    return Muon(
        matrices,
        rest,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        momentum=momentum,
        betas=betas,
        product_dtype=product_dtype,
    )


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/), with
    Nesterov's look ahead and decoupled weight decay; fused AdamW for `rest`.

    A weight of shape (out, ...) counts as the matrix (out, -1). An update is scaled by the root of the matrix's larger
    side, so that its root mean square is about `update_rms` learning rates for any shape. torch.optim.Muon has
    this as adjust_lr_fn="match_rms_adamw", with 0.2 for `update_rms`; its default, "original", scales by
    sqrt(max(1, rows / columns)) instead and needs another learning rate.

    As in torch's fused optimizers, gradients are divided by `grad_scale`, and if `found_inf` is 1 neither weights nor
    state change. Both are tensors on the device of the weights, and a step needs no device sync.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        rest: Iterable[nn.Parameter] = (),
        *,
        learning_rate: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        update_rms: float = 1.0,
        rounds: int = 5,
        product_dtype: torch.dtype | None = None,
        betas: tuple[float, float] = (0.8, 0.99),
        eps: float = 1e-8,
    ) -> None:
        """`rounds` of Newton-Schulz run in `product_dtype`; default: bf16 on GPUs that support it, else fp32."""
        self.product_dtype = product_dtype
        orthogonal = {"momentum": momentum, "update_rms": update_rms, "rounds": rounds, "weight_decay": weight_decay}
        # "fused" tells load_state_dict that AdamW counts its steps on the device.
        plain = {"betas": betas, "eps": eps, "weight_decay": 0.0, "fused": True}
        groups: list[dict[str, Any]] = [
            {"params": list(matrices), "orthogonal": True, **orthogonal},
            {"params": list(rest), "orthogonal": False, **plain},
        ]
        super().__init__([group for group in groups if group["params"]], {"lr": learning_rate})
        self._counts = StepCounts()
        self._averaged: set[Tensor] = set()  # Parameters whose momentum contains the gradient of this step.
        self._made: Tensor | float = 1.0  # 0 if the step is not made.
        self._skipped: Tensor | None = None  # True if it is not made.

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        self._averaged = set()
        self._made = 1.0 if self.found_inf is None else 1 - self.found_inf
        self._skipped = None if self.found_inf is None else self.found_inf > 0
        for group in self.param_groups:
            parameters: list[Tensor] = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["orthogonal"]:
                if parameters and group["weight_decay"]:
                    torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"] * self._made)
                for alike in stacks(parameters):
                    self._step_in_parts(alike, group)
            elif parameters:
                self._step_plain(parameters, group)

    def _step_in_parts(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Muon's step for parameters of one shape. When memory runs out, they step one after the other."""

        def one_after_the_other() -> None:
            for parameter in parameters:
                self._step_matrices([parameter], group)

        retried_once(lambda: self._step_matrices(parameters, group), one_after_the_other)

    def _step_matrices(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Muon's step for parameters of one shape. All of them step, or none does if memory runs out: whatever needs
        memory comes before the first change."""
        x_KRC = orthogonalised(self._look_ahead(parameters, group["momentum"]).flatten(2), group["rounds"])
        scale = group["lr"] * group["update_rms"] * math.sqrt(max(x_KRC.shape[1:]))
        updates = x_KRC.to(parameters[0].dtype).mul_(-scale * self._made).reshape(-1, *parameters[0].shape)
        torch._foreach_add_(parameters, updates.unbind())

    def _look_ahead(self, parameters: list[Tensor], momentum: float) -> Tensor:
        """Update the momentum, unless this step has updated it before memory ran out.

        Returns Nesterov's mix of momentum and gradients, (K, ...), in the products' dtype.
        """
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        gradients = torch.stack([parameter.grad for parameter in parameters if parameter.grad is not None])
        averages = torch.stack(buffers)
        if self.grad_scale is not None:
            gradients.div_(self.grad_scale)
        if self._skipped is not None:  # Interpolating towards itself leaves the momentum unchanged.
            torch.where(self._skipped, averages, gradients, out=gradients)
        if not self._averaged.issuperset(parameters):
            averages.lerp_(gradients, 1 - momentum)
            torch._foreach_copy_(buffers, averages.unbind())
            self._averaged.update(parameters)
        return gradients.lerp_(averages, momentum).to(self.product_dtype or product_dtype(gradients))

    def _step_plain(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """AdamW's step, fused, with one kernel that counts it."""
        begin_adamw(self.state, parameters)
        with self._counts.counting(self.state, parameters, self.found_inf):
            step_adamw(self.state, parameters, group, self.grad_scale, self.found_inf)


def stacks(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Returns lists of parameters of one shape, each of at most STACKED_NUMBERS numbers or of one parameter."""
    alike: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        alike.setdefault((parameter.shape, parameter.dtype, parameter.device), []).append(parameter)
    for members in alike.values():
        most = max(1, STACKED_NUMBERS // members[0].numel())
        for first in range(0, len(members), most):
            yield members[first : first + most]


def product_dtype(tensor: Tensor) -> torch.dtype:
    """Returns bf16 on GPUs whose matrix units support it (compute capability 8.0), else the tensor's dtype."""
    known = tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (8, 0)
    return torch.bfloat16 if known else tensor.dtype


def orthogonalised(x_KRC: Tensor, rounds: int) -> Tensor:
    """Returns each matrix with its singular values brought near 1, by `rounds` of a quintic Newton-Schulz iteration.

    A round maps X to a X + b (X X') X + c (X X')^2 X. Tall matrices are transposed, so that the Gram matrix X X' has
    the shorter side. https://kellerjordan.github.io/posts/muon/
    """
    tall = x_KRC.shape[1] > x_KRC.shape[2]
    if tall:
        x_KRC = x_KRC.mT
    x_KRC = x_KRC / torch.linalg.vector_norm(x_KRC, dim=(1, 2), keepdim=True).clamp(min=LEAST_NORM)
    for _ in range(rounds):
        gram_KRR = x_KRC @ x_KRC.mT
        factor_KRR = torch.baddbmm(gram_KRR, gram_KRR, gram_KRR, beta=CUBIC, alpha=QUINTIC)  # b G + c G G
        x_KRC = torch.baddbmm(x_KRC, factor_KRR, x_KRC, beta=LINEAR)
    return x_KRC.mT.contiguous() if tall else x_KRC  # foreach needs one launch only if all tensors have one layout.
