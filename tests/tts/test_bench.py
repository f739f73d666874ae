"""`gputrain bench train-tts`: rows that add one switch each, measured in real training steps on synthetic speech."""

import json
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gputrain.bench import step_bench
from gputrain.config import assemble
from gputrain.errors import UserError
from gputrain.hw.plan import decide
from gputrain.speech.config import HOP_SIZE
from gputrain.tts.config import BenchTts, PlannedSpeech, TrainTts
from gputrain.tts.work import TtsWork, size_of
from tests.command import gputrain_here
from tests.tables import each_row
from tests.toy import cpu_runtime
from tests.tts.test_train import TINY, small_presets
from tests.vae.test_bench import H100, T4
from tests.vocoder.conftest import flags

SMALL = {"preset": "fast", "discriminator_channels": 8, "batch_size": 2, "clip_seconds": 0.5}


def trains(**changes: object) -> list[TrainTts]:
    """Returns the settings that each row trains, as its child reads them."""
    settings = [
        json.dumps(row.settings) for row in step_bench.bench_rows(TtsWork(), assemble(BenchTts, {**SMALL, **changes}))
    ]
    return [assemble(TrainTts, json.loads(text)["train"]) for text in settings]


@each_row((H100, "bf16"), (T4, "fp16"))
def test_each_row_turns_one_switch_on(machine, precision):
    plans = [decide(machine, train.hardware) for train in trains()]
    switches = ("tf32", "precision", "channels_last", "compile", "cuda_graphs")
    states = [tuple(plan.settings[name].value for name in switches) for plan in plans]
    tf32 = machine is H100
    assert states == [
        (False, "fp32", False, False, False), (tf32, "fp32", False, False, False),
        (tf32, precision, False, False, False), (tf32, precision, True, False, False),
        (tf32, precision, True, True, False),
    ]  # fmt: skip


def test_rows_train_what_was_asked_for():
    for train in trains(preset="high", batch_size=6, micro_batch_size=3, device="cpu", use_mrd=True):
        assert (train.model.preset, train.model.discriminator_channels, train.model.use_mrd) == ("high", 8, True)
        assert (train.schedule.whole_batch, train.schedule.micro_batch_size, train.hardware.device) == (6, 3, "cpu")


def test_synthetic_speech_is_of_the_size_asked_for():
    settings, speech = assemble(TrainTts, {**TINY, "data_dir": "."}), size_of(PlannedSpeech(), 0.5)
    (bucket,) = TtsWork(speech).synthetic_batch(settings)
    assert bucket.wave_BT.shape == (3, math.ceil(0.5 * 22050 / HOP_SIZE) * HOP_SIZE)
    assert (bucket.wave_BT.dtype, bucket.ids_BS.shape) == (torch.int16, (3, 15))
    assert bucket.frames_B.tolist() == [44] * 3
    assert bucket.symbols_B.tolist() == [15] * 3
    assert int(bucket.ids_BS.min()) >= 3
    assert int(bucket.ids_BS.max()) < speech.num_symbols
    loudest_hz = torch.fft.rfft(bucket.wave_BT.float()).abs().argmax(dim=1) * 22050 / bucket.wave_BT.shape[1]
    assert all(78 <= hz <= 322 for hz in loudest_hz)
    assert len(set(loudest_hz.tolist())) == 3


def test_a_benchmark_makes_real_steps(tmp_path, monkeypatch):
    """Its prediction takes ten times as long on fake tensors; that of the VAE's benchmark is tested."""
    monkeypatch.setattr(step_bench.StepBench, "predicted_seconds", lambda bench, rates: 0.5)
    settings = assemble(TrainTts, {**TINY, "data_dir": ".", **step_bench.PLAIN, "micro_batch_size": 2})
    with small_presets():
        measured = step_bench.begin_bench(TtsWork(), settings, cpu_runtime(), tmp_path, clip_seconds=0.5)
        before = [weight.detach().clone() for weight in measured.recipe.voice.decoder.parameters()]
        figures = measured.measure(warmup=1, steps=2)
    assert measured.steps == 3
    assert all(
        bool((weight != old).any())
        for weight, old in zip(measured.recipe.voice.decoder.parameters(), before, strict=True)
    )
    assert figures["items_per_second"] == pytest.approx(3 / figures["seconds_per_step"])
    assert figures["audio_seconds_per_second"] == pytest.approx(0.5 * figures["items_per_second"])
    assert figures["micro_batch_size"] == 2
    assert figures["predicted_seconds_per_step"] == 0.5


@pytest.mark.slow
def test_bench_measures_a_row_of_the_voice_in_its_child(tmp_path):
    words = flags({**SMALL, "steps": 1, "warmup_steps": 1, "device": "cpu", "output_dir": tmp_path})
    done = gputrain_here("bench", "train-tts", *words)
    assert done.returncode == 0, done.stderr
    (table,) = tmp_path.glob("bench_*.json")
    rows = {row["label"]: row for row in json.loads(table.read_text())["rows"]}
    figures = rows["fp32"]["figures"]
    assert figures["seconds_per_step"] > 0
    assert (figures["micro_batch_size"], figures["plan"]["precision"]) == (2, "fp32")
    assert "needs a GPU" in rows["+ bf16"]["reason"]


def test_what_train_tts_refuses_is_refused_before_a_row_is_measured():
    for changes, said in (
        ({"discriminator_channels": 12}, "not a multiple of 8"),
        ({"preset": "grand"}, "preset is 'grand'"),
        ({"clip_seconds": 0.1}, "clip_seconds is 0.1"),
        ({"batch_size": 0}, "batch_size is 0"),
    ):
        with pytest.raises(UserError) as raised:
            assemble(BenchTts, {**SMALL, **changes})
        assert said in raised.value.message


def test_speaking_is_measured_without_a_training(tmp_path):
    settings = assemble(BenchTts, {**SMALL, "inference": True})
    assert TtsWork().title(settings, trains()[0]) == "fast, 2 clips of 0.5 s at once, without gradients"
    labels = [row.label for row in step_bench.bench_rows(TtsWork(), settings)]
    assert labels == ["fp32", "+ TF32", "+ compile", "+ bf16"]
    speaking = step_bench.begin_bench(TtsWork(), trains()[0], cpu_runtime(), tmp_path, clip_seconds=0.5, inference=True)
    waves = []
    speaking.compute = lambda compute=speaking.compute: waves.append(compute())
    figures = speaking.measure(warmup=1, steps=1)
    frames = math.ceil(0.5 * 22050 / HOP_SIZE)
    assert [tuple(wave.shape) for wave in waves] == [(2, 1, frames * HOP_SIZE)] * 2
    assert not waves[0].requires_grad
    assert figures["real_time_factor"] == pytest.approx(figures["seconds_per_step"] / (2 * 0.5))
    with FlopCounterMode(display=False) as counter:
        speaking.step()
    counted = figures["tflops"] * 1e12 * figures["seconds_per_step"]
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert figures["predicted_seconds_per_step"] > 0
