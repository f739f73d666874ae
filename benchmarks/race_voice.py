"""A learning race between Piper's own training step (VITS) and our voice.

usage: python benchmarks/race_voice.py --data PREPARED [--peer CHECKOUT] [--seconds 200] [--seeds 1 2 3] [--smoke]

PREPARED is a folder that `gputrain prepare-data --kind tts --audio-sample-rate 16000` has filled; CHECKOUT is one of
https://github.com/OHF-Voice/piper1-gpl (default: the installed piper-tts). Both sides have the same small voice with
Piper's discriminators, the same buckets of clips in the same order, one thread and equal CPU seconds (race.py).

- `peer`: Piper's task with its default settings (vits_peer.py). Buckets of equal length spare it the padding of its own
  loader; it computes spectrograms that its loader has on disk, which is 1 % of a step.
- `ours`: the recipe of train-tts with its default settings; the moving average is evaluated, which is what a user gets.
  "ours+learning_rate=4e-4" and other options of train-tts are sides too.

Evaluated are held-out clips (race_sound.py): spoken from their texts and compared along the path of dynamic time
warping (mel-cepstral distortion, Praat's pitch, duration), encoded and decoded (librosa's mel), and heard by
pocketsphinx, which is of neither side (character error rate; `facts` has that of the recordings). `--no-cer` does
without it, as is necessary for other languages than English. Writes race_voice_SECONDS_DEVICE.json and .png in
benchmarks/results.

Shapes: S symbols, L samples, N frequencies, T frames.
"""

import argparse
import functools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import race
import race_sound
import torch
import vits_peer
from race import Figures, Metric, OurTraining, Race
from torch import Tensor
from vits_vs_piper import TINY, peer_facts

from gputrain.audio.discriminators import vits_discriminators
from gputrain.audio.mel import magnitudes
from gputrain.bench.runner import Settings
from gputrain.engine.data import Sample
from gputrain.speech.buckets import Buckets, ClipBatch, Speech, open_speech
from gputrain.speech.config import HOP_SIZE
from gputrain.tts.architecture import VoiceArchitecture
from gputrain.tts.config import TrainTts
from gputrain.tts.data import SpeechSize, architecture_for, fill_buckets
from gputrain.tts.reading import Text, eval_mode, synthesise
from gputrain.tts.recipe import VoiceRecipe

SMALL: Settings = {"hidden_channels": 96, "latent_channels": 96, "encoder_filter_channels": 384, "encoder_layers": 4,
                   "upsample_initial_channel": 128}  # fmt: skip
RATE_HZ = 16000
LONGEST = 2  # Speech is cut at so many times the frames of its recording.
METRICS = (
    Metric("mcd_db", "mel-cepstral distortion, dB", "lower"),
    Metric("mel_distance", "mel distance of decoded recordings", "lower"),
    Metric("f0_frame_error", "F0 frame error, %", "lower"),
    Metric("duration_ratio", "duration / recording's", "close to 1"),
    Metric("cer", "character error rate, %", "lower"),
)


class Peer:
    """Piper's task with its own step, losses and optimizers."""

    def __init__(self, root: Path, sizes: VoiceArchitecture, clips: Buckets, settings: Settings) -> None:
        seed = settings["seed"]
        torch.manual_seed(seed)
        self.task = vits_peer.load(root, sizes, settings["batch_size"], torch.device("cpu")).train()
        narrow_discriminators(self.task.model_d, settings["discriminator_channels"])
        self.task.begin()
        self.batches = race.batches_of(clips, 1, seed)
        self.steps = 0

    def step(self) -> None:
        (clips,) = next(self.batches)
        self.task.training_step(self._batch(clips), 0)
        self.steps += 1

    def _batch(self, clips: ClipBatch) -> Any:
        wave_B1L = clips.wave_BT[:, None] / 32768
        return vits_peer.batch_for(self.task, SimpleNamespace(**{**clips._asdict(), "wave_B1L": wave_B1L}))  # type: ignore[arg-type]

    def speak(self, clip: ClipBatch) -> Tensor:
        longest = LONGEST * int(clip.frames_B)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            made_L: Tensor = self._at_rest().infer(clip.ids_BS, clip.symbols_B, max_len=longest)[0][0, 0]
        self.task.train()
        return made_L

    def decode(self, clip: ClipBatch) -> Tensor:
        batch, model = self._batch(clip), self._at_rest()
        _, mean_BCT, _, mask_B1T = model.enc_q(batch.spectrograms, batch.spectrogram_lengths)
        made_L: Tensor = model.dec(mean_BCT * mask_B1T)[0, 0]
        self.task.train()
        return made_L

    def _at_rest(self) -> Any:
        return self.task.model_g.eval()


