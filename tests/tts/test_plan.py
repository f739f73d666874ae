"""Plans of train-tts without the GPU, and predictions compared with real steps of small voices."""

import json

import pytest

from gputrain.config import assemble
from gputrain.planner.model_planner import plan_cards
from gputrain.speech.buckets import ClipSize
from gputrain.tts.config import PlannedSpeech, PlanTts, TrainTts
from gputrain.tts.data import SpeechSize, size_of
from gputrain.tts.kind import TtsWork
from tests.command import gputrain_here
from tests.tts.test_train import TINY


def settings_of(**changes: object) -> TrainTts:
    return assemble(TrainTts, {**TINY, "data_path": ".", "batch_size": 4, "plan": True, **changes})


def test_speech_that_is_not_there_has_a_size():
    size = size_of(PlannedSpeech(symbols_a_second=20, num_speakers=3, sampling_rate=16000), 4.0)
    assert size == SpeechSize(16000, 64, 3, ClipSize(frames=250, symbols=80))
    assert size_of(PlannedSpeech(), 5.0).clip == ClipSize(431, 150)


@pytest.mark.slow
def test_the_users_batch_on_a_4090_and_on_a_t4():
    """`high` at its full size: a card of 24 GB takes 64 clips in parts, and in no more memory than there is."""
    plans = {}
    for preset in ("high", "medium"):
        asked = assemble(PlanTts, {"preset": preset, "batch_size": 64, "gpu": "rtx4090,t4"})
        plans[preset] = ours = plan_cards(TtsWork(), asked)
        for plan in ours:
            assert plan.fit.fits
            assert plan.fit.predicted_peak_gb <= plan.fit.budget_gb
            assert plan.fit.micro_batch_size * plan.fit.accumulation_steps >= 64
            assert plan.stage == {"preset": preset, "batch_size": 64, "seconds": 5.0, "batch_seconds": 320.0}
        assert ours[0].fit.micro_batch_size >= ours[1].fit.micro_batch_size
    assert plans["high"][1].fit.micro_batch_size <= plans["medium"][1].fit.micro_batch_size


@pytest.mark.slow
def test_the_command():
    words = ["plan", "train-tts", "--preset", "medium", "--batch-size", 64, "--gpu", "rtx4090", "--gpu", "t4"]
    done = gputrain_here(*words, "--json")
    assert done.returncode == 0, done.stderr
    plans = json.loads(done.stdout)
    assert [(plan["preset"], plan["batch_size"], plan["fits"]) for plan in plans] == [("medium", 64, True)] * 2
    assert [plan["precision"] for plan in plans] == ["bf16", "fp16"]
    table = gputrain_here(*words)
    assert table.returncode == 0, table.stderr
    assert "4090" in table.stdout
    assert "t4" in table.stdout
