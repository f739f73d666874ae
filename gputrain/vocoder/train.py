"""`gputrain train-vocoder`: opens the run and its sound, plans, and trains."""

import logging
from collections.abc import Generator
from dataclasses import replace
from typing import Any

from rich.console import Console

from gputrain import config
from gputrain.engine.data import batches, digests
from gputrain.engine.run_dir import Run, given_plan, open_run
from gputrain.engine.schedule import StepSchedule, begin
from gputrain.engine.train import train
from gputrain.errors import UserError
from gputrain.hw.probe import probe
from gputrain.hw.runtime import Runtime, apply
from gputrain.planner.calibrate import choose
from gputrain.planner.planning import fit_workers, memory_budget, planned, tell_runtime
from gputrain.vocoder.calibration import calibrated
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.data import Crops, Sounds, open_sounds
from gputrain.vocoder.evaluate import Excerpts, check_fits
from gputrain.vocoder.plan import Planner
from gputrain.vocoder.pretrained import Weights, read_weights
from gputrain.vocoder.recipe import VocoderRecipe

log = logging.getLogger(__name__)

CROP_SECONDS = 0.0003  # of a core, to cut a crop out of the store and to collate it
WARMUP_STEPS = 1000  # of new discriminators beside a generator that is good
LEAST_VOICED = 0.05  # share of the frames, below which something is wrong with the pitch


def train_vocoder(settings: TrainVocoder, console: Console) -> None:
    """Train in the run folder that the settings name, from the start or from a checkpoint."""
    machine = probe()
    given = given_plan(settings.hardware)
    plan = given.plan if given else Planner.decide(machine, settings.hardware)
    sounds = open_for(settings)
    run = open_run(settings, settings.saving, kind=VocoderRecipe.kind, command="gputrain train-vocoder")
    run.given_plan = given
    run.data = digests(training=sounds.parts.train, held_out=sounds.parts.held_out)
    runtime = apply(plan)
    kept = plan.memory_budget_gb  # of a plan that is wanted again
    runtime.limit_memory(float(kept.value) if kept else memory_budget(machine, plan, settings.hardware, None).budget_gb)
    tell(settings, runtime, sounds)
    weights = None
    if settings.model.init_from and run.resumed is None:
        weights = read_weights(settings.model.init_from, settings.model.finetune_ignored_params)
    settings = with_warmup(settings, run, weights)
    crops = Crops(sounds.store, sounds.parts.train, settings.data.frames_to_read, settings.schedule.seed)
    start = begin(run.progress, len(crops), new_stage=run.goes_onwards)
    if given:
        settings = planned(settings, given.plan)
    elif settings.hardware.plan:
        settings = choose(settings, run, runtime, machine, Planner(), calibrated, CROP_SECONDS)
    recipe = VocoderRecipe(settings, runtime, held_out(sounds, settings.saving.num_valid_plots))
    if weights:
        recipe.start_from(weights)
    steps = StepSchedule(settings.schedule, start)
    fit_workers(runtime, machine, crops.item_bytes * steps.items_a_step)

    def open_batches(first: int, last: int) -> Generator[Any, None, None]:
        return batches(crops, len(crops), steps, runtime.plan, first, last)

    train(recipe, open_batches, steps, run, runtime, console)


def with_warmup(settings: TrainVocoder, run: Run, weights: Weights | None) -> TrainVocoder:
    """The settings with a warm-up of the discriminators, where it is left to us: a good generator must not listen to
    new ones. A run that goes on keeps to its own."""
    if settings.losses.discriminator_warmup_steps >= 0:
        return settings
    if run.resumed:
        steps = max(0, run.resumed["config"].get("discriminator_warmup_steps", 0))
    else:
        steps = (
            WARMUP_STEPS if weights and not weights.discriminators and not settings.losses.discriminator_start else 0
        )
    if steps:
        log.info("the discriminators learn alone in the first %d steps (discriminator_warmup_steps)", steps)
    settings = replace(settings, losses=replace(settings.losses, discriminator_warmup_steps=steps))
    run.settings = config.flatten(settings)
    run.configuration = config.to_yaml(settings)
    return settings


def open_for(settings: TrainVocoder) -> Sounds:
    """The prepared sound. Raises UserError where it is not what the model is trained on."""
    data = settings.data
    sounds = open_sounds(data.data_path, data.held_out_share, data.val_num)
    check_fits(sounds.store, settings.spectrogram.mel)
    longest = max(clip.frames for clip in sounds.parts.train)
    if longest < data.crop_mel_frames:
        raise UserError(
            f"a crop of {data.crop_mel_frames} frames is longer than every clip in {data.data_path}",
            hint=f"--crop-mel-frames {longest // 8 * 8 or 8}, or longer recordings",
        )
    return sounds


def held_out(sounds: Sounds, count: int) -> Excerpts:
    """Beginnings of some held-out clips, in the order of their fingerprints, so that they are of many a recording."""
    return Excerpts(sounds.store, sorted(sounds.parts.held_out, key=lambda clip: clip.fingerprint)[:count])


def tell(settings: TrainVocoder, runtime: Runtime, sounds: Sounds) -> None:
    """Say in a few lines what is about to be trained, on what, and how."""
    if sounds.parts.shared:
        log.warning("there is only one clip: figures on held-out clips are figures on it")
    elif len(sounds.parts.held_out) == 1:
        log.warning(
            "only one clip is held out: every evaluation, the samples and checkpoint_best.pt rest on it; "
            "--val-num 8 holds out eight"
        )
    mel = settings.spectrogram.mel
    hours = sum(clip.samples for clip in sounds.parts.train) / mel.sampling_rate / 3600
    log.info(
        "%d clips (%.2f hours) to learn from, %d held out", len(sounds.parts.train), hours, len(sounds.parts.held_out)
    )
    voiced = sounds.voiced_share
    if voiced < LEAST_VOICED:
        log.warning(
            "%.1f %% of the frames have a pitch: a vocoder learns none from them; gputrain validate --kind vocoder "
            "tells more", 100 * voiced,
        )  # fmt: skip
    source = "mini" if settings.model.mini_nsf else "full"
    log.info(
        "%s source, %d channels, %g Hz; discriminators: %s; crops of %.2f s", source,
        settings.model.upsample_initial_channel, mel.sampling_rate,
        ", ".join(settings.discriminators.discriminators), settings.crop_seconds,
    )  # fmt: skip
    if faults := settings.architecture.stock_faults:
        log.warning("openvpi's generator cannot load such a model; export writes ONNX alone: %s", "; ".join(faults))
    tell_runtime(runtime)
