"""AdamW and Muon, loss scaling, the moving average of the weights, and their 16-bit copies."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from gputrain.engine.out_of_memory import retried_once

Model = TypeVar("Model", bound=nn.Module)


def adamw(
    parameters: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float = 1e-8,
) -> "FusedAdamW":
    """Returns fused AdamW that decays weights, but not gains and biases (one dimension)."""
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for parameter in parameters:
        (decayed if parameter.ndim > 1 else kept).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return FusedAdamW([g for g in groups if g["params"]], lr=learning_rate, betas=betas, eps=eps, fused=True)


class FusedAdamW(torch.optim.AdamW):
    """torch's fused AdamW with the same arithmetic, whose counts of steps are one tensor: torch launches kernels that
    add 1 to hundreds of them, and as many that subtract `found_inf` again."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.counts = StepCounts()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        groups = [[weight for weight in group["params"] if weight.grad is not None] for group in self.param_groups]
        every = [parameter for parameters in groups for parameter in parameters]
        begin_adamw(self.state, every)
        with self.counts.counting(self.state, every, self.found_inf):
            for group, parameters in zip(self.param_groups, groups, strict=True):
                step_adamw(self.state, parameters, group, self.grad_scale, self.found_inf)


class StepCounts:
    """The counts of AdamW's steps, one for each parameter, as places of one tensor, so that one kernel counts them.

    A checkpoint holds a count for each parameter, as torch's optimizers do.
    """

    def __init__(self) -> None:
        self.all_counts: Tensor | None = None  # The counts of all parameters that step.
        self.views: list[Tensor] = []  # Its elements, which are the counts in the optimizer's state.

    @contextmanager
    def counting(
        self, states: MutableMapping[Any, dict[str, Tensor]], parameters: Sequence[Tensor], found_inf: Tensor | None
    ) -> Iterator[None]:
        """Counts a step of these parameters, whose update is made within. It is counted back if `found_inf` is 1."""
        if not parameters:
            yield
            return
        counts = [states[parameter]["step"] for parameter in parameters]
        if self.all_counts is None or len(counts) != len(self.views) or not all(map(is_, counts, self.views)):
            self.all_counts = torch.cat([count.reshape(1) for count in counts])
            self.views = list(self.all_counts.unbind())
            for parameter, count in zip(parameters, self.views, strict=True):
                states[parameter]["step"] = count
        self.all_counts.add_(1)
        yield
        if found_inf is not None:
            self.all_counts.sub_(found_inf)


def begin_adamw(states: MutableMapping[Any, dict[str, Tensor]], parameters: Iterable[Tensor]) -> None:
    """Allocates the state of the parameters that have none."""
    for parameter in parameters:
        if not states[parameter]:
            states[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def step_adamw(
    states: Mapping[Any, dict[str, Tensor]],
    parameters: list[Tensor],
    group: Mapping[str, Any],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Updates parameters of one data type, whose step is counted already, by torch's fused kernel (Loshchilov and
    Hutter 2019, algorithm 2)."""
    if not parameters:
        return
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(
        parameters,
        [parameter.grad for parameter in parameters if parameter.grad is not None],
        [states[parameter]["exp_avg"] for parameter in parameters],
        [states[parameter]["exp_avg_sq"] for parameter in parameters],
        [],
        [states[parameter]["step"] for parameter in parameters],
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        grad_scale=grad_scale,
        found_inf=found_inf,
    )


# --------------------------------------------------------------------------------------------------------------- Muon

# Muon for matrices with AdamW for everything else, as one optimizer. Shapes: K matrices of one shape stacked, R rows,
# C columns, and `...` further dimensions of a weight.

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


# ------------------------------------------------------------------------------------- loss scale and moving average


class LossScale(nn.Module):
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018, section 3.2), entirely on the device.

    A non-finite gradient skips the step and halves the scale; `growth_interval` finite steps in a row double it.
    """

    scale: Tensor
    good_steps: Tensor

    def __init__(self, start: float = 65536.0, growth_interval: int = 2000) -> None:
        super().__init__()
        self.growth_interval = growth_interval
        self.register_buffer("scale", torch.tensor(start))
        self.register_buffer("good_steps", torch.tensor(0))

    def adjust(self, finite: Tensor) -> None:
        good = torch.where(finite, self.good_steps + 1, 0)
        grow = good >= self.growth_interval
        factor = torch.where(finite, torch.where(grow, 2.0, 1.0), 0.5)
        self.scale.copy_((self.scale * factor).clamp(min=1.0, max=2.0**24))
        self.good_steps.copy_(torch.where(grow, 0, good))


class Ema(nn.Module, Generic[Model]):
    """Exponential moving average of a model's weights; `average` is the model to evaluate and to export.

    The decay rises with the step as (1 + step) / (10 + step), so that a short run is not averaged with random weights.
    It begins at `least_decay` if the weights to begin with are good ones.
    """

    average: Model

    def __init__(self, model: Model, average: Model, decay: float, least_decay: float = 0.0) -> None:
        """`average` is a second instance of the model; it receives the weights."""
        super().__init__()
        self.decay, self.least_decay = decay, min(least_decay, decay)
        self.average = average
        self.average.requires_grad_(False)
        self.restart(model)

    def restart(self, model: Model) -> None:
        """Average from the present weights of the model on."""
        self.average.load_state_dict(model.state_dict())

    @torch.no_grad()
    def update(self, model: Model, step: int) -> None:
        decay = min(self.decay, max(self.least_decay, (1 + step) / (10 + step)))
        torch._foreach_lerp_(list(self.average.parameters()), list(model.parameters()), 1 - decay)
        for mine, theirs in zip(self.average.buffers(), model.buffers(), strict=True):
            mine.copy_(theirs)


# ---------------------------------------------------------------------------------------------------- 16-bit copies

# Under autocast, every pass casts each weight and each bias to 16 bits, and every backward pass casts each gradient
# back: a kernel each, and compiled code does not keep the copies from pass to pass. Here one call of a foreach function
# casts all of them at the start of a step, and gradients are cast and added to the weights' own gradients in buckets.
# Every gradient is cast before it is added, as by autocast, so that the sums are the same bit for bit.
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d)  # Layers that autocast computes in 16 bits.
# Numbers of gradients that wait to be cast: 32 MB of them, and twice as much while they are added.
BUCKET_NUMBERS = 16 << 20


