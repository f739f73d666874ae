"""Plans of train-asr without the GPU, predictions against real steps, and the benchmark."""

import json

import pytest

from gputrain.asr import architecture
from gputrain.asr.config import PlanAsr, TrainAsr
from gputrain.asr.kind import AsrWork
from gputrain.config import assemble
from gputrain.planner.model_planner import plan_cards
from gputrain.speech.buckets import ClipSize
from gputrain.speech.training import PlannedClips
from gputrain.tts.config import PlanTts
from gputrain.tts.kind import TtsWork
from tests.asr.models import SIZES
from tests.command import gputrain_here
from tests.tables import each_row

CLIP = ClipSize(frames=60, symbols=20)


@pytest.fixture
def small_preset(monkeypatch):
    monkeypatch.setitem(architecture.PRESETS, "tiny", {**architecture.PRESETS["tiny"], **SIZES})


def settings_of(**changes: object) -> TrainAsr:
    values = {"data_path": ".", "preset": "tiny", "batch_size": 4, "learning_rate": 1e-3}
    return assemble(TrainAsr, {**values, **changes})


@each_row((AsrWork, PlanAsr, 50), (TtsWork, PlanTts, 86.13))
def test_a_plan_without_data_is_for_clips_of_the_length_that_was_asked_for(work, options, rate):
    for values, seconds, shown in (
        ({"clip_seconds": 8.0}, 8.0, {"seconds": 8.0, "batch_seconds": 256.0}),
        ({"clip_seconds": 8.0, "max_batch_audio_ratio": 3.0}, 8.0, {"seconds": 8.0, "batch_seconds": 256.0}),
    ):
        settings = assemble(options, {"batch_size": 32, **values})
        planned = work().planned(settings)
        columns = planned.columns
        assert {name: columns[name] for name in shown} == shown
        assert planned.work.sizes.clip.frames == pytest.approx(seconds * rate, abs=1)
    of_data = PlannedClips.of(assemble(options, {"batch_size": 32, "clip_seconds": 8.0}), of_data=True)
    assert of_data == (12.0, {"seconds": 8.0, "batch_seconds": 384.0})  # As in a training, by max_batch_audio_ratio.


@pytest.mark.slow
def test_full_fine_tuning_of_1b_does_not_fit_a_t4_and_lora_does():
    values = {"preset": "xls-r-1b", "clip_seconds": 5.4, "gpu": ["t4"], "batch_size": 32}
    (full,), (lora,) = (
        plan_cards(AsrWork(), assemble(PlanAsr, {**values, **changes})) for changes in ({}, {"adapters": "lora"})
    )
    assert not full.fit.fits
    assert full.fit.parts["parameters"] + full.fit.parts["gradients"] + full.fit.parts["optimizer"] > 15
    assert any(remedy.startswith("--adapters lora would take") for remedy in full.remedies)
    assert lora.fit.fits
    assert lora.fit.parts["optimizer"] < 0.1


# ----------------------------------------------------------------------------------------------- from the command line


@pytest.mark.slow
def test_plan_train_asr_from_the_command_line():
    words = "plan train-asr --preset tiny --gpu t4 --gpu a100-40 --json"
    made = json.loads(gputrain_here(*words.split()).stdout)
    assert [(one["gpu"], one["precision"]) for one in made] == [("t4", "fp16"), ("a100-40", "bf16")]
    assert all(one["settings"]["compile"] is False for one in made)
