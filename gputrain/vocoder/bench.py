"""`gputrain bench train-vocoder`: measures the speed-up of each setting in training steps on synthetic sound, or in
synthesising it."""

import math
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gputrain.audio.mel import log_mel
from gputrain.audio.weight_norm import weights_made_once
from gputrain.bench.inference_bench import SOUND_SWITCHES, Compute, InferenceBench, sound_title
from gputrain.bench.step_bench import GRAPHS, SWITCHES, BenchSpec, StepBench
from gputrain.hw.runtime import Runtime
from gputrain.planner.spec import ModelSpec
from gputrain.vocoder.commands import BenchVocoder
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.generator import draw_noise
from gputrain.vocoder.plan import SPEC
from gputrain.vocoder.recipe import VocoderRecipe, build_generator


def title(settings: BenchVocoder, train: TrainVocoder) -> str:
    parts = [f"{train.model.upsample_initial_channel} channels"]
    parts += [] if settings.inference else train.discriminators.discriminators
    items = f"{train.schedule.batch_size} crops of {train.crop_seconds:.2f} s"
    return sound_title(", ".join(parts), settings.inference, items)


def synthetic_sound(settings: TrainVocoder) -> tuple[Tensor, Tensor]:
    """Returns a batch as the data loader does: notes of two octaves with a little noise."""
    draws = torch.Generator().manual_seed(0)
    items, frames, mel = settings.schedule.whole_batch, settings.data.frames_to_read, settings.spectrogram.mel
    time_T = torch.arange(frames * mel.hop_size) / mel.sampling_rate
    f0_B1 = 110 * 4 ** torch.rand(items, 1, generator=draws)
    wave_BT = 0.3 * torch.sin(2 * math.pi * f0_B1 * time_T) + 0.01 * torch.randn(items, len(time_T), generator=draws)
    return (wave_BT * 32767).to(torch.int16), f0_B1.repeat(1, frames)


def begin_bench(
    settings: TrainVocoder, runtime: Runtime, folder: Path, inference: bool = False
) -> StepBench | InferenceBench:
    """Returns a training on synthetic sound, or its synthesis without a training."""
    seconds = settings.crop_seconds
    if inference:
        return InferenceBench(partial(synthesis, settings), runtime, settings.schedule.whole_batch, seconds)
    build = partial(VocoderRecipe, settings)
    return StepBench(build, synthetic_sound(settings), settings, runtime, folder, item_seconds=seconds)


def planned_model(settings: TrainVocoder, inference: bool = False) -> ModelSpec[TrainVocoder]:
    return SPEC


def synthesis(settings: TrainVocoder, runtime: Runtime) -> Compute:
    """Returns a function that synthesises crops from their mels, and makes the weights first, as `vocode` does."""
    generator = build_generator(settings, runtime).requires_grad_(False)
    samples_BT, f0_BF = (tensor.to(runtime.device) for tensor in synthetic_sound(settings))
    frames = settings.data.crop_mel_frames
    mel_BMF = log_mel(samples_BT / 32768, settings.spectrogram.mel)[..., :frames]
    draws = torch.Generator(runtime.device).manual_seed(0)
    noise = draw_noise(generator.architecture, len(mel_BMF), frames, draws)
    generate = runtime.compile(generator.forward)

    def compute() -> Tensor:
        with weights_made_once(generator):
            return generate(mel_BMF, f0_BF[:, :frames], noise)

    return compute


BENCH = BenchSpec(
    "vocoder", TrainVocoder, title, VocoderRecipe.unit, begin_bench, planned_model, options=("inference",),
    switches=(*SWITCHES, GRAPHS), inference=SOUND_SWITCHES,
)  # fmt: skip
