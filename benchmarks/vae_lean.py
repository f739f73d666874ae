"""Our autoencoder against stock diffusers' in one run: the time of a step, loss and gradients.

usage: python benchmarks/vae_lean.py [--preset flux] [--image-size 128] [--batch-size 1] [--rounds 5]

Steps of both alternate, so that a machine that drifts drifts for both; CPU-seconds on the CPU, device time on a GPU.
Needs the development tools (diffusers). Writes benchmarks/results/vae_lean_DEVICE.json.
"""

import argparse
import dataclasses
import json
import platform
import re
import statistics
import time
from importlib.metadata import version
from pathlib import Path

import diffusers
import torch
from torch import Tensor

from gputrain.vae.config import PRESETS
from gputrain.vae.model import AutoencoderKL


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="flux")
    parser.add_argument("--image-size", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    architecture = PRESETS[options.preset]
    ours = AutoencoderKL(architecture).to(device)
    levels = len(architecture.block_out_channels)
    stock = diffusers.AutoencoderKL(
        **dataclasses.asdict(architecture),
        down_block_types=["DownEncoderBlock2D"] * levels,
        up_block_types=["UpDecoderBlock2D"] * levels,
    )
    stock.load_state_dict(ours.state_dict())
    stock.to(device).eval()
    images = torch.rand(options.batch_size, 3, options.image_size, options.image_size, device=device) * 2 - 1

    def our_step() -> Tensor:
        return (ours.decode(ours.encode(images).mean_BLhw) - images).abs().mean()

    def stock_step() -> Tensor:
        return (stock.decode(stock.encode(images).latent_dist.mean).sample - images).abs().mean()

    seconds: dict[str, list[float]] = {"ours": [], "stock": []}
    losses: dict[str, float] = {}
    for round_ in range(options.rounds + 1):  # the first warms up
        for name, model, step in (("ours", ours, our_step), ("stock", stock, stock_step)):
            model.zero_grad()
            began = clock(device)
            loss = step()
            loss.backward()
            took = clock(device) - began
            losses[name] = loss.item()
            if round_:
                seconds[name].append(took)
    gradients = dict(ours.named_parameters())
    difference = max(float((gradients[n].grad - p.grad).abs().max()) for n, p in stock.named_parameters())
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    report(
        device,
        {
            **vars(options),
            "threads": torch.get_num_threads(),
            "seconds_ours": medians["ours"],
            "seconds_stock": medians["stock"],
            "ratio": medians["ours"] / medians["stock"],
            "loss_difference": abs(losses["ours"] - losses["stock"]),
            "largest_gradient_difference": difference,
        },
    )


def clock(device: torch.device) -> float:
    """Seconds: of the process on the CPU, of the wall on a GPU, once its work is done."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def report(device: torch.device, figures: dict[str, object]) -> None:
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()} CPU"
    versions = {package: version(package) for package in ("torch", "diffusers")}
    page = {"device": name, "python": platform.python_version(), **versions, **figures}
    path = Path(__file__).parent / "results" / f"vae_lean_{re.sub(r'[^a-z0-9]+', '_', name.lower())}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(page, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(page, indent=2))


if __name__ == "__main__":
    main()
