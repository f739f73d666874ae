"""Whether training is right on this GPU: losses, lean layers, compiled code, memory that runs out, resuming.

usage: python benchmarks/gpu_check.py [--device cuda]

Each check is a fresh process and compares with a reference: the CPU in fp32 or fp64, plain layers, or an undisturbed
run. Writes benchmarks/results/gpu_check_DEVICE.json; exits with 1 when a check fails. On the CPU (`--device cpu`) the
same checks run, to see that the script works.

Shape suffixes: B items, C channels, H and W pixels, h and w before upsampling.
"""

import argparse
import dataclasses
import logging
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.console import Console
from torch import Tensor, nn

from gputrain.bench import runner
from gputrain.bench.runner import BenchReport, BenchResult, BenchRow, NotMeasured, Settings
from gputrain.config import assemble
from gputrain.engine.optim import LossScale
from gputrain.engine.state import TrainState
from gputrain.engine.train import accumulate
from gputrain.hw.plan import decide
from gputrain.hw.probe import probe
from gputrain.hw.runtime import Runtime, apply, release_memory
from gputrain.vae import memory_efficient_layers as efficient
from gputrain.vae.bench import begin_bench
from gputrain.vae.config import TrainVae
from gputrain.vae.norm_arithmetic import EAGER
from gputrain.vae.recipe import VaeRecipe
from gputrain.vae.train import train_vae
from gputrain.vae.upsample_conv import upsample_conv

SMALL = {"data_path": ".", "preset": "fast", "channels": [32, 64], "image_size": 64, "batch_size": 8, "ema_decay": 0}
PLAIN = {"mixed_precision": False, "enable_tf32": False, "use_torch_compile": False, "channels_last": False}
# Largest relative errors of a loss and of the gradient as a whole, against fp32 on the CPU.
BOUNDS = {"fp32": (1e-5, 1e-3), "bf16": (1e-2, 1e-1), "fp16": (2e-3, 2e-2)}


def main() -> None:
    run(__doc__, "gpu_check", __file__, CHECKS)


