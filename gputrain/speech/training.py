"""The training on prepared speech, which a voice and a recogniser share: its data, plans, benchmarks and recipes.

Shape suffixes: B clips, T samples.
"""

import functools
import logging
import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Self

from gputrain.data_in.split import digests, warn_of_few_held_out
from gputrain.engine.distributed import BatchDraws
from gputrain.engine.optim import Ema
from gputrain.engine.run_folder import Run
from gputrain.engine.stop import format_duration
from gputrain.errors import UserError
from gputrain.hw.runtime import Runtime
from gputrain.planner.kind_work import (
    PlanTarget,
    StageData,
    StageTraining,
    TrainingData,
    TrainingStart,
    TrainSettings,
)
from gputrain.planner.memory.predict import step_flops
from gputrain.samples import Report
from gputrain.speech.buckets import (
    Buckets,
    ClipBatch,
    ClipSize,
    Speech,
    StepClips,
    clips_of_step,
    even_bucket,
)

S = TypeVar("S", bound=TrainSettings)
log = logging.getLogger(__name__)

CLIP_SECONDS = 0.0005  # CPU seconds to read a clip from the store and to pad it.


@dataclass
class SpeechTraining(TrainingData[S]):
    """Prepared speech in buckets of clips with similar lengths."""

    speech: Speech
    buckets: Buckets
    sizes: Any

    divides_items = True
    # Facts that a resumed run must share with its checkpoint.
    fixed_facts: ClassVar[tuple[str, ...]] = ("text", "sampling_rate")

    def __len__(self) -> int:
        return len(self.buckets)

    def digests(self) -> dict[str, Any]:
        return digests(training=self.speech.parts.train, held_out=self.speech.parts.held_out)

    @abstractmethod
    def facts(self, run: Run) -> dict[str, Any]:
        """Returns what inference needs besides the weights."""

    @abstractmethod
    def described(self, settings: S) -> str:
        """Returns the model in a few words, for the log."""

    def advise(self, settings: S, hours: float) -> None:
        """Warns if a start from other weights would help."""

    def begin(self, settings: S, run: Run, runtime: Runtime) -> TrainingStart[S]:
        facts = self.facts(run)
        before: dict[str, Any] = run.resumed["facts"] if run.resumed else facts
        changed = [name for name in self.fixed_facts if before[name] != facts[name]]
        if changed:
            raise UserError(
                f"the data's {' and '.join(changed)} changed since the run began",
                hint="prepare the data as they were, or begin a new run with --init-from this one",
            )
        self.log(settings, runtime)
        return TrainingStart(settings, self.digests(), facts)

    def stage(self, settings: S) -> StageData:
        return StageData(lambda: CLIP_SECONDS, step_items=settings.schedule.accumulation_steps)

    def training(self, settings: S, run: Run, runtime: Runtime) -> StageTraining:
        recipe = self.recipe(settings, runtime)
        starts_pretrained = run.resumed is None and self.start(recipe)
        source = replace(self.buckets, ranks=runtime.ranks)
        return StageTraining(recipe, source, starts_pretrained=starts_pretrained)

    @abstractmethod
    def recipe(self, settings: S, runtime: Runtime) -> Any:
        """Returns the recipe, with random weights and the held-out clips."""

    @abstractmethod
    def start(self, recipe: Any) -> bool:
        """Gives the recipe of a new run the weights that the settings name. Returns whether it has some of a file."""

    def log(self, settings: S, runtime: Runtime) -> None:
        speech, buckets = self.speech, self.buckets
        format, clips = speech.store.format, buckets.clips
        warn_of_few_held_out(speech.parts, "clip", "a higher --held-out-share holds out more")
        hours = sum(clip.samples for clip in clips) / format.sampling_rate / 3600
        speakers = f", {len(format.speakers)} speakers" if len(format.speakers) > 1 else ""
        held_out = len(speech.parts.held_out)
        duration = format_duration(3600 * hours)
        log.info("clips for training: %d (%s%s), held out: %d", len(clips), duration, speakers, held_out)
        self.advise(settings, hours)
        log.info(
            "model: %s, %d symbols (%s); %d batches an epoch of %.1f clips, %.1f %% padding",
            self.described(settings), len(format.frontend.symbols), format.frontend.language, len(buckets),
            len(buckets.longest_M) / len(buckets), 100 * buckets.padding,
        )  # fmt: skip
        speech.split.log_shares(speech.split.mixture(), "clips")


def speaking_rate(speech: Speech) -> tuple[float, float]:
    """Returns the seconds of an average clip of prepared speech, and its symbols a second."""
    format, clips = speech.store.format, speech.parts.train
    seconds = sum(clip.samples for clip in clips) / format.sampling_rate
    symbols = sum(len(format.frontend.ids(clip.normalized)) for clip in clips)
    return seconds / len(clips), symbols / seconds


