"""Predicted and measured time of a micro-batch: our models and two of other projects, at several sizes, on this device.

    python -m benchmarks.roofline_check [--device cpu|cuda] [--seconds 3] [--output-dir benchmarks/results]

The rates of the device are measured first: a large product, a large copy and, on the CPU, the time of a small operator.
Then each model's kernels are counted on shapes (planner/roofline.py), and real micro-batches are timed: forward and
backward of every step group. Nothing is fitted. Needs diffusers and transformers for the models of others, whose
architectures are built from configurations with random weights. On the CPU one thread computes, in fp32, and CPU time
is counted.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gputrain.bench import runner, timing
from gputrain.hw.facts import machine_facts
from gputrain.hw.plan import Hardware, Plan, decide
from gputrain.hw.probe import probe
from gputrain.hw.runtime import Runtime, apply
from gputrain.planner.predict import predict_training_memory
from gputrain.planner.resident import ResidentStep, allocate_gradients
from gputrain.planner.roofline import DeviceRates, KernelCost, StepTotals, busy_seconds
from gputrain.planner.session import measured_rates
from gputrain.planner.step_memory import predict_step
from tests.planner.step_counts import of_recogniser, of_vae, of_vocoder, of_voice


class Row(NamedTuple):
    family: str
    size: str
    kernels: tuple[KernelCost, ...]
    micro_batch: Callable[[], object]


def rates_of(runtime: Runtime) -> DeviceRates:
    """Returns the measured rates. A CPU computes each operator when it is called, and nothing overlaps."""
    rates = measured_rates(runtime)
    if runtime.device.type == "cuda":
        return rates
    x = torch.zeros(16)
    began = time.perf_counter()
    for _ in range(20_000):
        x.add_(1)
    return dataclasses.replace(rates, launch_seconds=0.0, least_seconds=(time.perf_counter() - began) / 20_000)


SMALL_VAE = {"preset": "fast", "channels": "32,64,64"}
ON_CPU: dict[str, list[tuple[str, Callable[..., Any], dict[str, Any]]]] = {
    "vae": [
        (f"{size} px x {batch}", of_vae, {**SMALL_VAE, "image_size": size, "batch_size": batch})
        for size, batch in ((64, 2), (64, 8), (128, 4))
    ],
    "vocoder": [
        (f"{frames} frames x {batch}", of_vocoder, {
            "batch_size": batch, "crop_mel_frames": frames, "upsample_initial_channel": 32, "mini_nsf": True,
            "discriminators": ["mpd"],
        })
        for frames, batch in ((16, 1), (32, 1), (32, 4))
    ],
    "voice": [
        (f"{seconds} s x {batch}", of_voice, {"preset": "fast", "batch_size": batch, "clip_seconds": seconds,
                                               "discriminator_channels": 8})
        for seconds, batch in ((2.0, 1), (2.0, 4), (5.0, 4))
    ],
    "recogniser": [
        (f"{seconds} s x {batch}", of_recogniser, {"preset": "tiny", "batch_size": batch, "clip_seconds": seconds})
        for seconds, batch in ((4.0, 2), (4.0, 8), (16.0, 4))
    ],
}  # fmt: skip


def our_rows(runtime: Runtime) -> Iterator[Row]:
    for family, sizes in ON_CPU.items():
        for size, make, options in sizes:
            settings, spec = make(**options, device=runtime.device.type, use_torch_compile=False)
            target, items = spec.target(settings), settings.schedule.batch_size
            kernels = predict_step(target, runtime.plan, micro_batch_size=items).micro_batch
            yield Row(family, size, kernels, real_step(ResidentStep.of(target, runtime, False, items), items))


def real_step(resident: ResidentStep, items: int) -> Callable[[], None]:
    micro_batch, groups = resident.micro_batch(items), resident.recipe.step_groups
    for group in groups:
        for phase in group.phases:
            allocate_gradients(phase)

    def step() -> None:
        for group in groups:
            resident.add_gradients(group, micro_batch)

    return step


def other_rows(runtime: Runtime) -> Iterator[Row]:
    """Models of other projects, by the planner of any torch model."""
    for size, batch in ((64, 2), (128, 2), (128, 4)):
        yield other_row("diffusers AutoencoderKL", f"{size} px x {batch}", diffusers_vae(), reconstruction,
                        torch.empty(batch, 3, size, size), runtime)  # fmt: skip
    for seconds, batch in ((2, 1), (2, 4), (8, 2)):
        yield other_row("transformers Wav2Vec2", f"{seconds} s x {batch}", wav2vec2(), log_probability,
                        torch.empty(batch, 16000 * seconds), runtime)  # fmt: skip


def other_row(
    family: str, size: str, model: nn.Module, loss: Callable[[Any, Any], Tensor], batch: Tensor, runtime: Runtime
) -> Row:
    precision: Any = runtime.plan.precision.value
    rules: Any = runtime.device.type
    found = predict_training_memory(model, loss, batch, precision=precision, autocast_rules=rules)
    model, real = model.to(runtime.device), torch.randn_like(batch, device=runtime.device)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None

    def step() -> None:
        with runtime.autocast():
            value = loss(model, real)
        value.backward()  # type: ignore[no-untyped-call]

    return Row(family, size, found.micro_batch, step)


def diffusers_vae() -> nn.Module:
    from diffusers import AutoencoderKL

    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 3, "up_block_types": ["UpDecoderBlock2D"] * 3}
    made: nn.Module = AutoencoderKL(block_out_channels=(32, 64, 64), layers_per_block=2, latent_channels=16, **blocks)
    return made.train()


def reconstruction(model: Any, images: Tensor) -> Tensor:
    return (model.decode(model.encode(images).latent_dist.mean).sample - images).abs().mean()


def wav2vec2() -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        hidden_size=256, num_hidden_layers=6, num_attention_heads=4, intermediate_size=1024, layerdrop=0.0,
        apply_spec_augment=False, feat_extract_norm="layer", do_stable_layer_norm=True,
    )  # fmt: skip
    return Wav2Vec2ForCTC(config).train()


def log_probability(model: Any, waves: Tensor) -> Tensor:
    return -torch.log_softmax(model(waves).logits.float(), -1).mean()


def measured_seconds(step: Callable[[], object], runtime: Runtime, seconds: float) -> float:
    """Returns the median time of a micro-batch, over so many seconds and at least three of them, after a first one."""
    device, laps = runtime.device, timing.Laps(runtime.device)
    step()
    timing.synchronize(device)
    began = time.perf_counter()
    laps.mark()
    done = 0
    while done < 3 or time.perf_counter() - began < seconds:
        step()
        timing.synchronize(device)
        laps.mark()
        done += 1
    return statistics.median(laps.cpu_seconds() or laps.seconds())


def rank_correlation(rows: list[dict[str, Any]]) -> float:
    """Returns Spearman's rank correlation of predicted and measured times."""
    ranks = [np.argsort(np.argsort([row[side] for row in rows])) for side in ("predicted_ms", "measured_ms")]
    return float(np.corrcoef(*ranks)[0, 1])


