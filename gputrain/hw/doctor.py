"""`gputrain check-compatibility`: facts about this machine, verdicts on them, trials, and the settings that suit it.

The rules decide from facts alone, and are tested on recorded machines. Imports no torch at its top.

Versions of drivers: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
GPUs that each build of torch has code for: https://github.com/pytorch/pytorch/blob/main/RELEASE.md
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from gputrain.config import as_flags, config, opt
from gputrain.errors import UserError, first_line
from gputrain.formatting import shell_command
from gputrain.hw.driver import torch_for
from gputrain.hw.gpus import find_gpu
from gputrain.hw.plan import Hardware, Plan, decide
from gputrain.hw.probe import Machine, probe
from gputrain.kinds import ModelKind, default_kind, kinds

# The oldest driver for each CUDA: every minor version runs on the driver of the first one of its major version.
OLDEST_DRIVER = {"Linux": {12: 525, 13: 580}, "Windows": {12: 528, 13: 580}}
NEWEST_DRIVER = 580  # The driver to recommend: it runs every build.
LITTLE_GPU_SHARE_FREE = 0.8  # Below this share, another program holds the GPU's memory.
LITTLE_RAM_GB = 4.0
LITTLE_SHARED_MEMORY_GB = 1.0  # Docker gives 64 MB by default.
# Largest relative error due to rounding: about four units in the last place of each format. fp32 may be TF32.
LARGEST_ERROR = {"bf16": 2e-2, "fp16": 2e-3, "fp32": 2e-3}
LONGEST_CPU_HOURS = 6.0  # A training on a CPU of which nothing was chosen is not begun if it takes longer.
CPU_TIME = "3h"  # Time of the training that is advised instead.
REPLACED = ("model", "schedule", "device", "yes")  # Options, in groups or alone, that are those of this training then.
REPAIR_TORCH = "update the driver, or install torch again in a new environment"


@config(panel="Check")
class CheckCompatibility:
    data_path: Path = opt(default=Path(), help="Folder of your data, for the command that is shown.")
    json: bool = opt(default=False, help="Print the report as JSON.")


@dataclass(frozen=True)
class Check:
    """One line of the report.

    The status note means that training runs, failed that it cannot run, or not on the GPU that is there. With both,
    `remedy` says what to do.
    """

    name: str
    status: Literal["ok", "note", "failed"]
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class CompatibilityReport:
    """The checks in the order in which they are shown, and the advised settings: as a plan, and as a command."""

    machine: Machine
    checks: tuple[Check, ...]
    plan: Plan
    command: str

    def to_json(self) -> dict[str, Any]:
        return {
            "checks": [vars(check) for check in self.checks],
            "advised": {"command": self.command, "settings": self.plan.to_json()},
            "machine": asdict(self.machine),
        }


def check_machine(data_path: Path, doing: Callable[[str], object] = lambda what: None) -> CompatibilityReport:
    """Collect facts about this machine, check them, and run trials. `doing` receives a description of each trial.

    Raises UserError if the folder is missing.
    """
    if not data_path.exists():
        raise UserError(f"{data_path}: no such folder or file", hint="--data-path takes the folder of your data")
    machine = probe()
    checks = check_rules(machine)
    if not machine.torch_error:
        checks += run_trials(machine, checks, doing)
    plan = advise(machine, checks)
    command = train_command(plan, default_kind(), ["--data-path", str(data_path)], ranks=machine.gpu_count)
    return CompatibilityReport(machine, tuple(checks), plan, command)


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


def train_command(plan: Plan, kind: ModelKind, options: Sequence[str], ranks: int = 1) -> str:
    """Return the command that trains with a plan's settings, on as many GPUs as `ranks`, for a shell of this system. On
    a CPU it is a training that ends after hours."""
    precision, device = str(plan.precision.value), str(plan.device.value)
    launcher = ["torchrun", "--nproc-per-node", str(ranks), "-m"] if ranks > 1 and device == "cuda" else []
    words = [*launcher, "gputrain", kind.command, *options, "--device", device]
    if device == "cuda":
        words += ["--precision", precision if precision != "fp32" else "tf32"]
        words += [] if plan.compile.value else ["--no-use-torch-compile"]  # The number of steps decides otherwise.
        words.append("--channels-last" if plan.channels_last.value else "--no-channels-last")
        words += ["--num-workers", str(plan.num_workers.value)]
    else:
        words += [*kind.small, "--finish-by", CPU_TIME]
    return shell_command(*words)


def smaller_command(plan: Plan, settings: object) -> str:
    """Return the command of a training that suits a machine without a GPU better than these settings; "" if there is a
    GPU, no such training of this kind, or if they are that training."""
    kind = kinds().get(getattr(settings, "kind", ""))
    if plan.device.value != "cpu" or not (kind and kind.small) or CPU_TIME in as_flags(settings):
        return ""
    return train_command(
        plan, kind, as_flags(settings, [*REPLACED, *(word[2:].replace("-", "_") for word in kind.small)])
    )


# ------------------------------------------------------------------------------------------------------------- rules


def check_rules(machine: Machine) -> list[Check]:
    """Check every fact, in the order in which a user should fix them."""
    return [
        _python(machine),
        *_driver(machine),
        _torch(machine),
        *_gpu(machine),
        *_settings(machine),
        _cpu(machine),
        *_ram(machine),
        *_shared_memory(machine),
    ]


def _cpu(machine: Machine) -> Check:
    found = f"{machine.cpu_cores} core{'s' if machine.cpu_cores > 1 else ''}"
    if machine.gpu and machine.cpu_cores < 4:
        remedy = "resize the pictures to the size of the training beforehand: gputrain prepare-data"
        return Check("cpu", "note", f"{found}, few to decode pictures as fast as a GPU trains", remedy)
    return Check("cpu", "ok", found)


def _ram(machine: Machine) -> Iterator[Check]:
    if not machine.ram_gb:
        return
    free = f"{machine.ram_free_gb:.1f} of " if machine.ram_free_gb else ""
    found = f"{free}{machine.ram_gb:.1f} GB{' free' if free else ''}"
    if machine.ram_free_gb and machine.ram_free_gb < LITTLE_RAM_GB:
        yield Check("ram", "note", found, "close other programs, or use fewer workers (--num-workers 1)")
    else:
        yield Check("ram", "ok", found)


def _shared_memory(machine: Machine) -> Iterator[Check]:
    if not machine.shared_memory_gb:
        return
    found = f"{machine.shared_memory_gb:.3g} GB free in /dev/shm"
    if machine.shared_memory_gb < LITTLE_SHARED_MEMORY_GB:
        remedy = "sudo mount -o remount,size=8G /dev/shm, in Docker: docker run --shm-size 8g; otherwise fewer data "
        remedy += "workers are used"
        yield Check("shared memory", "note", f"{found}, through which data workers pass batches", remedy)
    else:
        yield Check("shared memory", "ok", found)


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13, 0) for "2.13.0+cu130"."""
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, leading[0].split("."))) if leading else ()