class PlannedClips(NamedTuple):
    """The clips of a plan: `seconds` is the average length of a clip in the largest batches."""

    seconds: float
    columns: dict[str, object]

    @classmethod
    def of(cls, settings: Any, *, of_data: bool) -> "PlannedClips":
        """Returns the clips of the options of `plan`: all of one length, or those of the data, whose largest
        batches have up to `max_batch_audio_ratio` times as much sound as others."""
        clip = settings.speech.clip_seconds
        seconds = settings.data.max_batch_audio_ratio * clip if of_data else clip
        columns = {"seconds": round(clip, 1), "batch_seconds": round(seconds * settings.schedule.global_batch_size, 1)}
        return cls(float(seconds), columns)


def size_of_clip(frames: float, symbols: float) -> ClipSize:
    return ClipSize(math.ceil(frames), math.ceil(symbols))


def synthetic_bucket(wave_BT: Tensor, clip: ClipSize, num_symbols: int, draws: torch.Generator) -> list[ClipBatch]:
    """Returns a bucket of clips of one length with random symbols."""
    ids_BS = torch.randint(3, num_symbols, (len(wave_BT), clip.symbols), generator=draws)
    return even_bucket(ids_BS, wave_BT, clip.frames)


# ------------------------------------------------------------------------------------------------------------- recipes


class ClipsOfBatch(Protocol):
    """The clips of a step, or a part of them, as a recipe prepares them."""

    @property
    def frames(self) -> tuple[int, ...]: ...  # Frames of each clip.
    @property
    def padded_frames(self) -> int: ...  # Frames of all clips with their padding.
    def part(self, first: int, stop: int) -> Self: ...  # Returns items `first` to `stop` - 1.


class BucketRecipe:
    """Sizes, parts, noise, samples and evaluations of batches of clips whose lengths differ."""

    settings: Any
    runtime: Runtime
    architecture: Any
    clip: ClipSize
    hop_size: int  # Samples from a frame to the next.
    held_out: Any  # Samples and evaluates a model; None: there is neither.
    model: Any
    ema: Ema[Any]  # if the settings have an `ema_decay`

    def average(self, step: int) -> None:
        if self.settings.schedule.ema_decay:
            self.ema.update(self.model, step)

    @property
    def best_model(self) -> Any:
        """The EMA of the model, or the model itself if the EMA is off."""
        return self.ema.average if self.settings.schedule.ema_decay else self.model

    def clips_and_draws(self, loaded: list[ClipBatch], step: int) -> tuple[StepClips, BatchDraws]:
        """Returns the clips of a step, of one bucket or of several with gradient accumulation, and its noise."""
        clips = clips_of_step(loaded)
        generator = torch.Generator(self.runtime.device).manual_seed((self.settings.schedule.seed << 32) + step)
        return clips, BatchDraws(generator, len(clips.frames), clips.rows)

    def size(self, batch: ClipsOfBatch) -> int:
        """Returns the number of clips, or for long clips the number of average length that needs as much memory."""
        return max(len(batch.frames), math.ceil(batch.padded_frames / self.clip.frames))

    def flops(self, batch: ClipsOfBatch, step: int) -> float:
        return self._item_flops * self.size(batch)

    @functools.cached_property
    def _item_flops(self) -> float:
        """FLOPs of a step for each clip, in a step that computes all that the model has."""
        target = plan_target(type(self), self.settings, self.architecture, self.clip, self.hop_size)
        return step_flops(target, self.peak_memory_step(0)) / float(self.settings.schedule.global_batch_size)

    def peak_memory_step(self, step: int) -> int:
        return step

    def split(self, batch: Any, parts: int) -> list[Any]:
        """Splits into parts whose numbers of clips differ by at most one; there are at most as many parts as clips."""
        clips = len(batch.frames)
        parts = min(parts, clips)
        ends = [-(-clips * part // parts) for part in range(parts + 1)]
        return [batch.part(first, stop) for first, stop in pairwise(ends)]

    def sample(self) -> Report:
        """Uses the model on the sample clips or texts, for a person to look at."""
        if self.held_out is None:
            return Report()
        with self.runtime.autocast():
            made: Report = self.held_out.sample(self.best_model, self.runtime.device)
        return made

    def evaluate(self) -> Report:
        assert self.held_out is not None
        with self.runtime.autocast():
            made: Report = self.held_out.evaluate(self.best_model, self.runtime.device)
        return made


def plan_target(
    recipe: Callable[..., BucketRecipe], settings: Any, architecture: Any, clip: ClipSize, hop_size: int
) -> PlanTarget:
    """Returns a training by a recipe in the form that the memory planner takes: all clips have one size."""

    def build(runtime: Runtime, checkpointing: bool) -> Any:
        model = replace(settings.model, gradient_checkpointing=checkpointing)
        return recipe(replace(settings, model=model), architecture, clip, runtime)

    def load(items: int = settings.schedule.global_batch_size) -> list[ClipBatch]:
        ids_BS = torch.zeros(items, clip.symbols, dtype=torch.int64)
        return even_bucket(ids_BS, torch.zeros(items, clip.frames * hop_size), clip.frames)

    return PlanTarget(build, load, proportional_up_to=math.inf)


def fit_length(x: Tensor, size: int) -> Tensor:
    """Returns a contiguous tensor whose last dimension is cropped or zero-padded to `size` elements."""
    return F.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x[..., :size].contiguous()
