"""The voice's steps as CUDA graphs, recorded and replayed on the CPU with real values."""

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from gputrain.config import assemble
from gputrain.engine import cuda_graph
from gputrain.engine.cuda_graph import replay_gradients
from gputrain.engine.state import TrainState
from gputrain.engine.step import gradients, update
from gputrain.hw.plan import MOST_GRAPHED_SHAPES, Hardware, Setting
from gputrain.speech.buckets import ClipBatch
from gputrain.tts import recipe as recipe_module
from gputrain.tts.config import TrainTts
from gputrain.tts.data import bucket_shapes
from gputrain.tts.kind import TtsWork
from tests.comparison import assert_same
from tests.hw.test_plan import machine
from tests.recorded_graphs import RecordedGraphs
from tests.toy import weights
from tests.tts.test_recipe import HOP, begin, bucket

pytestmark = pytest.mark.usefixtures("no_garbage_collection")
SLOW = pytest.mark.slow


@pytest.fixture
def one_discriminator(monkeypatch):
    whole = recipe_module.vits_discriminators
    monkeypatch.setattr(recipe_module, "vits_discriminators", lambda width: type(whole(width))(list(whole(width))[1:2]))


def planned(state: TrainState, make: Callable[[], RecordedGraphs] | None = None) -> TrainState:
    """Returns a state whose batches are made for graphs, which are captured if `make` is given."""
    state.runtime.plan = replace(state.runtime.plan, cuda_graphs=Setting(True, "asked for"))
    for module in state.recipe.voice.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
    if make:
        replay_gradients(state, make)
    return state


def with_room(clips: ClipBatch, frames: int, symbols: int) -> ClipBatch:
    """Returns the bucket with this room for each clip."""
    rows = len(clips.ids_BS)
    ids_BS, wave_BT = torch.zeros(rows, symbols, dtype=torch.int64), torch.zeros(rows, frames * HOP, dtype=torch.int16)
    ids_BS[:, : clips.ids_BS.shape[1]] = clips.ids_BS
    wave_BT[:, : clips.wave_BT.shape[1]] = clips.wave_BT
    return clips._replace(ids_BS=ids_BS, wave_BT=wave_BT)


def two_shapes(step: int) -> ClipBatch:
    """Returns clips of other lengths in each step, in the shape of long or of short ones."""
    if step % 3 == 2:
        return with_room(bucket(step, 4, 80 - step), 80, 16)
    return with_room(bucket(step, 6, 60 - step), 60, 14)


def steps(state: TrainState, count: int, first: int = 0) -> list[dict[str, float]]:
    rows = []
    torch.manual_seed(3)  # Of dropout.
    for step in range(first, first + count):
        scalars = update(state, state.recipe.prepare([two_shapes(step)], step), step, 1e-3)
        state.recipe.average(step)
        rows.append({name: float(value) for name, value in scalars.items()})
    return rows


def compared(tmp_path, count: int, **changes: object) -> tuple[RecordedGraphs, TrainState]:
    """Asserts that replayed steps are eager ones, losses and weights, with dropout."""
    recorder = RecordedGraphs()
    make = functools.partial(begin, tmp_path, "fast", dtype=torch.float32, **changes)
    ours, theirs = planned(make(), recorder), planned(make())
    assert steps(ours, count) == steps(theirs, count)
    assert_same(weights(ours.recipe), weights(theirs.recipe))
    return recorder, ours


@SLOW
def test_replayed_steps_are_eager_steps(tmp_path, one_discriminator, monkeypatch):
    """A shape is captured when it has come twice here; the other one is computed eagerly beside it. The prior of
    positions has another weight in each step."""
    monkeypatch.setattr(cuda_graph, "EAGER_PASSES", 0)
    recorder, _ = compared(tmp_path, 4, alignment_prior_steps=9)
    assert (recorder.captures, recorder.replays) == (1, 2)


@SLOW
@pytest.mark.parametrize("changes", [{}, {"micro_batch_size": 4}])
def test_two_shapes_have_graphs_at_once(tmp_path, one_discriminator, changes):
    """They write the same gradients. The graph of step 4 is captured again when the prior ends at step 9."""
    recorder, state = compared(tmp_path, 21, alignment_prior_steps=9, **changes)
    groups = len(state.recipe.step_groups)
    assert (recorder.captures, recorder.replays) == (3 * groups, groups * (3 + 6 + 2))
    graphs = [graph for key, graph in state.gradients.graphs.items() if key.group == state.recipe.step_groups[0].name]
    assert len(graphs) == 2
    places = [[id(gradient) for _, gradient in graph.gradients] for graph in graphs]
    assert places[0] == places[1]


def test_room_changes_nothing_but_rounding(tmp_path, one_discriminator):
    """In float64, without dropout: gradients of the same clips, alone and with room for longer ones."""
    found = []
    for room in (False, True):
        state = begin(tmp_path, "fast", alignment_prior_steps=9)
        clips = bucket(1)
        if room:
            state.runtime.plan = replace(state.runtime.plan, cuda_graphs=Setting(True, "asked for"))
            clips = with_room(clips, 75, 19)
        (group,), batch = state.recipe.step_groups, state.recipe.prepare([clips], 1)
        assert (batch.spectrogram_BNT.shape[2], max(batch.frames), max(batch.symbols)) == (
            (75, 75, 19) if room else (60, 60, 13)
        )
        gradients(state, group, batch, 1, 1)
        found.append(torch.cat([one.grad.flatten() for one in group.parameters() if one.grad is not None]))
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 1e-12


def test_room_without_graphs_is_cropped(tmp_path):
    state = begin(tmp_path)
    (part,) = state.recipe.split(state.recipe.prepare([with_room(bucket(0), 75, 19)], 0), 1)
    assert (part.spectrogram_BNT.shape[2], part.ids_BS.shape[1], part.noise_BCT.shape[2]) == (60, 13, 60)


@pytest.mark.parametrize(
    ("changes", "shapes", "captured"),
    [
        ({}, MOST_GRAPHED_SHAPES, True),
        ({"use_cuda_graphs": False}, 0, True),
        ({"accumulation_steps": 2}, 0, False),
        ({"gradient_checkpointing": True}, 0, False),
    ],
)
def test_what_is_captured(changes, shapes, captured, tmp_path):
    settings = assemble(TrainTts, {"data_path": ".", "use_cuda_graphs": True, **changes})
    assert bucket_shapes(settings) == shapes
    state = begin(tmp_path, **{name: value for name, value in changes.items() if name != "use_cuda_graphs"})
    assert (state.recipe.step_groups[0].graph_key is not None) is captured
    assert TtsWork().decide(machine("H100"), Hardware(use_cuda_graphs=True)).cuda_graphs.value is True