def run(about: str | None, name: str, script: str, checks: Collection[str]) -> None:
    """Every check in a process of its own, which `script` answers in. Exits with 1 when one fails."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--check-minutes", type=float, default=3)
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU: nothing checked (--device cpu tries the script on the CPU)")
        return
    runner.open_folder(options.output_dir)
    report = BenchReport("checks", "checks", runner.command_line(f"python benchmarks/{name}.py"))
    rows = [BenchRow(check, {"check": check, "device": options.device}) for check in checks]
    for result in runner.measure_rows(rows, (sys.executable, script), minutes=options.check_minutes):
        report.results.append(result)
        print(line(result), flush=True)
        runner.write_json(runner.result_path(options.output_dir, name, report.device), report.to_json())
    if not all(passed(result) for result in report.results):
        sys.exit(1)


def passed(result: BenchResult) -> bool:
    return bool(result.figures.get("passed")) or result.reason.startswith("not on this device")


def line(result: BenchResult) -> str:
    figures = {name: value for name, value in result.figures.items() if name != "passed"}
    shown = ", ".join(f"{k} {v:.2g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items())
    return f"{'ok    ' if passed(result) else 'FAILED'}  {result.label:<20} {shown or result.reason}"


def measure(settings: Settings) -> dict[str, Any]:
    """In the child: one check."""
    return CHECKS[settings["check"]](settings["device"])


def runtime_on(device: str, **wishes: Any) -> tuple[TrainVae, Runtime]:
    """Everything off but what is wished for."""
    settings = assemble(TrainVae, {**SMALL, **PLAIN, **wishes, "device": device})
    return settings, apply(decide(probe(), settings.hardware))


def gradient_of(settings: TrainVae, runtime: Runtime, weights: dict[str, Tensor]) -> tuple[dict[str, float], Tensor]:
    """Losses by name, and the gradient of all weights in a row, from the same pictures and noise on every device."""
    recipe = VaeRecipe(settings, runtime, held_out=[])
    recipe.autoencoder.load_state_dict(weights)
    scale = LossScale(1024.0 if runtime.dtype == torch.float16 else 1.0).to(runtime.device)
    state = TrainState(recipe, runtime, 0.0, {"autoencoder": 4}, {"autoencoder": scale})
    cpu = VaeRecipe(settings, runtime_on("cpu")[1], held_out=[])
    batch: Any = cpu.prepare(pictures(settings), 0)
    moved = {n: v.to(runtime.device) for n, v in vars(batch).items() if isinstance(v, Tensor)}
    losses = accumulate(state, recipe.step_groups[0], dataclasses.replace(batch, **moved), 0)["autoencoder"].losses
    gradients = [
        p.grad.flatten().cpu() / scale.scale.cpu() for p in recipe.autoencoder.parameters() if p.grad is not None
    ]
    return {name: value.item() for name, value in losses.items()}, torch.cat(gradients).double()


def pictures(settings: TrainVae) -> Tensor:
    """Smooth random pictures, (B, C, H, W) in uint8."""
    generator = torch.Generator().manual_seed(0)
    coarse_BChw = torch.rand(settings.schedule.whole_batch, 3, 8, 8, generator=generator)
    smooth_BCHW = nn.functional.interpolate(coarse_BChw, size=settings.data.image_size, mode="bilinear")
    return (255 * smooth_BCHW).byte()


def relative(found: Tensor, reference: Tensor) -> float:
    return float((found.double().cpu() - reference.double().cpu()).norm() / reference.double().norm())


def check_precision(name: str, wishes: Settings) -> Callable[[str], dict[str, Any]]:
    def check(device: str) -> dict[str, Any]:
        settings, runtime = runtime_on(device, **wishes)
        if runtime.plan.precision.value != name:
            raise NotMeasured(f"not on this device: {runtime.plan.precision.reason}")
        plain, cpu = runtime_on("cpu")
        weights = VaeRecipe(plain, cpu, held_out=[]).autoencoder.state_dict()
        losses, gradient = gradient_of(settings, runtime, weights)
        reference_losses, reference = gradient_of(plain, cpu, weights)
        loss_error = max(abs(losses[term] / value - 1) for term, value in reference_losses.items())
        error = relative(gradient, reference)
        bound, gradient_bound = BOUNDS[name]
        return {
            "passed": loss_error < bound and error < gradient_bound,
            "loss_error": loss_error,
            "gradient_error": error,
        }

    return check


def check_lean(device: str) -> dict[str, Any]:
    """The lean layers in either memory format, and whether they keep it, against plain ones in fp64 on the CPU."""
    _, runtime = runtime_on(device)
    torch.manual_seed(0)
    figures: dict[str, Any] = {"passed": True}
    norm, conv = nn.GroupNorm(32, 64, eps=1e-6), nn.Conv2d(64, 48, 3, padding=1)
    layers: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[nn.Module, ...]]] = {
        "norm_silu_conv": (
            lambda x, *layers: efficient.norm_silu_conv(efficient.Features(x), *layers, EAGER)[0].added(),
            plain_norm_silu_conv,
            (norm, conv),
        ),
        "upsample_conv": (
            lambda x, layer: upsample_conv(x, layer, EAGER).added(),
            plain_upsample_conv,
            (conv,),
        ),
    }
    x_BCHW = 2 * torch.randn(2, 64, 48, 40) + 1
    for name, (ours, plain, modules) in layers.items():
        reference = gradients(plain, x_BCHW.double(), [module.double() for module in modules], torch.float64)
        for layout in (torch.contiguous_format, torch.channels_last):
            for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
                x = x_BCHW.to(runtime.device).contiguous(memory_format=layout)
                found = gradients(ours, x, [module.float().to(runtime.device) for module in modules], dtype)
                error = max(relative(a, b) for a, b in zip(found, reference, strict=True))
                kept = all(a.is_contiguous(memory_format=layout) for a in found[:2])
                figures[f"{name} {str(layout)[6:]} {str(dtype)[6:]}"] = error if kept else "changes the memory format"
                figures["passed"] &= kept and error < bound
                for module in modules:
                    module.cpu()
    return figures


def plain_norm_silu_conv(x: Tensor, norm: nn.GroupNorm, conv: nn.Conv2d) -> Tensor:
    out: Tensor = conv(nn.functional.silu(norm(x)))
    return out


def plain_upsample_conv(x: Tensor, conv: nn.Conv2d) -> Tensor:
    out: Tensor = conv(nn.functional.interpolate(x, scale_factor=2.0, mode="nearest"))
    return out


def gradients(function: Callable[..., Tensor], x: Tensor, modules: list[nn.Module], dtype: torch.dtype) -> list[Tensor]:
    """The output, and the gradients of a weighted sum of it to the input and all parameters."""
    x = x.detach().requires_grad_()
    with torch.autocast(x.device.type, dtype=dtype, enabled=dtype == torch.bfloat16):
        out = function(x, *modules)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return [out.detach(), *torch.autograd.grad(out, [x, *parameters], weights)]


def check_compile(device: str) -> dict[str, Any]:
    """Compiled blocks against eager ones: losses and gradient, in fp32."""
    settings, eager = runtime_on(device)
    _, compiled = runtime_on(device, use_torch_compile=True)
    if not compiled.plan.compile.value:
        raise NotMeasured(f"not on this device: {compiled.plan.compile.reason}")
    weights = VaeRecipe(settings, eager, held_out=[]).autoencoder.state_dict()
    losses, reference = gradient_of(settings, eager, weights)
    found_losses, found = gradient_of(settings, compiled, weights)
    loss_error = max(abs(found_losses[term] / value - 1) for term, value in losses.items())
    error = relative(found, reference)
    on = bool(compiled.plan.compile.value)  # off by now, if the compiler failed
    return {
        "passed": on and loss_error < 1e-5 and error < 1e-3,
        "loss_error": loss_error,
        "gradient_error": error,
        "compiled": on,
    }


def check_memory(device: str) -> dict[str, Any]:
    """Memory runs out in the middle of a run: the same weights as without, in fp64, where rounding hides nothing."""
    settings, runtime = runtime_on(device, image_size=256 if device == "cuda" else 32)
    begin = partial(begin_bench, settings, runtime)
    reference, peak_bytes, _ = weights_after(begin, 4)
    with little_memory(runtime, 0.7 * peak_bytes, VaeRecipe, "autoencoder_loss"):
        found, _, micro_batch = weights_after(begin, 4)
    error = relative(found, reference)
    return {"passed": micro_batch < 8 and error < 1e-10, "weight_error": error, "micro_batch_size": micro_batch}


def weights_after(begin: Callable[[Path], Any], steps: int) -> tuple[Tensor, float, int]:
    """Of the trial that `begin` makes in a folder, in fp64: all weights in a row, the peak of memory in bytes, and the
    smallest micro-batch that it ended with."""
    with tempfile.TemporaryDirectory() as folder:
        trial = begin(Path(folder))
        for module in trial.recipe.modules.values():
            module.double()
        on_gpu = trial.state.runtime.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(steps):
            trial.step()
    weights = [p.detach().cpu().flatten() for module in trial.recipe.modules.values() for p in module.parameters()]
    micro_batch = min(trial.state.micro_batch.values())
    peak_bytes = torch.cuda.max_memory_allocated() if on_gpu else 0
    del trial
    release_memory()
    return torch.cat(weights), peak_bytes, micro_batch


@contextmanager
def little_memory(runtime: Runtime, limit_bytes: float, recipe: Any, loss: str) -> Iterator[None]:
    """A card capped to so many bytes. The CPU cannot be capped: there an allocation that no machine can serve fails
    whenever the `loss` of recipes of this class is asked for more than two items."""
    if runtime.device.type == "cuda":
        total = torch.cuda.get_device_properties(runtime.device).total_memory
        torch.cuda.set_per_process_memory_fraction(limit_bytes / total)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return
    whole = getattr(recipe, loss)

    def failing(self: Any, batch: Any, step: int) -> Iterator[Any]:
        for term in whole(self, batch, step):
            yield term
            if self.size(batch) > 2:
                torch.empty(10**15)

    setattr(recipe, loss, failing)
    try:
        yield
    finally:
        setattr(recipe, loss, whole)


def check_resume(device: str) -> dict[str, Any]:
    """6 steps at once against 3, a new start from the checkpoint, and 3 more: apart by little of the way they went.

    A GPU sums gradients in another order each time, so that only a CPU gives the same bits.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pictures").mkdir()
        for index, picture_CHW in enumerate(pictures(runtime_on("cpu")[0])):
            picture = Image.fromarray(picture_CHW.permute(1, 2, 0).numpy())
            picture.save(folder / "pictures" / f"{index}.png")
        straight = train_in(folder / "straight", device, 6)
        half = train_in(folder / "cut", device, 3)
        resumed = train_in(folder / "cut", device, 6)
    error = float((resumed - straight).norm() / (straight - half).norm())
    return {"passed": error < (0.05 if device == "cuda" else 1e-12), "error_by_way": error, "same_bits": error == 0}


