"""Plans of train-asr without the GPU, predictions against real steps, and the benchmark."""

import dataclasses
import json

import pytest
import torch

from gputrain.asr import architecture
from gputrain.asr.config import BenchAsr, PlanAsr, PlannedSpeech, TrainAsr
from gputrain.asr.work import AsrWork, facts_of
from gputrain.bench import step_bench
from gputrain.config import assemble
from gputrain.engine import adamw_8bit
from gputrain.hw.plan import decide
from gputrain.hw.probe import Machine
from gputrain.planner.memory.predict import predict_step
from gputrain.planner.model_planner import plan_cards
from gputrain.speech.buckets import ClipSize
from gputrain.speech.training import PlannedClips
from gputrain.tts.config import PlanTts
from gputrain.tts.work import TtsWork
from tests.asr.models import SIZES, W2V_BERT, transformers_folder
from tests.command import gputrain_here
from tests.planner.memory.measured_steps import measured_peak_gb
from tests.tables import each_row
from tests.vae.test_bench import H100, T4

CPU = Machine(system="Linux", cpu_cores=2, torch="2.13")
CLIP = ClipSize(frames=60, symbols=20)


@pytest.fixture
def small_preset(monkeypatch):
    monkeypatch.setitem(architecture.PRESETS, "tiny", {**architecture.PRESETS["tiny"], **SIZES})


def settings_of(**changes: object) -> TrainAsr:
    values = {"data_dir": ".", "preset": "tiny", "batch_size": 4, "learning_rate": 1e-3}
    return assemble(TrainAsr, {**values, **changes})


def target_of(settings: TrainAsr, clip: ClipSize = CLIP):
    facts = facts_of(settings, PlannedSpeech(), 1.0)
    return AsrWork(dataclasses.replace(facts, clip=clip)).target(settings)


@pytest.mark.parametrize(
    ("changes", "checkpointing"),
    [
        ({}, False),
        ({"ema_decay": 0.9, "layer_drop": 0.3, "mask_feature_prob": 0.1}, True),
        ({"adapters": "lora"}, False),
        ({"optimizer": "adamw-8bit"}, False),
        ({"adapters": "attention"}, True),
        ({"freeze_encoder_steps": 5, "freeze_feature_encoder": True, "hidden_dropout": 0.1}, False),
        ({"init_from": "w2v-bert"}, False),
        ({"init_from": "w2v-bert", "adapters": "lora", "hidden_dropout": 0.1}, True),
    ],
)
def test_a_step_takes_what_was_predicted(changes, checkpointing, small_preset, monkeypatch, tmp_path):
    """Compares the tensors of a real step on the CPU, tracked through their lifetimes, with fake tensors."""
    monkeypatch.setattr(adamw_8bit, "LEAST_NUMBERS", 256)
    if "init_from" in changes:
        changes = {**changes, "init_from": str(transformers_folder(tmp_path / "model", **W2V_BERT))}
    settings = settings_of(**changes)
    plan = decide(CPU, settings.hardware)
    target = target_of(settings)
    predicted = predict_step(target, plan, micro_batch_size=3, checkpointing=checkpointing)
    assert predicted.allocated_gb == pytest.approx(measured_peak_gb(target, plan, 3, checkpointing), rel=0.02)


