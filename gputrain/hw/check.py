"""Whether training can run on this machine: each requirement tried, with a remedy for what fails."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.nn.functional as F

from gputrain.hw.probe import Machine, probe

PACKAGES = ("torch", "numpy", "pillow", "librosa", "safetensors", "tensorboard", "typer", "rich")
MATRIX = 1024  # side of the matrices of the test product


@dataclass(frozen=True)
class Check:
    """One line of the report. Training cannot run where `passed` is false; `remedy` says what to do about it."""

    name: str
    passed: bool
    found: str
    remedy: str = ""


def check() -> list[Check]:
    machine = probe()
    device = torch.device("cuda" if machine.gpu else "cpu")
    packages = map(check_package, PACKAGES)
    return [check_python(), *packages, check_device(machine), check_product(device), check_conv(device)]


def check_python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    return Check("python", (3, 10) <= sys.version_info < (3, 15), found, "install Python 3.10 to 3.14")


def check_package(name: str) -> Check:
    try:
        return Check(name, True, version(name))
    except PackageNotFoundError:
        return Check(name, False, "not installed", f"pip install {name}, or run the set-up script again")


def check_device(machine: Machine) -> Check:
    """A card that this torch has no code for fails every kernel, though CUDA says that it is available."""
    if not machine.gpu:
        build = f"this torch is built for CUDA {machine.cuda}" if machine.cuda else "this torch is built without CUDA"
        return Check("device", True, f"no GPU in reach ({build}): training runs on the CPU, slowly")
    capability = ".".join(map(str, machine.compute_capability))
    found = f"{machine.gpu}, {machine.gpu_memory_gb:.1f} GB, compute capability {capability}, CUDA {machine.cuda}"
    return Check("device", machine.has_kernels, found, "install a torch that knows this card: setup.sh --torch auto")


def check_product(device: torch.device) -> Check:
    """A matrix product in fp32, compared with the same one in float64."""
    a, b = (torch.randn(MATRIX, MATRIX, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    try:
        on_device = (a.to(device), b.to(device))
        product = on_device[0] @ on_device[1]
        seconds = _seconds(lambda: on_device[0] @ on_device[1], device)
    except RuntimeError as refusal:
        return Check("matrix product", False, str(refusal).splitlines()[0], "update the driver, or reinstall torch")
    error = float((product.double().cpu() - a.double() @ b.double()).norm() / MATRIX**1.5)
    rate = 2 * MATRIX**3 / seconds / 1e12
    return Check("matrix product", error < 1e-3, f"{rate:.2f} TFLOPS in fp32, error {error:.0e}", "reinstall torch")


def check_conv(device: torch.device) -> Check:
    """A convolution and its gradients, compared with the same ones in float64."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 16, 32, 32, generator=generator), torch.randn(16, 16, 3, 3, generator=generator)
    try:
        mine, reference = _conv_gradients(x, w, device), _conv_gradients(x.double(), w.double(), torch.device("cpu"))
    except RuntimeError as refusal:
        return Check("convolution", False, str(refusal).splitlines()[0], "update the driver, or reinstall torch")
    error = max(float((a.double() - b).norm() / b.norm()) for a, b in zip(mine, reference, strict=True))
    return Check("convolution", error < 2e-3, f"with its gradients, error {error:.0e}", "reinstall torch")


def _conv_gradients(x: torch.Tensor, w: torch.Tensor, device: torch.device) -> list[torch.Tensor]:
    x, w = (leaf.detach().clone().to(device).requires_grad_() for leaf in (x, w))
    y = F.conv2d(x, w, padding=1)
    return [y.detach().cpu(), *(gradient.cpu() for gradient in torch.autograd.grad(y.square().mean(), (x, w)))]


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Time of one call, the best of five, the device's work included."""
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best
