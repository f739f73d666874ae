"""The fixed part of the voice's steps as CUDA graphs, recorded and replayed on the CPU with real values."""

import pytest
import torch

from gputrain.engine import graphs, train
from gputrain.engine.graphs import StepGraphs
from gputrain.engine.train import update
from tests.recorded_graphs import RecordedGraphs
from tests.tts.test_recipe import begin, bucket, weights

LONGEST = (60, 52, 40, 56, 36)  # Frames of the longest clip, by step, over and over.


@pytest.fixture(autouse=True)
def no_garbage_collection(monkeypatch):
    monkeypatch.setattr(graphs, "release_memory", lambda: None)
    monkeypatch.setattr(train, "release_memory", lambda: None)


def recorded(state, recorder):
    state.graphs = StepGraphs.with_backend(state.recipe, state.runtime, recorder)
    return state


def steps(state, count, clips=lambda step: 6, longest=lambda step: LONGEST[step % len(LONGEST)]):
    """Returns the scalars of each step."""
    rows = []
    for step in range(count):
        batch = state.recipe.prepare([bucket(step, clips(step), longest(step))], step)
        rows.append({name: float(value) for name, value in update(state, batch, step, 1e-3).items()})
        state.recipe.average(step)
    return rows


def assert_equal_weights(ours, theirs):
    mine, expected = weights(ours), weights(theirs)
    assert not [name for name in expected if not torch.equal(mine[name], expected[name])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "preset", "speakers", "changes"),
    [
        (20, "medium", 1, {"micro_batch_size": 2}),
        (20, "fast", 2, {}),
        (20, "medium", 2, {"micro_batch_size": 4, "ema_decay": 0.0}),
        (20, "medium", 2, {"step_order": "alternating", "micro_batch_size": 4}),
    ],
)
def test_replayed_steps_are_eager_steps(tmp_path, count, preset, speakers, changes):
    """Losses and weights are equal bit for bit, whatever the lengths of the clips, which change in every step."""
    given = {"preset": preset, "speakers": speakers, "dtype": torch.float32, **changes}
    recorder = RecordedGraphs()
    ours, theirs = recorded(begin(tmp_path, **given), recorder), begin(tmp_path, **given)
    assert steps(ours, count) == steps(theirs, count)
    assert_equal_weights(ours, theirs)
    parts = len(ours.recipe.step_groups)  # Each has a part of fixed shapes.
    assert recorder.captures >= parts
    assert recorder.replays >= parts * (count - 2)
    assert ours.graphs.make is not None
