"""AdamW with averages of 8 bits a number, by block-wise dynamic quantisation (Dettmers et al. 2022, arXiv:2110.02861),
in plain torch, deterministic and without a device sync.

Shapes: N numbers of a parameter, K blocks of W = 256 numbers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gputrain.engine.optim import FusedAdamW, begin_adamw, step_adamw
from gputrain.engine.out_of_memory import retried_once

BLOCK = 256  # Numbers that share a scale; fp32 scales add 1/64 byte to a number.
AVERAGES = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")  # Keys of a parameter's state.
LEAST_NUMBERS = 4096  # Smaller parameters keep averages of fp32, as in the paper.
DECADES = 7  # Powers of ten that a code reaches below the scale of its block.
SLICE_NUMBERS = 1 << 24  # Numbers that are updated at once; some 20 bytes each are in memory for that time.


def has_8bit_state(parameter: Tensor) -> bool:
    """Returns True if the averages of a parameter have 8 bits: it consists of whole blocks that lie one after the
    other."""
    return parameter.numel() >= LEAST_NUMBERS and parameter.numel() % BLOCK == 0 and parameter.is_contiguous()


@cache
def code_values(*, signed: bool) -> tuple[float, ...]:
    """Returns the values of the 256 codes in ascending order, relative to the scale of a block.

    Each power of ten has twice as many codes as the one below, evenly spread (sections 1.3 and 2.2 of the paper).
    The unsigned ones lack zero: an average of squares that rounds to zero, beside an average gradient that does not,
    would make a step as large as 1 / eps.
    """
    least = 1 if signed else 2
    above = [
        10.0 ** (decade + 1 - DECADES) * (0.1 + 0.9 * (place + 0.5) / (least << decade))
        for decade in range(DECADES)
        for place in range(least << decade)
    ]
    return (*(-value for value in reversed(above)), 0.0, *above, 1.0) if signed else (10.0**-DECADES, *above, 1.0)


class BlockCode:
    """The codes of one of the two averages, on a device and for one data type of arithmetic."""

    def __init__(self, like: Tensor, *, signed: bool) -> None:
        values = torch.tensor(code_values(signed=signed), dtype=torch.float64)
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.values = values.to(like.device, dtype)
        self.borders = ((values[1:] + values[:-1]) / 2).to(like.device, dtype)

    def decoded(self, codes_N: Tensor, scale_K: Tensor) -> Tensor:
        """Returns numbers (K, W)."""
        return self.values.index_select(0, codes_N.int()).view(-1, BLOCK).mul_(scale_K[:, None])

    def encoded_(self, numbers_KW: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the nearest codes (N,), uint8, and the scales (K,), fp32: the largest magnitude of each block. The
        numbers are overwritten."""
        scale_K = torch.linalg.vector_norm(numbers_KW, torch.inf, dim=1).float()
        numbers_KW.div_(scale_K.clamp(min=torch.finfo(torch.float32).tiny)[:, None])
        return torch.bucketize(numbers_KW.view(-1), self.borders, out_int32=True).to(torch.uint8), scale_K


