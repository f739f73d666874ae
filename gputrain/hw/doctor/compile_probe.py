"""Compares a small network compiled and uncompiled: `python -m gputrain.hw.doctor.compile_probe cuda`.

It runs in a child process, as a compiler may crash or hang. TORCHINDUCTOR_CACHE_DIR is set to an empty folder, in which
it leaves the compiled code.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

LARGEST_ERROR = 1e-3  # Relative error. fp32 in another order differs by 1e-6, TF32 by 3e-4.


class ProbeBlock(nn.Module):
    """A layer of an image model. It is no nn.Sequential, which torch silently leaves uncompiled."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.GroupNorm(4, 8)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return F.silu(self.norm(self.conv(x_BCHW)))


def main(device: str) -> None:
    """Print the seconds that compiling took. Exits with a message if nothing is compiled, or results differ."""
    torch.manual_seed(0)
    block = ProbeBlock().to(device)
    x_BCHW = torch.randn(2, 8, 16, 16).to(device)
    expected = gradients(block, x_BCHW)
    began = time.perf_counter()
    block.compile(dynamic=False)
    compiled = gradients(block, x_BCHW)
    seconds = time.perf_counter() - began
    if not any(path.is_file() for path in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*")):
        sys.exit("RuntimeError: torch.compile has compiled nothing")
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(compiled, expected, strict=True))
    if not error < LARGEST_ERROR:
        sys.exit(f"ValueError: compiled and uncompiled gradients differ by {error:.0e}")
    print(seconds)


def gradients(block: nn.Module, x_BCHW: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(block(x_BCHW).square().sum(), list(block.parameters())))


if __name__ == "__main__":
    main(sys.argv[1])
