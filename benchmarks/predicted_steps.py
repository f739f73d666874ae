"""Predicted time of each model's training step on five cards, with its launches, GB and TFLOP. Nothing is measured.

    python -m benchmarks.predicted_steps [--output-dir benchmarks/results] [--name predicted_steps] [CASE ...]

The cases are those of tests/planner/step_counts.py, as they run on an H100, and stock diffusers (bf16, AdamW, EMA). For
the other cards the same kernels are taken; a T4 would compute in fp16, and compiles only if asked. The whole batch is
one micro-batch, whether it fits the card or not. `launches` are those of the processor, and with CUDA graphs those of
the graphs, of the copies of their inputs and of the rest. Needs diffusers for the last row.
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gputrain.bench import runner
from gputrain.hw.facts import machine_facts
from gputrain.hw.gpus import find_gpu
from gputrain.planner.predict import predict_training_memory
from gputrain.planner.roofline import DeviceRates, StepCost
from gputrain.planner.step_memory import predict_step
from tests.planner.step_counts import CASES, plan_of

CARDS = ("h100", "rtx5090", "rtx4090", "l4", "t4")
STOCK = "vae flux 512 x 8, stock diffusers, eager"


class WholeStep(NamedTuple):
    """The kernels of a step on one micro-batch, with the optimizers and averages."""

    cost: StepCost
    has_graphs: bool = False

    def ms(self, rates: DeviceRates, *, graphs: bool = False) -> float:
        return round(1e3 * self.cost.seconds(rates, self.cost.items, 1, graphs=graphs), 1)


def step_of(name: str) -> WholeStep:
    if name == STOCK:
        found = predict_training_memory(
            stock_vae(), reconstruction, torch.empty(8, 3, 512, 512), gradients_resident=False, ema=True
        )
        return WholeStep(StepCost((), found.micro_batch, 8, found.update))
    settings, spec = CASES[name].make(**CASES[name].options)
    items, plan = settings.schedule.batch_size, plan_of(settings, spec)
    found = predict_step(spec.target(settings), plan, micro_batch_size=items)
    cost = StepCost((), found.micro_batch, items, found.update, found.graph, found.graph)
    return WholeStep(cost, bool(plan.cuda_graphs.value))


def stock_vae() -> nn.Module:
    from diffusers import AutoencoderKL

    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
    channels = (128, 256, 512, 512)
    with torch.device("meta"):
        made: nn.Module = AutoencoderKL(block_out_channels=channels, layers_per_block=2, latent_channels=16, **blocks)
    return made.train()


def reconstruction(model: Any, images: Tensor) -> Tensor:
    """Returns L1 and KL of a picture and its reconstruction from a sample of the posterior."""
    posterior = model.encode(images).latent_dist
    mean, logvar = posterior.mean.float(), posterior.logvar.float()
    made = model.decode(mean + (0.5 * logvar).exp() * torch.randn_like(mean)).sample
    kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).sum((1, 2, 3)).mean()
    return (made.float() - images).abs().mean() + 1e-6 * kl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all")
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--name", default="predicted_steps", help="name of the file")
    options = parser.parse_args()
    rates = {card: DeviceRates.published(find_gpu(card), tf32=True) for card in CARDS}
    rows = []
    for name in options.cases or [*CASES, STOCK]:
        step = step_of(name)
        totals = step.cost.totals(step.cost.items)
        ms = {card: step.ms(rate) for card, rate in rates.items() if rate}
        row: dict[str, Any] = {"case": name, **totals._asdict(), "launches": totals.kernels, "predicted_ms": ms}
        if step.has_graphs:
            row["launches_with_graphs"] = step.cost.host_launches(step.cost.items, 1)
            row["predicted_ms_with_graphs"] = {card: step.ms(rate, graphs=True) for card, rate in rates.items() if rate}
        rows.append(row)
        print(json.dumps(row), flush=True)
    report = {
        "title": "Predicted time of a step on shapes, not measured", **machine_facts("cpu"),
        "command": runner.command_line("python -m benchmarks.predicted_steps"), "rows": rows,
    }  # fmt: skip
    runner.open_folder(options.output_dir)
    runner.write_json(options.output_dir / f"{options.name}.json", report)


if __name__ == "__main__":
    main()
