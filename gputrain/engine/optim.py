"""Optimizers, loss scaling, the moving average of the weights, and their 16-bit copies."""

from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


def adamw(
    parameters: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float = 1e-8,
    algorithm: "type[FusedAdamW] | None" = None,
) -> "FusedAdamW":
    """Returns fused AdamW, or another `algorithm`, that decays weights, but not gains and biases (one dimension)."""
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for parameter in parameters:
        (decayed if parameter.ndim > 1 else kept).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    made = algorithm or FusedAdamW
    return made([g for g in groups if g["params"]], lr=learning_rate, betas=betas, eps=eps, fused=True)


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
        self.begin(every)
        with self.counts.counting(self.state, every, self.found_inf):
            for group, parameters in zip(self.param_groups, groups, strict=True):
                self.step_group(parameters, group)

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Allocates the state of the parameters that have none."""
        begin_adamw(self.state, parameters)

    def step_group(self, parameters: list[Tensor], group: Mapping[str, Any]) -> None:
        """Updates parameters of a group, whose step is counted already."""
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
