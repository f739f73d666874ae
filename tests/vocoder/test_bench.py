"""`gputrain bench train-vocoder`: rows that add one switch each, measured by training steps on synthetic sound."""

import json
from unittest import mock

import pytest
import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from gputrain.bench import step_bench
from gputrain.config import assemble, to_yaml
from gputrain.hw.plan import decide
from gputrain.vocoder.config import BenchVocoder, TrainVocoder
from gputrain.vocoder.work import VocoderWork
from tests.command import gputrain_here
from tests.tables import each_row
from tests.toy import cpu_runtime
from tests.vae.test_bench import H100, T4
from tests.vocoder.conftest import TINY

SMALL = {
    "upsample_initial_channel": 32, "discriminators": "fast_mpd", "discriminator_periods": "3", "crop_mel_frames": 8,
    "batch_size": 2,
}  # fmt: skip


def trains(**changes: object) -> list[TrainVocoder]:
    """Returns the settings of each row as its child process reads them."""
    settings = [
        json.dumps(row.settings)
        for row in step_bench.bench_rows(VocoderWork(), assemble(BenchVocoder, {**SMALL, **changes}))
    ]
    return [assemble(TrainVocoder, json.loads(text)["train"]) for text in settings]


@pytest.mark.parametrize(("machine", "precision"), [(H100, "bf16"), (T4, "fp16")])
def test_each_row_turns_one_switch_on(machine, precision):
    plans = [decide(machine, train.hardware) for train in trains()]
    switches = ("tf32", "precision", "compile", "channels_last", "cuda_graphs")
    states = [tuple(plan.settings[name].value for name in switches) for plan in plans]
    tf32 = machine is H100
    assert states == [
        (False, "fp32", False, False, False), (tf32, "fp32", False, False, False),
        (tf32, precision, False, False, False), (tf32, precision, False, True, False),
        (tf32, precision, True, True, False), (tf32, precision, True, True, True),
    ]  # fmt: skip


def test_rows_train_what_was_asked_for():
    asked = {"optimizer": "muon", "micro_batch_size": 1, "mini_nsf": True, "crop_mel_frames": 16, "device": "cpu"}
    for train in trains(**asked):
        schedule = train.schedule
        assert (schedule.generator_optimizer, schedule.discriminator_optimizer) == ("muon", "muon")
        assert (train.architecture.mini_nsf, train.architecture.upsample_initial_channel) == (True, 32)
        assert (schedule.whole_batch, schedule.micro_batch_size, train.data.crop_mel_frames) == (2, 1, 16)
        assert train.discriminators.discriminators == ("fast_mpd",)
        assert train.hardware.device == "cpu"


def run_with(*words: object) -> tuple[str, list[tuple[str, TrainVocoder]]]:
    """Returns the title and the rows of `bench train-vocoder` with these words, none of which is measured."""
    seen: list[BenchVocoder] = []
    with mock.patch("gputrain.cli.app.print_bench", lambda kind, settings: seen.append(settings)):
        done = gputrain_here("bench", "train-vocoder", *words)
    assert done.returncode == 0, done.stderr
    (settings,) = seen
    with mock.patch("gputrain.bench.runner.run_rows", return_value=[]):
        report, _ = step_bench.run_bench(VocoderWork(), settings)
    rows = step_bench.bench_rows(VocoderWork(), settings)
    return report.title, [
        (row.label, assemble(TrainVocoder, json.loads(json.dumps(row.settings))["train"])) for row in rows
    ]


def test_a_configuration_is_measured_and_flags_beat_it():
    title, rows = run_with("--config", "base_hifi_rtx5090_optimized", "--batch-size", 3)
    assert title == "train-vocoder: 1024 channels, fast_mrd, fast_mpd, 3 crops of 0.93 s a step"
    assert [label for label, _ in rows] == ["fp32", "+ TF32", "+ bf16", "+ channels_last", "+ compile", "+ CUDA graphs"]
    for _, train in rows:
        assert (train.schedule.batch_size, train.data.crop_mel_frames) == (3, 80)
        assert train.discriminators.discriminator_periods == (2, 3, 5, 7, 11, 17, 23)
        assert (train.schedule.generator_optimizer, train.schedule.discriminator_optimizer) == ("muon", "muon")
    assert [train.hardware.precision for _, train in rows] == ["fp32", "tf32", *["mixed"] * 4]
    _, rows = run_with("--config", "base_hifi_rtx5090_optimized", "--optimizer", "adamw")
    assert {train.schedule.generator_optimizer for _, train in rows} == {"adamw"}


def test_configurations_are_measured_side_by_side():
    title, rows = run_with("--config", "base_hifi_gpu", "--config", "base_hifi_rtx5090_optimized")
    assert title.count("base_hifi") == 2
    (one, plain), (other, fast) = rows
    assert (one, other) == ("base_hifi_gpu", "base_hifi_rtx5090_optimized")
    assert (plain.schedule.batch_size, fast.schedule.batch_size) == (16, 32)
    assert (plain.hardware.precision, fast.hardware.precision) == ("tf32", "fp16")
    assert (plain.schedule.generator_optimizer, fast.schedule.generator_optimizer) == ("adamw", "muon")


def test_the_configuration_of_a_run_can_be_measured(tmp_path):
    written = assemble(TrainVocoder, {"data_path": "gone", "output_dir": "also gone", **TINY})
    (tmp_path / "config.yaml").write_text(to_yaml(written))
    _, rows = run_with("--config", tmp_path / "config.yaml")
    assert {train.architecture for _, train in rows} == {written.architecture}
    assert {str(train.data.data_path[0]) for _, train in rows} == {"."}


