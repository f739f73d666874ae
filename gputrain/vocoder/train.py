"""`gputrain train-vocoder`: opens the data and the run folder, plans, and trains."""

import logging
from dataclasses import replace

from rich.console import Console

from gputrain import config
from gputrain.engine.data import digests
from gputrain.engine.mixture import in_words
from gputrain.engine.run_folder import Run
from gputrain.engine.schedule import StepSchedule, begin
from gputrain.engine.train import train
from gputrain.errors import UserError
from gputrain.hw.runtime import Runtime
from gputrain.planner.session import log_runtime, open_session
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.evaluate import Excerpts, check_fits
from gputrain.vocoder.load import Weights, read_weights
from gputrain.vocoder.plan import SPEC
from gputrain.vocoder.recipe import VocoderRecipe
from gputrain.vocoder.store import SoundCrops, VocoderData, open_sounds

log = logging.getLogger(__name__)

CROP_SECONDS = 0.0003  # CPU seconds to read a crop from the store and to collate it.
WARMUP_STEPS = 1000  # Warm-up of new discriminators next to a pretrained generator.
LEAST_VOICED = 0.05  # Share of voiced frames below which the pitch is probably wrong.


def train_vocoder(settings: TrainVocoder, console: Console) -> None:
    """Trains in the run folder that the settings name, from the beginning or from a checkpoint."""
    sounds = open_training_data(settings)
    session = open_session(settings, SPEC)
    run, runtime = session.run, session.runtime
    run.data = digests(training=sounds.parts.train, held_out=sounds.parts.held_out)
    log_training(settings, runtime, sounds)
    weights = None
    if settings.model.init_from and run.resumed is None:
        weights = read_weights(settings.model.init_from, settings.model.finetune_ignored_params)
    settings = with_warmup(settings, run, weights)
    crops = SoundCrops(sounds.store, sounds.parts.train, settings.data.frames_to_read, settings.schedule.seed)
    mixture = sounds.mixture(crops)
    sounds.split.log_shares(mixture, "crops")
    start = begin(run.progress, len(mixture), new_stage=run.goes_onwards)
    settings = session.choose_settings(settings, CROP_SECONDS)
    # In the order of their fingerprints, the first clips come from many recordings.
    held_out = sorted(sounds.parts.held_out, key=lambda clip: clip.fingerprint)[: settings.saving.num_valid_plots]
    recipe = VocoderRecipe(settings, runtime, Excerpts(sounds.store, held_out))
    if weights:
        recipe.start_from(weights)
    steps = StepSchedule(settings.schedule, start)
    train(recipe, session.open_batches(mixture.of(crops), steps), steps, run, runtime, console)


def with_warmup(settings: TrainVocoder, run: Run, weights: Weights | None) -> TrainVocoder:
    """Returns the settings with the number of warm-up steps of the discriminators, if the user left it open: new
    discriminators would harm a pretrained generator. A resumed run keeps its number."""
    if settings.losses.discriminator_warmup_steps >= 0:
        return settings
    if run.resumed:
        steps = max(0, run.resumed["config"].get("discriminator_warmup_steps", 0))
    else:
        steps = (
            WARMUP_STEPS if weights and not weights.discriminators and not settings.losses.discriminator_start else 0
        )
    if steps:
        log.info("only the discriminators are trained in the first %d steps (discriminator_warmup_steps)", steps)
    settings = replace(settings, losses=replace(settings.losses, discriminator_warmup_steps=steps))
    run.settings = config.flatten(settings)
    run.configuration = config.to_yaml(settings)
    return settings


def open_training_data(settings: TrainVocoder) -> VocoderData:
    """Returns the prepared sound. Raises UserError if it does not suit the settings."""
    data = settings.data
    sounds = open_sounds(data.data_path, data.held_out_share, data.val_num)
    check_fits(sounds.store, settings.spectrogram.mel)
    longest = max(clip.frames for clip in sounds.parts.train)
    if longest < data.crop_mel_frames:
        raise UserError(
            f"a crop of {data.crop_mel_frames} frames is longer than every clip in {in_words(data.data_path)}",
            hint=f"--crop-mel-frames {longest // 8 * 8 or 8}, or longer recordings",
        )
    return sounds


def log_training(settings: TrainVocoder, runtime: Runtime, sounds: VocoderData) -> None:
    if sounds.parts.shared:
        log.warning("there is only one clip: evaluations use the training data")
    elif len(sounds.parts.held_out) == 1:
        log.warning(
            "only one clip is held out: every evaluation, the samples and checkpoint_best.pt depend on it; "
            "--val-num 8 holds out eight"
        )
    mel = settings.spectrogram.mel
    hours = sum(clip.samples for clip in sounds.parts.train) / mel.sampling_rate / 3600
    log.info(
        "clips for training: %d (%.2f hours), held out: %d", len(sounds.parts.train), hours, len(sounds.parts.held_out)
    )
    voiced = sounds.voiced_share
    if voiced < LEAST_VOICED:
        log.warning(
            "%.1f %% of the frames have a pitch: the vocoder cannot learn it; run gputrain validate --kind vocoder",
            100 * voiced,
        )  # fmt: skip
    source = "mini" if settings.model.mini_nsf else "full"
    log.info(
        "%s source, %d channels, %g Hz; discriminators: %s; crops of %.2f s", source,
        settings.model.upsample_initial_channel, mel.sampling_rate,
        ", ".join(settings.discriminators.discriminators), settings.crop_seconds,
    )  # fmt: skip
    if faults := settings.architecture.stock_faults:
        log.warning(
            "openvpi's generator cannot load this model; it can only be exported as ONNX: %s", "; ".join(faults)
        )
    log_runtime(runtime)
