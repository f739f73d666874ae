"""Tensors at fixed addresses, which captured steps read and write, and copies on the host to compare them with."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gputrain.engine.recipe import Batch, PhaseSums

Sums = dict[str, PhaseSums]  # By the name of the phase.
LEAST = float(torch.finfo(torch.float32).tiny)  # Sums that differ by less are equal.


class TensorLayout(NamedTuple):
    """The properties of a tensor, besides its address, that a kernel's arguments depend on."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorLayout":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Returns the value with every tensor in it changed; it consists of dataclasses, tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {one.name: getattr(value, one.name) for one in fields(value) if one.init}
        return replace(value, **{name: mapped(part, change) for name, part in parts.items()})
    if isinstance(value, dict):
        return {name: mapped(part, change) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        parts_of = [mapped(part, change) for part in value]
        return type(value)(*parts_of) if hasattr(value, "_fields") else type(value)(parts_of)
    return value


@dataclass
class StaticBatch:
    """A batch whose tensors stay where they are; other batches of the same shapes are copied into them."""

    batch: Batch
    shapes: Any  # The batch with a TensorLayout for each tensor.
    tensors: list[Tensor]

    @classmethod
    def like(cls, batch: Batch) -> "StaticBatch":
        """Returns a copy of a batch."""
        made = mapped(batch, lambda tensor: torch.empty_like(tensor).copy_(tensor))
        return cls(made, cls.shapes_of(batch), list(_tensors_of(made)))

    @staticmethod
    def shapes_of(batch: Batch) -> Any:
        """Returns the batch with its shapes in place of tensors. Batches with equal ones differ in values alone."""
        return mapped(batch, TensorLayout.of)

    def takes(self, batch: Batch) -> bool:
        """Copies the values of a batch, if it has the same shapes. Returns whether it has."""
        if self.shapes_of(batch) != self.shapes:
            return False
        for static, tensor in zip(self.tensors, _tensors_of(batch), strict=True):
            static.copy_(tensor, non_blocking=True)
        return True


def _tensors_of(value: Any) -> Iterator[Tensor]:
    found: list[Tensor] = []
    mapped(value, found.append)
    return iter(found)


def copied(sums: Sums) -> Sums:
    """Returns copies of all sums, made by one kernel if they have one dtype."""
    places = [(one, name) for phase in sums.values() for one in (phase.losses, phase.statistics) for name in one]
    values = [one[name] for one, name in places]
    alike = len({(value.dtype, value.shape) for value in values}) == 1
    copies = torch.stack(values).unbind() if alike else [value.clone() for value in values]
    made = {name: PhaseSums() for name in sums}
    targets = [one for phase in made.values() for one in (phase.losses, phase.statistics)]
    sources = [one for phase in sums.values() for one in (phase.losses, phase.statistics)]
    by_source = {id(source): target for source, target in zip(sources, targets, strict=True)}
    for (one, name), copy in zip(places, copies, strict=True):
        by_source[id(one)][name] = copy
    return made


@dataclass
class HostCopies:
    """Values of tensors, copied to the host, where they take none of the device's memory."""

    tensors: list[Tensor]
    values: list[Tensor]

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> "HostCopies":
        kept = [tensor.detach() for tensor in tensors]
        return cls(kept, [tensor.to("cpu", copy=True) for tensor in kept])

    def write(self) -> None:
        """Copies the values back."""
        for tensor, value in zip(self.tensors, self.values, strict=True):
            tensor.copy_(value)

    def difference(self, before: "HostCopies", eps: float) -> str:
        """Returns what is wrong with the present values of the tensors, which should have moved from `before` to these
        values; "" if nothing is. `eps` is the relative rounding step of the arithmetic."""
        expected = [value - old for value, old in zip(self.values, before.values, strict=True)]
        found = [tensor.to("cpu") - old for tensor, old in zip(self.tensors, before.values, strict=True)]
        return "" if agree(expected, found, eps) else "the weights of a replayed step differ from those of a step"


@dataclass
class ExpectedGradients:
    """The losses and gradients that a graph should have, on the host."""

    parameters: list[Tensor]  # The last ones may be inputs.
    gradients: list[Tensor | None]
    sums: dict[str, float]
    inputs: int = 0

    @classmethod
    def of(cls, sums: Sums, parameters: Sequence[Tensor], inputs: Sequence[Tensor] = ()) -> "ExpectedGradients":
        """Returns copies of the sums, and of the gradients that the parameters and inputs have."""
        tensors = [*parameters, *inputs]
        gradients = [None if one.grad is None else one.grad.detach().to("cpu", copy=True) for one in tensors]
        return cls(tensors, gradients, _numbers(sums), len(inputs))

    @property
    def can_be_compared(self) -> bool:
        """Returns whether there are losses, and all numbers are finite."""
        known = [gradient for gradient in self.gradients if gradient is not None]
        finite = all(bool(gradient.isfinite().all()) for gradient in known)
        return bool(self.sums) and finite and all(map(math.isfinite, self.sums.values()))

    def difference(self, sums: Sums, eps: float) -> str:
        """Returns what is wrong with these sums or with the parameters' gradients; "" if nothing is. `eps` is the
        relative rounding step of the arithmetic."""
        found = _numbers(sums)
        if found.keys() != self.sums.keys():
            return "a replayed step has other losses"
        for name, value in self.sums.items():
            if not abs(found[name] - value) <= half_of_the_digits(eps) * abs(value) + LEAST:
                return f"{name} of a replayed step is {found[name]:.6g} instead of {value:.6g}"
        pairs = [(parameter.grad, value) for parameter, value in zip(self.parameters, self.gradients, strict=True)]
        if any((made is None) != (value is None) for made, value in pairs):
            return "a replayed step has gradients of other parameters"
        known = [(value, made.to("cpu")) for made, value in pairs[: len(pairs) - self.inputs] if made is not None]
        given = [(value, made.to("cpu")) for made, value in pairs[len(pairs) - self.inputs :] if made is not None]
        # An input's gradient is much smaller than those of parameters, which are sums over items and positions.
        for group in [known, *([pair] for pair in given)]:
            if not agree([value for value, _ in group if value is not None], [made for _, made in group], eps):
                return "the gradients of a replayed step differ from those of a step"
        return ""

    def restore(self) -> None:
        """Gives the parameters these gradients."""
        for parameter, value in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = None if value is None else value.to(parameter.device)


def half_of_the_digits(eps: float) -> float:
    """Returns the relative difference of two results that agree in half of the digits of their arithmetic. The order of
    the additions in atomic sums differs from pass to pass, and changes fewer digits than these."""
    return math.sqrt(eps)


def agree(expected: Sequence[Tensor], found: Sequence[Tensor], eps: float) -> bool:
    """Returns whether each tensor is equal to another in half of the digits of an arithmetic that rounds by `eps`.

    A difference is relative to the norm of its tensor, or to the norm that it would have with the mean square of all
    tensors, because some are zero but for rounding.
    """
    count = max(1, sum(value.numel() for value in expected))
    squares = sum(float(value.double().square().sum()) for value in expected)
    for value, other in zip(expected, found, strict=True):
        norm = max(float(value.double().square().sum()), squares * value.numel() / count) ** 0.5
        if not float((other.double() - value.double()).norm()) <= half_of_the_digits(eps) * norm:
            return False
    return True


def _numbers(sums: Sums) -> dict[str, float]:
    kinds = [(f"{phase} {name}", value) for phase, one in sums.items() for name, value in one.losses.items()]
    kinds += [(f"{phase} {name} (statistic)", v) for phase, one in sums.items() for name, v in one.statistics.items()]
    return {name: float(value) for name, value in kinds}


@dataclass
class GradientGraph:
    """Gradients as a graph, with the tensors that it reads and writes."""

    group: str
    replay: Callable[[], None]
    sums: Sums
    gradients: list[tuple[Tensor, Tensor | None]]  # Every parameter of the group, and its gradient.
    inputs: Sequence[Tensor] = ()  # What a part of a loss reads besides parameters.
    added: Sequence[tuple[Tensor, Tensor]] = ()  # Parameters and gradients that a replay adds to; others are made anew.

    def run(self, inputs: Sequence[Tensor] = ()) -> Sums:
        """Replays the graph. Returns copies of the sums, as those of several steps are kept."""
        with torch.no_grad():
            for static, tensor in zip(self.inputs, inputs, strict=True):
                static.copy_(tensor)
        put_gradients(self.added)
        self.replay()
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        return copied(self.sums)


def put_gradients(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Gives each parameter a tensor as its gradient, which keeps the values of the gradient that it has; else zeros."""
    zeros = [made for parameter, made in pairs if parameter.grad is None]
    known = [(made, parameter.grad) for parameter, made in pairs if parameter.grad is not None]
    moved = [(made, gradient) for made, gradient in known if made is not gradient]
    if zeros:
        torch._foreach_zero_(zeros)
    if moved:
        torch._foreach_copy_([made for made, _ in moved], [gradient for _, gradient in moved])
    for parameter, made in pairs:
        parameter.grad = made


def drop_gradients(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None