def test_synthetic_sound_has_its_pitch():
    settings = assemble(TrainVocoder, {"data_path": ".", **TINY, "crop_mel_frames": 250, "key_aug": True})
    wave_BT, f0_BF = VocoderWork().synthetic_batch(settings)
    assert (wave_BT.dtype, wave_BT.shape) == (torch.int16, (4, 350 * 64))  # The frames that key_aug reads.
    assert f0_BF.shape == (4, 350)
    spectrum_BN = torch.fft.rfft(wave_BT.float()).abs()
    loudest_hz = spectrum_BN.argmax(dim=1) * 16000 / (350 * 64)
    assert torch.allclose(loudest_hz, f0_BF[:, 0], atol=1)
    assert all(110 <= hz <= 440 for hz in f0_BF[:, 0])


def test_a_benchmark_makes_real_steps(tmp_path, monkeypatch):
    """Its prediction takes longer than the steps; that of the VAE's benchmark is tested."""
    monkeypatch.setattr(step_bench.StepBench, "predicted_seconds", lambda bench, rates: 0.5)
    settings = assemble(TrainVocoder, {"data_path": ".", **TINY, **step_bench.PLAIN, "micro_batch_size": 2})
    measured = step_bench.begin_bench(VocoderWork(), settings, cpu_runtime(), tmp_path)
    before = [weight.detach().clone() for weight in measured.recipe.generator.parameters()]
    figures = measured.measure(warmup=1, steps=2)
    assert measured.steps == 3
    assert all(
        bool((weight != old).any()) for weight, old in zip(measured.recipe.generator.parameters(), before, strict=True)
    )
    assert figures["items_per_second"] == pytest.approx(4 / figures["seconds_per_step"])
    assert figures["audio_seconds_per_second"] == pytest.approx(figures["items_per_second"] * 24 * 64 / 16000)
    assert figures["micro_batch_size"] == 2
    assert figures["predicted_seconds_per_step"] == 0.5


@pytest.mark.slow
def test_the_command(tmp_path):
    """Runs real rows on the CPU: those that need a GPU say so, the others are measured."""
    words = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", value)]
    done = gputrain_here(
        "bench", "train-vocoder", *words, "--steps", 1, "--warmup-steps", 1, "--device", "cpu",
        "--output-dir", tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (table,) = tmp_path.glob("bench_vocoder_*.json")
    page = json.loads(table.read_text())
    rows = {row["label"]: row for row in page["rows"]}
    assert list(rows) == ["fp32", "+ TF32", "+ bf16", "+ channels_last", "+ compile", "+ CUDA graphs"]
    assert rows["fp32"]["figures"]["audio_seconds_per_second"] > 0
    assert rows["fp32"]["figures"]["micro_batch_size"] == 2
    for label, reason in (("+ TF32", "Ampere"), ("+ bf16", "needs a GPU"), ("+ compile", "needs a GPU")):
        assert reason in rows[label]["reason"]
    with Image.open(table.with_suffix(".png")) as picture:
        assert picture.width == 1200


@each_row(
    (["--discriminators", "fast_mpd,cqt"], "discriminators is"),
    (["--discriminators", "msd,msd"], "each may be named once"),
    (["--crop-mel-frames", 8, "--discriminators", "mrd,nothing"], "discriminators is"),
    (["--optimizer", "adam"], "--optimizer"),
    (["--upsample-initial-channel", 31], "--upsample-initial-channel"),
)
def test_bad_input_gets_a_sentence_and_2(typed, tmp_path, words, said):
    code, printed = typed("bench", "train-vocoder", *words)
    assert code == 2
    assert said in printed
    assert not list(tmp_path.iterdir())


def test_synthesis_is_measured_without_a_training(tmp_path):
    assert VocoderWork().title(assemble(BenchVocoder, {**SMALL, "inference": True}), trains()[0]) == (
        "32 channels, 2 crops of 0.09 s at once, without gradients"
    )
    synthesis = step_bench.begin_bench(VocoderWork(), trains()[0], cpu_runtime(), tmp_path, inference=True)
    waves = []
    synthesis.compute = lambda compute=synthesis.compute: waves.append(compute())
    figures = synthesis.measure(warmup=1, steps=2)
    assert [tuple(wave.shape) for wave in waves] == [(2, 1, 8 * 512)] * 3
    assert not waves[0].requires_grad
    assert torch.equal(waves[0], waves[2])
    crop_seconds = 8 * 512 / 44100
    assert figures["real_time_factor"] == pytest.approx(figures["seconds_per_step"] / (2 * crop_seconds))
    with FlopCounterMode(display=False) as counter:
        synthesis.step()
    counted = figures["tflops"] * 1e12 * figures["seconds_per_step"]
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert figures["predicted_seconds_per_step"] > 0


@pytest.mark.parametrize(("machine", "precision"), [(H100, "bf16"), (T4, "fp16")])
def test_rows_of_inference_have_no_switch_that_does_nothing(machine, precision):
    rows = step_bench.bench_rows(VocoderWork(), assemble(BenchVocoder, {**SMALL, "inference": True}))
    plans = [decide(machine, assemble(TrainVocoder, row.settings["train"]).hardware) for row in rows]
    states = [(plan.tf32.value, plan.compile.value, plan.precision.value) for plan in plans]
    tf32 = machine is H100
    assert states == [(False, False, "fp32"), (tf32, False, "fp32"), (tf32, True, "fp32"), (tf32, True, precision)]
    assert all((plan.channels_last.value, plan.cuda_graphs.value) == (False, False) for plan in plans)
