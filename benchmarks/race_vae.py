"""A learning race between diffusers' AutoencoderKL in a plain loop and our image VAE.

usage: python benchmarks/race_vae.py --data PREPARED [--seconds 200] [--seeds 1 2 3] [--sides peer ours] [--smoke]

PREPARED is a folder that `gputrain prepare-data --kind vae --target-size 512` has filled. Both sides have the
architecture of the preset `fast`, the same crops in the same order, one thread and equal CPU seconds (race.py).

- `peer`: diffusers.AutoencoderKL from its own random weights, L1 and KL (1e-6 per pixel value), torch's AdamW at a
  constant 1e-4. "peer+learning_rate=3e-4" has another rate.
- `ours`: the recipe of train-vae with its default settings, its start as a linear code included; the moving average
  is evaluated, which is what a user gets. "ours+start=random" and other options of train-vae are sides too.

Evaluated are reconstructions of unseen crops of `--evaluated-size` from the mean of their latents, by scikit-image's
PSNR and SSIM. Writes benchmarks/results/race_vae_SECONDS_DEVICE.json and .png.

Shapes: B items, 3 channels, H x W pixels.
"""

import argparse
import functools
from pathlib import Path
from typing import Any

import numpy as np
import race
import skimage.metrics
import torch
import torch.nn.functional as F
from PIL import Image
from race import Figures, Metric, OurTraining, Race
from torch import Tensor
from vae_vs_diffusers import stock_autoencoder

from gputrain.bench.runner import Settings
from gputrain.engine.distributed import RankGroup
from gputrain.vae import dataset
from gputrain.vae.architecture import VaeArchitecture
from gputrain.vae.config import TrainVae
from gputrain.vae.data import start_linear
from gputrain.vae.dataset import CropDataset, Pictures, centre_crop, open_pictures, to_unit
from gputrain.vae.pictures import Crop, read_picture
from gputrain.vae.recipe import VaeRecipe

HELD_OUT = 0.15
KL_WEIGHT = 1e-6
METRICS = (Metric("psnr_db", "PSNR, dB", "higher"), Metric("ssim", "SSIM", "higher"))


class Peer:
    """A plain loop around diffusers' autoencoder."""

    def __init__(
        self,
        architecture: VaeArchitecture,
        dataset: CropDataset,
        batch_size: int,
        seed: int,
        learning_rate: float = 1e-4,
    ) -> None:
        torch.manual_seed(seed)
        self.model = stock_autoencoder(architecture).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate)
        self.batches = race.batches_of(dataset, batch_size, seed)
        self.steps = 0

    def step(self) -> None:
        images_B3HW = to_unit(next(self.batches))
        posterior = self.model.encode(images_B3HW).latent_dist
        made_B3HW = self.model.decode(posterior.sample()).sample
        kl = posterior.kl().mean() / images_B3HW[0].numel()
        torch.autograd.backward(F.l1_loss(made_B3HW, images_B3HW) + KL_WEIGHT * kl)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def reconstruct(self, images_B3HW: Tensor) -> Tensor:
        made_B3HW: Tensor = self.model.decode(self.model.encode(images_B3HW).latent_dist.mode()).sample
        return made_B3HW


class Ours(OurTraining):
    """Our recipe, with its default settings."""

    def __init__(self, settings: TrainVae, runtime: Any, pictures: Pictures, dataset: CropDataset) -> None:
        recipe = VaeRecipe(settings, runtime)
        if settings.model.start == "linear":
            start_linear(recipe, RankGroup(), pictures)
        self.vae = recipe
        super().__init__(recipe, settings, runtime, dataset)

    def reconstruct(self, images_B3HW: Tensor) -> Tensor:
        mean_BLhw, _ = self.vae.best_model.encode(images_B3HW)
        return self.vae.best_model.decode(mean_BLhw)


def measure(settings: Settings) -> dict[str, Any]:
    """Runs a side with a seed."""
    race.one_thread()
    side, seed = settings["side"], settings["seed"]
    mine = side if side.startswith("ours") else ""
    options = {name: settings[name] for name in ("preset", "channels", "image_size", "batch_size") if settings[name]}
    given, runtime = race.assemble_for_cpu(TrainVae, mine, data_path=settings["data"], seed=seed, **options)
    pictures = open_pictures(Path(settings["data"]), held_out_share=HELD_OUT)
    # Both sides read the pictures from RAM, so that the clock counts cutting crops and no decoding.
    decoded = functools.cache(read_picture)

    def part(path: Path, *, crop: Crop, channels: int) -> Image.Image:
        image = decoded(path, channels=channels)
        return image.crop(crop(*image.size))

    vars(dataset)["read_picture"] = part
    crops = CropDataset(pictures.train, settings["image_size"], seed, given.data.horizontal_flip)
    evaluated = [centre_crop(one.path, settings["evaluated_size"]) for one in pictures.held_out[: settings["clips"]]]
    for item in range(len(crops)):
        crops[(0, item)]  # type: ignore[index]  # It decodes the picture.

    def begin() -> Any:
        if mine:
            return Ours(given, runtime, pictures, crops)
        return Peer(given.architecture, crops, settings["batch_size"], seed, **race.changes_of(side))

    points = race.train_and_evaluate(begin, functools.partial(evaluate, crops=evaluated), **race.marks_of(settings))
    return {"points": points, "facts": {"training_pictures": len(crops), "evaluated_pictures": len(evaluated)}}


@torch.no_grad()
def evaluate(trainee: Any, crops: list[Tensor]) -> Figures:
    """Returns scikit-image's PSNR and SSIM of reconstructions rounded to eight bits, the mean over pictures."""
    psnr, ssim = [], []
    for crop_3HW in crops:
        made_3HW = trainee.reconstruct(to_unit(crop_3HW[None]))[0]
        made = ((made_3HW.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).numpy()
        real = crop_3HW.permute(1, 2, 0).numpy()
        psnr.append(skimage.metrics.peak_signal_noise_ratio(real, made, data_range=255))
        ssim.append(skimage.metrics.structural_similarity(real, made, channel_axis=2, data_range=255))
    return {"psnr_db": float(np.mean(psnr)), "ssim": float(np.mean(ssim))}


RACE = Race(
    "vae", __file__, METRICS, measure,
    "architecture fast (13 M), crops of 64 pixels, batch 4; unseen 256-pixel crops are evaluated; unless the command "
    "says otherwise",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="prepared pictures")
    parser.add_argument("--preset", default="fast")
    parser.add_argument("--channels", default="", help="channels of the blocks; default: the preset's")
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--evaluated-size", type=int, default=256, help="side of the evaluated crops, in pixels")
    race.main(RACE, parser, smoke={"image_size": 32, "batch_size": 2})


if __name__ == "__main__":
    main()
