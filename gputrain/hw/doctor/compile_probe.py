"""A small network, compiled and as it is, which must agree: `python -m gputrain.hw.doctor.compile_probe cuda`.

It runs in a process of its own, as a compiler may crash or hang, and with TORCHINDUCTOR_CACHE_DIR set to an empty
folder, where it leaves the compiled code.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

LARGEST_ERROR = 1e-3  # relative; fp32 in another order differs by 1e-6, TF32 by 3e-4


class Block(nn.Module):
    """A layer of an image model. Not an nn.Sequential, which torch quietly leaves as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.GroupNorm(4, 8)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return F.silu(self.norm(self.conv(x_BCHW)))


def main(device: str) -> None:
    """Print the seconds that compiling took. Exits with a message where nothing is compiled, or results differ."""
    torch.manual_seed(0)
    block = Block().to(device)
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
