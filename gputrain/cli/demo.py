"""The demo: every command of the image VAE in turn, on real photographs, as a user would type them."""

import json
import shlex
import shutil
import time
from pathlib import Path

from gputrain.cli import ui
from gputrain.errors import UserError

# Photographs in scikit-image's wheel. (Of its stereo pair, one: the other would leak into the held-out share.)
PHOTOGRAPHS = (
    "astronaut.png", "brick.png", "camera.png", "chelsea.png", "coffee.png", "coins.png", "grass.png", "gravel.png",
    "hubble_deep_field.jpg", "ihc.png", "moon.png", "motorcycle_left.png", "retina.jpg", "rocket.jpg",
)  # fmt: skip

STEPS = 150
SIZE = 64


def run_demo(folder: Path) -> None:
    """Leaves `folder`/photographs, data, run, export and reconstructions. Raises UserError if it is not empty."""
    from gputrain.cli.app import app

    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty", hint="delete it, or choose another --output-dir")
    photographs, data, run, export = (folder / name for name in ("photographs", "data", "run", "export"))
    began = time.monotonic()
    copy_photographs(photographs)
    train = [
        "--data-path", data, "--output-dir", run, "--preset", "fast", "--image-size", SIZE, "--batch-size", 8,
        "--max-steps", STEPS, "--learning-rate", 1e-3, "--warmup-steps", 20, "--perceptual-weight", 0.2,
        "--held-out-share", 0.2, "--ema-decay", 0.98, "--save-samples-freq", 50,
    ]  # fmt: skip
    for line in (
        ["prepare-data", "--input-dir", photographs, "--output-dir", data, "--target-size", 384],
        ["validate", "--input-dir", data, "--output-file", folder / "validation.json"],
        ["train-vae", *train],
        ["evaluate", "--model", run, "--data-path", data, "--held-out-share", 0.2, "--image-size", 256, "--json", folder / "evaluation.json"],
        ["export", "--model", run, "--output-dir", export],
        ["reconstruct", "--model", export, "--input", data, "--output-dir", folder / "reconstructions"],
    ):  # fmt: skip
        words = [str(word) for word in line]
        ui.err.print(f"\n[bold cyan]$ gputrain {shlex.join(words)}[/]", soft_wrap=True)
        app(words, standalone_mode=False)
    tell(folder, time.monotonic() - began)


def copy_photographs(folder: Path) -> None:
    import skimage.data

    folder.mkdir(parents=True)
    for name in PHOTOGRAPHS:
        shutil.copy(Path(skimage.data.__file__).parent / name, folder)


def tell(folder: Path, seconds: float) -> None:
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    psnr = [row["eval/psnr_db"] for row in rows if "eval/psnr_db" in row]
    ui.out.print()
    ui.print_figures(
        f"The demo took {seconds:.0f} s",
        {
            "PSNR before training": f"{psnr[0]:.1f} dB",
            "PSNR after training": f"{psnr[-1]:.1f} dB on held-out crops of {SIZE} pixels",
            "look at": folder / "reconstructions" / "sheet.png",
            "curves": f"tensorboard --logdir {folder / 'run' / 'logs'}",
            "load it": f'diffusers.AutoencoderKL.from_pretrained("{folder / "export"}")',
            "next": "gputrain train-vae --data-path YOUR_PICTURES --output-dir outputs",
        },
    )
