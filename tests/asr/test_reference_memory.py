"""Memory of the recogniser's training step against references that other code made.

- The 37 reference cells of tests/planner/test_reference_cells.py are those of a bare model with a simple loss. The
  recipe is brought to their conditions: no EMA and no SpecAugment, gradients that do not stay from step to step where
  the cells have none, and the CPU's autocast rules. What is left by construction is the CTC loss, with one label a
  second, instead of a mean of log-probabilities: its state of 2 x labels + 1 numbers a frame is below 2 MB a clip.
- For frozen encoders and adapters there are no such cells. torch's own MemTracker follows a step of transformers' model
  with its own loss on the same shapes instead, with the adapters of transformers or plain low-rank ones.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from gputrain.asr import model as networks
from gputrain.asr.config import PlannedSpeech, TrainAsr
from gputrain.asr.data import facts_of
from gputrain.asr.kind import AsrWork
from gputrain.config import assemble
from gputrain.engine.recipe import StepGroup
from gputrain.engine.step import gradients
from gputrain.hw.plan import Hardware, Plan, Setting, decide
from gputrain.planner.kind_work import PlanTarget
from gputrain.planner.memory.allocator import CachingAllocator
from gputrain.planner.memory.fake_runtime import FakeRuntime, FunctionsOf, on_fake_tensors
from gputrain.planner.memory.predict import (
    ResidentStep,
    batch_tensors,
    explained,
    optimizer_tensors,
    predict_step,
    weights_of,
)
from gputrain.planner.memory.timeline import MemoryTimeline
from tests.machines import H100
from tests.planner.test_reference_cells import BATCHES, CELLS, RESIDENT

pytestmark = pytest.mark.slow

WINDOWS = dataclasses.replace(H100, system="Windows")  # There the allocator counts whole blocks, as in the cells.
PRESET = {"300M": "xls-r-300m", "1B": "xls-r-1b"}


def settings_of(size: str, **changes: object) -> TrainAsr:
    values = {
        "data_path": ".", "preset": PRESET[size], "batch_size": 1, "max_batch_audio_ratio": 1.0, "learning_rate": 1e-3,
        "hidden_dropout": 0.1, "mask_time_prob": 0.0, "ema_decay": 0.0,
    }  # fmt: skip
    return assemble(TrainAsr, {**values, **changes})


def target_of(settings: TrainAsr, seconds: float) -> PlanTarget:
    return AsrWork(facts_of(settings, PlannedSpeech(labels_a_second=1), seconds)).target(settings)


def plan_of(precision: str) -> Plan:
    plan = decide(WINDOWS, Hardware(precision="mixed" if precision != "fp32" else "tf32", use_torch_compile=False))
    assert plan.precision.value == precision
    return plan


class OfCells(FakeRuntime):
    """A GPU's runtime with the CPU's autocast rules, which keep layer norms in 16 bit, as in the cells."""

    @contextmanager
    def autocast(self) -> Iterator[None]:
        with FunctionsOf("cpu"), torch.autocast("cpu", self.dtype, enabled=self.dtype != torch.float32):
            yield


@contextmanager
def copies_dropped(group: StepGroup) -> Iterator[StepGroup]:
    """Has a group drop 16-bit copies of weights before the backward pass, and keep none in checkpoints that are
    computed again, as the cells do. A run keeps them for the next micro-batch."""

    def loss(batch, step):
        for term in group.loss(batch, step):
            torch.clear_autocast_cache()
            torch.set_autocast_cache_enabled(False)
            yield term

    @contextmanager
    def uncached():
        torch.set_autocast_cache_enabled(False)
        yield

    def checkpointed(*arguments, **named):
        return checkpoint(*arguments, **named, context_fn=lambda: (nullcontext(), uncached()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(networks, "checkpoint", checkpointed)
        yield dataclasses.replace(group, loss=loss)


def first_micro_batch_gb(
    target: PlanTarget, plan: Plan, items: int, checkpointing: bool, *, keeps_copies: bool = False
) -> float:
    """Returns the peak of a step's first micro-batch, without gradients from before: the recipe's own step."""
    timeline = MemoryTimeline()
    with on_fake_tensors(), explained():
        made = ResidentStep.of(target, OfCells(plan, timeline), checkpointing, items)
        recipe, micro_batch = made.recipe, made.micro_batch(items)
        timeline.note("optimizer", optimizer_tensors(recipe))
        timeline.note("parameters", weights_of(recipe), batch_tensors(made.batch))
        (group,) = recipe.step_groups
        with timeline.watching(), nullcontext(group) if keeps_copies else copies_dropped(group) as running:
            gradients(made.state, running, micro_batch, 1, made.step)
    return timeline.peak(CachingAllocator())[0] / 1e9


@pytest.mark.parametrize("at", range(4), ids=lambda at: f"batch_{BATCHES[at]}")
@pytest.mark.parametrize("row", CELLS, ids=str)
def test_a_cell_without_resident_gradients(row, at):
    size, seconds, precision, checkpointing = row
    target = target_of(settings_of(size), seconds)
    found = first_micro_batch_gb(target, plan_of(precision), BATCHES[at], checkpointing)
    assert abs(found - CELLS[row][at]) <= 0.05 + 0.01 * CELLS[row][at]  # The cells are rounded to 0.1 GB.


@pytest.mark.parametrize("items", RESIDENT)
def test_a_cell_with_resident_gradients(items):
    """As the planner itself asks: no helper of this file takes part. The table was made with the CPU's dropout, which
    keeps its noise in fp32, and with whole blocks of memory."""
    plan = dataclasses.replace(plan_of("fp32"), device=Setting("cpu", "as the table"))
    found = predict_step(target_of(settings_of("1B"), 8), plan, micro_batch_size=items, caching_allocator=True)
    assert found.allocated_gb == pytest.approx(RESIDENT[items], rel=0.01)


def test_copies_of_weights_in_16_bit_are_what_a_run_adds_to_a_cell():
    """One autocast around all micro-batches keeps them to the end of the backward pass, where the cells have freed most
    of them: 2 bytes for each weight of a matrix product. It matters for the smallest batches only."""
    target, plan = target_of(settings_of("1B"), 8), plan_of("bf16")
    cell = first_micro_batch_gb(target, plan, 1, False)
    kept = first_micro_batch_gb(target, plan, 1, False, keeps_copies=True)
    with on_fake_tensors():
        recipe = target.build(FakeRuntime(plan, MemoryTimeline()), False)
        # Weights of the encoder's layers: 4 projections of attention and 2 of the feed-forward part.
        copies = sum(p.numel() for name, p in recipe.model.named_parameters() if ".layers." in name and p.ndim == 2)
    assert kept - cell == pytest.approx(2 * copies / 1e9, rel=0.02)


# ------------------------------------------------------------------------------------- what trains, against MemTracker


def their_tracker():
    """Returns a MemTracker without its hooks on gradients, which fail for frozen parameters. It counts gradients all
    the same."""
    from torch.distributed._tools.mem_tracker import MemTracker  # This takes 2 s, in every run that collects the tests.

    class Tracker(MemTracker):
        def _track_module_params_and_buffers(self, module, install_grad_hooks=True):
            return super()._track_module_params_and_buffers(module, install_grad_hooks=False)

    return Tracker()


class LowRank(nn.Module):
    """A frozen linear layer with low-rank adapters, written as in peft (without scale and dropout)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, hidden):
        return self.base(hidden) + self.lora_b(self.lora_a(hidden))