@each_row((AsrWork, PlanAsr, 50), (TtsWork, PlanTts, 86.13))
def test_a_plan_without_data_is_for_clips_of_the_length_that_was_asked_for(work, options, rate):
    for values, seconds, shown in (
        ({"clip_seconds": 8.0}, 8.0, {"seconds": 8.0, "batch_seconds": 256.0}),
        ({"clip_seconds": 8.0, "batch_room": 3.0}, 8.0, {"seconds": 8.0, "batch_seconds": 256.0}),
        ({"clip_seconds": 8.0, "batch_seconds": 160.0}, 5.0, {"seconds": 8.0, "batch_seconds": 160.0}),
        ({"clip_seconds": 8.0, "batch_seconds": 900.0}, 8.0, {"seconds": 8.0, "batch_seconds": 256.0}),
    ):
        settings = assemble(options, {"batch_size": 32, **values})
        planned = work().planned(settings)
        ((_, columns),) = planned.stages
        assert {name: columns[name] for name in shown} == shown
        assert planned.work.sizes.clip.frames == pytest.approx(seconds * rate, abs=1)
    if options is PlanAsr:  # Clips are planned at their slowest.
        settings = assemble(options, {"batch_size": 32, "clip_seconds": 8.0, "speed_change": 0.2})
        assert work().planned(settings).work.sizes.clip.frames == pytest.approx(10 * rate, abs=1)
    of_data = PlannedClips.of(assemble(options, {"batch_size": 32, "clip_seconds": 8.0}), of_data=True)
    assert of_data == (12.0, {"seconds": 8.0, "batch_seconds": 384.0})  # As in a training, by batch_room.


@pytest.mark.slow
def test_full_fine_tuning_of_1b_fits_a_t4_only_with_averages_of_8_bits_and_lora_does():
    values = {"preset": "xls-r-1b", "clip_seconds": 5.4, "gpu": ["t4"], "batch_size": 32}
    (full,), (small,), (lora,) = (
        plan_cards(AsrWork(), assemble(PlanAsr, {**values, **changes}))
        for changes in ({}, {"optimizer": "adamw-8bit"}, {"adapters": "lora"})
    )
    assert not full.fit.fits
    assert full.fit.parts["parameters"] + full.fit.parts["gradients"] + full.fit.parts["optimizer"] > 15
    for option in ("--adapters lora", "--optimizer adamw-8bit"):
        assert any(remedy.startswith(f"{option} would take") for remedy in full.remedies)
    assert small.fit.fits
    assert small.fit.parts["optimizer"] == pytest.approx(full.fit.parts["optimizer"] * 65 / 256, rel=0.01)
    assert lora.fit.fits
    assert lora.fit.parts["optimizer"] < 0.1


# ----------------------------------------------------------------------------------------------- from the command line


@pytest.mark.slow
def test_plan_train_asr_from_the_command_line():
    words = "plan train-asr --preset tiny --gpu t4 --gpu a100-40 --json"
    made = json.loads(gputrain_here(*words.split()).stdout)
    assert [(one["gpu"], one["precision"]) for one in made] == [("t4", "fp16"), ("a100-40", "bf16")]
    assert all(one["settings"]["compile"] is False for one in made)


@each_row((H100, "bf16"), (T4, "fp16"))
def test_each_row_of_the_benchmark_turns_one_switch_on(machine, precision):
    rows = step_bench.bench_rows(AsrWork(), assemble(BenchAsr, {}))
    trains = [assemble(TrainAsr, json.loads(json.dumps(row.settings))["train"]) for row in rows]
    plans = [decide(machine, train.hardware) for train in trains]
    assert [(plan.precision.value, plan.compile.value) for plan in plans] == [
        ("fp32", False), ("fp32", False), (precision, False), (precision, True),
    ]  # fmt: skip


def test_synthetic_speech_is_of_the_size_asked_for():
    settings = settings_of()
    facts = facts_of(settings, PlannedSpeech(), 0.5)
    (bucket,) = AsrWork(facts).synthetic_batch(settings)
    assert bucket.wave_BT.shape == (4, 25 * 320)
    assert (bucket.wave_BT.dtype, bucket.ids_BS.shape) == (torch.int16, (4, 8))


@pytest.mark.slow
def test_bench_train_asr_from_the_command_line(tmp_path):
    words = "bench train-asr --batch-size 1 --clip-seconds 0.5 --device cpu --warmup-steps 1 --steps 1 --output-dir"
    assert gputrain_here(*words.split(), tmp_path).returncode == 0
    (table,) = tmp_path.glob("bench_asr*.json")
    assert json.loads(table.read_text())["rows"][0]["figures"]["seconds_per_step"] > 0
