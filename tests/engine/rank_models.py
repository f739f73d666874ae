"""Small recipes of all models for ranks that train together: `tests.engine.rank_steps` says how."""

from collections.abc import Callable
from typing import Any

import torch

from gputrain.asr.recipe import RecogniserRecipe
from gputrain.config import assemble
from gputrain.hw.ranks import Ranks
from gputrain.hw.runtime import Runtime
from gputrain.speech.buckets import ClipBatch
from gputrain.tts.recipe import VoiceRecipe
from gputrain.vae.config import TrainVae
from gputrain.vae.recipe import VaeRecipe
from gputrain.vocoder.recipe import VocoderRecipe
from tests.asr import test_recipe as recognisers
from tests.tts import test_recipe as voices
from tests.vae import test_recipe as vaes
from tests.vocoder import test_recipe as vocoders


def vae(runtime: Runtime) -> tuple[VaeRecipe, Callable[[int], Any]]:
    """A VAE with an adversary and uneven parts: 7 pictures on 2 and 4 ranks."""
    settings = assemble(TrainVae, {**vaes.SMALL, "batch_size": 7, "lecam_weight": 0.1})
    recipe = VaeRecipe(settings, runtime)
    if runtime.ranks.index == 1:
        vaes.inject(recipe, "autoencoder", 6)
    return recipe, lambda step: vaes.crops(step, 7)[runtime.ranks.rows(7)]


def vocoder(runtime: Runtime, variant: str = "all augmentations") -> tuple[VocoderRecipe, Callable[[int], Any]]:
    settings = vocoders.settings_of(**vocoders.VARIANTS[variant], batch_size=6)
    recipe = VocoderRecipe(settings, runtime)
    rows = runtime.ranks.rows(6)
    return recipe, lambda step: tuple(tensor[rows] for tensor in vocoders.sounds(settings, step, 6))


def vocoder_muon(runtime: Runtime) -> tuple[VocoderRecipe, Callable[[int], Any]]:
    return vocoder(runtime, "plain")


def voice(runtime: Runtime) -> tuple[VoiceRecipe, Callable[[int], Any]]:
    """A voice with accumulation: a bucket of five clips, and one of two, in which two of four ranks have no part; every
    fourth step is one bucket of three clips, so that a rank is idle."""
    settings = voices.settings_of(accumulation_steps=2)
    recipe = VoiceRecipe(settings, voices.shape("medium", 2), voices.CLIP, runtime)
    generator = torch.Generator().manual_seed(5)
    for parameter in recipe.voice.parameters():  # Otherwise flows and text would be initialised to zero.
        if not parameter.any():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)

    def load(step: int) -> list[ClipBatch]:
        sizes = (3,) if step % 4 == 3 else (5, 2)
        return [part_of(voices.bucket(10 * step + size, size), runtime.ranks) for size in sizes]

    return recipe, load


def recogniser(runtime: Runtime) -> tuple[RecogniserRecipe, Callable[[int], Any]]:
    """A recogniser with masks, dropped layers and an encoder that trains from the third step on. Its buckets are those
    of the voice: two of four ranks have no part in some."""
    recipe = recognisers.make(
        runtime=runtime, accumulation_steps=2, layer_drop=0.3, mask_time_prob=0.3, mask_time_length=3,
        freeze_encoder_steps=2,
    )  # fmt: skip

    def load(step: int) -> list[ClipBatch]:
        sizes = (3,) if step % 4 == 3 else (5, 2)
        return [part_of(recognisers.bucket(10 * step + size, size), runtime.ranks) for size in sizes]

    return recipe, load


def recogniser_of_whole_waves(runtime: Runtime) -> tuple[RecogniserRecipe, Callable[[int], Any]]:
    """A recogniser whose first layer normalises over the padding of the whole batch."""
    recipe = recognisers.make(recognisers.GROUP, runtime=runtime)
    return recipe, lambda step: [part_of(recognisers.bucket(step), runtime.ranks)]


def part_of(bucket: ClipBatch, ranks: Ranks) -> ClipBatch:
    """Returns a rank's part of a bucket, as `Buckets` reads it."""
    if ranks.count == 1:
        return bucket
    part = ranks.rows(len(bucket.frames_B))
    kept = part if part.stop > part.start else slice(0, 1)
    clips = [tensor[kept] for tensor in bucket[:7]]
    return ClipBatch(*clips, bucket.symbols_B, bucket.frames_B, torch.tensor([part.start, part.stop]))
