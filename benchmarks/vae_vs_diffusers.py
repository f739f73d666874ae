"""Compares our autoencoder with stock diffusers' in one run: loss, gradients, time and memory of a training step.

usage: python benchmarks/vae_vs_diffusers.py [--preset flux] [--image-size 128] [--batch-size 1] [--rounds 5]

Weights, pictures, noise and losses (L1 and KL) are equal, and every side has a fused AdamW step. The sides alternate in
one process, so that changes of the machine's speed affect all of them; malloc keeps freed memory for all, as a training
of ours on a CPU has it. Each has its best switches: --precision bf16, --channels-last and --compile, which are on by
default on a GPU; gradient checkpointing is a separate side. Beside the measured time of each side stands the one that
the planner predicts from its shapes and the device's measured rates (predictions.py).

Needs the development tools (diffusers). Writes benchmarks/results/vae_vs_diffusers_DEVICE.json after every size.

Shape suffixes: B items, C channels, H and W pixels, L latent channels, h and w latent pixels.
"""

import argparse
import contextlib
import dataclasses
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch
from predictions import kernels_of
from torch import Tensor, nn

from gputrain.bench import runner, step_bench
from gputrain.engine.optim import adamw
from gputrain.hw.plan import Hardware, decide
from gputrain.hw.probe import machine_facts, probe
from gputrain.hw.runtime import (
    Runtime,
    apply,
    compiler_failure,
    is_out_of_memory,
    release_memory,
    synchronize,
)
from gputrain.planner.memory.fake_runtime import FakeRuntime, FunctionsOf, on_fake_tensors
from gputrain.planner.memory.timeline import MemoryTimeline
from gputrain.planner.model_planner import measured_rates
from gputrain.planner.time.roofline import DeviceRates, busy_seconds
from gputrain.vae.architecture import PRESETS, VaeArchitecture
from gputrain.vae.losses import kl_divergence
from gputrain.vae.model import AutoencoderKL, compile_layers

KL_WEIGHT = 1e-6
SIDES = ("stock", "stock-checkpointing", "ours", "ours-checkpointing")
log = logging.getLogger("gputrain.benchmark")


@dataclass
class Batch:
    images_BCHW: Tensor
    noise_BLhw: Tensor


Reconstruct = Callable[[Batch], tuple[Tensor, Tensor, Tensor]]  # made_BCHW, and the latents' mean and log-variance


@dataclass
class Side:
    """One of the compared implementations, with its measurements."""

    name: str
    model: nn.Module
    reconstruct: Reconstruct
    optimizer: torch.optim.Optimizer
    seconds: list[float] = field(default_factory=list)  # durations of the timed steps
    cpu_seconds: list[float] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)


def main() -> None:
    options = parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if options.threads:
        torch.set_num_threads(options.threads)
    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    runtime = apply(decide(probe(), requested(options, on_gpu)))
    rates = measured_rates(runtime)  # They are measured first, while the device is idle.
    report = {
        **machine_facts(options.device),
        "command": runner.command_line("python benchmarks/vae_vs_diffusers.py"),
    }
    report["switches"] = {name: setting.value for name, setting in runtime.plan.settings.items()}
    report["rates"] = dataclasses.asdict(rates)
    path = runner.result_path(options.output_dir, "vae_vs_diffusers", str(report["device"]))
    runner.open_folder(options.output_dir)
    sizes = []
    for image_size in options.image_size:
        sizes.append(compare(options, image_size, runtime, rates))
        runner.write_json(path, {**report, "comparisons": sizes})
        show(sizes[-1])
    print(path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="flux")
    parser.add_argument("--channels", type=lambda text: tuple(map(int, text.split(","))), default=())
    parser.add_argument("--image-size", type=int, nargs="+", default=[128])
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--largest", action="store_true", help="halve the batch until the first side can hold it")
    parser.add_argument("--sides", choices=SIDES, nargs="+", default=list(SIDES), help="the first is the reference")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each side")
    parser.add_argument("--minutes", type=float, default=60, help="no further round after this time, for each size")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--precision", choices=("fp32", "bf16"))
    parser.add_argument("--channels-last", action=argparse.BooleanOptionalAction)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction)
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args()


def requested(options: argparse.Namespace, on_gpu: bool) -> Hardware:
    """Returns a runtime with the requested precision, channels_last and compile; default: on if there is a GPU."""
    bf16 = options.precision == "bf16" if options.precision else on_gpu
    return Hardware(
        device=options.device,
        precision="bf16" if bf16 else "tf32",
        channels_last=on_gpu if options.channels_last is None else options.channels_last,
        use_torch_compile=on_gpu if options.compile is None else options.compile,
    )


