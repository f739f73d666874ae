"""The image VAE as the commands know it, and what is planned, measured and trained of it. Imports no torch until one of
its functions is called.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gputrain import kinds
from gputrain.config import leaves
from gputrain.planner.kind_work import CUDA_GRAPHS, NO_DATA, SWITCHES, KindWork, PlannedTraining, SyntheticWork
from gputrain.vae.architecture import VaePreset
from gputrain.vae.config import (
    PUBLISHED,
    PictureEvaluation,
    PictureLimits,
    PlanVae,
    Reconstruct,
    TrainVae,
    VaePrepareConfig,
)

if TYPE_CHECKING:
    from gputrain.planner.kind_work import PlanTarget
    from gputrain.planner.memory.fit import Fit, MemoryBudget
    from gputrain.vae.data import VaeData
    from gputrain.vae.prepare import ImageReport


# ------------------------------------------------------------------------------------------------------------ data


def prepare_pictures(settings: Any) -> kinds.DataWork:
    from gputrain.data_in.sources import hub_name
    from gputrain.vae.prepare import check_output, prepare_images

    size = settings.pictures.target_size
    # The full path, or the name on the Hub, wherever that is unpacked.
    origin = hub_name(settings.input_dir) or str(settings.input_dir.resolve())
    return kinds.DataWork(
        partial(prepare_images, origin=origin),
        settings.pictures,
        lambda report: kinds.prepared_counts(report, "held out", report.held_out),
        train_options=("--image-size", str(size)) if size < leaves(TrainVae)["image_size"].default else (),
        check_output=partial(check_output, config=settings.pictures, origin=origin),
    )


def validate_pictures(settings: Any) -> kinds.DataWork:
    from gputrain.vae.prepare import validate_images

    return kinds.DataWork(validate_images, settings.pictures, picture_figures)


def picture_figures(report: ImageReport) -> dict[str, object]:
    from gputrain.data_in.preparation import format_range

    figures: dict[str, object] = {
        "readable pictures": report.pictures,
        "held out": report.held_out,
        "refused": len(report.refused),
        **report.account(),
        "formats": ", ".join(f"{count} {name}" for name, count in report.formats.items()),
        "size": f"{report.bytes / 1e6:.1f} MB",
        "width in pixels": format_range(report.width),
        "height in pixels": format_range(report.height),
    }
    if report.manifest:
        odd = {name: len(paths) for name, paths in vars(report.manifest).items() if paths}
        figures["manifest"] = ", ".join(f"{count} {name}" for name, count in odd.items()) or "agrees with the files"
    return figures


# --------------------------------------------------------------------------------- planning, benchmarks and training

UNPACKED = "unpacked"  # Folder of a run for the pictures of archives and tables that it trains on.
SIZE_STEP = 64  # Pixels between the image sizes that are proposed.
SMALL_PRESETS: tuple[VaePreset, ...] = ("lite", "fast")


class VaeWork(KindWork[TrainVae]):
    """The work of planning, measuring and training an image VAE."""

    kind, item = "vae", "picture"
    switches = (
        ("fp32", {"recompute_norms": False}, ""),
        *SWITCHES[1:],
        ("+ recompute norms", {"recompute_norms": True}, ""),
        CUDA_GRAPHS,
    )

    def completed(self, settings: TrainVae) -> TrainVae:
        return settings

    def open_data(self, settings: TrainVae) -> VaeData:
        return self._opened(settings, settings.saving.output_dir / UNPACKED)

    def _opened(self, settings: TrainVae, unpack_at: Path | None) -> VaeData:
        from gputrain.vae.data import VaeData
        from gputrain.vae.dataset import open_pictures

        data = settings.data
        return VaeData(
            open_pictures(data.data_path, held_out_share=data.held_out_share, unpack_at=unpack_at, exclude=data.exclude)
        )

    def target(self, settings: TrainVae) -> PlanTarget:
        from gputrain.vae.data import plan_target

        return plan_target(settings)

    def fallbacks(self, settings: TrainVae, budget: MemoryBudget, found: Fit) -> dict[str, TrainVae]:
        model = settings.model
        own_widths = replace(model, channels=(), decoder_channels=())
        return {
            **super().fallbacks(settings, budget, found),
            "--recompute-norms": replace(settings, model=replace(model, recompute_norms=True)),
            **{
                f"--image-size {size}": replace(settings, data=replace(settings.data, image_size=size))
                for size in smaller_sizes(settings, budget, found)
            },
            **{
                f"--preset {preset}": replace(settings, model=replace(own_widths, preset=preset))
                for preset in SMALL_PRESETS
                if model.train_part == "all"  # The encoder of others is given.
            },
        }

    def begins(self, settings: TrainVae) -> dict[str, int]:
        losses = settings.losses
        late = losses.discriminator_start + losses.discriminator_warmup_steps
        what = "the adversarial loss (discriminator_start + discriminator_warmup_steps)"
        return {what: late} if losses.adversarial_weight else {}

    def planned(self, settings: Any) -> PlannedTraining:
        columns = {"image_size": settings.data.image_size, "batch_size": settings.schedule.global_batch_size}
        named = settings.data.data_path != NO_DATA
        return PlannedTraining(self, settings, columns, len(self._opened(settings, None)) if named else None)

    def synthetic(self, settings: TrainVae, **options: Any) -> SyntheticWork:
        from gputrain.vae.data import synthetic_pictures, synthetic_recipe

        return SyntheticWork(
            title=f"{settings.model.preset}, {settings.data.image_size} px, {settings.schedule.batch_size} pictures",
            recipe=partial(synthetic_recipe, settings),
            batch=partial(synthetic_pictures, settings),
        )


def smaller_sizes(settings: TrainVae, budget: MemoryBudget, found: Fit) -> list[int]:
    """Returns three image sizes, the largest first. Activations and workspace grow at least in proportion to the
    area."""
    grows = {"activations", "workspace", "cached"}
    growing_gb = sum(gb for kind, gb in found.parts.items() if kind in grows) / found.micro_batch_size
    left_gb = budget.budget_gb / budget.margin - sum(gb for kind, gb in found.parts.items() if kind not in grows)
    step = math.lcm(SIZE_STEP, settings.architecture.multiple)
    largest = int(settings.data.image_size * max(0.0, left_gb / growing_gb) ** 0.5) // step * step
    return [size for size in (largest, largest - step, largest - 2 * step) if size > 0]


# -------------------------------------------------------------------------------------------------- trained models


def evaluate(settings: Any, **shared: Any) -> Any:
    from gputrain.vae.evaluate import evaluate_pictures

    return evaluate_pictures(settings.weights, settings.data_path, settings.pictures, **shared)


def export_diffusers(settings: Any, progress: kinds.ReportProgress, *, single_file: bool = False) -> kinds.Exported:
    from gputrain.vae.export import export_vae

    return export_vae(
        settings.weights, settings.output_dir, data_path=settings.data_path, device=settings.device,
        single_file=single_file, progress=progress,
    )  # fmt: skip


def reconstruct(settings: Reconstruct, output: kinds.CommandOutput) -> None:
    from gputrain.vae.reconstruct import reconstruct_folder

    with output.progress("reconstructing") as progress:
        made = reconstruct_folder(settings, progress)
    count = len(made.written)
    output.data(
        f"{count} picture{'s' * (count != 1)}, PSNR {made.psnr_db:.1f} dB on average over whole pictures (evaluate "
        f"takes centre crops of held-out ones); look at {made.page}"
    )


# --------------------------------------------------------------------------------------- demo, on real photographs

# Photographs in scikit-image's wheel. Only one of its stereo pair is used, as the other shows the same scene.
PHOTOGRAPHS = (
    "astronaut.png", "camera.png", "chelsea.png", "coffee.png", "coins.png", "hubble_deep_field.jpg", "ihc.png",
    "moon.png", "motorcycle_left.png", "retina.jpg", "rocket.jpg",
)  # fmt: skip
SIZE = 64  # Side of a crop, in pixels.
SHARE = 0.2  # Share of the parts that is held out.


def cut_photographs(folder: Path) -> None:
    """Cut about sixty parts of 200 to 300 pixels a side, so that parts of several photographs are held out."""
    import skimage.data
    from PIL import Image

    parts = folder / "photographs"
    if parts.is_dir():
        return
    parts.mkdir(parents=True)
    for name in PHOTOGRAPHS:
        with Image.open(Path(skimage.data.__file__).parent / name) as image:
            image.thumbnail((640, 640))
            columns, rows = image.width // 200, image.height // 200
            for column, row in product(range(columns), range(rows)):
                box = (column / columns, row / rows, (column + 1) / columns, (row + 1) / rows)
                part = image.crop(tuple(int(at * size) for at, size in zip(box, 2 * image.size, strict=True)))
                part.convert("RGB").save(parts / f"{Path(name).stem}_{row}{column}.png")


def demo_commands(folder: Path) -> list[kinds.Words]:
    photographs, data, run, export = (folder / name for name in ("photographs", "data", "run", "export"))
    train = [
        "--preset", "fast", "--image-size", SIZE, "--batch-size", 4, "--num-epochs", 36, "--learning-rate", 1e-4,
        "--warmup-steps", 100, "--perceptual-weight", 0.2, "--ema-decay", 0.9, "--held-out-share", SHARE,
        "--evaluate-every-epochs", 12, "--eval-first", "--checkpoint-every-epochs", 0, "--sample-every-steps", 100,
        "--resume-from", "auto",
    ]  # fmt: skip
    return [
        ["prepare-data", "--input-dir", photographs, "--output-dir", data, "--target-size", 256],
        ["validate", "--input-dir", data, "--output-file", folder / "validation.json"],
        ["train-vae", "--data-path", data, "--output-dir", run, *train],
        ["evaluate", "--model", run, "--data-path", data, "--json", folder / "evaluation.json"],
        ["export", "--model", run, "--output-dir", export],
        ["reconstruct", "--model", export, "--input", photographs, "--output-dir", folder / "reconstructions"],
    ]


def demo_results(folder: Path) -> dict[str, object]:
    from gputrain.report.records import evaluated

    psnr = evaluated(folder / "run", "psnr_db")
    return {
        "PSNR before training": f"{psnr[0]:.1f} dB",
        "PSNR after training": f"{psnr[-1]:.1f} dB, on held-out parts",
        "look at": folder / "reconstructions" / "sheet.html",
        "load it": f'diffusers.AutoencoderKL.from_pretrained("{folder / "export"}")',
        "next": "gputrain train-vae --data-path YOUR_PICTURES --output-dir outputs/vae",
    }


KIND = kinds.ModelKind(
    name="vae",
    title="an image VAE",
    panel="Image VAE",
    help="Train an image VAE on a folder of pictures.",
    bench_help="Time a step of train-vae in fp32, adding TF32, bf16, channels_last, compile, recomputed norms and CUDA "
    "graphs.",
    train=TrainVae,
    plan=PlanVae,
    work=VaeWork,
    data="pictures",
    media="image",
    prepared={
        "manifest.jsonl": frozenset({"width", "height", "fingerprint"}),
        "journal.jsonl": frozenset({"input_dir"}),
    },
    prepare=kinds.DataCommand(
        groups={"pictures": VaePrepareConfig},
        names=frozenset({"exclude", "mode", *leaves(VaePrepareConfig)}),
        work=prepare_pictures,
    ),
    validate=kinds.DataCommand(
        groups={"pictures": PictureLimits}, names=frozenset({"exclude", *leaves(PictureLimits)}), work=validate_pictures
    ),
    published=PUBLISHED,
    evaluation=kinds.EvaluateCommand(
        groups={"pictures": PictureEvaluation},
        names=frozenset(leaves(PictureEvaluation)),
        items="pictures",
        run=evaluate,
    ),
    exporters={
        "diffusers": kinds.Exporter(export_diffusers, frozenset({"data_path", "device"})),
        "single-file": kinds.Exporter(
            partial(export_diffusers, single_file=True), frozenset({"data_path", "device"})
        ),
    },
    commands=(
        kinds.OwnCommand(
            "reconstruct", Reconstruct,
            "Reconstruct pictures of any size with a VAE, and show them next to their originals.", reconstruct,
        ),
    ),
    use=(
        "reconstruct pictures", "reconstruct", "--input", "PICTURES", "--pictures", "8",
        "--output-dir", "reconstructions",
    ),
    headlines=("psnr_db", "ssim", "ms_ssim", "rfid"),
    demo=kinds.DemoSteps("photographs", cut_photographs, demo_commands, demo_results),
    shipped=Path(__file__).parent / "profiles",
    # What a CPU trains in hours instead of weeks: 13 M parameters on crops of 128 pixels.
    small=("--preset", "fast", "--image-size", "128", "--batch-size", "8"),
)  # fmt: skip
