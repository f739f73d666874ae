"""Predicted and measured time of a micro-batch on the CPU: our models and two of other projects, at several sizes.

    python -m benchmarks.roofline_check [--seconds 3] [--output-dir benchmarks/results]

The rates of the CPU are measured first: a large product, a large copy, and the time of a small operator. Then each
model's kernels are counted on shapes (planner/time/roofline.py), and real micro-batches are timed: forward and backward
of every step group, with the plan of a training. Nothing is fitted. Needs diffusers and transformers for the models of
others, whose architectures are built from configurations with random weights. One thread computes, in fp32, and CPU
time is counted. Of a GPU, `gpu.sh measure` does the same with whole steps. Writes
benchmarks/results/roofline_DEVICE.json after every row.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gputrain.bench import runner, step_bench
from gputrain.engine.step import gradients
from gputrain.hw.plan import Hardware, Plan, decide
from gputrain.hw.probe import machine_facts, probe
from gputrain.hw.runtime import Runtime, apply, is_out_of_memory, release_memory, synchronize
from gputrain.planner.memory.predict import ResidentStep, allocate_gradients, predict_step
from gputrain.planner.memory.torch_model import predict_training_memory
from gputrain.planner.model_planner import measured_rates
from gputrain.planner.time.roofline import DeviceRates, KernelCost, busy_seconds
from tests.planner.predictions import StepTotals
from tests.planner.step_counts import of_recogniser, of_vae, of_vocoder, of_voice


class Row(NamedTuple):
    family: str
    size: str
    kernels: tuple[KernelCost, ...]
    micro_batch: Callable[[], object]


class Case(NamedTuple):
    """A size of a model. `make` returns the settings and the spec of one of ours, or the module, the loss and the batch
    of another project's."""

    family: str
    size: str
    make: Callable[..., Any]
    options: dict[str, Any]
    ours: bool = True


SMALL_VAE = {"preset": "fast", "channels": "32,64,64"}
SMALL_STOCK = (32, 64, 64)
SMALL_W2V = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 1024}


def of_stock(channels: Sequence[int], size: int, batch: int) -> tuple[nn.Module, Callable[[Any, Any], Tensor], Tensor]:
    import diffusers

    autoencoder: Any = diffusers.AutoencoderKL
    levels = len(channels)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * levels, "up_block_types": ["UpDecoderBlock2D"] * levels}
    model = autoencoder(block_out_channels=channels, layers_per_block=2, latent_channels=16, **blocks)
    return model.train(), reconstruction, torch.empty(batch, 3, size, size)


def of_wav2vec2(sizes: dict[str, int], seconds: int, batch: int) -> tuple[nn.Module, Any, Tensor]:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        layerdrop=0.0, apply_spec_augment=False, feat_extract_norm="layer", do_stable_layer_norm=True, **sizes
    )
    made: nn.Module = Wav2Vec2ForCTC(config).train()
    return made, log_probability, torch.empty(batch, 16000 * seconds)


ON_CPU = [
    *(Case("vae", f"{size} px x {batch}", of_vae, {**SMALL_VAE, "image_size": size, "batch_size": batch})
      for size, batch in ((64, 2), (64, 8), (128, 4))),
    *(Case("vocoder", f"{frames} frames x {batch}", of_vocoder, {
        "batch_size": batch, "crop_mel_frames": frames, "upsample_initial_channel": 32, "mini_nsf": True,
        "discriminators": ["mpd"],
      }) for frames, batch in ((16, 1), (32, 1), (32, 4))),
    *(Case("voice", f"{seconds} s x {batch}", of_voice, {
        "preset": "fast", "batch_size": batch, "clip_seconds": seconds, "discriminator_channels": 8,
      }) for seconds, batch in ((2.0, 1), (2.0, 4), (5.0, 4))),
    *(Case("recogniser", f"{seconds} s x {batch}", of_recogniser, {
        "preset": "tiny", "batch_size": batch, "clip_seconds": seconds,
      }) for seconds, batch in ((4.0, 2), (4.0, 8), (16.0, 4))),
    *(Case("diffusers AutoencoderKL", f"{size} px x {batch}", of_stock, {
        "channels": SMALL_STOCK, "size": size, "batch": batch,
      }, ours=False) for size, batch in ((64, 2), (128, 2), (128, 4))),
    *(Case("transformers Wav2Vec2", f"{seconds} s x {batch}", of_wav2vec2, {
        "sizes": SMALL_W2V, "seconds": seconds, "batch": batch,
      }, ours=False) for seconds, batch in ((2, 1), (2, 4), (8, 2))),
]  # fmt: skip


def our_row(case: Case) -> tuple[Row, Runtime]:
    """Returns a row of one of our models, with the runtime of its training."""
    settings, spec = case.make(**case.options, device="cpu")
    runtime = apply(spec.decide(probe(), settings.hardware))
    target, items = spec.target(settings), settings.schedule.batch_size
    kernels = predict_step(target, runtime.plan, micro_batch_size=items).micro_batch
    step = real_step(ResidentStep.of(target, runtime, False, items), items)
    return Row(case.family, case.size, kernels, step), runtime


