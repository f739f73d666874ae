"""A learning race between openvpi/SingingVocoders' own training step and our vocoder.

usage: python benchmarks/race_vocoder.py --data PREPARED --peer CHECKOUT [--seconds 200] [--seeds 1 2 3] [--smoke]
       python benchmarks/race_vocoder.py --data PREPARED --sides ours ours+emulated=fp16 --steps 200

PREPARED is a folder that `gputrain prepare-data --kind vocoder --audio-sample-rate 16000 --hop-size 256` has filled;
CHECKOUT is one of https://github.com/openvpi/SingingVocoders. Both sides have the same small generator and
discriminators, the same crops in the same order, one thread and equal CPU seconds (race.py).

- `peer`: the task of its configs/nsf_hifigan_fast.yaml (vocoder_peer.py) with the training settings of that file: Muon
  at 2e-4, mel and STFT losses, the discriminators stepping first. Its loader's change of loudness is its own.
- `ours`: the recipe of train-vocoder with its default settings; the moving average is evaluated, which is what a user
  gets. "ours+use_stftloss=false" and other options of train-vocoder are sides too; with "+emulated=fp16" at its
  end, a side computes as a GPU without bf16 does under autocast, with loss scaling (precision.py).

Evaluated are held-out clips, resynthesised from their mels and pitches (race_sound.py): librosa's mel, wideband PESQ if
the package pesq is installed, and Praat's pitch. Writes benchmarks/results/race_vocoder_SECONDS_DEVICE.json and .png.

Shapes: B items, T samples, F frames, M mel bands; 1 channel.
"""

import argparse
import copy
import functools
import math
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import precision
import race
import race_sound
import torch
import vocoder_peer
from race import Figures, Metric, OurTraining, Race
from torch import Tensor

from gputrain.audio.f0 import interpolated
from gputrain.audio.mel import log_mel
from gputrain.bench.runner import Settings
from gputrain.config import read_file
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.generator import draw_noise
from gputrain.vocoder.recipe import VocoderRecipe
from gputrain.vocoder.store import SoundCrops, open_sounds

CONFIGURATION = "configs/nsf_hifigan_fast.yaml"
RATE_HZ, HOP = 16000, 256
LOSS_SCALE = 1024.0  # A training comes to it by leaving out its first steps, which would be a large share of a race.
MOST_SECONDS = 4.0  # Longer clips are cut before they are evaluated.
# Sizes of both sides, by the names that they share.
SPECTROGRAM: Settings = {"audio_sample_rate": RATE_HZ, "hop_size": HOP, "audio_num_mel_bins": 80, "fft_size": 1024,
                         "win_size": 1024, "fmin": 40, "fmax": 8000}  # fmt: skip
GENERATOR: Settings = {"mini_nsf": True, "noise_sigma": 0.01, "upsample_rates": [8, 8, 2, 2],
                       "upsample_kernel_sizes": [16, 16, 4, 4], "resblock_kernel_sizes": [3, 7]}  # fmt: skip
DISCRIMINATORS: Settings = {"discriminator_periods": [2, 3, 5], "fast_mpd_init_channel": 4, "fast_mrd_init_channel": 4,
                            "fast_mrd_fft_sizes": [512, 1024], "fast_mrd_hop_sizes": [128, 256],
                            "fast_mrd_win_lengths": [512, 1024]}  # fmt: skip
DILATIONS = [[1, 3, 5], [1, 3, 5]]
METRICS = (
    Metric("mel_distance", "mel distance", "lower"),
    Metric("pesq", "PESQ (wideband)", "higher"),
    Metric("f0_frame_error", "F0 frame error, %", "lower"),
    Metric("f0_rmse_cents", "F0 fine error, cents", "lower"),
    Metric("skipped", "steps left out (fp16)", "lower"),
)


