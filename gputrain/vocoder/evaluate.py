"""Evaluates a vocoder: held-out clips, resynthesised from their log-mels and pitches, compared with the recordings.

Shapes: T samples, F frames, M mel bands.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gputrain.audio import metrics
from gputrain.audio.config import Mel
from gputrain.audio.f0 import CEILING_HZ, FLOOR_HZ, Method, f0, interpolated, require_tracker, trackable_range, voiced
from gputrain.audio.io import Samples, from_int16
from gputrain.audio.mel import frequency_ticks, log_mel, mel_decades
from gputrain.audio.metrics import ClipMetrics, PitchMatch, pitch_match
from gputrain.audio.store import Pitch, Wave
from gputrain.audio.weight_norm import cached_weights
from gputrain.data_in.split import HELD_OUT_SHARE, GivenFolders
from gputrain.drawing import spectrogram_picture, with_axes
from gputrain.errors import UserError
from gputrain.files import Progress, no_progress, to_int16
from gputrain.hw.plan import DeviceName
from gputrain.hw.runtime import Runtime, runtime_on, synchronize
from gputrain.kinds import how_to_prepare
from gputrain.samples import Report, Sheet, SheetCell, SoundSample
from gputrain.vocoder.config import VocoderSaving
from gputrain.vocoder.generator import Generator, Noise, draw_noise
from gputrain.vocoder.load import load_vocoder
from gputrain.vocoder.store import VocoderClip, VocoderStore, open_sounds

log = logging.getLogger(__name__)

SHIFTS = (-12, 12)  # Semitones.
SECONDS = 10.0
AUDIBLE = 1e-3  # Lowest peak of an excerpt, relative to full scale; as in `audio.prepare`, less is silence.


@dataclass(frozen=True)
class Excerpts:
    """The beginnings of some clips of a store, read on demand."""

    store: VocoderStore
    clips: Sequence[VocoderClip]
    seconds: float = SECONDS

    def __len__(self) -> int:
        return len(self.clips)

    def __iter__(self) -> Iterator[tuple[Wave, Pitch]]:
        most = frames_of(self.seconds, self.store.format.sampling_rate, self.store.format.hop_size)
        for clip in self.clips:
            yield self.store.crop(clip, 0, min(most, clip.frames))

    def sample(self, generator: Generator, saving: VocoderSaving, runtime: Runtime) -> Report:
        """Returns spectrograms and sounds of the first clips, for a person to look at and to listen to."""
        with runtime.autocast():
            return sample_clips(generator, self, saving, runtime.device)

    def evaluate(self, generator: Generator, loss_mel: Mel, runtime: Runtime) -> Report:
        """Returns the figures of an evaluation during training, which measures no shifted pitches."""
        form = self.store.format
        figures = evaluate_generator(
            generator,
            self,
            runtime.device,
            f0_method=form.f0_method,
            f0_min=form.f0_min,
            f0_max=form.f0_max,
            loss_mel=loss_mel,
            quick=True,
            autocast=runtime.autocast,
        )
        return Report(figures.scalars)


Clips = Sequence[tuple[Wave, Pitch]] | Excerpts  # Recordings with their pitches.


@dataclass
class _Sums:
    weighted: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    weights: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    pitches: dict[str, PitchMatch] = field(default_factory=lambda: defaultdict(PitchMatch))
    left_out: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # Voiced frames left out.
    voiced: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # All voiced frames.

    def add(self, seconds: float, values: Mapping[str, float | None]) -> None:
        for name, value in values.items():
            if value is not None:
                self.weighted[name] += value * seconds
                self.weights[name] += seconds

    def scalars(self) -> dict[str, float]:
        found: dict[str, float | None] = {name: total / self.weights[name] for name, total in self.weighted.items()}
        for suffix, match in self.pitches.items():
            found[f"f0_rmse_cents{suffix}"] = match.rmse_cents
            found[f"vuv_f1{suffix}"] = match.voicing_f1
        found |= {
            f"f0_left_out{suffix}": self.left_out[suffix] / count for suffix, count in self.voiced.items() if count
        }
        return {name: value for name, value in found.items() if value is not None}


@torch.no_grad()
def evaluate_generator(
    generator: Generator,
    clips: Clips,
    device: torch.device,
    *,
    f0_method: Method | None = None,
    f0_min: float = FLOOR_HZ,
    f0_max: float = CEILING_HZ,
    loss_mel: Mel | None = None,
    shifts: Sequence[int] = SHIFTS,
    seconds: float = SECONDS,
    seed: int = 0,
    quick: bool = False,
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    progress: Progress = no_progress,
) -> ClipMetrics:
    """Resynthesises the first `seconds` of each clip (int16 samples T, pitch in Hz F) and compares. The metrics, which
    docs/vocoder.md lists, are means over clips weighted by their lengths, those of pitch over all frames together.
    Metrics without a value are absent. `score` is -m_stft, the only one that covers the whole band, between the
    harmonics too, and depends neither on a pitch tracker nor on the mel that training minimises.

    The pitch of the result is tracked by `f0_method` from `f0_min` to `f0_max` Hz, which should be the settings used
    for the clips. `loss_mel` is the mel of `mel_distance` (default: that of the generator). The noise of the source
    depends on `seed` and is the same on every device. `quick` omits shifted pitches and PESQ. Only the generator runs
    on `device` and within `autocast`. Sounds are compared as they would be saved, in 16 bits. Raises UserError if all
    clips are silent.
    """
    mel = generator.architecture.mel
    sums, timed = _Sums(), list[tuple[float, float]]()
    shifts = () if quick else shifts
    progress(0, len(clips))
    for done, (wave_T, pitch_F) in enumerate(clips, start=1):
        real_T, asked_F = excerpt(wave_T, pitch_F, mel, seconds)
        if np.abs(real_T).max(initial=0) >= AUDIBLE:
            length = len(real_T) / mel.sampling_rate
            synthesise = partial(_synthesise, generator, device, autocast, real_T, seed + done)
            tracker = _Tracker(mel, f0_method, f0_min, f0_max, generator.m_source.rate_hz / 2)
            made_T, computing = synthesise(asked_F)
            timed.append((computing, length))  # The first one warms up, and does not count unless it is the only one.
            sums.add(length, _compared(made_T, real_T, mel, loss_mel or mel))
            sums.pitches[""] += pitch_match(tracker.track(made_T), asked_F)
            if not quick:
                sums.add(length, {"pesq": metrics.pesq(made_T, real_T, mel.sampling_rate)})
            for number, shift in enumerate(shifts, start=1):  # Each takes about as long as everything before.
                progress(done - 1 + number / (len(shifts) + 1), len(clips))
                _compare_shifted(sums, synthesise, tracker, asked_F, shift)
        progress(done, len(clips))
    if not timed:
        raise UserError("all held-out clips begin with silence", hint="hold out more clips")
    scalars = sums.scalars()
    computing, sound = (sum(column) for column in zip(*(timed[1:] or timed), strict=True))
    return ClipMetrics({**scalars, "rtf": computing / sound, "score": -scalars["m_stft"]}, len(timed))


def excerpt(wave_T: Wave, f0_F: Pitch, mel: Mel, seconds: float) -> tuple[Samples, Pitch]:
    """Returns the first `seconds`, in whole frames: samples in [-1, 1), and a pitch for each frame."""
    frames = min(len(f0_F), frames_of(seconds, mel.sampling_rate, mel.hop_size))
    samples = frames * mel.hop_size
    return np.pad(from_int16(wave_T[:samples]), (0, samples - len(wave_T[:samples]))), f0_F[:frames]


def frames_of(seconds: float, rate_hz: int, hop_size: int) -> int:
    return max(1, int(seconds * rate_hz / hop_size))


def _synthesise(
    generator: Generator,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[object]],
    real_T: Samples,
    seed: int,
    f0_F: Pitch,
) -> tuple[Samples, float]:
    """Returns what the generator makes of the mel of a clip and a pitch, and the seconds that it took."""
    architecture = generator.architecture
    given = metrics.log_mel_of(real_T, architecture.mel), interpolated(f0_F)
    mel_1MF, f0_1F = (torch.from_numpy(values)[None].to(device) for values in given)
    drawn = draw_noise(architecture, 1, len(f0_F), torch.Generator().manual_seed(seed))
    noise = Noise(*(tensor.to(device) for tensor in drawn))
    synchronize(device)
    began = time.perf_counter()
    with cached_weights(generator), autocast():
        made_T = generator(mel_1MF, f0_1F, noise)[0, 0]
    synchronize(device)
    computing = time.perf_counter() - began
    # NaN from a diverged model counts as silence, so that the metrics are bad and finite.
    return from_int16(to_int16(np.nan_to_num(made_T.float().cpu().numpy()))), computing


@dataclass(frozen=True)
class _Tracker:
    mel: Mel
    method: Method | None
    floor_hz: float
    ceiling_hz: float
    source_hz: float  # Highest pitch of the model's source.

    def track(self, wave_T: Samples) -> Pitch:
        (floor_hz, ceiling_hz), mel = self.range_hz, self.mel
        return f0(wave_T, mel.sampling_rate, mel.hop_size, self.method, floor_hz=floor_hz, ceiling_hz=ceiling_hz)

    @property
    def range_hz(self) -> tuple[float, float]:
        floor_hz, ceiling_hz = trackable_range(self.method, self.floor_hz, self.ceiling_hz)
        return floor_hz, min(ceiling_hz, self.source_hz)


def _compared(made_T: Samples, real_T: Samples, mel: Mel, loss_mel: Mel) -> dict[str, float]:
    """Returns the metrics of one clip that do not need its pitch."""
    waves = made_T, real_T
    return {
        "m_stft": metrics.multi_resolution_stft(made_T, real_T),
        "mel_distance": metrics.mel_distance(*(metrics.log_mel_of(wave_T, loss_mel) for wave_T in waves)),
        "mcd_db": metrics.mel_cepstral_distortion(*(metrics.log_mel_of(wave_T, mel) for wave_T in waves)),
    }


def _compare_shifted(
    sums: _Sums, synthesise: Callable[[Pitch], tuple[Samples, float]], tracker: _Tracker, f0_F: Pitch, shift: int
) -> None:
    """Adds the pitch metrics of a clip synthesised `shift` semitones higher. The upper limit of the tracker is raised
    by a positive shift; the lower one stays, because its windows grow with the longest period. Frames whose shifted
    pitch is beyond the tracker or the source of the model are left out; their share of the voiced ones is counted."""
    suffix = f"_{'up' if shift > 0 else 'down'}_{abs(shift)}"
    factor = np.float32(2 ** (shift / 12))
    tracker = replace(tracker, ceiling_hz=tracker.ceiling_hz * max(1.0, float(factor)))
    floor_hz, ceiling_hz = tracker.range_hz
    asked_F = f0_F * factor
    within_F = ~voiced(f0_F) | ((asked_F >= floor_hz) & (asked_F <= ceiling_hz))
    made_F = tracker.track(synthesise(asked_F.clip(max=tracker.source_hz))[0])
    sums.pitches[suffix] += pitch_match(made_F[within_F], asked_F[within_F])
    sums.left_out[suffix] += int((~within_F).sum())
    sums.voiced[suffix] += int(voiced(f0_F).sum())


def evaluate_folder(
    model: Path,
    data_path: GivenFolders,
    *,
    device: DeviceName = "auto",
    held_out_share: float | None = None,
    max_clips: int = 1000,
    seconds: float = SECONDS,
    quick: bool = False,
    progress: Progress = no_progress,
) -> ClipMetrics:
    """Evaluates a trained model on the first `max_clips` held-out clips of prepared sound.

    Without `held_out_share`, they are those that the training held out; 1 takes all clips. Raises UserError if there is
    no such model or no such sound, or if its rate or hop size is not the model's.
    """
    runtime = runtime_on(device, precision="tf32")  # The precision of vocode.
    loaded = load_vocoder(model, runtime.device)
    trained = loaded.training
    if held_out_share is not None or trained is None:
        sounds = open_sounds(data_path, HELD_OUT_SHARE if held_out_share is None else held_out_share)
    else:
        sounds = open_sounds(data_path, trained.data.held_out_share, trained.data.val_num)
    check_fits(sounds.store, loaded.generator.architecture.mel)
    chosen = sounds.store.clips if held_out_share == 1 else sounds.evaluated
    format = sounds.store.format
    figures = evaluate_generator(
        loaded.generator,
        Excerpts(sounds.store, chosen[:max_clips], seconds),
        runtime.device,
        f0_method=format.f0_method,
        f0_min=format.f0_min,
        f0_max=format.f0_max,
        loss_mel=trained.loss_mel if trained else None,
        seconds=seconds,
        quick=quick,
        autocast=runtime.autocast,
        progress=progress,
    )
    return figures


def check_fits(store: VocoderStore, mel: Mel, *, is_new: bool = False) -> None:
    """Raises UserError if the sampling rate or hop size of a store is not the model's, which for a new one may change,
    or if its pitch tracker, with which evaluations measure other pitches, is not installed."""
    require_tracker(store.format.f0_method)
    for name, theirs, ours, unit in (
        ("audio_sample_rate", store.format.sampling_rate, mel.sampling_rate, "Hz"),
        ("hop_size", store.format.hop_size, mel.hop_size, "samples"),
    ):
        if theirs != ours:
            option = f"--{name.replace('_', '-')}"
            raise UserError(
                f"{store.folders}: prepared with {name} {theirs}, and the model has {ours} {unit}",
                hint=f"train with {option} {theirs}, or " * is_new
                + how_to_prepare("vocoder", options=(option, str(ours))),
            )


# -------------------------------------------------------------------------------------------------------------- samples

CLIPS = 4
SAMPLE_SECONDS = 4.0
DIFFERENCE_DECADES = 2.0  # Difference shown brightest: a factor of 100 in magnitude.


@torch.no_grad()
def sample_clips(
    generator: Generator, clips: Iterable[tuple[Wave, Pitch]], saving: VocoderSaving, device: torch.device
) -> Report:
    """Returns one picture of the spectrograms of the first CLIPS clips, and the synthesised audio of each."""
    mel = generator.architecture.mel
    frames = int(SAMPLE_SECONDS * mel.sampling_rate / mel.hop_size)
    recorded, made = [], []
    for wave_T, f0_F in islice(clips, CLIPS):
        real_1T = torch.from_numpy(wave_T[: frames * mel.hop_size] / 32768).float().to(device)[None]
        f0_1F = torch.from_numpy(interpolated(f0_F[:frames])).to(device)[None]
        recorded.append(real_1T[0].cpu())
        made.append(generator(log_mel(real_1T, mel), f0_1F)[0, 0].float().cpu())
    picture = sheet(recorded, made, mel, saving.mel_vmin, saving.mel_vmax)
    sounds = {
        f"clip_{number}": SoundSample(made_T, mel.sampling_rate, f"held-out clip {number}", real_T)
        for number, (made_T, real_T) in enumerate(zip(made, recorded, strict=True), start=1)
    }
    return Report(pictures={"spectrograms": picture}, sounds=sounds)


def sheet(real_waves: Sequence[Tensor], made_waves: Sequence[Tensor], mel: Mel, vmin: float, vmax: float) -> Sheet:
    """Returns spectrograms with a column for each clip (waves of T samples): from the top, the recording, the
    synthesised wave, and their difference, each with axes of frequency and time. Low frequencies are at the bottom.

    `vmin` and `vmax` are the mel magnitudes that are shown darkest and brightest, as powers of ten. The difference is
    that of these powers, from 0 to DIFFERENCE_DECADES.
    """

    def shown(values_MF: Tensor, low: float, high: float) -> Tensor:
        seconds = values_MF.shape[1] * mel.hop_size / mel.sampling_rate
        return with_axes(spectrogram_picture(values_MF, low, high), frequency_ticks(mel), seconds)

    real, made, differences = [], [], []
    for number, (real_T, made_T) in enumerate(zip(real_waves, made_waves, strict=True), start=1):
        real_MF, made_MF = (mel_decades(wave_T, mel) for wave_T in (real_T, made_T))
        difference_MF = (real_MF - made_MF).abs()
        real.append(SheetCell(shown(real_MF, vmin, vmax), f"clip {number}"))
        made.append(SheetCell(shown(made_MF, vmin, vmax)))
        words = f"{20 * float(difference_MF.mean()):.1f} dB apart"
        differences.append(SheetCell(shown(difference_MF, 0, DIFFERENCE_DECADES), words))
    return Sheet(("recording", "synthesised", "difference"), (real, made, differences), "mel spectrograms")