def plan_of(device: Any) -> Plan:
    return decide(probe(), Hardware(device=device, mixed_precision=False if device == "cpu" else None,
                                    use_torch_compile=False))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=3.0, help="time for the micro-batches of a row")
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    runtime = apply(plan_of(options.device))
    rates = rates_of(runtime)
    rows = []
    for make in (our_rows, other_rows):
        for row in make(runtime):
            totals = StepTotals.of(row.kernels)
            predicted = busy_seconds(row.kernels, rates)
            measured = measured_seconds(row.micro_batch, runtime, options.seconds)
            rows.append({
                "model": row.family, "size": row.size, "kernels": totals.kernels, "gb": round(totals.gb, 4),
                "gflop": round(1e3 * totals.tflop, 3), "predicted_ms": round(1e3 * predicted, 2),
                "measured_ms": round(1e3 * measured, 2), "ratio": round(predicted / measured, 3),
            })  # fmt: skip
            print(
                f"{row.family:<24}{row.size:<16}",
                *(f"{name} {rows[-1][name]}" for name in list(rows[-1])[5:]),
                flush=True,
            )
    families = {row["model"]: [one for one in rows if one["model"] == row["model"]] for row in rows}
    summary = {
        "rank_correlation": round(rank_correlation(rows), 4),
        "ranking_right_within_each_model": all(rank_correlation(few) > 0.999 for few in families.values()),
        "median_ratio": statistics.median(row["ratio"] for row in rows),
        "least_ratio": min(row["ratio"] for row in rows),
        "largest_ratio": max(row["ratio"] for row in rows),
    }
    print(summary)
    report = {
        **machine_facts(options.device), "command": runner.command_line("python -m benchmarks.roofline_check"),
        "rates": dataclasses.asdict(rates), "rows": rows, "summary": summary,
    }  # fmt: skip
    runner.open_folder(options.output_dir)
    path = runner.result_path(options.output_dir, "roofline", str(report["device"]))
    runner.write_json(path, report)
    print(path)


if __name__ == "__main__":
    main()
