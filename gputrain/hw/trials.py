"""Trials of `gputrain check-compatibility`: each runs a small part of what training does, and returns a check.

`python -m gputrain.hw.trials cuda` is the child process of `try_compile`.
"""

import contextlib
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from gputrain.errors import UserError, first_line
from gputrain.hw.child_process import run_child
from gputrain.hw.gpus import find_gpu
from gputrain.hw.probe import Machine
from gputrain.hw.rules import Check
from gputrain.hw.speed import product_flops_per_second

# Largest relative error due to rounding: about four units in the last place of each format.
LARGEST_ERROR = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 2e-3}  # fp32 may be TF32.
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
LARGEST_COMPILED_ERROR = 1e-3  # fp32 in another order differs by 1e-6, TF32 by 3e-4.
COMPILE_SECONDS = 240.0  # A cold start with a slow disk takes a minute.
REPAIR_TORCH = "update the driver, or install torch again in a new environment"


def training_dtype(machine: Machine, device: torch.device) -> torch.dtype:
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if machine.has_bf16 else torch.float16


def try_product(machine: Machine, device: torch.device, dtype: torch.dtype) -> Check:
    """Check a matrix product, and its rate against the published one if the GPU is known."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator) for _ in range(2))
    try:
        product = (a.to(device, dtype) @ b.to(device, dtype)).cpu()
        rate = product_flops_per_second(device, dtype)
    except RuntimeError as refusal:
        return _refused("matrix product", refusal, device)
    error = _relative_error(product, a.double() @ b.double())
    amount = f"{rate / 1e12:.1f} TFLOPS" if rate > 1e12 else f"{rate / 1e9:.0f} GFLOPS"
    found = f"{amount} in {NAMES[dtype]}{_published(machine, dtype, rate)}"
    return _verdict("matrix product", found, error, LARGEST_ERROR[dtype], device)


def _published(machine: Machine, dtype: torch.dtype, rate: float) -> str:
    """Return the published rate in words; nothing on a CPU, or for a GPU that is not in gpus.yaml."""
    with contextlib.suppress(UserError):
        published = find_gpu(machine.gpu).flops_per_second(NAMES[dtype]) if machine.gpu else None
        if published:
            return f", {rate / published:.0%} of the {published / 1e12:g} published"
    return ""


def try_convolution(device: torch.device, dtype: torch.dtype) -> Check:
    """Compare a convolution and its gradients with float64."""
    generator = torch.Generator().manual_seed(0)
    x_BCHW = torch.randn(2, 16, 32, 32, generator=generator)
    weight = torch.randn(16, 16, 3, 3, generator=generator) / 12  # Results are about 1, within the range of fp16.
    try:
        mine = _convolution(x_BCHW.to(device, dtype), weight.to(device, dtype))
    except RuntimeError as refusal:
        return _refused("convolution", refusal, device)
    reference = _convolution(x_BCHW.double(), weight.double())
    error = max(map(_relative_error, mine, reference))
    return _verdict("convolution", f"{NAMES[dtype]}, with its gradients", error, LARGEST_ERROR[dtype], device)


def _convolution(x_BCHW: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """Return the result and its gradients, on the CPU."""
    x_BCHW, weight = x_BCHW.requires_grad_(), weight.requires_grad_()
    y_BCHW = F.conv2d(x_BCHW, weight, padding=1)
    gradients = torch.autograd.grad(y_BCHW.square().sum(), (x_BCHW, weight))
    return [tensor.detach().cpu() for tensor in (y_BCHW, *gradients)]


def _relative_error(mine: torch.Tensor, reference: torch.Tensor) -> float:
    return float((mine.double() - reference).norm() / reference.norm())


def _verdict(name: str, found: str, error: float, largest: float, device: torch.device) -> Check:
    if error < largest:
        return Check(name, "ok", f"{found}, error {error:.0e}")
    return Check(name, "failed", f"wrong: error {error:.0e}", REPAIR_TORCH + _meanwhile(device))


def _refused(name: str, refusal: RuntimeError, device: torch.device) -> Check:
    crowded = isinstance(refusal, torch.OutOfMemoryError)
    remedy = "close the programs that hold the GPU's memory; nvidia-smi lists them" if crowded else REPAIR_TORCH
    return Check(name, "failed", first_line(refusal), remedy + _meanwhile(device))


def _meanwhile(device: torch.device) -> str:
    return "" if device.type == "cpu" else "; until then train with --device cpu"


def try_compile(device: torch.device, seconds: float = COMPILE_SECONDS) -> Check:
    """Compile a small network in a child process, with empty caches, for at most `seconds`.

    A crash of the compiler affects neither this process nor training, which runs without it.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        code, output = run_child(["gputrain.hw.trials", device.type], Path(folder), seconds)
    if code == 0:
        return Check("torch.compile", "ok", f"works; compiling took {float(output.split()[-1]):.0f} s")
    found = f"not finished after {seconds:g} s" if code is None else _cause(output, code)
    remedy = "training runs without it; --no-use-torch-compile skips the attempt"
    if "Python.h" in output:
        remedy = f"install Python's headers (Debian and Ubuntu: sudo apt install python3-dev); until then {remedy}"
    return Check("torch.compile", "note", found, remedy)


class ProbeBlock(nn.Module):
    """A layer of an image model. It is no nn.Sequential, which torch silently leaves uncompiled."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.GroupNorm(4, 8)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return F.silu(self.norm(self.conv(x_BCHW)))


def compare_compiled(device: str) -> None:
    """Compare a small network compiled and uncompiled, and print the seconds that compiling took.

    Exits with a message if nothing is compiled, or results differ. TORCHINDUCTOR_CACHE_DIR is set to an empty folder,
    in which it leaves the compiled code.
    """
    torch.manual_seed(0)
    block = ProbeBlock().to(device)
    x_BCHW = torch.randn(2, 8, 16, 16).to(device)
    expected = _gradients(block, x_BCHW)
    began = time.perf_counter()
    block.compile(dynamic=False)
    compiled = _gradients(block, x_BCHW)
    seconds = time.perf_counter() - began
    if not any(path.is_file() for path in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*")):
        sys.exit("RuntimeError: torch.compile has compiled nothing")
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(compiled, expected, strict=True))
    if not error < LARGEST_COMPILED_ERROR:
        sys.exit(f"ValueError: compiled and uncompiled gradients differ by {error:.0e}")
    print(seconds)


def _gradients(block: nn.Module, x_BCHW: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(block(x_BCHW).square().sum(), list(block.parameters())))


def _cause(output: str, code: int) -> str:
    """Return the last line that names an error; a traceback of the compiler ends with advice instead."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|NotFound|Unsupported)\b", line)]
    if errors or (lines and code > 0):
        return (errors or lines)[-1][:200]
    return f"the compiler's process crashed (exit code {code})"


if __name__ == "__main__":
    compare_compiled(sys.argv[1])
