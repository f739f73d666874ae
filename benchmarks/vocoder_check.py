"""Checks the vocoder's training on this GPU: precisions, compiled code, running out of memory, synchronisation.

usage: python benchmarks/vocoder_check.py [--device cuda]

Each check runs in a fresh process and compares both phases with the CPU in fp32, or with an undisturbed run in fp64.
Writes benchmarks/results/vocoder_check_DEVICE.json; exits with 1 when a check fails. On the CPU (`--device cpu`) the
same checks run, to see that the script works.
"""

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_check
import torch
from gpu_check import PLAIN, little_memory, relative, weights_after
from torch import Tensor
from torch.utils._pytree import tree_map_only

from gputrain.bench import runner
from gputrain.bench.runner import NotMeasured, Settings
from gputrain.config import assemble
from gputrain.engine.optim import LossScale
from gputrain.engine.recipe import phases_of
from gputrain.engine.state import TrainState
from gputrain.engine.train import accumulate
from gputrain.hw.plan import decide
from gputrain.hw.probe import probe
from gputrain.hw.runtime import Runtime, apply
from gputrain.vocoder.bench import begin_bench, synthetic_sound
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.recipe import VocoderBatch, VocoderRecipe

SMALL = {
    "data_path": ".", "upsample_initial_channel": 32, "batch_size": 4, "crop_mel_frames": 16, "ema_decay": 0,
    "discriminators": ["msd", "mpd", "mrd", "fast_mrd", "fast_mpd"], "discriminator_periods": [2, 3],
    "msd_channels": 16, "mpd_channels": 4, "mrd_channels": 4, "use_stftloss": True,
}  # fmt: skip
EVERYTHING = {"mini_nsf": True, "pc_aug": True, "key_aug": True, "noise_sigma": 0.1, "generator_optimizer": "muon"}
# Largest relative errors of a loss and of the whole gradient of a phase, compared with fp32 on the CPU.
BOUNDS = {"fp32": (1e-4, 5e-3), "bf16": (5e-2, 3e-1), "fp16": (1e-2, 1e-1)}


def measure(settings: Settings) -> dict[str, Any]:
    """Runs one check in the child process."""
    return CHECKS[settings["check"]](settings["device"])


def runtime_on(device: str, **wishes: Any) -> tuple[TrainVocoder, Runtime]:
    """Returns settings and runtime with all switches off except `wishes`."""
    settings = assemble(TrainVocoder, {**SMALL, **PLAIN, **wishes, "device": device})
    return settings, apply(decide(probe(), settings.hardware))


