"""Runs a training step of openvpi/SingingVocoders with its own code from a checkout, and compares its results with
ours.

It imports and calls the peer's whole task: models, losses, optimizers and `training_step`. The task imports the
packages named in ABSENT, none of which takes part in the arithmetic of a step; stand-ins replace them, whether they are
installed or not. The stand-in for Lightning's module does what Lightning does around a step with manual optimization:
autocast, loss scaling, optimizer steps, and reading the metrics for the progress bar. The rest of Lightning's work
(hooks, the bar itself, loops) is omitted, in favour of the peer.

Shapes: B items, 1 channel, T samples, M mel bands, F frames, H harmonics.
"""

import copy
import importlib
import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from gputrain.bench.step_bench import StepBench
from gputrain.engine.step import accumulate
from gputrain.vocoder.discriminators import FastPeriodDiscriminator
from gputrain.vocoder.generator import HARMONICS, Noise
from gputrain.vocoder.recipe import VocoderBatch, VocoderRecipe

ABSENT = ("lightning", "matplotlib", "parselmouth", "pyworld", "torchaudio", "torchmetrics")
NAMES = {"msd": "msd", "mpd": "mpd", "fast_mrd": "mrd", "fast_mpd": "mpd"}  # Names of our kinds in the peer's tasks.
# Factors of the peer's gradients: its loss is real + fake in one task, and their mean, like ours, in the other.
FACTORS = {"generator": 1.0, "msd": 2.0, "mpd": 2.0, "fast_mrd": 1.0, "fast_mpd": 1.0}

Sample = dict[str, Tensor]  # The peer's audio (B, 1, T), mel (B, M, F) and f0 (B, F).
Gradients = dict[str, dict[str, Tensor]]  # Gradients of the generator and of each kind of discriminator.


def commit(folder: Path) -> str:
    """Returns the commit of the checkout, with "-dirty" if it was changed; "unknown" without git."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class StandIn:
    """Replaces any object of the absent packages: as a base class, a decorator or a function, it does nothing."""

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
    """The parts of lightning.pytorch.LightningModule that the task needs in a training step."""

    global_rank = 0

    def __init__(self) -> None:
        super().__init__()
        self.steppers: tuple[Any, ...] = ()
        self.scaler = torch.amp.GradScaler(enabled=False)
        self.made: list[bool] = []  # True for each optimizer step that was made; fp16 skips those that overflow.

    @property
    def global_step(self) -> int:
        """Returns the steps of every optimizer, as Lightning counts them."""
        return len(self.made)

    @property
    def logger(self) -> "ManualOptimization":
        return self

    def begin(self, device: torch.device, *, fp16: bool) -> None:
        """Creates the optimizers, and the loss scale of 16-mixed, which they share."""
        task: Any = self
        self.scaler = torch.amp.GradScaler(device.type, enabled=fp16)
        self.steppers = tuple(Stepper(self, optimizer) for optimizer in task.configure_optimizers())

    def optimizers(self) -> tuple[Any, ...]:
        return self.steppers

    def manual_backward(self, loss: Tensor) -> None:
        torch.autograd.backward(self.scaler.scale(loss))

    def log_dict(self, values: Mapping[str, Any], **how: object) -> None:
        """Reads the metrics, which the progress bar shows after every step."""
        self.shown = numbers(values)

    def log_metrics(self, values: Mapping[str, Any], step: int) -> None:
        """Ignores the metrics of the logger, which is called every log_interval steps."""
        self.logged = numbers(values)


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Reads each metric from the device."""
    return {name: torch.as_tensor(value).item() for name, value in values.items()}


class Stepper:
    """An optimizer with the loss scale of Lightning's 16-mixed; plain steps without a scale."""

    def __init__(self, task: ManualOptimization, optimizer: torch.optim.Optimizer) -> None:
        self.task, self.optimizer = task, optimizer
        self.made = False
        optimizer.register_step_post_hook(self._note)

    def _note(self, *arguments: object) -> None:
        self.made = True

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.made = False
        scaler = self.task.scaler
        scaler.unscale_(self.optimizer)
        scaler.step(self.optimizer)
        scaler.update()
        self.task.made.append(self.made)


