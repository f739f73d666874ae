"""Plans, measures and trains an image VAE.

A training has one stage, unless a schedule of resolutions names several.
"""

import contextlib
import logging
import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from gputrain.data_in.split import digests, warn_of_few_held_out
from gputrain.engine.checkpoint import format_list
from gputrain.engine.distributed import RankGroup
from gputrain.engine.run_folder import Run
from gputrain.errors import UserError
from gputrain.formatting import counted
from gputrain.hw.runtime import Runtime
from gputrain.planner.kind_work import (
    CUDA_GRAPHS,
    BatchSource,
    KindWork,
    PlannedTraining,
    PlanTarget,
    StageData,
    StageTraining,
    SyntheticWork,
    TrainingData,
    TrainingStart,
)
from gputrain.planner.memory.fit import Fit, MemoryBudget
from gputrain.session import log_start
from gputrain.vae.architecture import VaePreset
from gputrain.vae.config import PlannedData, PlanVae, TrainVae
from gputrain.vae.data import CropDataset, Pictures, decoding_seconds, open_pictures
from gputrain.vae.linear_start import LinearCode, fit_code, signals_of, write_code
from gputrain.vae.losses import PUBLISHED_FILES, load_lpips
from gputrain.vae.model import AutoencoderKL
from gputrain.vae.pictures import UnusablePicture, check_colours, has_transparency, read_picture
from gputrain.vae.pretrained import Pretrained, load_pretrained
from gputrain.vae.recipe import VaeRecipe, plan_target
from gputrain.vae.weights import named_files

log = logging.getLogger(__name__)

UNPACKED = "unpacked"  # Folder of a run for the pictures of archives and tables that it trains on.
SIZE_STEP = 64  # Pixels between the image sizes that are proposed.
MOST_LEFT_OUT = 0.2  # Share of small pictures up to which leaving them out is proposed.
SMALL_PRESETS: tuple[VaePreset, ...] = ("lite", "fast")
NAMED = 10  # Files left out that are named one by one.
# Pictures of a single colour are looked for among so many, of which so many are decoded; files of such pictures have up
# to 0.016 bytes a pixel.
FLAT_LOOKED_AT, FLAT_DECODED, FLAT_BYTES_A_PIXEL = 200, 20, 0.03
LOOKED_AT = 50  # Pictures whose transparency is looked at before training.
SWITCHES = (
    ("fp32", {"recompute_norms": False}, ""),
    ("+ TF32", {"precision": "tf32"}, "tf32"),
    ("+ bf16", {"precision": "mixed"}, "precision"),
    ("+ channels_last", {"channels_last": True}, "channels_last"),
    ("+ compile", {"use_torch_compile": True}, "compile"),
    ("+ recompute norms", {"recompute_norms": True}, ""),
    CUDA_GRAPHS,
)


class VaeWork(KindWork[TrainVae]):
    """The work of planning, measuring and training an image VAE."""

    kind, item = "vae", "picture"
    switches = SWITCHES

    def completed(self, settings: TrainVae) -> TrainVae:
        if settings.hardware.plan_file and len(settings.stages) > 1:
            raise UserError("plan_file and resolution_schedule contradict each other", hint="a plan is for one size")
        return settings

    def open_data(self, settings: TrainVae) -> "VaeData":
        data, run = settings.data, settings.saving.output_dir
        unpack_at = None if isinstance(settings, PlanVae) else run / UNPACKED
        return VaeData(
            open_pictures(data.data_path, held_out_share=data.held_out_share, unpack_at=unpack_at, exclude=data.exclude)
        )

    def target(self, settings: TrainVae) -> PlanTarget:
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

    def planned(self, settings: PlanVae) -> PlannedTraining:
        stages = [
            (stage, {"image_size": stage.data.image_size, "batch_size": stage.schedule.global_batch_size})
            for stage in settings.stages
        ]
        named = settings.data.data_path != PlannedData.data_path
        return PlannedTraining(self, stages, len(self.open_data(settings)) if named else None)

    def synthetic(self, settings: TrainVae, **options: Any) -> SyntheticWork:
        return SyntheticWork(
            title=f"{settings.model.preset}, {settings.data.image_size} px, {settings.schedule.batch_size} pictures",
            recipe=partial(VaeRecipe, settings, held_out=[]),
            batch=partial(self.synthetic_batch, settings),
        )

    def synthetic_batch(self, settings: TrainVae) -> torch.Tensor:
        data = settings.data
        shape = (settings.schedule.global_batch_size, data.image_channels, data.image_size, data.image_size)
        return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def smaller_sizes(settings: TrainVae, budget: MemoryBudget, found: Fit) -> list[int]:
    """Returns three image sizes, the largest first. Activations and workspace grow at least in proportion to the
    area."""
    grows = {"activations", "workspace", "cached"}
    growing_gb = sum(gb for kind, gb in found.parts.items() if kind in grows) / found.micro_batch_size
    left_gb = budget.budget_gb / budget.margin - sum(gb for kind, gb in found.parts.items() if kind not in grows)
    step = math.lcm(SIZE_STEP, settings.architecture.multiple)
    largest = int(settings.data.image_size * max(0.0, left_gb / growing_gb) ** 0.5) // step * step
    return [size for size in (largest, largest - step, largest - 2 * step) if size > 0]


