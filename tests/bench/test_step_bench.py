"""`gputrain bench`: rows that add one switch each, measured in real steps of train-vae, train-vocoder, train-tts and
train-asr."""

import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from gputrain.asr import data as asr_data
from gputrain.asr.config import PlannedSpeech, TrainAsr
from gputrain.asr.kind import AsrWork
from gputrain.bench import step_bench
from gputrain.bench.options import bench_settings
from gputrain.bench.runner import NotMeasured
from gputrain.config import assemble, to_yaml
from gputrain.hw.plan import Hardware, decide
from gputrain.hw.probe import Machine
from gputrain.kinds import kinds
from gputrain.planner.memory.predict import predict_step
from gputrain.planner.time.roofline import DeviceRates
from gputrain.speech.config import HOP_SIZE
from gputrain.tts import config as tts
from gputrain.tts.config import TrainTts
from gputrain.tts.data import size_of, synthetic_batch
from gputrain.tts.kind import TtsWork
from gputrain.vae.config import TrainVae
from gputrain.vae.kind import VaeWork
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.data import synthetic_crops
from gputrain.vocoder.kind import VocoderWork
from tests.command import gputrain_here
from tests.machines import H100, T4
from tests.tables import each_row, slow
from tests.toy import cpu_runtime
from tests.tts.test_train import TINY as TINY_VOICE
from tests.tts.test_train import small_presets
from tests.vocoder.conftest import TINY as TINY_VOCODER
from tests.vocoder.conftest import flags


class Kind(NamedTuple):
    """One kind: its work, the options of its train command, values of a small model, and the switches of its rows."""

    work: type
    train: type
    small: dict[str, Any]
    switches: tuple[str, ...]


SMALL_VOCODER = {
    "upsample_initial_channel": 32, "discriminators": "fast_mpd", "discriminator_periods": "3", "crop_mel_frames": 8,
    "batch_size": 2,
}  # fmt: skip
KINDS = {
    "vae": Kind(
        VaeWork, TrainVae,
        {"preset": "fast", "channels": [8, 16], "image_size": 32, "batch_size": 4},
        ("tf32", "precision", "channels_last", "compile", "recompute_norms", "cuda_graphs"),
    ),
    "vocoder": Kind(
        VocoderWork, TrainVocoder, SMALL_VOCODER,
        ("tf32", "precision", "channels_last", "compile", "cuda_graphs"),
    ),
    "tts": Kind(
        TtsWork, TrainTts,
        {"preset": "fast", "discriminator_channels": 8, "batch_size": 2, "clip_seconds": 0.5},
        ("tf32", "precision", "channels_last", "compile"),
    ),
    "asr": Kind(AsrWork, TrainAsr, {"preset": "tiny", "batch_size": 8}, ("tf32", "precision", "compile")),
}  # fmt: skip


def trains(name: str, **changes: object) -> list[Any]:
    """Returns the settings that each row trains, as its child reads them."""
    kind = KINDS[name]
    settings = assemble(bench_settings(kinds()[name].plan), {**kind.small, **changes})
    rows = step_bench.bench_rows(kind.work(), settings)
    return [assemble(kind.train, json.loads(json.dumps(row.settings))["train"]) for row in rows]


# ------------------------------------------------------------------------------------------------------------- rows


@each_row(*[(name, machine, precision) for name in KINDS for machine, precision in ((H100, "bf16"), (T4, "fp16"))])
def test_each_row_turns_one_switch_on(name, machine, precision):
    switches, settings = KINDS[name].switches, trains(name)
    assert len(settings) == 1 + len(switches)
    for number, train in enumerate(settings):
        plan = decide(machine, train.hardware)
        found = {
            one: train.model.recompute_norms if one == "recompute_norms" else plan.settings[one].value
            for one in switches
        }
        expected = {one: place < number for place, one in enumerate(switches)}
        expected["tf32"] &= machine is H100
        assert found == {**expected, "precision": precision if expected["precision"] else "fp32"}, number


