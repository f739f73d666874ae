"""The data of a vocoder's training: prepared recordings, and the weights that it begins with."""

import logging
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gputrain.data_in.split import Mixture, digests, format_folders, warn_of_few_held_out
from gputrain.engine.checkpoint import format_list
from gputrain.engine.data import SampleSource
from gputrain.engine.run_folder import Run
from gputrain.engine.schedule import RunProgress, StepSchedule
from gputrain.engine.stop import format_duration
from gputrain.errors import UserError
from gputrain.hw.runtime import Runtime
from gputrain.planner.kind_work import StageData, StageTraining, TrainingData, TrainingStart
from gputrain.session import log_start
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.discriminators import KINDS
from gputrain.vocoder.evaluate import Excerpts, check_fits
from gputrain.vocoder.generator import Generator
from gputrain.vocoder.load import Weights, read_weights
from gputrain.vocoder.recipe import VocoderRecipe
from gputrain.vocoder.store import SoundCrops, VocoderData, open_sounds
from gputrain.weights import log_unused

log = logging.getLogger(__name__)

CROP_SECONDS = 0.0003  # CPU seconds to read a crop from the store and to collate it.
WARMUP_STEPS = 1000  # Warm-up of new discriminators next to a pretrained generator.
LEAST_VOICED = 0.05  # Share of voiced frames below which the pitch is probably wrong.


@dataclass
class VocoderTraining(TrainingData[TrainVocoder]):
    """The recordings of a training, and the pretrained weights that it begins with."""

    sounds: VocoderData
    all_crops: SoundCrops
    mixture: Mixture
    weights: Weights | None = None

    sizes = None

    @classmethod
    def of(cls, settings: TrainVocoder, sounds: VocoderData) -> "VocoderTraining":
        frames, seed = settings.data.frames_to_read, settings.schedule.seed
        crops = SoundCrops(sounds.store, sounds.parts.train, frames, seed)
        return cls(sounds, crops, sounds.split.mixture(crops.counts_of(sounds.split.counts)))

    def __len__(self) -> int:
        return len(self.mixture)

    def begin(self, settings: TrainVocoder, run: Run, runtime: Runtime) -> TrainingStart[TrainVocoder]:
        log_training(settings, runtime, self.sounds)
        if (silent := self.all_crops.silent_share) > 0.01:
            log.info("%.0f %% of the clips is digital silence, from which no crops are drawn", 100 * silent)
        if settings.model.init_from and run.resumed is None:
            self.weights = read_weights(settings.model.init_from, settings.model.finetune_ignored_params)
            check_weights(settings, self.weights)
            log_start(self.weights.source, ", ".join(["generator", *self.weights.discriminators]))
        settings = with_warmup(settings, run, self.weights, len(self))
        self.sounds.split.log_shares(self.mixture, "crops")
        return TrainingStart(settings, digests(training=self.sounds.parts.train, held_out=self.sounds.parts.held_out))

    def stage(self, settings: TrainVocoder) -> StageData:
        return StageData(lambda: CROP_SECONDS)

    def training(self, settings: TrainVocoder, run: Run, runtime: Runtime) -> StageTraining:
        held_out = self.sounds.evaluated[: settings.saving.num_valid_plots]
        recipe = VocoderRecipe(settings, runtime, Excerpts(self.sounds.store, held_out))
        if self.weights:
            start_from(recipe, self.weights)
        source: SampleSource = self.mixture.of(self.all_crops)
        return StageTraining(recipe, source, starts_pretrained=self.weights is not None)


def start_from(recipe: VocoderRecipe, weights: Weights) -> None:
    """Loads pretrained weights. Raises UserError if they belong to another architecture."""
    strict = recipe.settings.model.finetune_strict_shapes
    reinitialised = weights.fit("generator", recipe.generator, strict_shapes=strict)
    for kind in weights.discriminators.keys() & recipe.by_kind.keys():
        reinitialised += weights.fit(kind, recipe.by_kind[kind], strict_shapes=strict)
    reinitialised += [f"all of {kind}" for kind in recipe.by_kind if kind not in weights.discriminators]
    log_unused(weights.source, sorted(weights.discriminators.keys() - recipe.by_kind.keys()))
    if reinitialised:
        log.warning("%s: reinitialised: %s", weights.source, format_list(reinitialised))
    if recipe.settings.schedule.ema_decay:
        recipe.ema.restart(recipe.generator)