def train_in(run: Path, device: str, steps: int) -> Tensor:
    """All weights in a row after a real run of train-vae, resumed if it was begun."""
    settings = {**SMALL, **PLAIN, "data_path": str(run.parent / "pictures"), "output_dir": str(run), "device": device}
    quiet = {"evaluate_freq": 0, "save_samples_freq": 0, "num_workers": 0, "warmup_steps": 0, "batch_size": 2}
    train_vae(assemble(TrainVae, {**settings, **quiet, "max_steps": steps, "resume_from": "auto"}), Console(quiet=True))
    modules = torch.load(run / "checkpoint_last.pt", weights_only=True, map_location="cpu")["modules"]
    return torch.cat([tensor.double().flatten() for tensor in modules["autoencoder"].values()])


def check_waits(device: str) -> dict[str, Any]:
    """No step waits for the device, adversary and all; and the allocator does what it was asked for."""
    if device != "cuda":
        raise NotMeasured("not on this device: only a GPU works beside the host")
    adversary = {"adversarial_weight": 0.5, "discriminator_start": 0, "discriminator_warmup_steps": 0}
    settings, runtime = runtime_on(device, **adversary)
    with tempfile.TemporaryDirectory() as folder:
        trial = begin_bench(settings, runtime, Path(folder))
        for _ in range(3):
            trial.step()
        torch.cuda.set_sync_debug_mode("error")  # a wait raises
        trial.step()
        torch.cuda.set_sync_debug_mode("default")
    asked = bool(runtime.plan.expandable_segments.value)
    found = bool(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])
    return {"passed": asked == found, "expandable_segments": found}


CHECKS: dict[str, Callable[[str], dict[str, Any]]] = {
    "fp32": check_precision("fp32", {}),
    "bf16": check_precision("bf16", {"mixed_precision": True, "use_bf16": True, "channels_last": True}),
    "fp16": check_precision("fp16", {"mixed_precision": True, "use_bf16": False, "channels_last": True}),
    "lean": check_lean,
    "memory": check_memory,
    "resume": check_resume,
    "no waits": check_waits,
    "compile": check_compile,
}

if __name__ == "__main__" and not runner.answer(measure):
    main()
