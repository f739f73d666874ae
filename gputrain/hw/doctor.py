"""`gputrain check-compatibility`: facts about this machine, verdicts on them, trials, and the settings that suit it.

Imports no torch at its top.
"""

import os
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gputrain.config import config, opt
from gputrain.errors import UserError
from gputrain.hw.plan import Hardware, Plan, decide
from gputrain.hw.probe import Machine, probe
from gputrain.hw.rules import Check, check_rules
from gputrain.kinds import default_kind


@config(panel="Check")
class CheckCompatibility:
    data_path: Path = opt(default=Path(), help="Folder of your data, for the command that is shown.")
    quick: bool = opt(default=False, help="Leave out the slow trial of torch.compile.")
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


def check_machine(
    data_path: Path, *, quick: bool = False, doing: Callable[[str], object] = lambda what: None
) -> CompatibilityReport:
    """Collect facts about this machine, check them, and run  `doing` receives a description of each trial.

    Raises UserError if the folder is missing.
    """
    if not data_path.exists():
        raise UserError(f"{data_path}: no such folder or file", hint="--data-path takes the folder of your data")
    machine = probe()
    checks = check_rules(machine)
    if not machine.torch_error:
        checks += run_trials(machine, checks, quick=quick, doing=doing)
    plan = advise(machine, checks)
    return CompatibilityReport(machine, tuple(checks), plan, train_command(plan, data_path, ranks=machine.gpu_count))


def run_trials(
    machine: Machine, checks: Sequence[Check], *, quick: bool, doing: Callable[[str], object]
) -> list[Check]:
    """Try what training does, on the GPU, or on the CPU if no GPU works."""
    import torch  # It may be what is broken.

    from gputrain.hw import trials

    device = torch.device("cuda" if gpu_works(machine, checks) else "cpu")
    dtype = trials.training_dtype(machine, device)
    doing("trying a matrix product and a convolution")
    results = [trials.try_product(machine, device, dtype), trials.try_convolution(device, dtype)]
    if not quick and gpu_works(machine, results):
        doing("trying torch.compile, which takes up to some minutes")
        results.append(trials.try_compile(device))
    return results


def gpu_works(machine: Machine, checks: Sequence[Check]) -> bool:
    return bool(machine.gpu) and all(check.status != "failed" for check in checks)


def advise(machine: Machine, checks: Sequence[Check]) -> Plan:
    """Return the plan for this machine, without what its checks have found not to work."""
    compile_fails = any(check.name == "torch.compile" and check.status != "ok" for check in checks)
    requested = Hardware(
        device="auto" if gpu_works(machine, checks) else "cpu",
        use_torch_compile=False if compile_fails else None,
    )
    return decide(machine, requested)


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