class WeightSlot(NamedTuple):
    """A tensor that is an attribute of a module: a parameter, or a weight that is computed from parameters."""

    module: nn.Module
    name: str

    def put(self, tensor: Tensor) -> None:
        if self.name in self.module._parameters:
            self.module._parameters[self.name] = tensor  # type: ignore[assignment]
        else:
            setattr(self.module, self.name, tensor)

    @property
    def tensor(self) -> Tensor:
        tensor: Tensor = getattr(self.module, self.name)
        return tensor


def layer_weights(modules: Iterable[nn.Module], without_autocast: Collection[nn.Module] = ()) -> list[WeightSlot]:
    """Returns the weights and biases of the linear layers and convolutions of `modules`, except for those inside of
    `without_autocast`, which compute without autocast."""
    left_out = {part for module in without_autocast for part in module.modules()}
    return [
        WeightSlot(part, name)
        for module in modules
        for part in module.modules()
        if isinstance(part, LAYERS) and part not in left_out
        for name, parameter in part.named_parameters(recurse=False)
        if parameter.dtype == torch.float32
    ]


@contextmanager
def weights_cast_once(slots: Iterable[WeightSlot], dtype: torch.dtype) -> Iterator[None]:
    """Puts copies in `dtype` into these places while the block runs. The gradients of the copies are added to `grad` of
    the originals, the last of them when the block is left. With fp32, does nothing."""
    if dtype == torch.float32 or not (slots := list(slots)):
        yield
        return
    originals = [slot.tensor for slot in slots]
    copies = [torch.empty_like(original, dtype=dtype) for original in originals]
    with torch.no_grad():
        torch._foreach_copy_(copies, [original.detach() for original in originals])
    bucket = GradientBucket()
    for slot, original, copy in zip(slots, originals, copies, strict=True):
        # A computed weight stays a plain tensor, which is no part of a module's state.
        leaf = nn.Parameter(copy, requires_grad=False) if isinstance(original, nn.Parameter) else copy
        if original.requires_grad:
            leaf.requires_grad_(True)
            leaf.register_post_accumulate_grad_hook(partial(bucket.take, original))  # type: ignore[no-untyped-call]
        slot.put(leaf)
    try:
        yield
        bucket.empty()
    finally:
        for slot, original in zip(slots, originals, strict=True):
            slot.put(original)


class GradientBucket:
    """Gradients of copies that have not been added to the originals' yet, in the order in which they came."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.numbers = 0

    def take(self, original: Tensor, leaf: Tensor) -> None:
        """Takes the gradient of a copy of `original`."""
        assert leaf.grad is not None
        self.waiting.append((original, leaf.grad))
        leaf.grad = None
        self.numbers += original.numel()
        if self.numbers >= BUCKET_NUMBERS:
            self.empty()

    @torch.no_grad()
    def empty(self) -> None:
        """Adds all gradients to those of the originals. A second gradient of the same original waits for the next
        round."""
        while self.waiting:
            first: dict[Tensor, Tensor] = {}
            later: list[tuple[Tensor, Tensor]] = []
            for original, gradient in self.waiting:
                if original in first:
                    later.append((original, gradient))
                else:
                    first[original] = gradient
            self.waiting = later
            _add_gradients(first)
        self.numbers = 0


def _add_gradients(gradients: dict[Tensor, Tensor]) -> None:
    exact = [torch.empty_like(original) for original in gradients]
    torch._foreach_copy_(exact, list(gradients.values()))
    added, to = [], []
    for original, gradient in zip(gradients, exact, strict=True):
        if original.grad is None:
            original.grad = gradient
        else:
            to.append(original.grad)
            added.append(gradient)
    if to:
        torch._foreach_add_(to, added)
