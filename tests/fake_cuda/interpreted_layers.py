"""The functions of the memory-efficient layers as inductor compiles them for a card, run in Triton's interpreter:
`python -m tests.fake_cuda.interpreted_layers FILE`, with TRITON_INTERPRET=1. The file holds inputs and outputs."""

import sys
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._inductor.runtime import triton_helpers
from torch._subclasses.fake_tensor import FakeTensorMode

from gputrain.vae.norm_arithmetic import Arithmetic
from tests.fake_cuda import inductor_target

GROUPS, EPS = 4, 1e-6
CASES = ((torch.float32, torch.contiguous_format), (torch.bfloat16, torch.channels_last))


def stand_for_libdevice() -> None:
    """NVIDIA's library of functions has no code for a CPU; the interpreter has the same functions of its own."""
    tl.math.mul_rn = triton.jit(mul_rn)
    triton_helpers.libdevice = tl.math


def mul_rn(a: Any, b: Any) -> Any:
    """A product that is rounded before it is added to anything, as all of the interpreter's are."""
    return a * b


def inputs(dtype: torch.dtype, memory_format: torch.memory_format) -> dict[str, Tensor]:
    """Values with a mean; the tensors that the functions exchange are computed in eager mode."""
    draw = torch.Generator("cpu").manual_seed(0)
    x_BCHW, grad_BCHW, other_BCHW = (
        torch.randn(2, 8, 6, 10, generator=draw).to(dtype).contiguous(memory_format=memory_format) for _ in range(3)
    )
    weight_C, bias_C, offset_C = torch.randn(3, 8, generator=draw)
    return {
        "x_BCHW": 2 * x_BCHW + 1, "grad_BCHW": grad_BCHW, "other_BCHW": other_BCHW, "weight_C": weight_C,
        "bias_C": bias_C, "offset_C": offset_C,
    }  # fmt: skip


def layer(arithmetic: Arithmetic, given: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """All that the functions make of the inputs."""
    x_BCHW, grad_BCHW, other_BCHW, weight_C, bias_C, offset_C = given.values()
    mean_BG, rstd_BG = arithmetic.statistics(x_BCHW, GROUPS, EPS, offset_C)
    scale_BC, shift_BC = arithmetic.coefficients(mean_BG, rstd_BG, weight_C, bias_C, offset_C)
    active_BCHW = arithmetic.activate(x_BCHW, scale_BC, shift_BC, dtype)
    grad_x_BCHW, grad_weight_C, grad_bias_C, grad_offset_C, again_BCHW = arithmetic.gradients(
        grad_BCHW, x_BCHW, scale_BC, shift_BC, mean_BG, rstd_BG, weight_C, offset_C, other_BCHW, dtype
    )
    assert grad_offset_C is not None
    assert again_BCHW is not None
    return {
        "mean_BG": mean_BG, "rstd_BG": rstd_BG, "scale_BC": scale_BC, "shift_BC": shift_BC, "active_BCHW": active_BCHW,
        "grad_x_BCHW": grad_x_BCHW, "grad_weight_C": grad_weight_C, "grad_bias_C": grad_bias_C,
        "grad_offset_C": grad_offset_C, "again_BCHW": again_BCHW,
    }  # fmt: skip


def main(file: str) -> None:
    stand_for_libdevice()
    inductor_target.target((9, 0))
    compiled = Arithmetic.compiled(lambda function: torch.compile(function, dynamic=False))
    cases: list[dict[str, Any]] = []
    for dtype, memory_format in CASES:
        given = inputs(dtype, memory_format)
        copies = {key: t.clone() for key, t in given.items()}  # The functions overwrite some of them.
        with FakeTensorMode():
            fake = {
                key: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for key, t in given.items()
            }
            inductor_target.VALUES.update({id(one): (one, copies[key]) for key, one in fake.items()})
            made = layer(compiled, fake, dtype)
        values = {key: inductor_target.VALUES[id(one)][1].contiguous() for key, one in made.items()}
        cases.append({"dtype": dtype, "given": given, "made": values})
    torch.save(cases, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
