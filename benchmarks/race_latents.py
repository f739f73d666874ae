"""A race between an autoencoder that is trained with and without equivariance of its latents (EQ-VAE).

usage: python benchmarks/race_latents.py --data PREPARED [--steps 120] [--seeds 1 2 3]

PREPARED is a folder that `gputrain prepare-data --kind vae --target-size 512` has filled. For each seed, both sides are
trained from the same linear code for `--steps` steps on the same crops. Then the same small denoiser is trained by flow
matching (arXiv:2210.02747) on the standardised latents of the training pictures of each side. Evaluated are unseen
128-pixel crops: PSNR of their reconstructions, the figures of gputrain's latent report, the loss of the denoiser at
fixed noise and times, and, as losses on different latents are of different data, the PSNR of what it makes of half
noise, decoded, against the picture. Writes benchmarks/results/race_latents_DEVICE.json.

Shapes: B items, L latent channels, h x w latent positions.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import race
import torch
from torch import Tensor, nn

from gputrain.bench import runner
from gputrain.engine.distributed import RankGroup
from gputrain.hw.probe import machine_facts
from gputrain.vae.config import TrainVae
from gputrain.vae.data import CropDataset, Picture, centre_crop, open_pictures, to_unit
from gputrain.vae.evaluate import reconstruction_figures
from gputrain.vae.latent_report import LatentReport
from gputrain.vae.losses import psnr_db
from gputrain.vae.model import AutoencoderKL
from gputrain.vae.recipe import VaeRecipe
from gputrain.vae.work import start_linear

SIDES = {"off": {}, "eq 0.5": {"eq_probability": 0.5}}
OPTIONS = {
    "preset": "fast",
    "channels": [32, 32, 32],
    "z_channels": 4,
    "image_size": 32,
    "batch_size": 4,
    "learning_rate": 3e-4,
    "warmup_steps": 20,
}
WIDTH, WINDOW, BATCH, DENOISER_STEPS, TIMES = 32, 16, 8, 300, (0.1, 0.3, 0.5, 0.7, 0.9)


class Denoiser(nn.Module):
    """Residual convolutions that predict noise - latents from their mixture at a time in [0, 1]."""

    def __init__(self, latents: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(latents, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, latents, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(8, WIDTH) for _ in range(6))
        self.convs = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=2**n, dilation=2**n) for n in (0, 1, 2, 2, 1, 0))
        self.times = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 6 * 2 * WIDTH))

    def forward(self, mixed_BLhw: Tensor, time_B: Tensor) -> Tensor:
        x = self.first(mixed_BLhw)
        changes = self.times(time_B[:, None])[:, :, None, None].chunk(6, dim=1)
        for norm, conv, change in zip(self.norms, self.convs, changes, strict=True):
            scale, shift = change.chunk(2, dim=1)
            x = x + conv(nn.functional.silu(norm(x) * (1 + scale) + shift))
        made: Tensor = self.last(x)
        return made


def train_denoiser(latents_BLhw: Tensor, seed: int) -> Denoiser:
    draws = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Denoiser(latents_BLhw.shape[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    windows = latents_BLhw.unfold(2, WINDOW, WINDOW).unfold(3, WINDOW, WINDOW).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
    for step in range(DENOISER_STEPS):
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, 2 * (1 - step / DENOISER_STEPS))
        z = windows[torch.randint(len(windows), (BATCH,), generator=draws)]
        noise, at_B = torch.randn(z.shape, generator=draws), torch.rand(BATCH, generator=draws)
        mixed = torch.lerp(z, noise, at_B[:, None, None, None])
        torch.autograd.backward((model(mixed, at_B) - (noise - z)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def figures_of(model: AutoencoderKL, train: list[Picture], held_out: list[Picture], seed: int) -> dict[str, float]:
    crops = [centre_crop(one.path, 128) for one in held_out]
    found = reconstruction_figures(model, crops, torch.device("cpu"), report=LatentReport())
    assert found.report
    report, images = found.report.to_json(), to_unit(torch.stack(crops))
    latents = torch.cat([model.encode(to_unit(centre_crop(one.path, 256)[None])).mean_BLhw for one in train])
    std, mean = torch.std_mean(latents, dim=(0, 2, 3), keepdim=True)
    with torch.enable_grad():
        denoiser = train_denoiser((latents - mean) / std, seed)
    z = (model.encode(images).mean_BLhw - mean) / std
    noise = torch.randn(z.shape, generator=torch.Generator().manual_seed(0))
    made = {at: denoiser(torch.lerp(z, noise, at), torch.full((len(z),), at)) for at in TIMES}
    half = torch.lerp(z, noise, 0.5) - 0.5 * made[0.5]
    return {
        "psnr_db": found.scalars["psnr_db"],
        "error_half": report["equivariance"]["half"]["relative_error"],
        "error_turn": report["equivariance"]["turn"]["relative_error"],
        "decoded_half_db": report["equivariance"]["half"]["decoded_psnr_db"],
        "decoded_turn_db": report["equivariance"]["turn"]["decoded_psnr_db"],
        "upper_frequencies": report["upper_frequencies"]["latents"],
        "denoiser_loss": statistics.fmean(float((one - (noise - z)).square().mean()) for one in made.values()),
        "denoised_psnr_db": float(psnr_db(model.decode(half * std + mean).clamp(-1, 1), images).mean()),
    }


def run(options: argparse.Namespace, seed: int) -> dict[str, dict[str, float]]:
    """Returns the figures of each side with a seed."""
    pictures = open_pictures(options.data, held_out_share=0.25)
    began: dict[str, Tensor] = {}
    found = {}
    for side, changes in SIDES.items():
        given = {**OPTIONS, **changes, "data_path": str(options.data), "seed": seed}
        settings, runtime = race.assemble_for_cpu(TrainVae, "", **given)
        crops = CropDataset(pictures.train, settings.data.image_size, seed, True, in_memory=True)
        recipe = VaeRecipe(settings, runtime, held_out=[])
        if not began:
            start_linear(recipe, RankGroup(), pictures)
            began = {name: tensor.clone() for name, tensor in recipe.autoencoder.state_dict().items()}
        recipe.start_from(began)
        training, used = race.OurTraining(recipe, settings, runtime, crops), time.process_time()
        for _ in range(options.steps):
            training.step()
        used = time.process_time() - used
        found[side] = {**figures_of(recipe.best_model, pictures.train, pictures.held_out, seed), "cpu_seconds": used}
        print(f"seed {seed}, {side}: {json.dumps(found[side])}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="prepared pictures")
    parser.add_argument("--steps", type=int, default=120, help="steps of each side")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    race.one_thread()
    runs = [run(options, seed) for seed in options.seeds]
    sides: dict[str, Any] = {}
    for side in SIDES:
        by_name = {name: [one[side][name] for one in runs] for name in runs[0][side]}
        sides[side] = {
            name: {"mean": statistics.fmean(values), "interval": race.interval(values), "values": values}
            for name, values in by_name.items()
        }
    machine = {
        **machine_facts("cpu"),
        "threads": 1,
        "command": runner.command_line("python benchmarks/race_latents.py"),
    }
    path = runner.result_path(options.output_dir, "race_latents", str(machine["device"]))
    content = {"steps": options.steps, "options": OPTIONS, "seeds": options.seeds, "sides": sides}
    runner.write_json(path, {**machine, "interval": "95 % by Student's t over the seeds, +-", **content})
    for name in sides["off"]:
        print(f"| {name} | " + " | ".join(race.cell(sides[side][name]) for side in SIDES) + " |")
    print(path)


if __name__ == "__main__":
    main()
