"""The part of a recipe on buckets of clips that a voice and a recogniser share.

Shape suffixes: B clips.
"""

import functools
import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Protocol

import torch
from typing_extensions import Self

from gputrain.engine.distributed import BatchDraws
from gputrain.engine.samples import Report
from gputrain.hw.runtime import Runtime
from gputrain.planner.memory.predict import step_flops
from gputrain.planner.work import PlanTarget
from gputrain.speech.buckets import ClipBatch, ClipSize, StepClips, clips_of_step


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
    clip: ClipSize
    held_out: Any  # Samples and evaluates a model; None: there is neither.
    best_model: Any
    inference_options: Mapping[str, Any] = {}  # Passed to samples and evaluations beside the model.

    def plan_target(self) -> PlanTarget:
        """Returns the training in the form that the memory planner takes."""
        raise NotImplementedError

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
        return step_flops(self.plan_target(), self.peak_memory_step(0)) / float(self.settings.schedule.whole_batch)

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
            made: Report = self.held_out.sample(self.best_model, self.runtime.device, **self.inference_options)
        return made

    def evaluate(self) -> Report:
        assert self.held_out is not None
        with self.runtime.autocast():
            made: Report = self.held_out.evaluate(self.best_model, self.runtime.device, **self.inference_options)
        return made
