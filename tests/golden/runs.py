"""Short trainings of tiny models in float64, and the record of what they computed.

Everything that enters a step is made by arithmetic (numbers.py), so that the record holds on every machine. What the
recipes draw themselves, such as noise, is replaced by such numbers, and enters the record as mean squares.
"""

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gputrain.asr.recipe import RecogniserRecipe
from gputrain.config import assemble
from gputrain.engine.recipe import Recipe, phases_of
from gputrain.engine.run_folder import Run
from gputrain.engine.schedule import Schedule, StepSchedule, begin
from gputrain.engine.state import TrainState
from gputrain.engine.step import update
from gputrain.speech.buckets import ClipBatch, ClipSize
from gputrain.tts.recipe import VoiceRecipe
from gputrain.vae.config import TrainVae
from gputrain.vae.recipe import VaeRecipe
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.generator import Noise
from gputrain.vocoder.recipe import VocoderRecipe
from tests.asr import test_recipe as recognisers
from tests.asr.models import tiny_architecture
from tests.golden.numbers import normal_like, set_weights, uniform
from tests.toy import cpu_runtime, quiet
from tests.tts import test_recipe as voices
from tests.vae import test_recipe as pictures
from tests.vocoder import test_recipe as vocoders

STEPS = 20
Record = dict[str, list[float]]
TRAINING = {"warmup_steps": 4, "num_epochs": 0, "num_steps": STEPS, "ema_decay": 0.9, "gradient_clip": 1.0}
SOUND = {
    **vocoders.SMALL,
    **TRAINING,
    "batch_size": 3,
    "learning_rate": 2e-4,
    "discriminators": "msd,mpd,mrd,fast_mrd,fast_mpd",
}


@dataclasses.dataclass(frozen=True)
class GoldenRun:
    """A recipe, and what to train it on."""

    recipe: Recipe
    schedule: Schedule
    load: Callable[[int], Any]
    with_exact_noise: Callable[[Any, int], Any]  # Replaces what `prepare` has drawn.


def vae() -> GoldenRun:
    """An autoencoder with the structural loss, and its discriminator, which starts at step 4 and counts from step 8."""
    settings = assemble(
        TrainVae,
        {**pictures.SMALL, **TRAINING, "batch_size": 4, "discriminator_start": 4, "discriminator_warmup_steps": 4,
         "lecam_weight": 0.1, "learning_rate": 2e-4, "reconstruction_loss": "l2"},
    )  # fmt: skip

    def load(step: int) -> Tensor:
        coarse = uniform(f"pictures {step}", 4, 3, 4, 4)
        return (127.5 * coarse.repeat_interleave(6, 2).repeat_interleave(6, 3) + 127.5).round().byte()

    def with_exact_noise(batch: Any, step: int) -> Any:
        return dataclasses.replace(batch, noise_BLhw=normal_like(f"latents {step}", batch.noise_BLhw))

    return GoldenRun(VaeRecipe(settings, cpu_runtime()), settings.schedule, load, with_exact_noise)