def test_a_switch_that_a_machine_lacks_is_not_measured():
    with pytest.raises(NotMeasured, match="Ampere"):
        step_bench.check_switch(decide(T4, Hardware()), "tf32")
    step_bench.check_switch(decide(T4, Hardware()), "precision")
    cpu = decide(Machine(system="Linux", cpu_cores=2), Hardware(precision="mixed"))
    with pytest.raises(NotMeasured, match="needs a GPU"):
        step_bench.check_switch(cpu, "precision")


def test_rows_train_what_was_asked_for():
    for train in trains("vae", micro_batch_size=2, gradient_checkpointing=True, device="cpu"):
        assert train.architecture.block_out_channels == (8, 16)
        assert (train.data.image_size, train.schedule.global_batch_size, train.schedule.micro_batch_size) == (32, 4, 2)
        assert (train.model.gradient_checkpointing, train.hardware.device) == (True, "cpu")
    for train in trains("vocoder", micro_batch_size=1, mini_nsf=True, crop_mel_frames=16):
        schedule = train.schedule
        assert (schedule.generator_optimizer, schedule.discriminator_optimizer) == ("muon", "muon")
        assert (train.architecture.mini_nsf, train.architecture.upsample_initial_channel) == (True, 32)
        assert (schedule.global_batch_size, schedule.micro_batch_size, train.data.crop_mel_frames) == (2, 1, 16)
        assert train.discriminators.discriminators == ("fast_mpd",)
    for train in trains("tts", preset="high", batch_size=6, micro_batch_size=3):
        assert (train.model.preset, train.model.discriminator_channels) == ("high", 8)
        assert (train.schedule.global_batch_size, train.schedule.micro_batch_size) == (6, 3)


def run_with(*words: object) -> tuple[str, list[tuple[str, TrainVocoder]]]:
    """Returns the title and the rows of `bench train-vocoder` with these words, none of which is measured."""
    seen: list[Any] = []

    def note(work: object, settings: Any) -> None:
        seen.append(settings)
        raise SystemExit(0)

    with mock.patch("gputrain.bench.step_bench.run_bench", note):
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


def test_the_configuration_of_a_run_can_be_measured(tmp_path):
    written = assemble(TrainVocoder, {"data_path": "gone", "output_dir": "also gone", **TINY_VOCODER})
    (tmp_path / "config.yaml").write_text(to_yaml(written))
    _, rows = run_with("--config", tmp_path / "config.yaml")
    assert {train.architecture for _, train in rows} == {written.architecture}
    assert {str(train.data.data_path[0]) for _, train in rows} == {"."}


@each_row(
    ("vae", ["--image-size", 100], "image_size 100 is not a multiple of 8"),
    ("vae", ["--batch-size", 0], "--batch-size"),
    ("vae", ["--channels", "32,48"], "48 is not divisible into 32 groups"),
    ("vae", ["--output-dir", "file/below"], "Not a directory"),
    ("vae", ["--preset", "huge"], "--preset"),
    ("vocoder", ["--discriminators", "fast_mpd,cqt"], "discriminators is"),
    ("vocoder", ["--discriminators", "msd,msd"], "each may be named once"),
    ("vocoder", ["--generator-optimizer", "adam"], "--generator-optimizer"),
    ("vocoder", ["--upsample-initial-channel", 31], "upsample_initial_channel"),
    ("tts", ["--discriminator-channels", 12], "not a multiple of 8"),
    ("tts", ["--clip-seconds", 0.1], "--clip-seconds"),
)
def test_bad_input_gets_a_sentence_and_2(typed, tmp_path, kind, words, message):
    (tmp_path / "file").write_text("")
    code, printed = typed("bench", f"train-{kind}", *words)
    assert code == 2
    assert message in printed
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


# --------------------------------------------------------------------------------------------------- synthetic batches