def compare(options: argparse.Namespace, image_size: int, runtime: Runtime, rates: DeviceRates) -> dict[str, Any]:
    """Measures all sides at one size. A side that runs out of memory is reported, and the others continue."""
    architecture = PRESETS[options.preset]
    if options.channels:
        architecture = dataclasses.replace(architecture, block_out_channels=options.channels)
    batch_size = options.batch_size
    if options.largest:
        batch_size = largest_batch(options.sides[0], architecture, image_size, batch_size, runtime)
    batch = make_batch(architecture, image_size, batch_size, runtime)
    flops = count_flops(architecture, image_size) * batch_size
    torch.manual_seed(0)
    weights = stock_autoencoder(architecture).state_dict()
    sides = [make_side(name, architecture, weights, runtime) for name in options.sides]
    reference: dict[str, Tensor] = {}
    for side in sides:
        log.info("%s at %d px, %d images: loss, gradients, first step", side.name, image_size, batch_size)
        with failure_is_a_result(side):
            measure_gradients(side, batch, runtime, reference)
            warm_up(side, batch, runtime)
    take_turns(sides, batch, runtime, options.rounds, options.minutes)
    figures = []
    for side in sides:
        predicted = predicted_seconds(side.name, architecture, image_size, batch_size, runtime, rates)
        figures.append({**summary(side, flops, runtime), "predicted_seconds_per_step": predicted})
    return {
        "preset": options.preset,
        "channels": list(architecture.block_out_channels),
        "image_size": image_size,
        "batch_size": batch_size,
        "tflop_a_step": flops / 1e12,
        "sides": figures,
        "ratios": ratios(figures),
    }


def make_batch(architecture: VaeArchitecture, image_size: int, items: int, runtime: Runtime) -> Batch:
    generator = torch.Generator().manual_seed(0)
    side = image_size // architecture.downsampling
    images_BCHW = torch.rand(items, 3, image_size, image_size, generator=generator) * 2 - 1
    noise_BLhw = torch.randn(items, architecture.latent_channels, side, side, generator=generator)
    return Batch(images_BCHW.to(runtime.device, memory_format=runtime.memory_format), noise_BLhw.to(runtime.device))


def stock_autoencoder(architecture: VaeArchitecture) -> Any:
    levels, keys = len(architecture.block_out_channels), dataclasses.asdict(architecture)
    for name in ("decoder_block_out_channels", "patch_statistics"):  # AutoencoderKL knows none of them.
        del keys[name]
    autoencoder: Any = diffusers.AutoencoderKL
    return autoencoder(
        **keys,
        down_block_types=["DownEncoderBlock2D"] * levels,
        up_block_types=["UpDecoderBlock2D"] * levels,
    )


def make_side(name: str, architecture: VaeArchitecture, weights: dict[str, Tensor], runtime: Runtime) -> Side:
    """Returns a model with these weights and its best switches."""
    kind, _, checkpointing = name.partition("-")
    model: Any
    if kind == "ours":
        model = AutoencoderKL(architecture, checkpointing=bool(checkpointing))
        compile_layers(model, runtime)
        reconstruct = ours_reconstructs(model)
    else:
        model = stock_autoencoder(architecture)
        if checkpointing:
            model.enable_gradient_checkpointing()
        runtime.compile_modules([model.encoder, model.decoder])  # as a whole, for the best optimisation by the compiler
        reconstruct = stock_reconstructs(model)
    model.load_state_dict(weights)
    runtime.place(model)
    optimizer = adamw(model.parameters(), learning_rate=1e-4, weight_decay=0.0, betas=(0.9, 0.999))
    return Side(name, model.train(), reconstruct, optimizer)


