"""`gputrain train-vae`: opens the run and its pictures, and trains one stage after the other.

There is one stage, unless a schedule of resolutions names several. A stage begins where the checkpoint of the one
before ends, exactly as if the user had resumed it by hand at another size.
"""

import logging
from collections.abc import Generator
from dataclasses import replace

from rich.console import Console
from torch import Tensor

from gputrain import config
from gputrain.engine.data import batches, digests
from gputrain.engine.run_dir import Run, given_plan, open_run
from gputrain.engine.schedule import RunProgress, StepSchedule, begin, stages_ahead
from gputrain.engine.train import train
from gputrain.errors import UserError
from gputrain.hw.plan import data_in_memory, decide
from gputrain.hw.probe import Machine, probe
from gputrain.hw.runtime import Runtime, apply
from gputrain.planner.calibrate import choose
from gputrain.planner.planning import fit_workers, memory_budget, planned, tell_runtime, tell_setting
from gputrain.vae.calibration import calibrated
from gputrain.vae.config import TrainVae
from gputrain.vae.data import CropDataset, Pictures, decoding_seconds, open_pictures
from gputrain.vae.lpips import load_lpips
from gputrain.vae.plan import Planner
from gputrain.vae.pretrained import load_pretrained
from gputrain.vae.recipe import VaeRecipe

log = logging.getLogger(__name__)


def train_vae(settings: TrainVae, console: Console) -> None:
    """Train in the run folder that the settings name, from the start or from a checkpoint."""
    machine = probe()
    if settings.hardware.plan_file and len(settings.stages) > 1:
        raise UserError("plan_file and resolution_schedule contradict each other", hint="a plan is for one size")
    given = given_plan(settings.hardware)
    plan = given.plan if given else decide(machine, settings.hardware)
    run = open_run(settings, settings.saving, kind=VaeRecipe.kind, command="gputrain train-vae")
    run.given_plan = given
    pictures = open_pictures(settings.data.data_path, held_out_share=settings.data.held_out_share)
    run.data = digests(
        training=[(one.fingerprint, one.width, one.height) for one in pictures.train],
        held_out=[(one.fingerprint, one.width, one.height) for one in pictures.held_out],
    )
    runtime = apply(plan)
    kept = plan.memory_budget_gb  # of a plan that is wanted again
    runtime.limit_memory(float(kept.value) if kept else memory_budget(machine, plan, settings.hardware, None).budget_gb)
    tell(settings, runtime, pictures)
    stages = settings.stages
    for index in stages_ahead(run.progress, len(stages), onwards=run.goes_onwards):
        stage = stages[index]
        log.info(
            "%s%d px, %d images a step, epochs: %d", f"stage {index + 1} of {len(stages)}: " if len(stages) > 1 else "",
            stage.data.image_size, stage.schedule.whole_batch, stage.schedule.num_epochs,
        )  # fmt: skip
        saved = run.progress
        new = run.goes_onwards or (saved is not None and saved.stage != index)
        start = begin(saved, len(pictures.train), new_stage=new, stage=index, stages=len(stages))
        run.settings = config.flatten(stage)
        if given:
            stage = planned(stage, given.plan)
        elif settings.hardware.plan:
            stage = choose_stage(stage, run, runtime, machine, pictures)
        train_stage(stage, start, run, runtime, machine, pictures, console)
        ended = run.reopen(VaeRecipe.kind)
        if ended is None or not ended.finished:  # stopped by max_steps
            break


def choose_stage(stage: TrainVae, run: Run, runtime: Runtime, machine: Machine, pictures: Pictures) -> TrainVae:
    """A stage with what was chosen for it, and whether its pictures stay in memory."""
    data = CropDataset(pictures.train, stage.data.image_size, stage.schedule.seed, stage.data.horizontal_flip)
    stage = choose(stage, run, runtime, machine, Planner(), calibrated, decoding_seconds(data))
    processes = int(runtime.plan.num_workers.value)
    kept = data_in_memory(machine, stage.data.data_in_memory, data.decoded_gb, processes)
    runtime.plan = replace(runtime.plan, data_in_memory=kept)
    tell_setting("data_in_memory", kept)
    return stage


def train_stage(
    settings: TrainVae,
    start: RunProgress,
    run: Run,
    runtime: Runtime,
    machine: Machine,
    pictures: Pictures,
    console: Console,
) -> None:
    """Train at one size for the epochs of the settings."""
    steps = StepSchedule(settings.schedule, start)
    lpips = (
        load_lpips(settings.losses.lpips_weights, settings.losses.lpips_sha256) if settings.losses.uses_lpips else None
    )
    recipe = VaeRecipe(settings, runtime, pictures.held_out, lpips)
    if settings.model.init_from and run.resumed is None:
        recipe.start_from(load_pretrained(settings.model.init_from, settings.architecture))

    plan, data = runtime.plan, settings.data
    crops = CropDataset(
        pictures.train,
        data.image_size,
        settings.schedule.seed,
        data.horizontal_flip,
        in_memory=bool(plan.data_in_memory.value if plan.data_in_memory else data.data_in_memory),
    )
    fit_workers(runtime, machine, crops.item_bytes * steps.items_a_step)

    def open_batches(first: int, last: int) -> Generator[Tensor, None, None]:
        return batches(crops, len(pictures.train), steps, runtime.plan, first, last)

    train(recipe, open_batches, steps, run, runtime, console)


def tell(settings: TrainVae, runtime: Runtime, pictures: Pictures) -> None:
    """Say in a few lines what is about to be trained, on what, and how."""
    for refused in pictures.refused:
        log.warning("%s: %s; left out", refused.path, refused.detail)
    if pictures.shared:
        log.warning("there is only one picture: figures on held-out pictures are figures on it")
    log.info("%d pictures to learn from, %d held out", len(pictures.train), len(pictures.held_out))
    log.info("model %s; losses: %s", settings.model.preset, settings.losses.in_words)
    tell_runtime(runtime)