def _setup(machine: Machine) -> str:
    """Return the command that installs the build of torch for driver and GPUs."""
    script = "setup_windows.bat" if machine.system == "Windows" else "./setup.sh"
    needs_build = machine.gpu and not machine.has_kernels
    return (torch_for(machine.compute_capability, script) if needs_build else "") or f"{script} --torch auto"


def _gpu_remedy(machine: Machine, *, newer_driver: bool = False) -> str:
    """Return how to get a build that fits driver and GPUs, and what to do until then."""
    driver = f"install NVIDIA driver {NEWEST_DRIVER} or later and run " if newer_driver else ""
    return f"{driver}{_setup(machine)}; until then train with --device cpu"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _python(machine: Machine) -> Check:
    if (3, 10) <= numbers(machine.python)[:2] < (3, 15):
        return Check("python", "ok", machine.python)
    return Check("python", "failed", machine.python or "unknown", "install Python 3.10 to 3.14")


def _driver(machine: Machine) -> Iterator[Check]:
    driver = machine.driver
    oldest = OLDEST_DRIVER.get(machine.system, {}).get((numbers(machine.cuda) or (0,))[0], 0)
    if driver.version and numbers(driver.version) < (oldest,):
        found = f"{driver.version} is too old for this torch: CUDA {machine.cuda} needs {oldest} or later"
        yield Check("driver", "failed", found, _gpu_remedy(machine, newer_driver=True))
    elif driver.version:
        yield Check("driver", "ok", driver.version + (f", runs CUDA up to {driver.cuda}" if driver.cuda else ""))
    elif "no devices" in driver.error.lower():
        remedy = "if there is a card, see that it is powered and, in a container, handed on (docker run --gpus all)"
        yield Check("driver", "note", f"NVML says: {driver.error}", remedy)
    elif driver.error:
        # After an update, the old driver is still loaded while the libraries are new: only that is a mismatch.
        more = "" if "mismatch" in driver.error else f", or install NVIDIA driver {NEWEST_DRIVER} or later again"
        remedy = f"restart the machine{more}; until then train with --device cpu"
        yield Check("driver", "failed", f"NVML says: {driver.error}", remedy)
    elif machine.gpu:
        yield Check("driver", "ok", "works; of unknown version, as there is no NVML")
    elif machine.cuda:
        remedy = f"for an NVIDIA card, install driver {NEWEST_DRIVER} or later; without one, nothing is missing"
        yield Check("driver", "note", "none", remedy)