def load(folder: Path, content: Mapping[str, Any], device: torch.device) -> Any:
    """Returns the peer's task for a configuration file of this content, with its models and losses."""
    if not any(type(finder) is Absent for finder in sys.meta_path):
        sys.meta_path.insert(0, Absent())
    if str(folder.resolve()) not in sys.path:
        sys.path.insert(0, str(folder.resolve()))
    lightning: Any = importlib.import_module("lightning.pytorch")
    lightning.LightningModule = ManualOptimization
    # Its STFT loss names CUDA as the default device.
    importlib.import_module("modules.loss.stft_loss").warp_stft.__init__.__defaults__ = ({}, device)
    module, _, name = content["task_cls"].removeprefix("training.").rpartition(".")
    task = getattr(importlib.import_module(f"training.{module}"), name)(copy.deepcopy(dict(content)))
    task.build_model()
    task.build_losses_and_metrics()
    return task.to(device)


def parts_of(task: Any, kinds: Iterable[str]) -> dict[str, nn.Module]:
    """Returns the generator, and the discriminators under our names of their kinds. Ours have the same tensors."""
    return {"generator": task.generator, **{kind: task.discriminator[NAMES[kind]] for kind in kinds}}


def make_sample(task: Any, wave_BT: Tensor, f0_BF: Tensor) -> Sample:
    """Returns the batch that the peer's preparation and loader would produce from these waves."""
    mel_BMF = task.TF.dynamic_range_compression_torch(task.TF(wave_BT))
    return {"audio": wave_BT[:, None], "mel": mel_BMF, "f0": f0_BF}


def stepping(task: Any, sample: Sample, device: torch.device, *, fp16: bool) -> Callable[[], None]:
    """Runs a training step of the peer on a batch in (pinned) memory, as it comes from the loader."""
    task.begin(device, fp16=fp16)
    if device.type == "cuda":
        sample = {name: values.pin_memory() for name, values in sample.items()}

    def step() -> None:
        given = {name: values.to(device, non_blocking=True) for name, values in sample.items()}
        with torch.autocast(device.type, torch.float16 if fp16 else torch.bfloat16, enabled=fp16):
            task.training_step(given, 0)

    return step


# Comparison -----------------------------------------------------------------------------------------------------------


def compare(task: Any, ours: StepBench) -> dict[str, Any]:
    """Compares every loss of both phases, and the gradients, with the same weights, sound and noise.

    The same weights are the caller's matter. No side steps.
    """
    recipe: Any = ours.recipe
    prepared: VocoderBatch = recipe.prepare(ours.loaded, 0)
    sample = make_sample(task, prepared.real_B1T.squeeze(1), prepared.f0_BF)
    batch = replace(prepared, noise=noise_of_the_peer(prepared))
    logged, their_gradients = record(task, sample, recipe)
    as_trained, _ = losses_and_gradients(ours, batch)
    for discriminator in recipe.by_kind.get("fast_mpd", ()):
        cut_end(discriminator)
    losses, gradients = losses_and_gradients(ours, batch)
    theirs = under_our_names(logged, recipe)
    return {
        "items": len(batch.real_B1T),
        "crop_frames": batch.f0_BF.shape[1],
        "losses": {
            name: {"ours": losses[name], "peer": theirs[name], "relative": abs(losses[name] / theirs[name] - 1)}
            for name in theirs
        },
        "losses_as_trained": as_trained,
        "gradients": {
            name: {"factor": FACTORS[name], **distance(gradients[name], their_gradients[name], FACTORS[name])}
            for name in gradients
        },
    }