def check_weights(settings: TrainVocoder, weights: Weights) -> None:
    """Raises UserError, before anything is planned, if weights belong to another architecture."""
    with torch.device("meta"):
        generator = Generator(settings.architecture)
        groups = {kind: KINDS[kind](settings.discriminators) for kind in settings.discriminators.discriminators}
    parts: dict[str, nn.Module] = {"generator": generator}
    parts |= {kind: module for kind, module in groups.items() if kind in weights.discriminators}
    for name, module in parts.items():
        weights.fit(name, module.to_empty(device="cpu"), strict_shapes=settings.model.finetune_strict_shapes)


def with_warmup(settings: TrainVocoder, run: Run, weights: Weights | None, items: int) -> TrainVocoder:
    """Returns the settings with the number of warm-up steps of the discriminators, if the user left it open: new
    discriminators would harm a pretrained generator. It is at most a tenth of the training on `items` crops. A resumed
    run keeps its number."""
    if settings.losses.discriminator_only_steps >= 0:
        return settings
    if run.resumed:
        steps = run.resumed["config"]["discriminator_only_steps"]
    else:
        needs_some = weights and not weights.discriminators and not settings.losses.discriminator_start
        length = StepSchedule(settings.schedule, RunProgress(items=items)).last_step
        steps = min(WARMUP_STEPS, length // 10) if needs_some else 0
    if steps:
        log.info("only the discriminators are trained in the first %d steps (discriminator_only_steps)", steps)
    return replace(settings, losses=replace(settings.losses, discriminator_only_steps=steps))


def open_training_data(settings: TrainVocoder) -> VocoderData:
    """Returns the prepared sound. Raises UserError if it does not suit the settings."""
    data = settings.data
    sounds = open_sounds(data.data_path, data.held_out_share, data.val_num)
    check_fits(sounds.store, settings.spectrogram.mel, is_new=True)
    longest = max(clip.frames for clip in sounds.parts.train)
    if longest < data.crop_mel_frames:
        raise UserError(
            f"a crop of {data.crop_mel_frames} frames is longer than every clip in {format_folders(data.data_path)}",
            hint=f"--crop-mel-frames {longest // 8 * 8 or 8}, or longer recordings",
        )
    return sounds


def log_training(settings: TrainVocoder, runtime: Runtime, sounds: VocoderData) -> None:
    train, held_out, mel = sounds.parts.train, len(sounds.parts.held_out), settings.spectrogram.mel
    warn_of_few_held_out(sounds.parts, "clip", "--val-num 8 holds out eight")
    duration = format_duration(sum(clip.samples for clip in train) / mel.sampling_rate)
    log.info("clips for training: %d (%s), held out: %d", len(train), duration, held_out)
    if (voiced := sounds.voiced_share) < LEAST_VOICED:
        log.warning(
            "%.1f %% of the frames have a pitch: the vocoder cannot learn it; gputrain validate names the recordings",
            100 * voiced,
        )
    log.info(
        "model: %s source, %d channels, %g Hz; %s; crops of %.2f s",
        "mini" if settings.model.mini_nsf else "full",
        settings.model.upsample_initial_channel,
        mel.sampling_rate,
        ", ".join(settings.discriminators.discriminators),
        settings.crop_seconds,
    )
    if faults := settings.architecture.stock_faults:
        log.warning(
            "openvpi's generator cannot load this model; it can only be exported as ONNX: %s", "; ".join(faults)
        )


def synthetic_crops(settings: TrainVocoder) -> tuple[Tensor, Tensor]:
    """Returns a batch as the data loader does: notes of two octaves with a little noise."""
    draws = torch.Generator().manual_seed(0)
    items, frames, mel = settings.schedule.global_batch_size, settings.data.frames_to_read, settings.spectrogram.mel
    time_T = torch.arange(frames * mel.hop_size) / mel.sampling_rate
    f0_B1 = 110 * 4 ** torch.rand(items, 1, generator=draws)
    noise_BT = torch.randn(items, len(time_T), generator=draws)
    wave_BT = 0.3 * torch.sin(2 * math.pi * f0_B1 * time_T) + 0.01 * noise_BT
    return (wave_BT * 32767).to(torch.int16), f0_B1.repeat(1, frames)
