"""Evaluates vocoders with known faults by each metric, and a trained model in a folder."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gputrain.audio import metrics
from gputrain.audio.config import Mel
from gputrain.config import flatten
from gputrain.engine import checkpoint
from gputrain.errors import UserError
from gputrain.vocoder.config import Data, Model, NsfHifiganArchitecture, Spectrogram, TrainVocoder
from gputrain.vocoder.evaluate import Excerpts, evaluate_folder, evaluate_generator
from gputrain.vocoder.generator import Generator
from gputrain.vocoder.store import VocoderFormat, VocoderStore, VocoderStoreWriter, open_sounds
from tests.command import ProgressSeen
from tests.toy import whole_checkpoint

RATE, HOP = 16000, 160
MEL = Mel(RATE, 40, HOP, 640, 1024, 40, 8000)
SHAPE = NsfHifiganArchitecture(MEL, (10, 4, 4), (20, 8, 8), 16)
CPU = torch.device("cpu")

pytest.importorskip("parselmouth")


def pitch(frames: int, hz: float) -> np.ndarray:
    """Returns a glide of a semitone, unvoiced at both ends."""
    f0 = (hz * 2 ** (np.linspace(0, 1, frames) / 12)).astype(np.float32)
    f0[: frames // 8] = f0[-frames // 8 :] = 0
    return f0


def tone_of(f0: np.ndarray) -> np.ndarray:
    """Returns harmonics at this pitch, rounded to 16 bits in [-1, 1]; silence where unvoiced."""
    at_samples = np.repeat(f0.astype(np.float64), HOP)
    phase = 2 * np.pi * np.cumsum(at_samples) / RATE
    partials = [np.sin(k * phase) / k * (k * at_samples < RATE / 2) for k in range(1, 13)]
    return np.rint(32768 * 0.2 * sum(partials) * (at_samples > 0)) / 32768


def clip(hz: float = 220.0, frames: int = 80) -> tuple[np.ndarray, np.ndarray]:
    f0 = pitch(frames, hz)
    return (32768 * tone_of(f0)).astype(np.int16), f0


class Sines(Generator):
    """Synthesises the requested pitch, or `knows`, where the mel is not silent; `off` is a factor of the pitch,
    to which `more_hz` is added, and `noise` is added to the wave."""

    def __init__(
        self, *, knows: np.ndarray | None = None, off: float = 1.0, more_hz: float = 0.0, noise: float = 0.0
    ) -> None:
        super().__init__(SHAPE)
        self.knows, self.off, self.more_hz, self.noise = knows, off, more_hz, noise

    def forward(self, mel_BMF, f0_BF, noise=None, start_BF=None):
        # The windows of two silent frames beside a sound reach into it.
        silent_F = F.max_pool1d((mel_BMF.amax(dim=1) < math.log(2e-5)).float(), 5, stride=1, padding=2)[0] > 0
        f0 = (f0_BF[0] * ~silent_F).numpy() if self.knows is None else self.knows
        wave = tone_of(self.off * f0 + self.more_hz * (f0 > 0)) + self.noise * np.random.default_rng(0).normal(
            size=len(f0) * HOP
        )
        return torch.from_numpy(wave).float()[None, None]


def measured(generator: Generator, *clips, **settings) -> dict[str, float]:
    return evaluate_generator(generator, list(clips), CPU, f0_method="parselmouth", **settings).scalars


def test_a_perfect_vocoder():
    figures = measured(Sines(), clip())
    for name in ("m_stft", "mcd_db", "mel_distance"):
        assert figures[name] == pytest.approx(0, abs=1e-6), name
    for suffix in ("", "_down_12", "_up_12"):
        assert figures[f"f0_rmse_cents{suffix}"] < 5
        assert figures[f"vuv_f1{suffix}"] > 0.96
    assert figures["f0_left_out_up_12"] == figures["f0_left_out_down_12"] == 0
    assert figures["score"] == -figures["m_stft"]
    assert figures["rtf"] > 0
    if metrics.is_installed("pesq"):
        assert figures["pesq"] > 4.6


def test_the_source_gets_a_pitch_without_gaps():
    generator, given = Sines(), []
    generator.register_forward_pre_hook(lambda _, inputs: given.append(inputs[1][0].numpy()))
    wave, f0 = clip()
    measured(generator, (wave, f0), shifts=(12,))
    assert [len(one) for one in given] == [80, 80]
    for one, factor in zip(given, (1, 2), strict=True):
        assert (one > 0).all()
        np.testing.assert_array_equal(one[f0 > 0], factor * f0[f0 > 0])


def test_a_vocoder_that_does_not_listen_is_found_out_by_shifting():
    """It copies the recording, so that unshifted metrics are perfect, and misses every shifted pitch by an octave."""
    wave, f0 = clip()
    figures = measured(Sines(knows=f0), (wave, f0), shifts=(-12, 12, 5))
    assert figures["m_stft"] == pytest.approx(0, abs=1e-6)
    assert figures["f0_rmse_cents"] < 5
    assert figures["f0_rmse_cents_down_12"] == pytest.approx(1200, abs=10)
    assert figures["f0_rmse_cents_up_12"] == pytest.approx(1200, abs=10)
    assert figures["f0_rmse_cents_up_5"] == pytest.approx(500, abs=10)


def test_a_vocoder_out_of_tune():
    figures = measured(Sines(off=2 ** (1 / 12)), clip(), shifts=())
    assert figures["f0_rmse_cents"] == pytest.approx(100, abs=3)
    assert not any("up" in name or "down" in name for name in figures)


def test_pitches_beyond_the_tracker_are_left_out_and_counted():
    """An octave lower, half of a glide over the octave from 60 Hz lies below 40 Hz; the rest is evaluated."""
    f0 = (60 * 2.0 ** np.linspace(0, 1, 100)).astype(np.float32)
    wave = (32768 * tone_of(f0)).astype(np.int16)
    figures = measured(Sines(), (wave, f0), shifts=(-12,))
    assert figures["f0_left_out_down_12"] == np.mean(f0 / 2 < 40)
    assert figures["f0_rmse_cents_down_12"] < 20
    assert figures["vuv_f1_down_12"] > 0.9


def test_pitches_beyond_the_source_are_left_out_and_counted():
    """The sine of mini-NSF has a quarter of the rate here: nothing is above 2000 Hz."""
    generator = Sines()
    generator.m_source = Generator(NsfHifiganArchitecture(MEL, (10, 4, 4), (20, 8, 8), 16, mini_nsf=True)).m_source
    assert generator.m_source.rate_hz / 2 == 2000
    f0 = (700 * 2.0 ** np.linspace(0, 1, 100)).astype(np.float32)
    wave = (32768 * tone_of(f0)).astype(np.int16)
    figures = measured(generator, (wave, f0), f0_max=1500)
    assert figures["f0_left_out_up_12"] == np.mean(2 * f0 > 2000)
    assert figures["f0_rmse_cents_up_12"] < 20


def test_clips_count_by_their_lengths_and_frames_by_their_voices():
    clips = [clip(200, 60), clip(330, 120)]
    apart = [measured(Sines(more_hz=8.0, noise=0.01), one) for one in clips]
    both = measured(Sines(more_hz=8.0, noise=0.01), *clips)
    for name in ("m_stft", "mcd_db", "mel_distance"):
        assert both[name] == pytest.approx((apart[0][name] + 2 * apart[1][name]) / 3, rel=1e-6)
    real, made = (
        clips[1][0] / 32768,
        tone_of(clips[1][1] + 8.0 * (clips[1][1] > 0)) + 0.01 * np.random.default_rng(0).normal(size=120 * HOP),
    )
    distance = metrics.multi_resolution_stft(made.astype(np.float32), real.astype(np.float32))
    assert apart[1]["m_stft"] == pytest.approx(distance, rel=0.01)  # Up to the rounding to 16 bits.
    low, high = sorted(
        one["f0_rmse_cents"] for one in apart
    )  # The same number of Hz is fewer cents of the longer clip.
    assert both["f0_rmse_cents"] == pytest.approx(math.sqrt((2 * low**2 + high**2) / 3), rel=0.02)


def test_clips_without_a_voice_leave_pitch_to_the_others():
    rng = np.random.default_rng(1)
    noise = rng.normal(0, 2000, 60 * HOP).astype(np.int16), np.zeros(60, np.float32)
    alone = measured(Sines(), noise)
    assert "f0_rmse_cents" not in alone
    assert "f0_left_out_up_12" not in alone
    assert all(math.isfinite(value) for value in alone.values())
    assert alone["m_stft"] > 1
    together, voice = measured(Sines(), noise, clip()), measured(Sines(), clip())
    for name in ("f0_rmse_cents", "f0_rmse_cents_up_12", "vuv_f1"):
        assert together[name] == voice[name]


def test_silent_clips_are_ignored():
    silence = np.zeros(60 * HOP, np.int16), np.zeros(60, np.float32)
    seen = []
    figures = evaluate_generator(Sines(), [silence, clip()], CPU, f0_method="parselmouth", quick=True,
                      progress=lambda *at: seen.append(at))  # fmt: skip
    assert figures.clips == figures.to_json()["clips"] == 1
    assert figures.scalars["m_stft"] == pytest.approx(0, abs=1e-6)
    assert seen == [(0, 2), (1, 2), (2, 2)]
    with pytest.raises(UserError, match="all held-out clips begin with silence"):
        evaluate_generator(Sines(), [silence], CPU)


def test_a_model_that_has_diverged_has_bad_and_finite_figures():
    figures = measured(Sines(noise=math.nan), clip())
    assert all(math.isfinite(value) for value in figures.values())
    assert figures["vuv_f1"] == 0
    assert figures["score"] < -3


def test_only_the_beginning_is_measured_and_quickly_on_wish():
    wave, f0 = clip(frames=200)
    wave[150 * HOP :] = 12345  # This part is not evaluated.
    figures = measured(Sines(), (wave, f0), seconds=1.5, quick=True)
    assert figures["m_stft"] < 1e-6
    assert set(figures) == {
        "m_stft", "mel_distance", "mcd_db", "f0_rmse_cents", "vuv_f1", "rtf", "score",
    }  # fmt: skip


def test_a_real_generator_answers_the_same_by_its_seed():
    torch.manual_seed(0)
    generator = Generator(SHAPE)
    rows = [measured(generator, clip(), quick=True, seed=seed) for seed in (0, 0, 1)]
    for row in rows:
        assert row.pop("rtf") > 0
    assert rows[0] == rows[1] != rows[2]
    higher = measured(generator, clip(), quick=True, loss_mel=Mel(RATE, 80, HOP, 640, 1024, 0, 8000))
    assert higher["mel_distance"] != rows[0]["mel_distance"]
    assert higher["mcd_db"] == rows[0]["mcd_db"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    writer = VocoderStoreWriter(tmp_path_factory.mktemp("store"), VocoderFormat(RATE, HOP, "parselmouth", 60, 800))
    for number in range(8):
        writer.add(f"{number}.wav", f"{number * 2:x}" + 31 * "0", *clip(150 + 20 * number, 60 + number))
    writer.finish()
    return writer.folder


def write_model(folder, architecture: NsfHifiganArchitecture) -> Generator:

    torch.manual_seed(1)
    generator = Generator(architecture)
    torch.save({"generator": generator.state_dict()}, folder / "model.ckpt")
    mel = architecture.mel
    values = {
        "sampling_rate": mel.sampling_rate, "num_mels": mel.num_mels, "hop_size": mel.hop_size, "n_fft": mel.n_fft,
        "win_size": mel.win_size, "fmin": mel.fmin, "fmax": mel.fmax, "resblock": "1",
        "upsample_rates": architecture.upsample_rates, "upsample_kernel_sizes": architecture.upsample_kernel_sizes,
        "upsample_initial_channel": 16, "resblock_kernel_sizes": [3, 7, 11],
        "resblock_dilation_sizes": [[1, 3, 5]] * 3, "mini_nsf": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values))
    return generator


def test_a_model_in_a_folder_on_the_clips_that_are_held_out(folder, tmp_path):
    generator = write_model(tmp_path, SHAPE)
    store = VocoderStore.open(folder)
    figures = evaluate_folder(tmp_path, folder, device="cpu", held_out_share=0.3, quick=True)
    same = evaluate_generator(
        generator, Excerpts(store, store.clips[:3]), CPU, f0_method="parselmouth", f0_min=60, f0_max=800,
                   quick=True)  # fmt: skip
    assert figures.clips == 3  # The fingerprints 0, 2, 4, ... of 16.
    for name in ("m_stft", "mcd_db"):
        assert figures.scalars[name] == pytest.approx(same.scalars[name], rel=1e-6)
    for most, clips in ((100, 8), (5, 5)):
        progress = ProgressSeen()
        everything = evaluate_folder(
            tmp_path, folder, device="cpu", held_out_share=1, max_clips=most, quick=True, progress=progress
        )
        assert everything.clips == clips
        assert progress.leads_to(clips)


def test_a_run_is_measured_on_what_it_held_out_with_its_own_mel(folder, tmp_path):
    settings = TrainVocoder(
        data=Data(data_path=folder, val_num=2),
        spectrogram=Spectrogram(
            audio_sample_rate=RATE, audio_num_mel_bins=40, hop_size=HOP, fft_size=1024, win_size=640, fmax=7000
        ),
        model=Model(upsample_rates=(10, 4, 4), upsample_kernel_sizes=(20, 8, 8), upsample_initial_channel=16),
    )
    torch.manual_seed(2)
    generator = Generator(settings.architecture)
    modules = {"generator": generator.state_dict(), "discriminators": {}}
    checkpoint.save(tmp_path, whole_checkpoint(kind="vocoder", config=flatten(settings), modules=modules))
    figures = evaluate_folder(tmp_path, folder, device="cpu", quick=True)
    store = VocoderStore.open(folder)
    same = evaluate_generator(
        generator, Excerpts(store, store.clips[:2]), CPU, f0_method="parselmouth", f0_min=60, f0_max=800,
                   loss_mel=settings.loss_mel, quick=True)  # fmt: skip
    assert figures.clips == 2
    for name in ("m_stft", "mel_distance"):
        assert figures.scalars[name] == pytest.approx(same.scalars[name], rel=1e-6)


def test_the_noise_of_a_held_out_clip_is_the_same_during_training_and_afterwards(folder, tmp_path):
    given = VocoderStore.open(folder)
    writer = VocoderStoreWriter(tmp_path, given.format)
    for number in (2, 1, 0):  # Training evaluates by fingerprint, whose order is not that of the files.
        writer.add(f"{number}.wav", given.clips[number].fingerprint, *clip(150 + 20 * number, 60 + number))
    writer.finish()
    opened = open_sounds(tmp_path, held_out=2)
    assert [one.path for one in opened.parts.held_out] == ["1.wav", "0.wav"]
    assert [one.path for one in opened.evaluated] == ["0.wav", "1.wav"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (VocoderFormat(22050, HOP, "parselmouth"), "audio_sample_rate 22050, and the model has 16000 Hz"),
        (VocoderFormat(RATE, 200, "parselmouth"), "hop_size 200, and the model has 160 samples"),
    ],
)
def test_sound_that_is_not_the_models(tmp_path, changed, message):
    write_model(tmp_path, SHAPE)
    folders = [tmp_path / "store", tmp_path / "more"]
    for folder in folders:
        writer = VocoderStoreWriter(folder, changed)
        for number in range(2):
            writer.add(f"{number}.wav", f"{number}" * 32, np.ones(changed.hop_size, np.int16), np.zeros(1, np.float32))
        writer.finish()
    with pytest.raises(UserError, match=message) as error:
        evaluate_folder(tmp_path, folders, device="cpu")
    assert error.value.message.startswith(f"{folders[0]}, {folders[1]}: prepared with ")
    assert "prepare-data" in error.value.hint