class Recorder:
    """Replaces an optimizer: records the gradients and does not step."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.gradients: dict[str, Tensor] = {}

    def zero_grad(self) -> None:
        self.module.zero_grad()

    def step(self) -> None:
        self.gradients = gradients_of(self.module)


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    named = module.named_parameters()
    return {name: p.grad.detach().cpu().double() for name, p in named if p.grad is not None}


def record(task: Any, sample: Sample, recipe: VocoderRecipe) -> tuple[dict[str, float], Gradients]:
    """Returns the metrics that a step of the peer logs, and the gradients of its optimizers.

    The discriminators are put into evaluation, so that the vectors of their spectral norms stand still.
    """
    task.discriminator.eval()
    recorders = {name: Recorder(module) for name, module in parts_of(task, recipe.by_kind).items()}
    generator, *discriminators = recorders.values()
    task.steppers = (generator, Together(discriminators))
    logged = task._training_step(sample, 0)
    return numbers(logged), {name: recorder.gradients for name, recorder in recorders.items()}


class Together:
    """Combines recorders into one optimizer."""

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        self.recorders = recorders

    def zero_grad(self) -> None:
        for recorder in self.recorders:
            recorder.zero_grad()

    def step(self) -> None:
        for recorder in self.recorders:
            recorder.step()


def noise_of_the_peer(batch: VocoderBatch) -> Noise:
    """Returns what its source draws next from the seeded default generator: phases of the batch, then noise."""
    items, device = len(batch.real_B1T), batch.real_B1T.device
    torch.manual_seed(0)
    phase_BH = torch.rand(1, 1, HARMONICS, device=device)[0].repeat(items, 1)
    phase_BH[:, 0] = 0
    source_BTH = torch.randn(items, batch.real_B1T.shape[-1], HARMONICS, device=device)
    torch.manual_seed(0)
    return batch.noise._replace(phase_BH=phase_BH, source_BTH=source_BTH)


def cut_end(discriminator: FastPeriodDiscriminator) -> None:
    """Makes it score what the peer's does: the longest prefix of a wave that period and strides divide."""
    tokens, multiple = discriminator.tokens, discriminator.period * math.prod(discriminator.strides)
    changed: Any = discriminator
    changed.tokens = lambda wave_B1T: tokens(wave_B1T[..., : wave_B1T.shape[-1] // multiple * multiple])


def losses_and_gradients(ours: StepBench, batch: VocoderBatch) -> tuple[dict[str, float], Gradients]:
    """Returns our losses under phase/term, unweighted, with the adversarial loss and feature matching apart; no step is
    made."""
    recipe: Any = ours.recipe
    losses: dict[str, float] = {}
    gradients: Gradients = {}
    (group,) = recipe.step_groups
    gathered = accumulate(ours.state, group, batch, 0)
    for phase in group.phases:
        found = gathered[phase.name]
        losses |= {f"{phase.name}/{name}": float(value) for name, value in {**found.losses, **found.statistics}.items()}
        modules = {"generator": recipe.generator} if phase.name == "generator" else recipe.by_kind
        gradients |= {name: gradients_of(module) for name, module in modules.items()}
        phase.optimizer.zero_grad(set_to_none=True)
    for kind in recipe.by_kind:
        losses[f"generator/{kind}"] -= losses[f"generator/{kind}_features"]
    return losses, gradients


def under_our_names(logged: Mapping[str, float], recipe: VocoderRecipe) -> dict[str, float]:
    """Returns the peer's logged metrics, with the factors of ours."""
    named = {"generator/mel": logged["aux_mel_loss"] / recipe.loss_options.lab_aux_melloss}
    for kind in recipe.by_kind:
        theirs = NAMES[kind]
        named[f"generator/{kind}"] = logged[f"G{theirs}loss"]
        named[f"generator/{kind}_features"] = logged[f"G{theirs}_feature_loss"]
        named[f"discriminator/{kind}"] = 0.5 * (logged[f"D{theirs}lossF"] + logged[f"D{theirs}lossT"])
    return named


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor], factor: float) -> dict[str, Any]:
    """Returns the differences of all gradients together and of the worst tensor, relative to the peer's norms. Raises
    KeyError on a name that only ours has, ValueError on one that only the peer has."""
    if missing := theirs.keys() - ours.keys():
        raise ValueError(f"without a gradient: {', '.join(sorted(missing))}")
    differences = {name: float((factor * ours[name] - theirs[name]).norm()) for name in ours}
    norms = {name: float(theirs[name].norm()) for name in ours}
    worst = max(ours, key=lambda name: differences[name] / norms[name])
    return {
        "relative": math.hypot(*differences.values()) / math.hypot(*norms.values()),
        "largest_relative": differences[worst] / norms[worst],
        "largest_in": worst,
    }