def test_synthetic_sound_has_its_pitch():
    settings = assemble(TrainVocoder, {"data_path": ".", **TINY_VOCODER, "crop_mel_frames": 250, "key_aug": True})
    wave_BT, f0_BF = synthetic_crops(settings)
    assert (wave_BT.dtype, wave_BT.shape) == (torch.int16, (4, 350 * 64))  # The frames that key_aug reads.
    assert f0_BF.shape == (4, 350)
    spectrum_BN = torch.fft.rfft(wave_BT.float()).abs()
    loudest_hz = spectrum_BN.argmax(dim=1) * 16000 / (350 * 64)
    assert torch.allclose(loudest_hz, f0_BF[:, 0], atol=1)
    assert all(110 <= hz <= 440 for hz in f0_BF[:, 0])


def test_synthetic_speech_is_of_the_size_asked_for():
    settings, speech = assemble(TrainTts, {**TINY_VOICE, "data_path": "."}), size_of(tts.PlannedSpeech(), 0.5)
    (bucket,) = synthetic_batch(settings, speech)
    assert bucket.wave_BT.shape == (3, math.ceil(0.5 * 22050 / HOP_SIZE) * HOP_SIZE)
    assert (bucket.wave_BT.dtype, bucket.ids_BS.shape) == (torch.int16, (3, 15))
    assert (bucket.frames_B.tolist(), bucket.symbols_B.tolist()) == ([44] * 3, [15] * 3)
    assert int(bucket.ids_BS.min()) >= 3
    assert int(bucket.ids_BS.max()) < speech.num_symbols
    loudest_hz = torch.fft.rfft(bucket.wave_BT.float()).abs().argmax(dim=1) * 22050 / bucket.wave_BT.shape[1]
    assert all(78 <= hz <= 322 for hz in loudest_hz)
    assert len(set(loudest_hz.tolist())) == 3
    settings = assemble(TrainAsr, {"data_path": ".", "preset": "tiny", "batch_size": 4})
    (bucket,) = asr_data.synthetic_batch(settings, asr_data.facts_of(settings, PlannedSpeech(), 0.5))
    assert bucket.wave_BT.shape == (4, 25 * 320)
    assert (bucket.wave_BT.dtype, bucket.ids_BS.shape) == (torch.int16, (4, 8))


# -------------------------------------------------------------------------------------------------------- measurements


def bench_of(name: str, folder: object, **more: object) -> step_bench.StepBench:
    """Begins a small training of a kind, or its inference, that makes plain steps in micro-batches of two items."""
    if name == "vae":
        settings = trains("vae", micro_batch_size=2, device="cpu")[0]
    else:
        tiny = {"vocoder": {"data_path": ".", **TINY_VOCODER}, "tts": {"data_path": ".", **TINY_VOICE}}[name]
        settings = assemble(KINDS[name].train, {**tiny, **step_bench.PLAIN, "micro_batch_size": 2})
    more = {**more, "clip_seconds": 0.5} if name == "tts" else more
    return step_bench.begin_bench(KINDS[name].work(), settings, cpu_runtime(), folder, **more)


@pytest.fixture
def small() -> Iterator[None]:
    with small_presets():
        yield


