"""Checks convolutions in bf16 on this CPU: `python -m gputrain.hw.bf16_check` prints their similarity to fp32.

With AMX instructions, oneDNN 3.12 (torch 2.13) returns wrong results where there are few input channels, and wrong
input gradients of transposed convolutions with few output channels. ONEDNN_MAX_CPU_ISA keeps oneDNN from using AMX; it
is read when a process first calls oneDNN, and has no effect later.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

VARIABLE = "ONEDNN_MAX_CPU_ISA"
BELOW_AMX = "AVX512_CORE_BF16"
LEAST_SIMILARITY = 0.999  # Rounding to bf16 gives 0.99999; the wrong kernels gave 0.07.

Convolution = Callable[..., Tensor]


def has_amx() -> bool:
    """Return True if the CPU has AMX instructions, or torch cannot tell."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: True)())


def similarity(convolve: Convolution = F.conv1d, transposed: Convolution = F.conv_transpose1d) -> float:
    """Return the lowest cosine similarity of bf16 to fp32 among the affected convolutions. Takes milliseconds."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    found = []
    for channels in (4, 8, 12):
        x_BCT, weight = normal(2, channels, 384), normal(16, channels, 16)
        found.append(_cosine(lambda x, w: convolve(x, w, stride=8, padding=4), x_BCT, weight))
    for channels in (4, 8):
        x_BCT, weight = normal(2, 16, 48), normal(16, channels, 16)
        found.append(_cosine(lambda x, w: _input_gradient(transposed, x, w), x_BCT, weight))
    return min(found)


def _cosine(function: Callable[[Tensor, Tensor], Tensor], x_BCT: Tensor, weight: Tensor) -> float:
    low, high = (function(x_BCT.to(dtype), weight.to(dtype)).double() for dtype in (torch.bfloat16, torch.float32))
    return float(F.cosine_similarity(low.flatten(), high.flatten(), dim=0))


def _input_gradient(transposed: Convolution, x_BCT: Tensor, weight: Tensor) -> Tensor:
    x_BCT = x_BCT.detach().requires_grad_()
    (gradient_BCT,) = torch.autograd.grad(transposed(x_BCT, weight, stride=8, padding=4).square().sum(), x_BCT)
    return gradient_BCT


def similarity_in_child() -> float:
    """Return `similarity` of a child process, so that this one does not call oneDNN; 0 if the child fails."""
    package = Path(__file__).parents[2]
    command: list[Any] = [sys.executable, "-m", "gputrain.hw.bf16_check"]
    child = subprocess.run(command, cwd=package, capture_output=True, text=True, check=False)
    return float(child.stdout) if child.returncode == 0 else 0.0


if __name__ == "__main__":
    print(similarity())