def ours_reconstructs(model: AutoencoderKL) -> Reconstruct:
    def reconstruct(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        mean_BLhw, logvar_BLhw = model.encode(batch.images_BCHW)
        made_BCHW = model.decode(mean_BLhw + (0.5 * logvar_BLhw).exp() * batch.noise_BLhw)
        return made_BCHW, mean_BLhw, logvar_BLhw

    return reconstruct


def stock_reconstructs(model: Any) -> Reconstruct:
    def reconstruct(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        latents = model.encode(batch.images_BCHW).latent_dist
        mean_BLhw, logvar_BLhw = latents.mean.float(), latents.logvar.float()
        made_BCHW = model.decode(mean_BLhw + (0.5 * logvar_BLhw).exp() * batch.noise_BLhw).sample
        return made_BCHW, mean_BLhw, logvar_BLhw

    return reconstruct


def loss_of(side: Side, batch: Batch, runtime: Runtime) -> Tensor:
    with runtime.autocast():
        made_BCHW, mean_BLhw, logvar_BLhw = side.reconstruct(batch)
    distance = (made_BCHW.float() - batch.images_BCHW).abs().mean()
    return distance + KL_WEIGHT * kl_divergence(mean_BLhw, logvar_BLhw, batch.images_BCHW[0].numel()).mean()


def step(side: Side, batch: Batch, runtime: Runtime) -> None:
    torch.autograd.backward(loss_of(side, batch, runtime))
    side.optimizer.step()
    side.optimizer.zero_grad(set_to_none=True)


@contextlib.contextmanager
def failure_is_a_result(side: Side) -> Iterator[None]:
    """Records that a side ran out of memory or cannot be compiled, and frees its memory."""
    try:
        yield
    except RuntimeError as error:
        reason = "out of memory" if is_out_of_memory(error) else compiler_failure(error)
        if not reason:
            raise
        side.figures["reason"] = reason
    if "reason" in side.figures:  # outside the except block, whose traceback keeps the tensors alive
        log.info("%s: %s", side.name, side.figures["reason"])
        side.optimizer.zero_grad(set_to_none=True)
        side.optimizer.state.clear()
        side.model.to("meta")
        release_memory()


def largest_batch(name: str, architecture: VaeArchitecture, image_size: int, items: int, runtime: Runtime) -> int:
    """Halves the batch until an uncompiled step of the side fits besides the weights of all sides. Returns its size."""
    plain = dataclasses.replace(runtime)
    plain.plan = dataclasses.replace(runtime.plan, compile=dataclasses.replace(runtime.plan.compile, value=False))
    while True:
        side = make_side(name, architecture, stock_autoencoder(architecture).state_dict(), plain)
        with failure_is_a_result(side):
            step(side, make_batch(architecture, image_size, items, plain), plain)
        if not side.figures or items == 1:
            del side
            release_memory()
            return items
        items //= 2


def measure_gradients(side: Side, batch: Batch, runtime: Runtime, reference: dict[str, Tensor]) -> None:
    """Returns the loss, the bytes kept for the backward pass, and the distance of the gradients from
    those of the first side, which fills `reference`."""
    # On CUDA the peak is more informative, and hooks would cause a second compilation.
    on_cpu = runtime.device.type == "cpu"
    began = time.perf_counter()
    with saved_bytes(side.model, count=on_cpu) as kept:
        loss = loss_of(side, batch, runtime)
    torch.autograd.backward(loss)
    gradients = {name: p.grad.cpu().double() for name, p in side.model.named_parameters() if p.grad is not None}
    side.optimizer.zero_grad(set_to_none=True)
    side.figures |= {"loss": loss.item(), "first_gradient_seconds": time.perf_counter() - began}
    if on_cpu:
        side.figures["saved_activations_gb"] = sum(kept.values()) / 1e9
    if not reference:
        reference.update(gradients, loss=loss.detach().cpu())
    side.figures["loss_difference"] = abs(loss.item() - reference["loss"].item())
    side.figures |= gradient_differences(gradients, reference, torch.finfo(runtime.dtype).eps)


def gradient_differences(gradients: dict[str, Tensor], reference: dict[str, Tensor], eps: float) -> dict[str, Any]:
    """Returns the largest absolute difference, and those of all and of each tensor relative to the reference's norm.

    A gradient that is 0 but for rounding has no share in the last: that of the keys' bias, as a softmax ignores what is
    added to all its scores, or of a bias before a group of one channel. It is detected by its norm, below `eps` of all.
    """
    differences = {name: gradient - reference[name] for name, gradient in gradients.items()}
    norms = {name: float(reference[name].norm()) for name in gradients}
    norm = math.hypot(*norms.values())
    relative = {name: float(differences[name].norm()) / norms[name] for name in norms if norms[name] > eps * norm}
    worst = max(relative, key=lambda name: relative[name])
    return {
        "largest_gradient_difference": max(float(difference.abs().max()) for difference in differences.values()),
        "relative_difference_of_all": math.hypot(*(float(d.norm()) for d in differences.values())) / norm,
        "largest_relative_difference": relative[worst],
        "largest_in": worst,
    }


@contextlib.contextmanager
def saved_bytes(model: nn.Module, *, count: bool) -> Iterator[dict[int, int]]:
    """Counts the bytes of distinct storages, except parameters, that a forward pass keeps for its backward pass."""
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor) if count else contextlib.nullcontext():
        yield kept


def warm_up(side: Side, batch: Batch, runtime: Runtime, steps: int = 2) -> None:
    """Runs the first steps: the optimizer allocates its state, and convolutions choose their algorithms."""
    for _ in range(steps):
        step(side, batch, runtime)
    synchronize(runtime.device)


def take_turns(sides: Sequence[Side], batch: Batch, runtime: Runtime, rounds: int, minutes: float) -> None:
    """Times steps of all sides in turn, and measures the peak memory of each."""
    ends = time.monotonic() + 60 * minutes
    for _ in range(rounds):
        for side in sides:
            if "reason" not in side.figures:
                with failure_is_a_result(side):
                    time_step(side, batch, runtime)
        if time.monotonic() > ends:
            return


def time_step(side: Side, batch: Batch, runtime: Runtime) -> None:
    on_gpu = runtime.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        others = torch.cuda.memory_allocated() - bytes_of(side)
    laps = step_bench.Laps(runtime.device)
    laps.mark()
    step(side, batch, runtime)
    laps.mark()
    side.seconds += laps.seconds()
    side.cpu_seconds += laps.cpu_seconds()
    if on_gpu:
        peak = (torch.cuda.max_memory_allocated() - others) / 1e9
        side.figures["peak_gb"] = max(peak, side.figures.get("peak_gb", 0.0))


def bytes_of(side: Side) -> int:
    """Returns the bytes of weights and optimizer state, which persist between steps."""
    state = [value for values in side.optimizer.state.values() for value in values.values()]
    return sum(tensor.nbytes for tensor in (*side.model.parameters(), *state))


def count_flops(architecture: VaeArchitecture, image_size: int) -> int:
    """Counts the FLOPs of a step of plain layers with one picture on fake tensors, without checkpointing."""
    timeline = MemoryTimeline()
    with on_fake_tensors():
        model = AutoencoderKL(architecture)
        model.use(None)
        with timeline.watching():
            mean_BLhw, logvar_BLhw = model.encode(torch.empty(1, 3, image_size, image_size))
            torch.autograd.backward(model.decode(mean_BLhw + logvar_BLhw).sum())
    return round(sum(operator.flops for operator in timeline.log.operators))


def predicted_seconds(
    name: str, architecture: VaeArchitecture, image_size: int, items: int, runtime: Runtime, rates: DeviceRates
) -> float:
    """Returns the time of a side's step by the roofline of its kernels, which are counted on fake tensors. What is
    compiled is fused by the planner's model of the compiler (planner/time/fusion.py)."""
    timeline = MemoryTimeline.on(runtime.device.type)
    fake = FakeRuntime(runtime.plan, timeline)
    with on_fake_tensors(), FunctionsOf("cuda" if runtime.device.type == "cuda" else "cpu"):
        side = make_side(name, architecture, stock_autoencoder(architecture).state_dict(), fake)
        batch = make_batch(architecture, image_size, items, fake)
        step(side, batch, fake)  # The first step allocates the optimizer's state.
        kernels = kernels_of(lambda: step(side, batch, fake), timeline)
    return busy_seconds(kernels, rates)


def summary(side: Side, flops: int, runtime: Runtime) -> dict[str, Any]:
    """Returns medians of the timed steps, and on a GPU their share of a matrix product's rate."""
    figures = {"side": side.name, **side.figures}
    if side.seconds and "reason" not in figures:
        seconds = statistics.median(side.seconds)
        figures |= {"seconds": seconds, "steps": len(side.seconds), "tflops": flops / seconds / 1e12}
        if (share := runtime.peak_share(flops / seconds)) is not None:
            figures["share_of_product"] = share
        if side.cpu_seconds:
            figures["cpu_seconds"] = statistics.median(side.cpu_seconds)
    return figures


def ratios(figures: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns ratios of each side to the first, the reference: below 1 is faster, or less memory."""
    keys = ("seconds", "predicted_seconds_per_step", "cpu_seconds", "peak_gb", "saved_activations_gb")
    first, *others = figures
    return {
        other["side"]: {key: other[key] / first[key] for key in keys if key in other and key in first}
        for other in others
    }


def show(comparison: dict[str, Any]) -> None:
    print(f"{comparison['preset']}, {comparison['image_size']} px, {comparison['batch_size']} images")
    for figures in comparison["sides"]:
        listed = {name: value for name, value in figures.items() if name != "side"}
        print(f"  {figures['side']}: " + ", ".join(f"{name} {cell(value)}" for name, value in listed.items()))
    for side, by_key in comparison["ratios"].items():
        print(f"  {side} / {comparison['sides'][0]['side']}: " + ", ".join(f"{k} {v:.3f}" for k, v in by_key.items()))


def cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