@pytest.mark.parametrize(
    ("kind", "model", "items", "item_seconds"),
    [("vae", "autoencoder", 4, 0), slow("vocoder", "generator", 4, 24 * 64 / 16000), slow("tts", "voice", 3, 0.5)],
)
def test_a_benchmark_makes_real_steps(small, monkeypatch, tmp_path, kind, model, items, item_seconds):
    if kind != "vae":  # Their predictions take longer than the steps.
        monkeypatch.setattr(step_bench.StepBench, "predicted_seconds", lambda bench, rates: 0.5)
    measured = bench_of(kind, tmp_path / kind)
    trained = getattr(measured.recipe, model)
    before = {name: weight.detach().clone() for name, weight in trained.named_parameters()}
    figures = measured.measure(warmup=2, steps=2)
    assert measured.steps == 4
    moved = sum(bool((weight != before[name]).any()) for name, weight in trained.named_parameters())
    assert moved > 0.8 * len(before)
    assert figures["items_per_second"] == pytest.approx(items / figures["seconds_per_step"])
    if item_seconds:
        assert figures["audio_seconds_per_second"] == pytest.approx(item_seconds * figures["items_per_second"])
    assert figures["micro_batch_size"] == 2
    assert min(figures[name] for name in ("seconds_per_step", "first_step_seconds", "cpu_seconds_per_step")) > 0
    assert figures["predicted_seconds_per_step"] > 0
    assert 0.1 < figures["peak_gb"] < 10
    assert not {"share_of_product", "product_tflops"} & figures.keys()
    if kind == "vae":
        with FlopCounterMode(display=False) as counter:
            measured.step()
        flops = figures["tflops"] * 1e12 * figures["seconds_per_step"]
        assert flops == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_rows_have_a_title_and_a_file(tmp_path, monkeypatch):
    names = []
    monkeypatch.setattr(step_bench.runner, "run_rows", lambda *_, name, **__: names.append(name))
    for kind, title in (
        ("vae", "train-vae: fast, 32 px, 4 pictures a step"),
        ("vocoder", "train-vocoder: 32 channels, fast_mpd, 2 crops of 0.09 s a step"),
        ("tts", "train-tts: fast, 2 clips of 0.5 s a step"),
    ):
        values = {**KINDS[kind].small, "output_dir": str(tmp_path)}
        report, _ = step_bench.run_bench(KINDS[kind].work(), assemble(bench_settings(kinds()[kind].plan), values))
        assert report.title == title
        assert names[-1] == f"bench_{kind}"


def test_the_time_of_a_row_is_predicted_as_a_plan_predicts_it(tmp_path):
    """Two micro-batches of two pictures on a card where a launch takes nothing: the products' and the copies' times."""
    settings = trains("vae", micro_batch_size=2)[0]
    rates = DeviceRates(3e12, 1e12, 1e10, launch_seconds=0.0, least_seconds=0.0)
    runtime = cpu_runtime()
    predicted = predict_step(VaeWork().target(settings), runtime.plan, micro_batch_size=2)
    first = [one for one in predicted.micro_batch if not one.accumulates]  # It adds to no gradients.
    kernels = (*first, *predicted.micro_batch, *predicted.update)
    parts = [max(one.flops / one.filled / 1e12, one.bytes / 1e10) for one in kernels]
    found = step_bench.begin_bench(VaeWork(), settings, runtime, tmp_path).predicted_seconds(rates)
    assert found == pytest.approx(sum(parts))
    assert 1e-4 < found < 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_command(kind, tmp_path):
    """Measures real rows on the CPU, each in its process: rows that need a GPU are reported so."""
    small = (
        {"preset": "tiny", "batch_size": 1, "clip_seconds": 0.5}
        if kind == "asr"
        else {**KINDS[kind].small, "batch_size": 2}
    )
    words = flags({**small, "steps": 1, "untimed_steps": 1, "device": "cpu", "output_dir": tmp_path})
    done = gputrain_here("bench", f"train-{kind}", *words)
    assert done.returncode == 0, done.stderr
    (table,) = tmp_path.glob(f"bench_{kind}_*.json")
    page = json.loads(table.read_text())
    rows = {row["label"]: row for row in page["rows"]}
    labels = {"tf32": "+ TF32", "precision": "+ bf16", "cuda_graphs": "+ CUDA graphs"}
    assert list(rows) == ["fp32", *(labels.get(name, f"+ {name}") for name in KINDS[kind].switches)]
    for label, reason in (("+ TF32", "Ampere"), ("+ bf16", "needs a GPU"), ("+ compile", "needs a GPU")):
        assert reason in rows[label]["reason"]
        assert label in done.stdout
    for label in [label for label in ("fp32", "+ channels_last", "+ recompute norms") if label in rows]:
        figures = rows[label]["figures"]
        assert (figures["plan"]["precision"], figures["plan"]["channels_last"]) == ("fp32", label != "fp32")
        assert math.isfinite(figures["items_per_second"])
        assert figures["micro_batch_size"] == int(small["batch_size"])
    assert page["command"].startswith(f"gputrain bench train-{kind} ")
    assert page["device"]
    with Image.open(table.with_suffix(".png")) as picture:
        assert picture.width == 1200
