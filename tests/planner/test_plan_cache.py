"""What later plans take from the folder of caches."""

import gzip
import json
from dataclasses import replace

import pytest

from gputrain import caches
from gputrain.config import assemble
from gputrain.planner import model_planner
from gputrain.planner.memory import predict
from gputrain.planner.memory.fit import MemoryModel
from gputrain.planner.memory.predict import MemoryEstimate, predict_step, predict_steps
from gputrain.planner.model_planner import FILES, ModelPlanner, kept_model, sources_digest
from gputrain.planner.time.roofline import KernelCost, StepCost
from gputrain.vocoder.config import PlanVocoder
from gputrain.vocoder.kind import VocoderWork
from tests.planner.predictions import StepTotals
from tests.planner.step_counts import plan_of

KERNELS = (
    KernelCost("fused, backward", 3, 1e9 / 3, 0.0, 0.0, 1.0, True, True),
    KernelCost("sum", 1, 7.0, 2e9, 3.5, 0.3, False),
)
COST = StepCost(KERNELS, KERNELS[:1], 8, KERNELS[1:], 3)  # No field has its default.
MODEL = MemoryModel({"a": 0.1 + 0.2}, {"a": 1 / 3}, 1e12 / 7, COST)
OTHER = MemoryModel({}, {}, 1.0)
SMALL = {
    "upsample_initial_channel": 32, "discriminators": "fast_mpd", "discriminator_periods": "3", "crop_mel_frames": 8,
    "batch_size": 4, "gpu": ["h100", "t4"],
}  # fmt: skip


def never():
    raise AssertionError("it was predicted again")


def test_a_kept_plan_is_the_same(monkeypatch):
    """To any digit, with and without checkpointing, for two cards of which one is too small without it."""
    made = []

    def predicted(target, plan, sizes, checkpointing):
        made.append(checkpointing)
        item_gb = (1 / 7 if checkpointing else 13.1) + len(made) / 1e9
        parts = [{"parameters": 0.1 + 0.2, "optimizer": 1 / 3, "activations": item_gb * size} for size in sizes]
        return [
            MemoryEstimate(sum(gb.values()), sum(gb.values()), gb, 10**9 * size, KERNELS, KERNELS[1:])
            for gb, size in zip(parts, sizes, strict=True)
        ]

    monkeypatch.setattr(predict, "predict_steps", predicted)

    def plans(**changes):
        settings = assemble(PlanVocoder, {**SMALL, **changes})
        found = ModelPlanner(VocoderWork(), keeps=True).card_plans(settings.cards, settings, {})
        return json.dumps([one.to_json() for one in found])

    first = plans()
    assert plans() == first
    assert made == [False, False, True]  # For the arithmetic of an H100, and of a T4.
    assert plans(num_steps=70, learning_rate=0.1) != first
    assert len(made) == 3
    plans(crop_mel_frames=9, gpu=["h100"])
    assert len(made) == 4


def test_a_change_of_the_key_the_versions_or_the_sources_is_a_miss(monkeypatch, tmp_path):
    assert kept_model("key", lambda: MODEL) == kept_model("key", never) == MODEL
    without = replace(MODEL, cost=None)
    assert kept_model("other", lambda: without) == kept_model("other", never) == without
    (tmp_path / "code.py").write_text("1")
    before = sources_digest(tmp_path)
    (tmp_path / "code.py").write_text("2")
    sources_digest.cache_clear()
    assert sources_digest(tmp_path) != before
    for name, value in (("sources_digest", lambda: "0"), ("_surroundings", lambda: ("torch 9",))):
        with monkeypatch.context() as patched:
            patched.setattr(model_planner, name, value)
            with pytest.raises(AssertionError, match="predicted again"):
                kept_model("key", never)


def test_what_is_damaged_or_foreign_is_predicted_again():
    kept_model("key", lambda: MODEL)
    (path,) = caches.plan_folder().iterdir()
    content = path.read_bytes()
    damaged = bytearray(content)
    damaged[len(content) // 2] ^= 255
    for other in (b"", content[: len(content) // 2], bytes(damaged), b"PK\3\4", gzip.compress(b"{}")):
        path.write_bytes(other)
        assert kept_model("key", lambda: OTHER) == OTHER
        assert kept_model("key", never) == OTHER
    path.rename(path.with_name("0" * 64))
    kept_model("other", lambda: MODEL)
    for copied in caches.plan_folder().iterdir():
        copied.write_bytes(path.with_name("0" * 64).read_bytes())
    assert kept_model("other", lambda: MODEL) == MODEL


def test_a_folder_that_takes_nothing_does_no_harm(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(caches, "plan_folder", lambda: tmp_path / "file")
    with caplog.at_level("INFO"):
        assert kept_model("key", lambda: MODEL) == MODEL
    assert f"{tmp_path / 'file'}: what was planned cannot be kept for the next start" in caplog.text
    monkeypatch.setattr(caches, "plan_folder", lambda: tmp_path / "plans")
    monkeypatch.setattr(model_planner, "FILES", 3)
    for number in range(FILES // 20):
        kept_model(number, lambda: MODEL)
    assert len(list((tmp_path / "plans").iterdir())) == 3


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_step_tells_those_of_other_sizes(checkpointing):
    """Of 1,009 items: what this prime divides grows with the items."""
    settings, work = assemble(PlanVocoder, SMALL), VocoderWork()
    target, plan = work.target(settings), plan_of(settings, work)
    sizes = (1, 4)
    for size, found in zip(sizes, predict_steps(target, plan, sizes, checkpointing), strict=True):
        alone = predict_step(target, plan, micro_batch_size=size, checkpointing=checkpointing)
        assert found.parts == pytest.approx(alone.parts, rel=1e-6)
        assert found.reserved_gb == pytest.approx(alone.reserved_gb, rel=1e-6)
        ours, theirs = (tuple(StepTotals.of((*step.micro_batch, *step.update))) for step in (found, alone))
        # A tensor of one item needs fewer copies, and more sums of 1,009 items take several blocks of threads.
        assert ours == pytest.approx(theirs, rel=3e-2)
