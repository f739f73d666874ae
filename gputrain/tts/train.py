"""`gputrain train-tts`: opens the run and its speech, plans, and trains."""

import logging
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from gputrain.engine.data import digests
from gputrain.engine.run_folder import Run
from gputrain.engine.schedule import StepSchedule, begin
from gputrain.engine.train import train
from gputrain.errors import UserError
from gputrain.hw.runtime import Runtime
from gputrain.planner.session import log_runtime, open_session
from gputrain.speech.buckets import Buckets, Speech, buckets_of, open_speech
from gputrain.speech.prepare_config import HOP_SIZE
from gputrain.speech.store import SpeechFormat
from gputrain.tts.config import TrainTts
from gputrain.tts.evaluate import HeldOutClips
from gputrain.tts.load import start_from
from gputrain.tts.plan import SpeechSize, architecture_for, model_spec
from gputrain.tts.recipe import ClipSize, VoiceRecipe

log = logging.getLogger(__name__)

CLIP_SECONDS = 0.0005  # CPU seconds to read a clip from the store and to pad it.
FEW_HOURS = 0.5


def train_tts(settings: TrainTts, console: Console) -> None:
    """Trains in the run folder that the settings name, from the beginning or from a checkpoint."""
    speech = open_speech(settings.data.data_dir, HOP_SIZE, settings.data.held_out_share)
    format, buckets = speech.store.format, fill_buckets(settings, speech)
    clip = largest_clip(settings, buckets)
    size = SpeechSize(format.sampling_rate, len(format.frontend.symbols), len(format.speakers), clip)
    session = open_session(settings, model_spec(size))
    run, runtime = session.run, session.runtime
    run.facts = {  # What inference needs besides the weights.
        "text": format.frontend.to_json(), "sampling_rate": format.sampling_rate, "hop_size": HOP_SIZE,
        "speakers": list(format.speakers),
    }  # fmt: skip
    check_same_symbols(run)
    run.data = digests(training=speech.parts.train, held_out=speech.parts.held_out)
    log_training(settings, runtime, speech, buckets)
    start = begin(run.progress, len(buckets), new_stage=run.goes_onwards)
    settings = session.choose_settings(settings, CLIP_SECONDS)
    recipe = VoiceRecipe(settings, architecture_for(settings, size), clip, runtime, HeldOutClips(speech, settings))
    if settings.model.init_from and run.resumed is None:
        init_from(recipe, settings.model.init_from, format)
    steps = StepSchedule(settings.schedule, start, step_items=settings.schedule.accumulation_steps)
    buckets = replace(buckets, ranks=runtime.ranks)
    train(recipe, session.open_batches(buckets, steps, divides_items=True), steps, run, runtime, console)


def check_same_symbols(run: Run) -> None:
    """Raises UserError if a resumed run would use other symbols or another sampling rate than before."""
    before = run.resumed.get("facts", {}) if run.resumed else {}
    changed = [name for name in before if before[name] != run.facts.get(name)]
    if changed:
        raise UserError(
            f"the data's {' and '.join(changed)} changed since the run began",
            hint="prepare the data as they were, or begin a new run with --init-from this one",
        )


def fill_buckets(settings: TrainTts, speech: Speech) -> Buckets:
    """Returns buckets that contain about the same amount of audio."""
    return buckets_of(speech, settings.data, HOP_SIZE, settings.schedule.batch_size, settings.schedule.seed)


def largest_clip(settings: TrainTts, buckets: Buckets) -> ClipSize:
    """Returns the average clip size of a batch that reaches both the frame limit and the clip limit."""
    return ClipSize(*buckets.largest_average)


def init_from(recipe: VoiceRecipe, path: Path, format: SpeechFormat) -> None:
    reinitialised = start_from(path, recipe.voice, recipe.discriminators, format.front_end, format.speakers)
    if reinitialised:
        log.warning("%s: reinitialised: %s", path, "; ".join(reinitialised))
    if recipe.settings.schedule.ema_decay:
        recipe.ema.restart(recipe.voice)


def log_training(settings: TrainTts, runtime: Runtime, speech: Speech, buckets: Buckets) -> None:
    format, clips = speech.store.format, buckets.clips
    if speech.parts.shared:
        log.warning("there is only one recording: it is used both for training and for evaluation")
    hours = sum(clip.samples for clip in clips) / format.sampling_rate / 3600
    speakers = f", {len(format.speakers)} speakers" if len(format.speakers) > 1 else ""
    log.info(
        "clips for training: %d (%.2f hours%s), held out: %d", len(clips), hours, speakers, len(speech.parts.held_out)
    )
    if hours < FEW_HOURS:
        log.warning("%.2f hours are little data: --init-from a voice of any language helps most", hours)
    log.info(
        "%s voice at %d Hz, %d symbols (%s); %d batches an epoch, of %.1f clips, %.1f %% of them padding",
        settings.model.preset, format.sampling_rate, len(format.frontend.symbols), format.frontend.language,
        len(buckets), len(buckets.longest_M) / len(buckets), 100 * buckets.padding,
    )  # fmt: skip
    buckets.log_fill()
    speech.split.log_shares(speech.split.mixture(), "clips")
    log_runtime(runtime)
