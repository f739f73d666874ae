"""`gputrain check-compatibility`: facts about this machine, verdicts on them, trials, and the settings that suit it.

Imports no torch at its top.
"""

import contextlib
import os
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gputrain.config import config, opt
from gputrain.errors import UserError, first_line
from gputrain.hw.gpus import find_gpu
from gputrain.hw.plan import Hardware, Plan, decide
from gputrain.hw.probe import Machine, probe
from gputrain.hw.rules import Check, check_rules
from gputrain.kinds import default_kind

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# Largest relative error due to rounding: about four units in the last place of each format. fp32 may be TF32.
LARGEST_ERROR = {"bf16": 2e-2, "fp16": 2e-3, "fp32": 2e-3}
REPAIR_TORCH = "update the driver, or install torch again in a new environment"


@config(panel="Check")
class CheckCompatibility:
    data_path: Path = opt(default=Path(), help="Folder of your data, for the command that is shown.")
    json: bool = opt(default=False, help="Print the report as JSON.")


@dataclass(frozen=True)
class CompatibilityReport:
    """The checks in the order in which they are shown, and the advised settings: as a plan, and as a command."""

    machine: Machine
    checks: tuple[Check, ...]
    plan: Plan
    command: str

    @property
    def can_train(self) -> bool:
        return all(check.status != "failed" for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        return {
            "checks": [vars(check) for check in self.checks],
            "advised": {"command": self.command, "settings": self.plan.to_json()},
            "machine": asdict(self.machine),
        }


def check_machine(data_path: Path, doing: Callable[[str], object] = lambda what: None) -> CompatibilityReport:
    """Collect facts about this machine, check them, and run  `doing` receives a description of each trial.

    Raises UserError if the folder is missing.
    """
    if not data_path.exists():
        raise UserError(f"{data_path}: no such folder or file", hint="--data-path takes the folder of your data")
    machine = probe()
    checks = check_rules(machine)
    if not machine.torch_error:
        checks += run_trials(machine, checks, doing)
    plan = advise(machine, checks)
    return CompatibilityReport(machine, tuple(checks), plan, train_command(plan, data_path, ranks=machine.gpu_count))


def run_trials(machine: Machine, checks: Sequence[Check], doing: Callable[[str], object]) -> list[Check]:
    """Try what training does, on the GPU, or on the CPU if no GPU works."""
    import torch  # It may be what is broken.

    device, precision = "cpu", "fp32"
    if gpu_works(machine, checks):
        device, precision = "cuda", "bf16" if machine.has_bf16 else "fp16"
    doing("trying a matrix product and a convolution")
    found = []
    for name, trial in (("matrix product", try_product), ("convolution", try_convolution)):
        try:
            found.append(trial(machine, device, precision))
        except RuntimeError as refusal:
            crowded = isinstance(refusal, torch.OutOfMemoryError)
            remedy = "close the programs that hold the GPU's memory; nvidia-smi lists them" if crowded else REPAIR_TORCH
            found.append(Check(name, "failed", first_line(refusal), remedy + _meanwhile(device)))
    return found


def gpu_works(machine: Machine, checks: Sequence[Check]) -> bool:
    return bool(machine.gpu) and all(check.status != "failed" for check in checks)


def advise(machine: Machine, checks: Sequence[Check]) -> Plan:
    """Return the plan for this machine, without what its checks have found not to work."""
    return decide(machine, Hardware(device="auto" if gpu_works(machine, checks) else "cpu"))


def train_command(plan: Plan, data_path: Path, ranks: int = 1) -> str:
    """Return the command that trains with a plan's settings, on as many GPUs as `ranks`, for a shell of this system."""
    precision = str(plan.precision.value)
    several = ranks > 1 and plan.device.value == "cuda"
    kind = default_kind()
    launcher = ["torchrun", "--nproc-per-node", str(ranks), "-m"] if several else []
    words = [*launcher, "gputrain", kind.command, "--data-path", str(data_path), "--device", str(plan.device.value)]
    if plan.device.value == "cuda":
        words += ["--precision", precision if precision != "fp32" else "tf32"]
        words += [] if plan.compile.value else ["--no-use-torch-compile"]  # The number of steps decides otherwise.
    words.append("--channels-last" if plan.channels_last.value else "--no-channels-last")
    if plan.device.value == "cpu":
        words += kind.small
    words += ["--num-workers", str(plan.num_workers.value)]
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)


# ------------------------------------------------------------------------------------------------------------ trials


def try_product(machine: Machine, device: str, precision: str) -> Check:
    """Check a matrix product, and its rate against the published one if the GPU is known. Raises RuntimeError if the
    device cannot compute it."""
    import torch

    from gputrain.hw.speed import product_flops_per_second

    dtype, generator = DTYPES[precision], torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator) for _ in range(2))
    product = (a.to(device, getattr(torch, dtype)) @ b.to(device, getattr(torch, dtype))).cpu()
    rate = product_flops_per_second(torch.device(device), getattr(torch, dtype))
    amount = f"{rate / 1e12:.1f} TFLOPS" if rate > 1e12 else f"{rate / 1e9:.0f} GFLOPS"
    found = f"{amount} in {precision}{_published(machine, precision, rate)}"
    return _verdict("matrix product", found, _relative_error(product, a.double() @ b.double()), precision, device)


def _published(machine: Machine, precision: str, rate: float) -> str:
    """Return the published rate in words; nothing on a CPU, or for a GPU that is not in gpus.yaml."""
    with contextlib.suppress(UserError):
        published = find_gpu(machine.gpu).flops_per_second(precision) if machine.gpu else None
        if published:
            return f", {rate / published:.0%} of the {published / 1e12:g} published"
    return ""


def try_convolution(machine: Machine, device: str, precision: str) -> Check:
    """Compare a convolution and its gradients with float64. Raises RuntimeError if the device cannot compute them."""
    import torch

    def computed(x_BCHW: Any, weight: Any) -> list[Any]:
        x_BCHW, weight = x_BCHW.requires_grad_(), weight.requires_grad_()
        y_BCHW = torch.nn.functional.conv2d(x_BCHW, weight, padding=1)
        gradients = torch.autograd.grad(y_BCHW.square().sum(), (x_BCHW, weight))
        return [tensor.detach().cpu() for tensor in (y_BCHW, *gradients)]

    dtype, generator = getattr(torch, DTYPES[precision]), torch.Generator().manual_seed(0)
    x_BCHW = torch.randn(2, 16, 32, 32, generator=generator)
    weight = torch.randn(16, 16, 3, 3, generator=generator) / 12  # Results are about 1, within the range of fp16.
    mine = computed(x_BCHW.to(device, dtype), weight.to(device, dtype))
    error = max(map(_relative_error, mine, computed(x_BCHW.double(), weight.double())))
    return _verdict("convolution", f"{precision}, with its gradients", error, precision, device)


def _relative_error(mine: Any, reference: Any) -> float:
    return float((mine.double() - reference).norm() / reference.norm())


def _verdict(name: str, found: str, error: float, precision: str, device: str) -> Check:
    if error < LARGEST_ERROR[precision]:
        return Check(name, "ok", f"{found}, error {error:.0e}")
    return Check(name, "failed", f"wrong: error {error:.0e}", REPAIR_TORCH + _meanwhile(device))


def _meanwhile(device: str) -> str:
    return "" if device == "cpu" else "; until then train with --device cpu"