def real_step(resident: ResidentStep, items: int) -> Callable[[], None]:
    micro_batch, groups = resident.micro_batch(items), resident.recipe.step_groups
    for group in groups:
        for phase in group.phases:
            allocate_gradients(phase)

    def step() -> None:
        for group in groups:
            gradients(resident.state, group, micro_batch, 1, resident.step)

    return step


def other_row(case: Case) -> tuple[Row, Runtime]:
    """Returns a row of another project's model, by the planner of any torch model, with its runtime."""
    runtime = apply(plan_on_cpu())
    with runtime.device:
        model, loss, batch = case.make(**case.options)
    precision: Any = runtime.plan.precision.value
    rules: Any = runtime.device.type
    found = predict_training_memory(model, loss, batch, precision=precision, autocast_rules=rules)
    real = torch.randn_like(batch)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None

    def step() -> None:
        with runtime.autocast():
            value = loss(model, real)
        value.backward()

    return Row(case.family, case.size, found.micro_batch, step), runtime


def reconstruction(model: Any, images: Tensor) -> Tensor:
    made: Tensor = model.decode(model.encode(images).latent_dist.mean).sample
    return (made - images).abs().mean()


def log_probability(model: Any, waves: Tensor) -> Tensor:
    return -torch.log_softmax(model(waves).logits.float(), -1).mean()


def measured_seconds(step: Callable[[], object], runtime: Runtime, seconds: float) -> float:
    """Returns the median time of a micro-batch, over so many seconds and at least three of them, after a first one."""
    device, laps = runtime.device, step_bench.Laps(runtime.device)
    step()
    synchronize(device)
    began = time.perf_counter()
    laps.mark()
    done = 0
    while done < 3 or time.perf_counter() - began < seconds:
        step()
        synchronize(device)
        laps.mark()
        done += 1
    return statistics.median(laps.cpu_seconds() or laps.seconds())


def rank_correlation(rows: list[dict[str, Any]]) -> float:
    """Returns Spearman's rank correlation of predicted and measured times."""
    predicted, measured = (
        np.argsort(np.argsort([row[side] for row in rows])) for side in ("predicted_ms", "measured_ms")
    )
    return float(np.corrcoef(predicted, measured)[0, 1])


def plan_on_cpu() -> Plan:
    return decide(probe(), Hardware(device="cpu"))


def row_of(case: Case, rates: DeviceRates, seconds: float) -> dict[str, Any]:
    """Returns the prediction and the measurement of a case, or the reason why it was not measured."""
    found: dict[str, Any] = {"model": case.family, "size": case.size}
    try:
        row, runtime = (our_row if case.ours else other_row)(case)
        measured = measured_seconds(row.micro_batch, runtime, seconds)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return {**found, "reason": "out of memory"}
    totals, predicted = StepTotals.of(row.kernels), busy_seconds(row.kernels, rates)
    return {
        **found, "kernels": totals.kernels, "gb": round(totals.gb, 4), "gflop": round(1e3 * totals.tflop, 3),
        "predicted_ms": round(1e3 * predicted, 2), "measured_ms": round(1e3 * measured, 2),
        "ratio": round(predicted / measured, 3),
    }  # fmt: skip


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns how well predictions rank and meet the measured times, of all rows and of each model's."""
    families: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        families.setdefault(row["model"], []).append(row)
    ratios = [float(row["ratio"]) for row in rows]
    several = [few for few in families.values() if len(few) > 1]
    return {
        "rank_correlation": round(rank_correlation(rows), 4) if len(rows) > 1 else None,
        "ranking_right_within_each_model": all(rank_correlation(few) > 0.999 for few in several),
        "median_ratio": statistics.median(ratios), "least_ratio": min(ratios), "largest_ratio": max(ratios),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="time for the micro-batches of a row")
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rates = measured_rates(apply(plan_on_cpu()))
    report: dict[str, Any] = {
        **machine_facts("cpu"), "command": runner.command_line("python -m benchmarks.roofline_check"),
        "rates": dataclasses.asdict(rates), "rows": [],
    }  # fmt: skip
    runner.open_folder(options.output_dir)
    path = runner.result_path(options.output_dir, "roofline", str(report["device"]))
    for case in ON_CPU:
        row = row_of(case, rates, options.seconds)
        release_memory()
        report["rows"].append(row)
        shown = [f"{name} {row[name]}" for name in ("predicted_ms", "measured_ms", "ratio", "reason") if name in row]
        print(f"{case.family:<24}{case.size:<28}", *shown, flush=True)
        measured = [one for one in report["rows"] if "ratio" in one]
        if measured:
            report["summary"] = summary_of(measured)
        runner.write_json(path, report)
    print(report.get("summary", {}))
    print(path)


if __name__ == "__main__":
    main()