def vocoder(**changes: Any) -> GoldenRun:
    settings = assemble(TrainVocoder, {**SOUND, **changes})
    frames, hop_size = settings.data.frames_to_read, settings.spectrogram.hop_size

    def load(step: int) -> tuple[Tensor, Tensor]:
        """Returns triangle waves of three pitches with noise, the last two frames unvoiced."""
        time = torch.arange(frames * hop_size)
        periods = torch.tensor([[64], [100], [144]]) - step
        triangle = (time % periods - periods // 2).abs() * 40000 // periods - 10000
        noise = (2000 * uniform(f"sound {step}", *triangle.shape)).round().long()
        f0 = (16000 / periods.double()).float().repeat(1, frames)
        f0[:, -2:] = 0
        return (triangle + noise).to(torch.int16), f0

    def exact(name: str, noise: Noise) -> Noise:
        phase = 0.5 + 0.5 * uniform(f"{name} phase", *noise.phase_BH.shape)
        phase[:, :1] = 0
        return Noise(phase, *(normal_like(f"{name} {number}", one) for number, one in enumerate(noise[1:])))

    def with_exact_noise(batch: Any, step: int) -> Any:
        shifts = dataclasses.replace(
            batch.shifts,
            once_S1=3 * uniform(f"once {step}", *batch.shifts.once_S1.shape),
            half_S1=2 * uniform(f"half {step}", *batch.shifts.half_S1.shape),
            noise=exact(f"shifted {step}", batch.shifts.noise),
        )
        return dataclasses.replace(batch, noise=exact(f"source {step}", batch.noise), shifts=shifts)

    return GoldenRun(VocoderRecipe(settings, cpu_runtime()), settings.schedule, load, with_exact_noise)


def vocoder_adamw() -> GoldenRun:
    """Mini-NSF with pitch-controllable training, the STFT loss and every kind of discriminator."""
    return vocoder(mini_nsf=True, noise_sigma=0.1, pc_aug=True, pc_aug_rate=0.4, use_stftloss=True, volume_aug=False)


def vocoder_muon() -> GoldenRun:
    """Nine harmonics, every kind of discriminator, and Muon for both phases."""
    return vocoder(generator_optimizer="muon", discriminator_optimizer="muon", volume_aug=False)


def tts(preset: str = "medium") -> GoldenRun:
    """A voice of two speakers with its six discriminators. Dropout is off, whose random numbers torch draws."""
    settings = voices.settings_of(**{**TRAINING, "batch_size": 3, "learning_rate": 2e-4})
    frames_B, symbols_B = torch.tensor([36, 44, 52]), torch.tensor([5, 8, 11])

    def load(step: int) -> list[ClipBatch]:
        ids = (4 + 4 * uniform(f"text {step}", 3, 11)).long() + 1
        time = torch.arange(52 * voices.HOP)
        periods = torch.tensor([[25], [33], [47]]) - step
        triangle = (time % periods - periods // 2).abs() * 40000 // periods - 10000
        noise = (1500 * uniform(f"speech {step}", *triangle.shape)).round().long()
        wave = (triangle + noise) * (time < frames_B[:, None] * voices.HOP)
        return [
            ClipBatch(
                ids * (torch.arange(11) < symbols_B[:, None]), symbols_B, wave.to(torch.int16),
                frames_B * voices.HOP, frames_B, torch.tensor([0, 1, 0]), torch.arange(3),
            )
        ]  # fmt: skip

    def with_exact_noise(batch: Any, step: int) -> Any:
        return dataclasses.replace(
            batch,
            noise_BCT=normal_like(f"latents {step}", batch.noise_BCT),
            duration_noise_B2S=normal_like(f"durations {step}", batch.duration_noise_B2S),
            places_B=0.5 + 0.5 * uniform(f"places {step}", *batch.places_B.shape),
        )

    recipe = VoiceRecipe(settings, voices.shape(preset, 2), voices.CLIP, cpu_runtime())
    return GoldenRun(recipe, settings.schedule, load, with_exact_noise)


def asr() -> GoldenRun:
    """A recogniser whose convolutions train, with SpecAugment, layer drop, and a clip too short for its text."""
    changes = {"freeze_feature_encoder": False, "layer_drop": 0.3, "mask_time_prob": 0.3, "mask_time_length": 3}
    settings = recognisers.settings_of(**{**TRAINING, **changes, "batch_size": 4, "learning_rate": 1e-3})
    samples_B, labels_B = torch.tensor([4000, 5200, 6400, 8000]), torch.tensor([3, 6, 5, 26])

    def load(step: int) -> list[ClipBatch]:
        ids = (13 + 13 * uniform(f"labels {step}", 4, 26)).long() + 3
        time = torch.arange(8000)
        periods = torch.tensor([[50], [66], [94], [30]]) - step
        triangle = (time % periods - periods // 2).abs() * 40000 // periods - 10000
        noise = (1500 * uniform(f"utterance {step}", *triangle.shape)).round().long()
        wave = (triangle + noise) * (time < samples_B[:, None])
        return [
            ClipBatch(
                ids * (torch.arange(26) < labels_B[:, None]), labels_B, wave.to(torch.int16), samples_B,
                -(-samples_B // 320), torch.zeros(4).long(), torch.arange(4),
            )
        ]  # fmt: skip

    def with_exact_noise(batch: Any, step: int) -> Any:
        inside_BT = torch.arange(batch.mask_BT.shape[1]) < batch.frames_B[:, None]
        masked_BT = uniform(f"masks {step}", *batch.mask_BT.shape) > 0.5
        return dataclasses.replace(batch, mask_BT=masked_BT & inside_BT)

    clip = ClipSize(frames=25, symbols=8)
    recipe = RecogniserRecipe(settings, tiny_architecture(), clip, cpu_runtime())
    return GoldenRun(recipe, settings.schedule, load, with_exact_noise)


RUNS: dict[str, Callable[[], GoldenRun]] = {
    "vae": vae,
    "vocoder_adamw": vocoder_adamw,
    "vocoder_muon": vocoder_muon,
    "tts": tts,
    "asr": asr,
}


def record(name: str, steps: int = STEPS) -> dict[str, Record]:
    """Trains, and returns a number of every step by what it is: `scalars`, which are losses, statistics and norms of
    gradients, how far the `weights` have moved after it, and `drawn`, the mean squares of what the
    recipe has drawn for it."""
    run = RUNS[name]()
    recipe = run.recipe
    for module in recipe.modules.values():
        module.to(torch.float64)
    set_weights(recipe.modules)
    # The recogniser's phase holds the parameters that train, and not the model.
    trained = recipe.model if name == "asr" else phases_of(recipe)[0].modules[0]
    recipe.ema.average.load_state_dict(trained.state_dict())
    with tempfile.TemporaryDirectory() as folder:
        state = TrainState.begin(recipe, run.schedule, cpu_runtime(), Run(Path(folder), quiet(Path(folder)), {}, ""))
    start = flat_weights(recipe)
    schedule = StepSchedule(run.schedule, begin(None, 100, new_stage=False))
    found: dict[str, Record] = {"scalars": {}, "weights": {}, "drawn": {}}
    for step in range(steps):
        batch = recipe.prepare(run.load(step), step)
        exact = run.with_exact_noise(batch, step)
        scalars = update(state, exact, step, schedule.learning_rate(step))
        recipe.average(step)
        for place, values in (
            ("scalars", {key: float(value) for key, value in scalars.items()}),
            ("weights", moved(start, recipe)),
            ("drawn", drawn(batch, exact)),
        ):
            for key, value in values.items():
                found[place].setdefault(key, [0.0] * step).append(value)
    return found


def flat_weights(recipe: Recipe) -> dict[str, Tensor]:
    """Returns all weights of each module in one vector."""
    return {
        name: torch.cat([value.double().flatten() for value in module.state_dict().values()])
        for name, module in recipe.modules.items()
    }


def moved(start: dict[str, Tensor], recipe: Recipe) -> dict[str, float]:
    """Returns how far each module's weights have moved: the sum of squares, and one with weights between 1 and 2."""
    sums = {}
    for name, weights in flat_weights(recipe).items():
        change = weights - start[name]
        slope = 1 + torch.arange(len(change), dtype=torch.float64) / len(change)
        sums |= {
            f"{name} squares": float(change.square().sum()),
            f"{name} absolute": float((slope * change).abs().sum()),
        }
    return sums


def drawn(batch: Any, exact: Any, prefix: str = "") -> dict[str, float]:
    """Returns the mean squares of the tensors that `with_exact_noise` has replaced, as they were before."""
    found: dict[str, float] = {}
    names = batch._fields if isinstance(batch, tuple) else [field.name for field in dataclasses.fields(batch)]
    for name in names:
        before, after = getattr(batch, name), getattr(exact, name)
        if isinstance(before, Tensor) and before is not after and before.numel():
            found[prefix + name] = float(before.double().square().mean())
        elif dataclasses.is_dataclass(before) or hasattr(before, "_fields"):
            found |= drawn(before, after, f"{prefix}{name}.")
    return found
