"""`gputrain train-vae`: opens the run and its pictures, and trains one stage after the other.

There is one stage, unless a schedule of resolutions names several. A stage starts from the checkpoint at the end of the
stage before, exactly as if the user had resumed it with another image size.
"""

import contextlib
import logging
from dataclasses import replace

import torch
from rich.console import Console

from gputrain import config
from gputrain.engine.data import digests
from gputrain.engine.distributed import RankGroup
from gputrain.engine.run_folder import Run
from gputrain.engine.schedule import RunProgress, StepSchedule, begin, stages_ahead
from gputrain.engine.train import train
from gputrain.errors import UserError
from gputrain.hw.plan import data_in_memory
from gputrain.hw.runtime import Runtime
from gputrain.planner.session import Session, log_runtime, log_setting, open_session
from gputrain.vae.config import TrainVae
from gputrain.vae.data import CropDataset, Pictures, decoding_seconds, open_pictures
from gputrain.vae.linear_start import LinearCode, fit_code, signals_of, write_code
from gputrain.vae.lpips import load_lpips
from gputrain.vae.model import AutoencoderKL
from gputrain.vae.pictures import UnusablePicture, has_transparency
from gputrain.vae.plan import SPEC
from gputrain.vae.pretrained import load_pretrained
from gputrain.vae.recipe import VaeRecipe

log = logging.getLogger(__name__)

LOOKED_AT = 50  # Pictures whose transparency is looked at before training.


def train_vae(settings: TrainVae, console: Console) -> None:
    """Trains in the run folder that the settings name, from the beginning or from a checkpoint."""
    stages = settings.stages
    if settings.hardware.plan_file and len(stages) > 1:
        raise UserError("plan_file and resolution_schedule contradict each other", hint="a plan is for one size")
    session = open_session(settings, SPEC)
    run, runtime = session.run, session.runtime
    check_same_channels(run, settings.data.image_channels)
    pictures = open_pictures(settings.data.data_path, held_out_share=settings.data.held_out_share)
    run.data = digests(
        training=[(one.fingerprint, one.width, one.height) for one in pictures.train],
        held_out=[(one.fingerprint, one.width, one.height) for one in pictures.held_out],
    )
    log_training(settings, runtime, pictures)
    for index in stages_ahead(run.progress, len(stages), onwards=run.goes_onwards):
        stage, start = begin_stage(stages, index, session, pictures)
        steps = StepSchedule(stage.schedule, start)
        recipe = build_recipe(stage, session, pictures)
        kept = runtime.plan.data_in_memory
        crops = crops_of(stage, pictures, in_memory=bool(kept.value if kept else stage.data.data_in_memory))
        drawn = pictures.mixture.of(crops)
        train(recipe, session.open_batches(drawn, steps), steps, run, runtime, console)
        ended = run.reopen(VaeRecipe.kind)
        if ended is None or not ended.finished:  # max_steps stopped the stage.
            break


def check_same_channels(run: Run, image_channels: int) -> None:
    """Raises UserError if a resumed run would get pictures of another number of channels than before."""
    before = run.resumed["config"].get("image_channels", 3) if run.resumed else image_channels
    if before != image_channels:
        raise UserError(
            f"the checkpoint was trained with image_channels {before}, and this run has {image_channels}",
            hint=f"--image-channels {before}, or begin a new run",
        )


