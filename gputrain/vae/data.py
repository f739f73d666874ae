"""The pictures of a training and the weights that it begins with, and synthetic pictures for plans and benchmarks."""

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
from gputrain.engine.data import SampleSource
from gputrain.engine.distributed import RankGroup
from gputrain.engine.run_folder import Run
from gputrain.errors import UserError
from gputrain.formatting import counted
from gputrain.hw.runtime import Runtime
from gputrain.planner.kind_work import PlanTarget, StageData, StageTraining, TrainingData, TrainingStart
from gputrain.planner.memory.predict import step_flops
from gputrain.session import log_start
from gputrain.vae.attention import SCORES
from gputrain.vae.config import TrainVae
from gputrain.vae.dataset import CropDataset, Pictures, decoding_seconds
from gputrain.vae.evaluate import HeldOutPictures
from gputrain.vae.linear_start import LinearCode, fit_code, signals_of, write_code
from gputrain.vae.losses import PUBLISHED_FILES, Lpips, load_lpips, named_files
from gputrain.vae.model import AutoencoderKL
from gputrain.vae.pictures import UnusablePicture, has_transparency
from gputrain.vae.pretrained import Pretrained, load_pretrained
from gputrain.vae.recipe import VaeRecipe

log = logging.getLogger(__name__)

MOST_LEFT_OUT = 0.2  # Share of small pictures up to which leaving them out is proposed.
NAMED = 10  # Files left out that are named one by one.
LOOKED_AT = 50  # Pictures whose transparency is looked at before training.


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
        return TrainingStart(settings, self.digests(), facts)

    def stage(self, settings: TrainVae) -> StageData:
        warn_of_small_pictures(self.pictures, settings.data.image_size)
        return StageData(partial(decoding_seconds, self.crops(settings)))

    def training(self, settings: TrainVae, run: Run, runtime: Runtime) -> StageTraining:
        recipe = self.recipe(settings, runtime)
        source: SampleSource = self.pictures.mixture.of(self.crops(settings))
        if run.resumed is None and self.pretrained:
            facts = self.start_pretrained(recipe, self.pretrained, run.group)
            self.pretrained = None
            return StageTraining(recipe, source, starts_pretrained=True, facts=facts)
        if run.resumed is None and settings.model.start == "linear":
            start_linear(recipe, run.group, self.pictures)
        return StageTraining(recipe, source)

    def crops(self, settings: TrainVae) -> CropDataset:
        data, seed, train = settings.data, settings.schedule.seed, self.pictures.train
        return CropDataset(train, data.image_size, seed, data.horizontal_flip, data.image_channels)

    def recipe(self, settings: TrainVae, runtime: Runtime) -> VaeRecipe:
        """Returns the recipe with random weights. Raises UserError if a file that it needs is unreadable."""
        losses, lpips = settings.losses, None
        if losses.uses_lpips:
            lpips = load_lpips(named_files(losses.lpips_weights, PUBLISHED_FILES))
        held_out = HeldOutPictures(settings.data, self.pictures.held_out)
        return VaeRecipe(settings, runtime, held_out, lpips, partial(item_flops, settings))

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
    sides = [min(picture.width, picture.height) for picture in (*pictures.train, *pictures.held_out)]
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
        reasons = ", ".join(
            f"{count} {reason}" for reason, count in Counter(refusal.reason for refusal in more).most_common()
        )
        log.warning("%d more files are left out (%s); gputrain validate names each", len(more), reasons)
    warn_of_few_held_out(pictures.split.parts, "picture", "a higher --held-out-share holds out more")
    log.info("pictures for training: %d, held out: %d", len(pictures.train), len(pictures.held_out))
    pictures.split.log_shares(pictures.mixture, "pictures")
    warn_of_opaque_pictures(settings.data.image_channels, pictures)
    model, size, losses = settings.model.preset, settings.data.image_size, settings.losses.description
    log.info("model: %s, %d px; losses: %s", model, size, losses)


# ------------------------------------------------------------------------------------------------ plans and benchmarks


def plan_target(settings: TrainVae) -> PlanTarget:
    """Returns the training at one size in the form that the memory planner takes."""

    def build(runtime: Runtime, checkpointing: bool) -> VaeRecipe:
        model = replace(settings.model, gradient_checkpointing=checkpointing)
        lpips = Lpips.without_values() if settings.losses.uses_lpips else None
        return VaeRecipe(replace(settings, model=model), runtime, lpips=lpips)

    def load(items: int = settings.schedule.global_batch_size) -> torch.Tensor:
        size = settings.data.image_size
        return torch.zeros(items, settings.data.image_channels, size, size, dtype=torch.uint8)

    # Attention in blocks computes as many scores at a time for any number of pictures.
    has_attention = settings.architecture.mid_block_add_attention
    side = settings.data.image_size // settings.architecture.downsampling
    return PlanTarget(build, load, proportional_up_to=SCORES / side**4 if has_attention else math.inf)


def item_flops(settings: TrainVae, step: int) -> float:
    """Returns the FLOPs of one picture in a step. Recomputation in memory-efficient layers is not counted."""
    plain = replace(settings, model=replace(settings.model, recompute_norms=False))
    return float(step_flops(plan_target(plain), step, items=1))


def synthetic_recipe(settings: TrainVae, runtime: Runtime) -> VaeRecipe:
    return VaeRecipe(settings, runtime, item_flops=partial(item_flops, settings))


def synthetic_pictures(settings: TrainVae) -> torch.Tensor:
    """Returns a batch of random levels as the data loader does."""
    data = settings.data
    shape = (settings.schedule.global_batch_size, data.image_channels, data.image_size, data.image_size)
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