def their_model(architecture: dict, kind: str):
    transformers = pytest.importorskip("transformers")
    config = transformers.Wav2Vec2Config(
        **{**architecture, "apply_spec_augment": False, "attn_implementation": "sdpa"}
    )  # fmt: skip
    model = transformers.Wav2Vec2ForCTC(config).train()
    if kind != "full":
        model.freeze_feature_encoder()
    if kind not in ("full", "feature encoder frozen"):
        model.freeze_base_model()
    if kind == "attention":
        for parameter in model._get_adapters().values():
            parameter.requires_grad_(True)
    if kind == "lora":
        for layer in model.wav2vec2.encoder.layers:
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                setattr(layer.attention, name, LowRank(getattr(layer.attention, name), 16))
    return model


def tracked_gb(architecture: dict, kind: str, seconds: float, items: int) -> float:
    """Returns the peak of the second of two micro-batches, with gradients and optimizer state resident."""
    with FakeTensorMode():
        model, wave = their_model(architecture, kind), torch.empty(items, round(16000 * seconds))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, fused=True)
        tracker = their_tracker()
        tracker.track_external(model, optimizer, wave)
        with tracker:
            for first in (True, False):
                loss = -torch.log_softmax(model(wave).logits.float(), -1).mean()
                loss.backward()
                del loss
                if first:
                    optimizer.step()
                    tracker.reset_mod_stats()
    (found,) = tracker.get_tracker_snapshot("peak").values()
    return found["Total"] / 1e9


KINDS = {
    "full": {"freeze_feature_encoder": False},
    "feature encoder frozen": {"freeze_feature_encoder": True},
    "lora": {"adapters": "lora"},
    "attention": {"adapters": "attention"},
    "encoder frozen": {"freeze_encoder_steps": 10},
}


@pytest.mark.parametrize(("size", "kind"), [*(("300M", kind) for kind in KINDS), ("1B", "lora")])
def test_what_trains_takes_as_much_as_in_transformers(size, kind, monkeypatch):
    settings = settings_of(size, **KINDS[kind])
    architecture = facts_of(settings, PlannedSpeech(), 8).architecture
    expected = tracked_gb(architecture, kind, 8, 4)
    width = architecture["hidden_size"]
    if kind not in ("full", "feature encoder frozen"):
        # The weight of the positional convolution (128 wide, 16 groups) is made once for all micro-batches, and stays.
        expected += 4 * width * (width // 16) * 128 / 1e9
    if kind == "encoder frozen":  # A plan is made for the step from which the encoder trains; this is the first.
        monkeypatch.setattr("gputrain.asr.recipe.RecogniserRecipe.peak_memory_step", lambda recipe, step: step)
        with on_fake_tensors():
            model = their_model(architecture, "full")
        base = [*model.wav2vec2.feature_projection.parameters(), *model.wav2vec2.encoder.parameters()]
        # A prediction has the gradients and the two moments of everything that trains later.
        expected += 3 * 4 * sum(parameter.numel() for parameter in base) / 1e9
    plan = dataclasses.replace(plan_of("fp32"), device=Setting("cpu", "as the tracker's dropout"))
    found = predict_step(target_of(settings, 8), plan, micro_batch_size=4, caching_allocator=True)
    assert found.allocated_gb == pytest.approx(expected, rel=0.01)