class Peer:
    """openvpi's task with its own step, losses and optimizers."""

    def __init__(self, folder: Path, content: Settings, crops: SoundCrops, seed: int) -> None:
        random.seed(seed)
        torch.manual_seed(seed)
        device = torch.device("cpu")
        self.task = vocoder_peer.load(folder, content, device).train()
        self.task.begin(device, fp16=False)
        # Its loader's change of loudness is a method of its data set, and needs nothing else of it.
        self.loading: Any = copy.copy(sys.modules[type(self.task).__module__].nsf_HiFigan_dataset)
        self.content = content
        self.batches = race.batches_of(crops, content["batch_size"], seed)
        self.steps = 0

    def step(self) -> None:
        wave_BT, f0_BF = next(self.batches)
        sample = vocoder_peer.make_sample(self.task, wave_BT / 32768, f0_BF)
        records = [
            {"audio": wave_T.numpy(), "spectrogram": mel_MF.T.numpy(), "f0": f0_F.numpy()}
            for wave_T, mel_MF, f0_F in zip(sample["audio"][:, 0], sample["mel"], sample["f0"], strict=True)
        ]
        self.task.training_step(self.loading.collater(_Loading(self.content), records), 0)
        self.steps += 1

    def synthesise(self, wave_T: Tensor, f0_F: Any) -> Tensor:
        sample = vocoder_peer.make_sample(self.task, wave_T[None], torch.from_numpy(interpolated(f0_F))[None])
        with torch.random.fork_rng():
            torch.manual_seed(0)
            made_T: Tensor = self.task.generator(x=sample["mel"], f0=sample["f0"])[0, 0]
        return made_T


class _Loading:
    """What the peer's collater reads of its data set."""

    infer = False

    def __init__(self, content: Settings) -> None:
        self.config = content
        self.volume_aug, self.volume_aug_prob = content["volume_aug"], content["volume_aug_prob"]


class Ours(OurTraining):
    """Our recipe, with its default settings."""

    def __init__(self, settings: TrainVocoder, runtime: Any, crops: SoundCrops) -> None:
        self.vocoder = VocoderRecipe(settings, runtime)
        super().__init__(self.vocoder, settings, runtime, crops)
        for scale in self.state.loss_scales.values() if self.state.scales_losses else ():
            scale.scale.fill_(LOSS_SCALE)

    def synthesise(self, wave_T: Tensor, f0_F: Any) -> Tensor:
        generator = self.vocoder.best_model
        noise = draw_noise(generator.architecture, 1, len(f0_F), torch.Generator().manual_seed(0))
        pitch_1F = torch.from_numpy(interpolated(f0_F))[None]
        made_B1T: Tensor = generator(log_mel(wave_T[None], self.vocoder.mel), pitch_1F, noise)
        return made_B1T[0, 0]


def peer_content(settings: Settings) -> Settings:
    """Returns the peer's configuration file with the sizes of the race."""
    content: Settings = {}
    for name in ("configs/base.yaml", "configs/base_hifi.yaml", CONFIGURATION):
        found: Settings = read_file(Path(settings["peer"]) / name)
        content = {**content, **found, "model_args": {**content.get("model_args", {}), **found.get("model_args", {})}}
    content["model_args"] |= {
        **GENERATOR, **DISCRIMINATORS, "resblock_dilation_sizes": DILATIONS,
        "upsample_initial_channel": settings["channels"],
    }  # fmt: skip
    return {
        **content, **SPECTROGRAM, "batch_size": settings["batch_size"], "crop_mel_frames": settings["crop_frames"],
        **race.changes_of(settings["side"]),
    }  # fmt: skip


