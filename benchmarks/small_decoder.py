"""Race a tiny decoder beside its teacher: PSNR on unseen photographs by seed, and CPU seconds of a decoded picture.

    python benchmarks/small_decoder.py --data-path DATA --teacher RUN --work-dir WORK --output-file RESULT.json

DATA is a prepared folder and RUN a run of train-vae on it with the same --held-out-share, so that neither side has seen
the photographs of the evaluation. Each seed trains `--steps` steps. Times are user seconds of one thread, the
median of `--repeats` rounds in which the decoders take turns; those of the published layout have random weights.
"""

import argparse
import json
import platform
import resource
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from rich.console import Console
from torch import Tensor

from benchmarks.race import interval
from gputrain.config import assemble
from gputrain.hw.probe import cpu_name
from gputrain.session import train_model
from gputrain.vae.architecture import PRESETS
from gputrain.vae.config import PictureEvaluation, TrainVae
from gputrain.vae.evaluate import evaluate_pictures
from gputrain.vae.export import export_vae
from gputrain.vae.model import AutoencoderKL
from gputrain.vae.pretrained import load_model
from gputrain.vae.tiny import AutoencoderTiny, TinyArchitecture
from gputrain.vae.work import VaeWork

CPU = torch.device("cpu")


def train_tiny(options: argparse.Namespace, seed: int) -> dict[str, float]:
    """Trains a tiny decoder of the teacher, and returns its figures on held-out pictures beside the teacher's."""
    folder = options.work_dir / f"seed{seed}"
    trained = load_model(options.teacher, CPU).settings
    assert trained is not None
    settings = assemble(
        TrainVae,
        {
            "data_path": str(options.data_path), "output_dir": str(folder), "init_from": str(options.teacher),
            "train_part": "tiny-decoder", "preset": trained.model.preset, "image_size": options.image_size,
            "held_out_share": trained.data.held_out_share, "batch_size": options.batch_size, "seed": seed,
            "max_steps": options.steps, "num_epochs": 1000, "warmup_steps": options.steps // 15, "ema_decay": 0.98,
            "learning_rate": options.learning_rate, "evaluate_every_epochs": 0, "sample_every_steps": 0,
            "checkpoint_every_epochs": 0,
            "num_workers": 0, "device": "cpu", "plan": False, "report": False,
        },
    )  # fmt: skip
    if not list(folder.glob("checkpoint_*.pt")):
        train_model(VaeWork(), settings, Console(quiet=True))
    evaluation = PictureEvaluation(image_size=options.evaluated_size)
    return dict(evaluate_pictures(folder, options.data_path, evaluation, device="cpu").scalars)


def decoders(options: argparse.Namespace) -> dict[str, tuple[Callable[[Tensor], Any], int]]:
    """Returns a decoding function and the channels of its latents by name."""
    run = options.work_dir / f"seed{options.seeds[0]}"
    export_vae(run, options.work_dir / "export", device="cpu")
    stock = diffusers.AutoencoderTiny.from_pretrained(options.work_dir / "export")  # type: ignore[no-untyped-call]
    teacher, tiny = load_model(options.teacher, CPU).model, load_model(run, CPU).model
    own = teacher.architecture.latent_channels
    made: dict[str, tuple[Callable[[Tensor], Any], int]] = {
        "teacher": (teacher.decode, own),
        "tiny": (tiny.decode, own),
        "tiny in stock diffusers": (stock.decode, own),
    }
    shape = PRESETS["sd"]
    published = AutoencoderKL(shape).eval().requires_grad_(False)
    small = AutoencoderTiny(TinyArchitecture.for_latents_of(shape)).eval().requires_grad_(False)
    made["layout of Stable Diffusion"] = (published.decode, shape.latent_channels)
    made["tiny for Stable Diffusion"] = (small.decode, shape.latent_channels)
    return made


@torch.no_grad()
def cpu_seconds(options: argparse.Namespace) -> dict[str, float]:
    sides = decoders(options)
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(options.repeats + 1):
        for name, (decode, channels) in sides.items():
            side = options.timed_size // 8
            latents_1Lhw = torch.randn(1, channels, side, side)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
            decode(latents_1Lhw)
            taken[name].append(resource.getrusage(resource.RUSAGE_SELF).ru_utime - before)
    return {name: statistics.median(seconds[1:]) for name, seconds in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data-path", "teacher", "work-dir", "output-file"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    sizes = {"steps": 150, "batch-size": 4, "image-size": 32, "evaluated-size": 64, "timed-size": 128, "repeats": 2}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = {seed: train_tiny(options, seed) for seed in options.seeds}
    psnrs = [figures["psnr_db"] for figures in runs.values()]
    result = {
        "device": cpu_name(),
        "threads": 1,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "diffusers": diffusers.__version__,
        },
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
        "psnr_db": {"mean": statistics.mean(psnrs), "interval_95": interval(psnrs)},
        "teacher_psnr_db": next(iter(runs.values()))["teacher_psnr_db"],
        "by_seed": runs,
        "cpu_seconds_a_picture": cpu_seconds(options),
    }
    options.output_file.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
