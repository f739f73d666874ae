"""The demo: every command of the image VAE in turn, on real photographs, as a user would type them."""

import json
import shlex
import time
from itertools import product
from pathlib import Path

from gputrain.cli import ui
from gputrain.errors import UserError

# Photographs in scikit-image's wheel. (Of its stereo pair, one: parts of the other would be held out in vain.)
PHOTOGRAPHS = (
    "astronaut.png", "camera.png", "chelsea.png", "coffee.png", "coins.png", "hubble_deep_field.jpg", "ihc.png",
    "moon.png", "motorcycle_left.png", "retina.jpg", "rocket.jpg",
)  # fmt: skip

SIZE = 64  # pixels of a crop
SHARE = 0.2  # of the parts, held out


def run_demo(folder: Path) -> None:
    """Leaves `folder`/photographs, data, run, export and reconstructions; run again, it does what is missing.

    Raises UserError if the folder holds something else.
    """
    from gputrain.cli.app import app

    photographs, data, run, export = (folder / name for name in ("photographs", "data", "run", "export"))
    if folder.exists() and any(folder.iterdir()) and not photographs.is_dir():
        raise UserError(f"{folder} is not empty", hint="choose another --output-dir for the demo")
    began = time.monotonic()
    if not photographs.is_dir():
        cut_photographs(photographs)
    train = [
        "--preset", "fast", "--image-size", SIZE, "--batch-size", 4, "--num-epochs", 36, "--learning-rate", 3e-4,
        "--warmup-steps", 20, "--perceptual-weight", 0.2, "--ema-decay", 0.9, "--held-out-share", SHARE,
        "--evaluate-freq", 12, "--checkpoint-freq", 0, "--save-samples-freq", 100, "--resume-from", "auto",
    ]  # fmt: skip
    for line in (
        ["prepare-data", "--input-dir", photographs, "--output-dir", data, "--target-size", 256],
        ["validate", "--input-dir", data, "--output-file", folder / "validation.json"],
        ["train-vae", "--data-path", data, "--output-dir", run, *train],
        ["evaluate", "--model", run, "--data-path", data, "--json", folder / "evaluation.json"],
        ["export", "--model", run, "--output-dir", export],
        ["reconstruct", "--model", export, "--input", photographs, "--output-dir", folder / "reconstructions"],
    ):
        words = [str(word) for word in line]
        ui.err.print(f"\n[bold cyan]$ gputrain {shlex.join(words)}[/]", soft_wrap=True)
        app(words, standalone_mode=False)
    tell(folder, time.monotonic() - began)


def cut_photographs(folder: Path) -> None:
    """Some sixty parts of about 200 to 300 pixels a side; the split will hold out some of every kind."""
    import skimage.data
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for name in PHOTOGRAPHS:
        with Image.open(Path(skimage.data.__file__).parent / name) as image:
            image.thumbnail((640, 640))
            columns, rows = image.width // 200, image.height // 200
            for column, row in product(range(columns), range(rows)):
                box = (column / columns, row / rows, (column + 1) / columns, (row + 1) / rows)
                part = image.crop(tuple(int(at * size) for at, size in zip(box, 2 * image.size, strict=True)))
                part.convert("RGB").save(folder / f"{Path(name).stem}_{row}{column}.png")


def tell(folder: Path, seconds: float) -> None:
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    psnr = [row["eval/psnr_db"] for row in rows if "eval/psnr_db" in row]
    ui.out.print()
    ui.print_figures(
        f"The demo took {seconds:.0f} s",
        {
            "PSNR before training": f"{psnr[0]:.1f} dB",
            "PSNR after training": f"{psnr[-1]:.1f} dB, on parts that were held out",
            "look at": folder / "reconstructions" / "sheet.png",
            "curves": f"tensorboard --logdir {folder / 'run' / 'logs'}",
            "load it": f'diffusers.AutoencoderKL.from_pretrained("{folder / "export"}")',
            "next": "gputrain train-vae --data-path YOUR_PICTURES --output-dir outputs",
        },
    )