def begin_stage(
    stages: tuple[TrainVae, ...], index: int, session: Session[TrainVae], pictures: Pictures
) -> tuple[TrainVae, RunProgress]:
    """Returns the settings of a stage, planned, and where it starts."""
    stage, run = stages[index], session.run
    log.info(
        "%s%d px, %d images a step, %s", f"stage {index + 1} of {len(stages)}: " if len(stages) > 1 else "",
        stage.data.image_size, stage.schedule.whole_batch, stage.schedule.length_in_words,
    )  # fmt: skip
    warn_of_small_pictures(pictures, stage.data.image_size)
    saved = run.progress
    new = run.goes_onwards or (saved is not None and saved.stage != index)
    start = begin(saved, len(pictures.mixture), new_stage=new, stage=index, stages=len(stages))
    run.settings = config.flatten(stage)
    if run.given_plan or not stage.hardware.plan:
        return session.choose_settings(stage, item_seconds=0.0), start
    crops = crops_of(stage, pictures, in_memory=False)
    stage = session.choose_settings(stage, decoding_seconds(crops))
    runtime = session.runtime
    processes = int(runtime.plan.num_workers.value)
    kept = data_in_memory(session.machine, stage.data.data_in_memory, crops.decoded_gb, processes)
    runtime.plan = replace(runtime.plan, data_in_memory=kept)
    log_setting("data_in_memory", kept)
    return stage, start


def warn_of_small_pictures(pictures: Pictures, image_size: int) -> None:
    """Warn if pictures have to be enlarged to the size of a crop, as a model learns their blur."""
    sides = [min(one.width, one.height) for one in (*pictures.train, *pictures.held_out)]
    small = [side for side in sides if side < image_size]
    if small:
        log.warning(
            "%d of %d pictures are smaller than a crop of %d pixels (the smallest has %d) and are enlarged: the model "
            "learns their blur; use a lower --image-size, or leave them out with prepare-data --min-size %d",
            len(small), len(sides), image_size, min(small), image_size,
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


def crops_of(settings: TrainVae, pictures: Pictures, in_memory: bool) -> CropDataset:
    data = settings.data
    return CropDataset(
        pictures.train,
        data.image_size,
        settings.schedule.seed,
        data.horizontal_flip,
        data.image_channels,
        in_memory=in_memory,
    )


def build_recipe(settings: TrainVae, session: Session[TrainVae], pictures: Pictures) -> VaeRecipe:
    """Returns the recipe of a stage; a new run starts from the weights that the settings name."""
    losses = settings.losses
    lpips = load_lpips(losses.lpips_weights, losses.lpips_sha256) if losses.uses_lpips else None
    recipe = VaeRecipe(settings, session.runtime, pictures.held_out, lpips)
    recipe.sample_crops  # noqa: B018  (It raises now, instead of in the middle of the training, if one is unreadable.)
    if session.run.resumed is None:
        if settings.model.init_from:
            recipe.start_from(load_pretrained(settings.model.init_from, settings.architecture))
        elif settings.model.start == "linear":
            start_linear(recipe, session.run.group, pictures)
    return recipe


def start_linear(recipe: VaeRecipe, group: RankGroup, pictures: Pictures) -> None:
    """Starts the autoencoder as a linear code of the pictures, if its architecture has a place for one."""
    architecture, seed = recipe.settings.architecture, recipe.settings.schedule.seed
    signals = signals_of(architecture)
    if not signals:
        log.info("the start is random: the norms of these channels have no place for a linear code")
        return
    code = LinearCode(signals, architecture.in_channels)
    code.load_state_dict(group.of_leader(lambda: fit_code(pictures.of_epoch, architecture, seed).state_dict()))
    torch.manual_seed(seed)
    autoencoder = AutoencoderKL(architecture)
    write_code(code, autoencoder)
    recipe.start_from(autoencoder.state_dict())


def log_training(settings: TrainVae, runtime: Runtime, pictures: Pictures) -> None:
    for refused in pictures.refused:
        log.warning("%s: %s; left out", refused.path, refused.detail)
    if pictures.shared:
        log.warning("there is only one picture: it is used both for training and for evaluation")
    log.info("pictures for training: %d, held out: %d", len(pictures.train), len(pictures.held_out))
    pictures.split.log_shares(pictures.mixture, "pictures")
    warn_of_opaque_pictures(settings.data.image_channels, pictures)
    log.info("model %s; losses: %s", settings.model.preset, settings.losses.in_words)
    log_runtime(runtime)
