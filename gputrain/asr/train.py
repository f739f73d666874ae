"""`gputrain train-asr`: opens the run and its speech, plans, and trains."""

import logging
from dataclasses import replace
from typing import Any

from rich.console import Console

from gputrain.asr.config import FINE_TUNING_RATE, FROM_SCRATCH_RATE, TrainAsr
from gputrain.asr.held_out import HeldOutSpeech
from gputrain.asr.initialise import init_weights, initial_normalizes, keep_architecture, recogniser_architecture
from gputrain.asr.plan import UtteranceFacts, model_spec
from gputrain.asr.recipe import RecogniserRecipe, UtteranceSize
from gputrain.engine.data import digests
from gputrain.engine.run_folder import Run
from gputrain.engine.schedule import StepSchedule, begin
from gputrain.engine.train import train
from gputrain.errors import UserError
from gputrain.hw.runtime import Runtime
from gputrain.planner.session import log_runtime, open_session
from gputrain.speech.buckets import Buckets, Speech, buckets_of, open_speech
from gputrain.speech.frames import ENCODER_RATE, STRIDE

log = logging.getLogger(__name__)

CLIP_SECONDS = 0.0005  # CPU seconds to read a clip from the store and to pad it.


def train_asr(settings: TrainAsr, console: Console) -> None:
    """Trains in the run folder that the settings name, from the beginning or from a checkpoint."""
    speech = open_speech(settings.data.data_dir, STRIDE, settings.data.held_out_share, kind="asr")
    settings = with_learning_rate(settings)
    vocabulary, buckets = speech.store.format.vocabulary, fill_buckets(settings, speech)
    clip = largest_utterance(settings, buckets)
    architecture = recogniser_architecture(settings, vocabulary, len(vocabulary.symbols))
    session = open_session(settings, model_spec(UtteranceFacts(clip, architecture)))
    run, runtime = session.run, session.runtime
    normalizes = initial_normalizes(settings)
    if run.resumed:  # The model to initialise from may be gone.
        normalizes = bool(run.resumed["facts"].get("normalizes", normalizes))
    run.facts = {  # What inference needs besides the weights.
        "text": vocabulary.to_json(), "sampling_rate": ENCODER_RATE, "hop_size": STRIDE,
        "architecture": architecture, "normalizes": normalizes,
    }  # fmt: skip
    check_same_speech(run)
    if run.group.leads:
        keep_architecture(run.folder, architecture)
    run.data = digests(training=speech.parts.train, held_out=speech.parts.held_out)
    log_training(settings, runtime, speech, buckets)
    start = begin(run.progress, len(buckets), new_stage=run.goes_onwards)
    settings = session.choose_settings(settings, CLIP_SECONDS)
    recipe = RecogniserRecipe(
        settings, architecture, clip, runtime, HeldOutSpeech(speech, settings), normalizes=normalizes
    )
    if settings.model.init_from and run.resumed is None:
        init_weights(recipe, settings.model.init_from, vocabulary)
    steps = StepSchedule(settings.schedule, start, step_items=settings.schedule.accumulation_steps)
    buckets = replace(buckets, ranks=runtime.ranks)
    train(recipe, session.open_batches(buckets, steps, divides_items=True), steps, run, runtime, console)


def with_learning_rate(settings: TrainAsr) -> TrainAsr:
    """Returns the settings with a learning rate, if it is left to the program."""
    if settings.schedule.learning_rate:
        return settings
    rate = FINE_TUNING_RATE if settings.model.init_from else FROM_SCRATCH_RATE
    return replace(settings, schedule=replace(settings.schedule, learning_rate=rate))


def check_same_speech(run: Run) -> None:
    """Raises UserError if a resumed run would use another vocabulary or sampling rate than before."""
    before: dict[str, Any] = run.resumed.get("facts", {}) if run.resumed else {}
    changed = [name for name in ("text", "sampling_rate") if name in before and before[name] != run.facts[name]]
    if changed:
        raise UserError(
            f"the data's {' and '.join(changed)} changed since the run began",
            hint="prepare the data as they were, or begin a new run with --init-from this one",
        )


def fill_buckets(settings: TrainAsr, speech: Speech) -> Buckets:
    """Returns buckets that contain about the same amount of audio."""
    return buckets_of(speech, settings.data, STRIDE, settings.schedule.batch_size, settings.schedule.seed)


def largest_utterance(settings: TrainAsr, buckets: Buckets) -> UtteranceSize:
    """Returns the average clip size of a batch that reaches both the frame limit and the clip limit."""
    return UtteranceSize(*buckets.largest_average)


def log_training(settings: TrainAsr, runtime: Runtime, speech: Speech, buckets: Buckets) -> None:
    format, clips = speech.store.format, buckets.clips
    if speech.parts.shared:
        log.warning("there is only one recording: it is used both for training and for evaluation")
    hours = sum(clip.samples for clip in clips) / format.sampling_rate / 3600
    speakers = f", {len(format.speakers)} speakers" if len(format.speakers) > 1 else ""
    log.info(
        "clips for training: %d (%.2f hours%s), held out: %d", len(clips), hours, speakers, len(speech.parts.held_out)
    )
    if not settings.model.init_from and settings.model.preset not in ("tiny", "base"):
        log.warning(
            "%s begins with random weights: --init-from its pretrained model, a folder or a name on the Hugging Face "
            "Hub, reaches low error rates with a thousandth of the speech", settings.model.preset,
        )  # fmt: skip
    log.info(
        "%s, %d symbols (%s); %d batches an epoch, of %.1f clips, %.1f %% of them padding",
        settings.model.init_from or settings.model.preset, len(format.vocabulary.symbols), format.vocabulary.language,
        len(buckets), len(buckets.longest_M) / len(buckets), 100 * buckets.padding,
    )  # fmt: skip
    buckets.log_fill()
    speech.split.log_shares(speech.split.mixture(), "clips")
    log_runtime(runtime)