def our_settings(settings: Settings) -> tuple[TrainVocoder, Any]:
    """Returns the default settings with the sizes of the race, and the runtime."""
    side, _, emulated = settings["side"].partition("+emulated=")
    dilations = ";".join(",".join(map(str, row)) for row in DILATIONS)
    sizes = {**SPECTROGRAM, **GENERATOR, **DISCRIMINATORS, "resblock_dilation_sizes": dilations}
    found, runtime = race.assemble_for_cpu(
        TrainVocoder, side, data_path=settings["data"], seed=settings["seed"], **sizes,
        upsample_initial_channel=settings["channels"], batch_size=settings["batch_size"],
        crop_mel_frames=settings["crop_frames"], num_workers=0,
    )  # fmt: skip
    return found, precision.runtime_of(emulated) if emulated else runtime


def measure(settings: Settings) -> dict[str, Any]:
    """Runs a side with a seed."""
    race.one_thread()
    sounds = open_sounds(Path(settings["data"]))
    mine = settings["side"].startswith("ours")
    crops = SoundCrops(sounds.store, sounds.parts.train, settings["crop_frames"], settings["seed"])
    held_out = sorted(sounds.parts.held_out, key=lambda clip: clip.fingerprint)[: settings["clips"]]
    most = int(MOST_SECONDS * RATE_HZ / HOP)
    clips = [sounds.store.crop(clip, 0, min(most, clip.frames)) for clip in held_out]

    def begin() -> Any:
        if mine:
            return Ours(*our_settings(settings), crops)
        return Peer(Path(settings["peer"]), peer_content(settings), crops, settings["seed"])

    points = race.train_and_evaluate(begin, functools.partial(evaluate, clips=clips), **race.marks_of(settings))
    peer = Path(settings["peer"]) if settings["peer"] else None
    facts = {
        "peer": {"repository": "openvpi/SingingVocoders", "commit": vocoder_peer.commit(peer)} if peer else {},
        "training_clips": len(sounds.parts.train), "evaluated_clips": len(clips), "pesq": race_sound.HAS_PESQ,
    }  # fmt: skip
    return {"points": points, "facts": facts}


@torch.no_grad()
def evaluate(trainee: Any, clips: list[tuple[Any, Any]]) -> Figures:
    """Returns means over clips, and the errors of pitch over all frames."""
    distances, qualities, pitches = [], [], []
    for wave_T, f0_F in clips:
        real_T = race_sound.as_saved(wave_T / 32768)
        made_T = race_sound.as_saved(trainee.synthesise(torch.from_numpy(real_T), f0_F).numpy())
        distances.append(race_sound.mel_distance(made_T, real_T, RATE_HZ))
        qualities.append(race_sound.quality(made_T, real_T, RATE_HZ))
        found, true = (race_sound.pitch(one_T, RATE_HZ) for one_T in (made_T, real_T))
        pitches.append(race_sound.pitch_errors(found, true))
    heard = [one for one in qualities if one is not None]
    quality = {"pesq": float(np.mean(heard))} if heard else {}
    return {
        "mel_distance": float(np.mean(distances)), **quality, **race_sound.pitch_figures(pitches), **skipped(trainee),
    }  # fmt: skip


def skipped(trainee: Any) -> Figures:
    """Returns the number of steps that both networks have left out in fp16, each of which halved a loss scale. A race
    is shorter than the steps after which a scale grows again."""
    if not (isinstance(trainee, Ours) and trainee.state.scales_losses):
        return {}
    scales = trainee.state.loss_scales
    assert trainee.steps < next(iter(scales.values())).growth_interval
    return {"skipped": sum(math.log2(LOSS_SCALE / float(one.scale)) for one in scales.values())}


RACE = Race(
    "vocoder", __file__, METRICS, measure,
    "a small NSF-HiFiGAN with fast discriminators, crops of 0.5 s at 16 kHz; held-out clips are evaluated",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="prepared sound")
    parser.add_argument("--peer", type=Path, help="checkout of openvpi/SingingVocoders, for the side of that name")
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--crop-frames", type=int, default=32)
    race.main(RACE, parser, smoke={"channels": 32, "batch_size": 1})


if __name__ == "__main__":
    main()