class Ours(OurTraining):
    """Our recipe, with its default settings."""

    def __init__(self, settings: TrainTts, runtime: Any, sizes: VoiceArchitecture, clips: Buckets) -> None:
        self.recipe_of_voice = VoiceRecipe(settings, sizes, clips.largest_average, runtime)
        super().__init__(self.recipe_of_voice, settings, runtime, clips, step_items=1)

    def speak(self, clip: ClipBatch) -> Tensor:
        voice = self.recipe_of_voice.best_model
        text = Text(clip.ids_BS[0].tolist(), 0, 0, LONGEST * int(clip.frames_B))
        with eval_mode(voice):
            return torch.from_numpy(synthesise(voice, [text], torch.device("cpu"))[0].wave_L)

    def decode(self, clip: ClipBatch) -> Tensor:
        voice = self.recipe_of_voice.best_model
        spectrogram_BNT = magnitudes(clip.wave_BT / 32768, voice.architecture.mel)
        none_BCT = torch.zeros(1, voice.architecture.latent_channels, spectrogram_BNT.shape[2])
        with eval_mode(voice):
            posterior, _ = voice.encode_sound(spectrogram_BNT, clip.frames_B, none_BCT, None)
            return voice.decoder(posterior.latent_BCT, None)[0, 0]  # type: ignore[no-any-return]


def measure(settings: Settings) -> dict[str, Any]:
    """Runs a side with a seed."""
    if not settings["no_cer"]:
        race_sound.check_recogniser()
    race.one_thread()
    side, seed = settings["side"], settings["seed"]
    mine = side if side.startswith("ours") else ""
    speech = open_speech(Path(settings["data"]))
    given, runtime = race.assemble_for_cpu(
        TrainTts, mine, data_path=settings["data"], seed=seed, preset="medium", batch_size=settings["batch_size"],
        discriminator_channels=settings["discriminator_channels"],
    )  # fmt: skip
    clips = fill_buckets(given, speech)
    sizes = small_voice(given, speech, clips, settings["sizes"])
    held_out = sorted(speech.parts.held_out, key=lambda clip: clip.fingerprint)[: settings["clips"]]
    one_by_one = Buckets(speech.store, held_out, HOP_SIZE, 1, 0)
    evaluated = [one_by_one[Sample(0, number)] for number in range(len(one_by_one))]
    texts = [] if settings["no_cer"] else [held_out[int(clip.clips_B)].normalized for clip in evaluated]
    root = vits_peer.root_of(Path(settings["peer"]) if settings["peer"] else None)
    if root is None:
        raise SystemExit("no training code of Piper: --peer CHECKOUT, or install piper-tts")

    def begin() -> Any:
        if mine:
            return Ours(given, runtime, sizes, clips)
        return Peer(root, sizes, clips, settings)

    evaluation = functools.partial(evaluate, clips=evaluated, texts=texts)
    points = race.train_and_evaluate(begin, evaluation, **race.marks_of(settings))
    peer = peer_facts(argparse.Namespace(peer=Path(settings["peer"]) if settings["peer"] else None))
    facts = {"peer": peer, "training_clips": len(clips.clips), "evaluated_clips": len(evaluated)}
    if texts:
        recordings = race_sound.recognised((recording_of(clip) for clip in evaluated), RATE_HZ)
        facts |= {"cer_of_recordings": race_sound.character_error_rate(texts, recordings)}
    return {"points": points, "facts": facts}