def _torch(machine: Machine) -> Check:
    if machine.torch_error:
        return Check("torch", "failed", f"cannot be imported: {machine.torch_error}", _setup(machine))
    build = f"{machine.torch}, built for CUDA {machine.cuda}" if machine.cuda else f"{machine.torch}, without CUDA"
    if machine.gpu and not machine.has_kernels:  # Every kernel fails there, though CUDA is available.
        found = f"{build}, has no code for compute capability {_dotted(machine.compute_capability)}"
        return Check("torch", "failed", found, _gpu_remedy(machine))
    if machine.driver.cards and not (machine.cuda or machine.gpu or _hidden(machine)):
        found = f"{machine.torch} cannot use {machine.driver.cards[0].name}: it is built without CUDA"
        return Check("torch", "failed", found, _gpu_remedy(machine))
    code = f", with code for {_dotted(machine.compute_capability)}" if machine.gpu else ""
    return Check("torch", "ok", build + code)


def _gpu(machine: Machine) -> Iterator[Check]:
    if machine.gpu:
        yield Check("gpu", "ok", f"{machine.gpu}, compute capability {_dotted(machine.compute_capability)}")
        yield _gpu_memory(machine)
    elif _hidden(machine):
        found = f"CUDA_VISIBLE_DEVICES={machine.visible_devices!r} hides {machine.driver.cards[0].name}"
        yield Check("gpu", "note", found, "unset CUDA_VISIBLE_DEVICES to train on the GPU")
    elif any(check.status == "failed" for check in (*_driver(machine), _torch(machine))):
        return  # The failed check explains why there is no GPU.
    elif machine.driver.cards:
        cause = f": {machine.gpu_error}" if machine.gpu_error else ""
        found = f"torch cannot use {machine.driver.cards[0].name}{cause}"
        yield Check("gpu", "failed", found, "restart the machine; until then train with --device cpu")
    else:
        remedy = "for large models, use a machine with an NVIDIA card"
        yield Check("gpu", "note", "none: the CPU trains, slowly", remedy)


def _hidden(machine: Machine) -> bool:
    """Return True if the first device of CUDA_VISIBLE_DEVICES is no GPU, so that CUDA finds none."""
    if machine.visible_devices is None or not machine.driver.cards:
        return False
    first = machine.visible_devices.split(",")[0].strip()
    return first in ("", "-1") or (first.isdecimal() and int(first) >= len(machine.driver.cards))


def _gpu_memory(machine: Machine) -> Check:
    found = f"{machine.gpu_free_gb:.1f} of {machine.gpu_memory_gb:.1f} GB free"
    if any(card.driver_model == "WDDM" for card in machine.driver.cards):
        found += " (beyond it, Windows moves data to RAM, and training is very slow)"
    if machine.gpu_free_gb < LITTLE_GPU_SHARE_FREE * machine.gpu_memory_gb:
        return Check("gpu memory", "note", found, "close the programs that hold the rest; nvidia-smi lists them")
    return Check("gpu memory", "ok", found)


def _settings(machine: Machine) -> Iterator[Check]:
    """Check what a training would choose on the GPU: its plan has the reasons, as for a missing compiler."""
    if machine.gpu and machine.has_kernels:
        plan = decide(machine, Hardware())
        yield Check("precision", "ok", f"{plan.precision.value}: {plan.precision.reason}")
        status, remedy = ("ok", "") if plan.compile.value else ("note", "training runs without torch.compile")
        yield Check("compiler", status, plan.compile.reason, remedy)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------ trials


def try_product(machine: Machine, device: str, precision: str) -> Check:
    """Check a matrix product, and its rate against the published one if the GPU is known. Raises RuntimeError if the
    device cannot compute it."""
    import torch

    from gputrain.hw.runtime import DTYPES
    from gputrain.hw.speed import product_flops_per_second

    dtype, generator = DTYPES[precision], torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator) for _ in range(2))
    product = (a.to(device, dtype) @ b.to(device, dtype)).cpu()
    rate = product_flops_per_second(torch.device(device), dtype)
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

    from gputrain.hw.runtime import DTYPES

    def computed(x_BCHW: Any, weight: Any) -> list[Any]:
        x_BCHW, weight = x_BCHW.requires_grad_(), weight.requires_grad_()
        y_BCHW = torch.nn.functional.conv2d(x_BCHW, weight, padding=1)
        gradients = torch.autograd.grad(y_BCHW.square().sum(), (x_BCHW, weight))
        return [tensor.detach().cpu() for tensor in (y_BCHW, *gradients)]

    dtype, generator = DTYPES[precision], torch.Generator().manual_seed(0)
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
