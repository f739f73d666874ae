"""A training step of openvpi/SingingVocoders as its own code makes it, out of a checkout of it.

The peer is on no package registry. What is imported from the checkout and called is its task, whole: models, losses,
optimizers and `training_step`. The task asks for the packages named in ABSENT, none of which takes part in the
arithmetic of a step; stand-ins take their place, whether they are installed or not. That for Lightning's module does
what Lightning does around a step with manual optimization: autocast, loss scaling, optimizer steps, and reading the
figures for the progress bar. The rest of Lightning's work (hooks, the bar itself, loops) is left out, in favour of the
peer.

Shapes: B items, 1 channel, T samples, M mel bands, F frames.
"""

import copy
import importlib
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

COMMIT = "4d0889c4c180c75ad3000cc565864656344f8190"  # that this was written against
ABSENT = ("lightning", "matplotlib", "parselmouth", "pyworld", "torchaudio", "torchmetrics")
NAMES = {"msd": "msd", "mpd": "mpd", "fast_mrd": "mrd", "fast_mpd": "mpd"}  # of our kinds in the peer's tasks

Sample = dict[str, Tensor]  # audio (B, 1, T), mel (B, M, F), f0 (B, F), as the peer's loader gives them
Weights = Mapping[str, Mapping[str, Tensor]]  # of the generator and of each kind of discriminator


def commit(folder: Path) -> str:
    """Of the checkout, with "-dirty" where it was changed; "unknown" where git cannot tell."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class StandIn:
    """For whatever the absent packages hold: taken as a base class, a decorator or a function, it does nothing."""

    def __init__(self, *arguments: object, **named: object) -> None:
        pass


class Absent(MetaPathFinder, Loader):
    """Imports the absent packages as modules full of stand-ins."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in ABSENT else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def __getattr__(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return StandIn

        module.__dict__["__getattr__"] = __getattr__


class ManualOptimization(nn.Module):
    """What the task needs of lightning.pytorch.LightningModule in a training step."""

    global_rank = 0

    def __init__(self) -> None:
        super().__init__()
        self.steppers: tuple[Any, ...] = ()
        self.scaler = torch.amp.GradScaler(enabled=False)
        self.logger = self
        self.global_step = 0  # Lightning counts the steps of every optimizer

    def begin(self, device: torch.device, *, fp16: bool) -> None:
        """Make the optimizers, and the loss scale of 16-mixed, which both of them share."""
        task: Any = self
        self.scaler = torch.amp.GradScaler(device.type, enabled=fp16)
        self.steppers = tuple(Stepper(self, optimizer) for optimizer in task.configure_optimizers())

    def optimizers(self) -> tuple[Any, ...]:
        return self.steppers

    def manual_backward(self, loss: Tensor) -> None:
        torch.autograd.backward(self.scaler.scale(loss))

    def log_dict(self, values: Mapping[str, Any], **how: object) -> None:
        """The progress bar shows them after every step."""
        self.shown = {name: float(value) for name, value in values.items()}

    def log_metrics(self, values: Mapping[str, Any], step: int) -> None:
        """The logger's, called every log_interval steps."""
        self.logged = {name: float(value) for name, value in values.items()}


class Stepper:
    """An optimizer under the loss scale, as Lightning's 16-mixed has it: without one, plain steps."""

    def __init__(self, task: ManualOptimization, optimizer: torch.optim.Optimizer) -> None:
        self.task, self.optimizer = task, optimizer

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        scaler = self.task.scaler
        scaler.unscale_(self.optimizer)
        scaler.step(self.optimizer)
        scaler.update()
        self.task.global_step += 1


class Recorder:
    """Keeps the gradients that an optimizer would step by, and steps not."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.gradients: dict[str, Tensor] = {}

    def zero_grad(self) -> None:
        self.module.zero_grad()

    def step(self) -> None:
        named = self.module.named_parameters()
        self.gradients = {name: p.grad.detach().clone() for name, p in named if p.grad is not None}


def load(folder: Path, content: Mapping[str, Any], weights: Weights, device: torch.device) -> Any:
    """The peer's task for a configuration file of this content, with these weights, its losses ready."""
    if not any(isinstance(finder, Absent) for finder in sys.meta_path):
        sys.meta_path.insert(0, Absent())
        sys.path.insert(0, str(folder.resolve()))
    lightning: Any = importlib.import_module("lightning.pytorch")
    lightning.LightningModule = ManualOptimization
    module, _, name = content["task_cls"].removeprefix("training.").rpartition(".")
    task = getattr(importlib.import_module(f"training.{module}"), name)(copy.deepcopy(dict(content)))
    task.build_model()
    task.build_losses_and_metrics()
    task.generator.load_state_dict(weights["generator"])
    for kind, state in weights.items():
        if kind != "generator":
            task.discriminator[NAMES[kind]].load_state_dict(state)
    return task.to(device)


def make_sample(task: Any, wave_BT: Tensor, f0_BF: Tensor) -> Sample:
    """What the peer's preparation and loader would make of these waves."""
    mel_BMF = task.TF.dynamic_range_compression_torch(task.TF(wave_BT))
    return {"audio": wave_BT[:, None], "mel": mel_BMF, "f0": f0_BF}


def stepping(task: Any, sample: Sample, device: torch.device, *, fp16: bool) -> Callable[[], None]:
    """A training step of the peer, from a batch in (pinned) memory, as it comes from the loader."""
    task.begin(device, fp16=fp16)
    if device.type == "cuda":
        sample = {name: values.pin_memory() for name, values in sample.items()}

    def step() -> None:
        given = {name: values.to(device, non_blocking=True) for name, values in sample.items()}
        with torch.autocast(device.type, torch.float16 if fp16 else torch.bfloat16, enabled=fp16):
            task.training_step(given, 0)

    return step


def record(task: Any, sample: Sample) -> tuple[dict[str, float], dict[str, dict[str, Tensor]]]:
    """The figures that a step logs, and the gradients of the generator and of all discriminators, without a step.

    The discriminators are put into evaluation, so that the vectors of their spectral norms stand still.
    """
    task.discriminator.eval()
    recorders = {"generator": Recorder(task.generator), "discriminator": Recorder(task.discriminator)}
    task.steppers = tuple(recorders.values())
    logged = task._training_step(sample, 0)
    return {name: float(value) for name, value in logged.items()}, {n: r.gradients for n, r in recorders.items()}