@dataclass
class VaeData(TrainingData[TrainVae]):
    """The pictures of a training."""

    pictures: Pictures
    pretrained: Pretrained | None = None  # What the training begins with, until it begins.

    sizes = None

    def __len__(self) -> int:
        return len(self.pictures.mixture)

    def digests(self) -> dict[str, Any]:
        facts, pictures = attrgetter("fingerprint", "width", "height"), self.pictures
        return digests(training=list(map(facts, pictures.train)), held_out=list(map(facts, pictures.held_out)))

    def begin(self, settings: TrainVae, run: Run, runtime: Runtime) -> TrainingStart[TrainVae]:
        check_same(run, "image_channels", settings.data.image_channels)
        check_same(run, "train_part", settings.model.train_part)
        log_training(settings, runtime, self.pictures)
        if settings.losses.uses_lpips:  # What is missing is said before the training is planned.
            named_files(settings.losses.lpips_weights, PUBLISHED_FILES)
        if settings.model.init_from and run.resumed is None:
            model = settings.model
            self.pretrained = load_pretrained(settings.model.init_from, settings.architecture, model.train_part)
            log_start(settings.model.init_from)
        facts = run.resumed["facts"] if run.resumed else {}
        return TrainingStart(settings, self.digests(), facts, settings.stages)

    def stage(self, settings: TrainVae, position: str) -> StageData:
        if position:
            log.info(
                "%s: %d px, %d images a step", position, settings.data.image_size, settings.schedule.global_batch_size
            )
        warn_of_small_pictures(self.pictures, settings.data.image_size)
        crops = self.crops(settings, in_memory=False)
        return StageData(
            partial(decoding_seconds, crops), decoded_gb=crops.decoded_gb, keep_decoded=settings.data.data_in_memory
        )

    def training(self, settings: TrainVae, run: Run, runtime: Runtime) -> StageTraining:
        recipe, kept = self.recipe(settings, runtime), runtime.plan.data_in_memory
        in_memory = bool(kept.value if kept else settings.data.data_in_memory)
        source: BatchSource = self.pictures.mixture.of(self.crops(settings, in_memory=in_memory))
        if run.resumed is None and self.pretrained:
            facts = self.start_pretrained(recipe, self.pretrained, run.group)
            self.pretrained = None
            return StageTraining(recipe, source, starts_pretrained=True, facts=facts)
        if run.resumed is None and settings.model.start == "linear":
            start_linear(recipe, run.group, self.pictures)
        return StageTraining(recipe, source)

    def crops(self, settings: TrainVae, *, in_memory: bool) -> CropDataset:
        data, seed, train = settings.data, settings.schedule.seed, self.pictures.train
        return CropDataset(train, data.image_size, seed, data.horizontal_flip, data.image_channels, in_memory=in_memory)

    def recipe(self, settings: TrainVae, runtime: Runtime) -> VaeRecipe:
        losses = settings.losses
        lpips = None
        if losses.uses_lpips:
            lpips = load_lpips(named_files(losses.lpips_weights, PUBLISHED_FILES))
        recipe = VaeRecipe(settings, runtime, self.pictures.held_out, lpips)
        recipe.sample_crops  # noqa: B018  (It raises now, instead of in the middle of the training, if one is unreadable.)
        return recipe

    def start_pretrained(self, recipe: VaeRecipe, pretrained: Pretrained, group: RankGroup) -> dict[str, Any]:
        """Loads the weights to begin with. Returns what inference needs to know of the latents."""
        weights, train_part = pretrained.weights, recipe.settings.model.train_part
        latents = replace(pretrained.latents, encoder_trained=train_part == "all")
        if train_part == "decoder":  # The decoder may be a new one.
            weights = {**recipe.autoencoder.state_dict(), **weights}
        recipe.start_from(weights)
        return latents.facts()


def check_same(run: Run, name: str, value: object) -> None:
    """Raises UserError if a resumed run would have another value of an option that its weights depend on."""
    before = run.resumed["config"].get(name) if run.resumed else value
    if before != value:
        raise UserError(
            f"the checkpoint was trained with {name} {before}, and this run has {value}",
            hint=f"--{name.replace('_', '-')} {before}, or begin a new run",
        )