def gradients_of(settings: TrainVocoder, runtime: Runtime) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Returns losses by name, and the flat gradient of each phase, with the same weights, sound and noise
    everywhere."""
    torch.manual_seed(0)
    recipe = VocoderRecipe(settings, runtime)
    with torch.no_grad():  # In quiet waves, rounding would dominate the logarithms of the losses.
        recipe.generator.conv_post.weight_g.mul_(20)
    start = LossScale(1024.0 if runtime.dtype == torch.float16 else 1.0).to(runtime.device)
    names = [phase.name for phase in phases_of(recipe)]
    state = TrainState(recipe, runtime, 0.0, dict.fromkeys(names, 2), dict.fromkeys(names, start))
    drawn = VocoderRecipe(settings, runtime_on("cpu")[1]).prepare(synthetic_sound(settings), 0)
    values = {field.name: getattr(drawn, field.name) for field in dataclasses.fields(drawn)}
    batch = VocoderBatch(**tree_map_only(Tensor, lambda tensor: tensor.to(runtime.device), values))
    losses: dict[str, float] = {}
    gradients: dict[str, Tensor] = {}
    (group,) = recipe.step_groups
    gathered = accumulate(state, group, batch, 0)
    for phase in group.phases:
        losses |= {f"{phase.name}/{name}": value.item() for name, value in gathered[phase.name].losses.items()}
        grads = [p.grad.flatten().cpu().double() / start.scale.cpu() for p in phase.parameters() if p.grad is not None]
        gradients[phase.name] = torch.cat(grads)
        phase.optimizer.zero_grad()
    return losses, gradients


def compared(found: tuple[Any, Any], reference: tuple[Any, Any], bounds: tuple[float, float]) -> dict[str, Any]:
    loss_error = max(abs(found[0][term] / value - 1) for term, value in reference[0].items())
    errors = {f"{name}_gradient_error": relative(found[1][name], gradient) for name, gradient in reference[1].items()}
    passed = loss_error < bounds[0] and max(errors.values()) < bounds[1]
    return {"passed": passed, "loss_error": loss_error, **errors}


def check_precision(name: str, wishes: Settings) -> Callable[[str], dict[str, Any]]:
    def check(device: str) -> dict[str, Any]:
        settings, runtime = runtime_on(device, **wishes)
        if runtime.plan.precision.value != name:
            raise NotMeasured(f"not on this device: {runtime.plan.precision.reason}")
        return compared(gradients_of(settings, runtime), gradients_of(*runtime_on("cpu")), BOUNDS[name])

    return check


def check_compile(device: str) -> dict[str, Any]:
    """Compares compiled generator and discriminators with eager ones, in fp32."""
    discriminators = {
        "discriminators": ["mpd", "fast_mrd"],
        "use_stftloss": False,
    }  # Only two, because compiling takes time.
    settings, eager = runtime_on(device, **discriminators)
    _, compiled = runtime_on(device, **discriminators, use_torch_compile=True)
    if not compiled.plan.compile.value:
        raise NotMeasured(f"not on this device: {compiled.plan.compile.reason}")
    figures = compared(gradients_of(settings, compiled), gradients_of(settings, eager), BOUNDS["fp32"])
    on = bool(compiled.plan.compile.value)  # It is off if the compiler failed.
    return {**figures, "passed": figures["passed"] and on, "compiled": on}


def check_memory(device: str) -> dict[str, Any]:
    """Checks that running out of memory changes no weights, in fp64, where rounding hides nothing."""
    settings, runtime = runtime_on(device, **({"batch_size": 16, "crop_mel_frames": 64} if device == "cuda" else {}))
    begin = functools.partial(begin_bench, settings, runtime)
    reference, peak_bytes, _ = weights_after(begin, 3)
    with little_memory(runtime, 0.6 * peak_bytes, VocoderRecipe, "loss"):
        found, _, micro_batch = weights_after(begin, 3)
    error = relative(found, reference)
    fewer = micro_batch < settings.schedule.batch_size
    return {"passed": fewer and error < 1e-9, "weight_error": error, "micro_batch_size": micro_batch}


def check_waits(device: str) -> dict[str, Any]:
    """Checks that no step waits for the device, with every augmentation and both optimizers."""
    if device != "cuda":
        raise NotMeasured("not on this device: only a GPU runs asynchronously")
    for wishes in ({}, EVERYTHING):
        settings, runtime = runtime_on(device, **wishes)
        with tempfile.TemporaryDirectory() as folder:
            trial = begin_bench(settings, runtime, Path(folder))
            for _ in range(2):
                trial.step()
            torch.cuda.set_sync_debug_mode("error")  # A wait raises an error.
            trial.step()
            torch.cuda.set_sync_debug_mode("default")
    return {"passed": True}


CHECKS: dict[str, Callable[[str], dict[str, Any]]] = {
    "fp32": check_precision("fp32", {}),
    "bf16": check_precision("bf16", {"mixed_precision": True, "use_bf16": True}),
    "fp16": check_precision("fp16", {"mixed_precision": True, "use_bf16": False}),
    "no waits": check_waits,
    "memory": check_memory,
    "compile": check_compile,
}

if __name__ == "__main__" and not runner.answer(measure):
    gpu_check.run(__doc__, "vocoder_check", __file__, CHECKS)