class ParameterSlice(NamedTuple):
    """Numbers `first` to `stop` - 1 of a parameter."""

    parameter: Tensor
    first: int
    stop: int

    def of(self, values: Tensor) -> Tensor:
        """Returns its numbers, or its blocks if there is one value for each block. What is whole is not sliced."""
        flat = values if values.ndim == 1 else values.reshape(-1)
        numbers = self.parameter.numel()
        if self.stop - self.first == numbers:
            return flat
        share = numbers // len(flat)
        return flat[self.first // share : self.stop // share]


class EightBitAdamW(FusedAdamW):
    """FusedAdamW that keeps the averages of large parameters in 8 bits. A step decodes, averages and updates in the
    weights' precision, a slice at a time, and encodes again; the update itself is not rounded to codes."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._codes: dict[Any, tuple[BlockCode, BlockCode]] = {}

    def begin(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if not has_8bit_state(parameter):
                begin_adamw(self.state, [parameter])
            elif not self.state[parameter]:  # Scales of 0 make every code 0.
                codes_N = torch.zeros(parameter.numel(), dtype=torch.uint8, device=parameter.device)
                scale_K = torch.zeros(len(codes_N) // BLOCK, dtype=torch.float32, device=parameter.device)
                averages = (codes_N, scale_K, codes_N.clone(), scale_K.clone())
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                self.state[parameter] = {"step": step, **dict(zip(AVERAGES, averages, strict=True))}

    def step_group(self, parameters: list[Tensor], group: Mapping[str, Any]) -> None:
        small = [parameter for parameter in parameters if not has_8bit_state(parameter)]
        step_adamw(self.state, small, group, self.grad_scale, self.found_inf)
        for pieces in slices([parameter for parameter in parameters if has_8bit_state(parameter)]):
            retried_once(partial(self._step_pieces, pieces, group))

    def _step_pieces(self, pieces: Sequence[ParameterSlice], group: Mapping[str, Any]) -> None:
        """AdamW's step for some numbers. All of them step, or none does if memory runs out: whatever needs memory comes
        before the first change."""
        states = [self.state[piece.parameter] for piece in pieces]
        held = {name: [piece.of(state[name]) for piece, state in zip(pieces, states, strict=True)] for name in AVERAGES}
        weights = [piece.of(piece.parameter) for piece in pieces]
        old = {name: torch.cat(parts) for name, parts in held.items()}
        gradients = [piece.of(piece.parameter.grad) for piece in pieces if piece.parameter.grad is not None]
        blocks = [(piece.stop - piece.first) // BLOCK for piece in pieces]
        steps_K = torch.cat([state["step"].expand(count) for state, count in zip(states, blocks, strict=True)])
        update_KW, new = self._update(torch.cat(gradients).view(-1, BLOCK), old, steps_K, group)
        if group["weight_decay"]:
            made = 1.0 if self.found_inf is None else 1 - self.found_inf  # 0 if the step is not made.
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"] * made)
        torch._foreach_sub_(weights, _like(weights, update_KW.view(-1)))
        for name, parts in held.items():
            torch._foreach_copy_(parts, _like(parts, new[name]))

    def _update(
        self, gradient_KW: Tensor, old: Mapping[str, Tensor], steps_K: Tensor, group: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns what the weights lose, without their decay, and the new averages (Loshchilov and Hutter 2019,
        algorithm 2). If the gradients are not finite, nothing is lost, and the averages are the old ones."""
        beta1, beta2 = group["betas"]
        first, second = self._codes_for(gradient_KW)
        gradient_KW = gradient_KW.to(first.values.dtype)
        steps_K1 = steps_K[:, None].to(gradient_KW.dtype)
        rate_K1, root_K1 = group["lr"] / (1 - beta1**steps_K1), (1 - beta2**steps_K1).sqrt_()
        if self.grad_scale is not None:
            gradient_KW = gradient_KW.div_(self.grad_scale)
        if self.found_inf is not None:
            gradient_KW, rate_K1 = gradient_KW.masked_fill_(self.found_inf > 0, 0.0), rate_K1 * (1 - self.found_inf)
        # What is multiplied by a number of each block costs no pass over the numbers.
        first_KW = first.decoded(old["exp_avg"], beta1 * old["exp_avg_scale"]).add_(gradient_KW, alpha=1 - beta1)
        second_KW = second.decoded(old["exp_avg_sq"], beta2 * old["exp_avg_sq_scale"])
        second_KW.addcmul_(gradient_KW, gradient_KW, value=1 - beta2)
        update_KW = torch.sqrt(second_KW, out=gradient_KW).add_(group["eps"] * root_K1)
        torch.div(first_KW, update_KW, out=update_KW).mul_(rate_K1 * root_K1)
        new = dict(zip(AVERAGES, (*first.encoded_(first_KW), *second.encoded_(second_KW)), strict=True))
        if self.found_inf is not None:
            new = {name: torch.where(self.found_inf > 0, old[name], value) for name, value in new.items()}
        return update_KW, new

    def _codes_for(self, like: Tensor) -> tuple[BlockCode, BlockCode]:
        key = like.device, like.dtype
        if key not in self._codes:
            self._codes[key] = BlockCode(like, signed=True), BlockCode(like, signed=False)
        return self._codes[key]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state without the conversion to the weights' data type that torch's optimizers make."""
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, state in state_dict["state"].items():
            parameter = parameters[index]
            self.state[parameter] = {name: value.to(parameter.device, copy=True) for name, value in state.items()}


def _like(parts: Sequence[Tensor], whole_N: Tensor) -> list[Tensor]:
    """Returns a tensor in parts of these lengths."""
    return list(torch.split(whole_N, [len(part) for part in parts]))


def slices(parameters: Iterable[Tensor]) -> Iterator[list[ParameterSlice]]:
    """Yields pieces of parameters in lists of at most SLICE_NUMBERS numbers: small parameters step together, and large
    ones in parts, so that the memory of a step does not grow with the model."""
    gathered: list[ParameterSlice] = []
    room = SLICE_NUMBERS
    for parameter in parameters:
        first = 0
        while first < parameter.numel():
            stop = min(parameter.numel(), first + room)
            gathered.append(ParameterSlice(parameter, first, stop))
            first, room = stop, room - (stop - first)
            if not room:
                yield gathered
                gathered, room = [], SLICE_NUMBERS
    if gathered:
        yield gathered


def moment_bytes(optimizer: torch.optim.Optimizer, parameter: Tensor) -> int:
    """Returns the bytes of the averages of a parameter, at most: AdamW's."""
    count = parameter.numel()
    is_8bit = isinstance(optimizer, EightBitAdamW) and has_8bit_state(parameter)
    return 2 * (count + 4 * count // BLOCK) if is_8bit else 8 * count


def other_precision(saved: Mapping[int, Mapping[str, Tensor]], optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if a saved state of AdamW has averages of 8 bits where this optimizer keeps 32, or vice versa."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    is_8bit = isinstance(optimizer, EightBitAdamW)
    return any(
        ("exp_avg_scale" in state) != (is_8bit and has_8bit_state(parameters[index]))
        for index, state in saved.items()
        if "exp_avg" in state
    )