def warn_of_small_pictures(pictures: Pictures, image_size: int) -> None:
    """Warn if pictures have to be enlarged to the size of a crop, as a model learns their blur."""
    sides = [min(one.width, one.height) for one in (*pictures.train, *pictures.held_out)]
    small = [side for side in sides if side < image_size]
    if not small:
        return
    remedy = f"--image-size {max(16, min(small) // 16 * 16)} takes them as they are"
    if len(small) <= MOST_LEFT_OUT * len(sides):
        remedy += f", and prepare-data --min-size {image_size} leaves them out"
    else:
        remedy += f", and prepare-data --target-size {image_size} keeps larger sources larger"
    are = "is" if len(small) == 1 else "are"
    log.warning(
        "%d of %s %s smaller than a crop of %d pixels (the smallest has %d) and %s enlarged: the model learns "
        "the blur; %s", len(small), counted(len(sides), "picture"), are, image_size, min(small), are, remedy,
    )  # fmt: skip


def warn_of_opaque_pictures(image_channels: int, pictures: Pictures) -> None:
    """Warn if pictures are to be trained with transparency, and none of a few has any."""
    if image_channels != 4:
        return
    count = min(LOOKED_AT, len(pictures.train))
    chosen = [pictures.train[number * len(pictures.train) // count] for number in range(count)]
    with contextlib.suppress(UnusablePicture):
        if not any(has_transparency(picture.path) for picture in chosen):
            log.warning(
                "image_channels is 4, and none of %d pictures has transparency: prepare the data with "
                "--image-channels 4 if their sources have it, or train with 3", count,
            )  # fmt: skip


def warn_of_flat_pictures(image_channels: int, pictures: Pictures) -> None:
    """Warn if some of the training pictures have a single colour or are nearly black, which `prepare-data` leaves out.
    Of evenly spaced ones, those are decoded whose files are small for their pixels, and those with transparency."""
    count = min(FLAT_LOOKED_AT, len(pictures.train))
    chosen = [pictures.train[number * len(pictures.train) // count] for number in range(count)]
    flat: list[str] = []
    decoded = 0
    for picture in chosen:
        with contextlib.suppress(UnusablePicture, OSError):
            is_small = picture.path.stat().st_size < FLAT_BYTES_A_PIXEL * picture.width * picture.height
            if decoded < FLAT_DECODED and (is_small or has_transparency(picture.path)):
                decoded += 1
                try:
                    check_colours(picture.path, read_picture(picture.path, channels=image_channels))
                except UnusablePicture as refused:
                    flat += [picture.path.name] * (refused.reason in ("one colour", "dark"))
    if flat:
        log.warning(
            "a single colour or nearly black, which any model reconstructs: %d of %d training pictures that were "
            "looked at: %s; gputrain prepare-data leaves such pictures out", len(flat), count, format_list(flat),
        )  # fmt: skip


def start_linear(recipe: VaeRecipe, group: RankGroup, pictures: Pictures) -> None:
    """Starts the autoencoder as a linear code of the pictures, if its architecture has a place for one."""
    architecture, seed = recipe.settings.architecture, recipe.settings.schedule.seed
    signals = signals_of(architecture)
    if not signals:
        log.info("the start is random: the norms of these channels have no place for a linear code")
        return
    code = LinearCode(signals, architecture.in_channels)
    code.load_state_dict(group.from_leader(lambda: fit_code(pictures.of_epoch, architecture, seed).state_dict()))
    torch.manual_seed(seed)
    autoencoder = AutoencoderKL(architecture)
    write_code(code, autoencoder)
    recipe.start_from(autoencoder.state_dict())


def log_training(settings: TrainVae, runtime: Runtime, pictures: Pictures) -> None:
    for refused in pictures.refused[:NAMED]:
        log.warning("%s: %s; left out", refused.path, refused.detail)
    if more := pictures.refused[NAMED:]:
        reasons = ", ".join(f"{count} {reason}" for reason, count in Counter(one.reason for one in more).most_common())
        log.warning("%d more files are left out (%s); gputrain validate names each", len(more), reasons)
    warn_of_few_held_out(pictures.split.parts, "picture", "a higher --held-out-share holds out more")
    log.info("pictures for training: %d, held out: %d", len(pictures.train), len(pictures.held_out))
    pictures.split.log_shares(pictures.mixture, "pictures")
    warn_of_opaque_pictures(settings.data.image_channels, pictures)
    warn_of_flat_pictures(settings.data.image_channels, pictures)
    sizes = ", ".join(f"{stage.data.image_size} px" for stage in settings.stages)
    log.info("model: %s, %s; losses: %s", settings.model.preset, sizes, settings.losses.description)
