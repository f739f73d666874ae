"""Real training steps of every recipe on a fake card."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gputrain.asr.config import TrainAsr
from gputrain.asr.recipe import RecogniserRecipe
from gputrain.config import assemble
from gputrain.engine.optim import LossScale
from gputrain.engine.recipe import Recipe, phases_of
from gputrain.engine.state import TrainState
from gputrain.engine.step import update
from gputrain.hw.plan import Hardware, decide
from gputrain.hw.probe import probe
from gputrain.hw.runtime import Runtime, apply
from gputrain.speech.buckets import ClipSize
from gputrain.speech.config import HOP_SIZE, STRIDE
from gputrain.speech.training import plan_target
from gputrain.tts.config import TrainTts
from gputrain.tts.data import SpeechSize, architecture_for
from gputrain.tts.recipe import VoiceRecipe
from gputrain.vae.config import TrainVae
from gputrain.vae.losses import Lpips
from gputrain.vae.recipe import VaeRecipe
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.recipe import VocoderRecipe
from gputrain.vocoder.recipe import target as vocoder_subject
from tests.asr.models import tiny_architecture
from tests.fake_cuda.device import Copies, FakeCard, switches
from tests.vocoder.conftest import TINY

Build = Callable[[Runtime], tuple[Recipe, Any]]  # a recipe, and a batch as the loader gives it
LATE = 10**6  # a step at which everything is at work
SMALL_VAE = {
    "data_path": ".", "preset": "fast", "channels": [32, 32], "image_size": 48, "batch_size": 4,
    "discriminator_channels": 16,
}  # fmt: skip
SMALL_VOCODER = {**TINY, "data_path": ".", "device": "auto"}


def vae(**changes: Any) -> Build:
    def build(runtime: Runtime) -> tuple[Recipe, Any]:
        settings = assemble(TrainVae, {**SMALL_VAE, **changes})
        lpips = Lpips.without_values() if settings.losses.uses_lpips else None
        loaded = torch.zeros(settings.schedule.global_batch_size, 3, 48, 48, dtype=torch.uint8)
        return VaeRecipe(settings, runtime, lpips=lpips), loaded

    return build


def vocoder(**changes: Any) -> Build:
    def build(runtime: Runtime) -> tuple[Recipe, Any]:
        settings = assemble(TrainVocoder, {**SMALL_VOCODER, **changes})
        return VocoderRecipe(settings, runtime), vocoder_subject(settings).load()

    return build


def voice(speakers: int = 1, **changes: Any) -> Build:
    def build(runtime: Runtime) -> tuple[Recipe, Any]:
        settings = assemble(TrainTts, {"data_path": ".", "batch_size": 4, "discriminator_channels": 8, **changes})
        clip = ClipSize(frames=40, symbols=12)
        architecture = architecture_for(settings, SpeechSize(22050, 50, speakers, clip))
        recipe = VoiceRecipe(settings, architecture, clip, runtime)
        return recipe, plan_target(VoiceRecipe, settings, architecture, clip, HOP_SIZE).load()

    return build


def recogniser(**changes: Any) -> Build:
    def build(runtime: Runtime) -> tuple[Recipe, Any]:
        settings = assemble(TrainAsr, {"data_path": ".", "batch_size": 4, "learning_rate": 1e-4, **changes})
        adapters = {"adapter_attn_dim": 4} if settings.model.adapters == "attention" else {}
        architecture, clip = tiny_architecture(**adapters), ClipSize(frames=40, symbols=12)
        return (
            RecogniserRecipe(settings, architecture, clip, runtime),
            plan_target(RecogniserRecipe, settings, architecture, clip, STRIDE).load(),
        )

    return build


@dataclass(frozen=True)
class Watched:
    """What was seen of a step that is not the first, which fills caches."""

    recipe: Recipe
    state: TrainState
    scalars: dict[str, torch.Tensor]
    prepare: Copies
    update: Copies
    average: Copies
    switches: dict[str, bool]

    @property
    def to_host(self) -> list[Any]:
        return [copy for part in (self.prepare, self.update, self.average) for copy in part.to_host]

    @property
    def to_device(self) -> list[Any]:
        return [copy for part in (self.prepare, self.update, self.average) for copy in part.to_device]


def take_steps(card: FakeCard, build: Build, hardware: Hardware, micro_batch: int) -> Watched:
    """Two steps of a recipe as `train` makes them; the second, which finds all caches filled, is watched."""
    runtime = apply(decide(probe(), hardware))
    recipe, loaded = build(runtime)
    start = 65536.0 if runtime.dtype == torch.float16 else 1.0
    scales = {phase.name: LossScale(start).to(runtime.device) for phase in phases_of(recipe)}
    sizes = {group.name: micro_batch for group in recipe.step_groups}
    state = TrainState(recipe, runtime, 1.0, sizes, scales)
    for step in range(LATE, LATE + 2):
        with card.watched() as prepared:
            batch = recipe.prepare(loaded, step)
        with card.watched() as updated:
            scalars = update(state, batch, step, 1e-4)
        with card.watched() as averaged:
            recipe.average(step)
    return Watched(recipe, state, scalars, prepared, updated, averaged, switches())