def recording_of(clip: ClipBatch) -> race_sound.Samples:
    return race_sound.as_saved(clip.wave_BT[0, : int(clip.samples_B)].numpy() / 32768)


def narrow_discriminators(discriminators: Any, channels: int) -> None:
    """Replaces the convolutions of Piper's discriminators by those with `channels` instead of 32 in the first layer of
    the period discriminators, and all others in proportion. Raises ValueError if they differ from ours."""
    share = 32 // channels

    def narrowed(conv: Any) -> Any:
        sizes = (max(1, size // share) for size in (conv.in_channels, conv.out_channels))
        how = {name: getattr(conv, name) for name in ("kernel_size", "stride", "padding")}
        return torch.nn.utils.weight_norm(type(conv)(*sizes, groups=max(1, conv.groups // share), **how))

    for one in discriminators.discriminators:
        one.convs = torch.nn.ModuleList(narrowed(conv) for conv in one.convs)
        one.conv_post = narrowed(one.conv_post)
    both = (discriminators, vits_discriminators(channels))
    theirs, ours = ({name: value.shape for name, value in one.state_dict().items()} for one in both)
    if theirs != ours:
        raise ValueError("the peer's discriminators differ from ours")


def small_voice(given: TrainTts, speech: Speech, clips: Buckets, sizes: Settings) -> VoiceArchitecture:
    format = speech.store.format
    size = SpeechSize(format.sampling_rate, len(format.frontend.symbols), 1, clips.largest_average)
    return replace(architecture_for(given, size), **sizes)


@torch.no_grad()
def evaluate(trainee: Any, clips: list[ClipBatch], texts: list[str]) -> Figures:
    """Returns means over clips, the errors of pitch over all aligned frames, and those of the characters of all texts,
    if there are any."""
    distortions, distances, ratios, pitches, spoken = [], [], [], [], []
    for clip in clips:
        real_L = race_sound.as_saved(clip.wave_BT[0].numpy() / 32768)
        decoded_L = race_sound.as_saved(trainee.decode(clip).numpy())[: len(real_L)]
        distances.append(race_sound.mel_distance(decoded_L, real_L[: len(decoded_L)], RATE_HZ))
        spoken_L = race_sound.as_saved(trainee.speak(clip).numpy())
        spoken_L = np.pad(spoken_L, (0, max(0, race_sound.FFT - len(spoken_L))))
        spoken.append(spoken_L)
        distortion, path_P2 = race_sound.aligned(spoken_L, real_L, RATE_HZ)
        distortions.append(distortion)
        ratios.append(len(spoken_L) / len(real_L))
        found_F, true_F = (race_sound.pitch(one_L, RATE_HZ) for one_L in (spoken_L, real_L))
        pitches.append(race_sound.pitch_errors(found_F[path_P2[:, 0]], true_F[path_P2[:, 1]]))
    figures = {
        "mcd_db": float(np.mean(distortions)), "mel_distance": float(np.mean(distances)),
        "duration_ratio": float(np.mean(ratios)), **race_sound.pitch_figures(pitches),
    }  # fmt: skip
    if texts:
        figures["cer"] = race_sound.character_error_rate(texts, race_sound.recognised(spoken, RATE_HZ))
    return figures


RACE = Race(
    "voice", __file__, METRICS, measure,
    "a small VITS with narrow discriminators, 2 clips a step at 16 kHz; held-out clips are evaluated",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="prepared speech")
    parser.add_argument("--peer", type=Path, help="checkout of OHF-Voice/piper1-gpl")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--discriminator-channels", type=int, default=8, help="of both sides; 32 as published")
    parser.add_argument("--no-cer", action="store_true", help="compute no character error rate")
    parser.set_defaults(sizes=SMALL)
    race.main(RACE, parser, smoke={"batch_size": 1, "sizes": TINY, "no_cer": True})


if __name__ == "__main__":
    main()
