"""The vocoder's steps as CUDA graphs, recorded and replayed on the CPU with real values."""

import copy

import pytest
import torch

from gputrain.engine import graphs
from gputrain.engine.graphs import StepGraphs
from gputrain.engine.recipe import phases_of
from tests.recorded_graphs import RecordedGraphs
from tests.vocoder.test_train import begin, steps

MUON = {"generator_optimizer": "muon", "discriminator_optimizer": "muon", "weight_decay": 0.01}
SMALL = {**MUON, "discriminators": "fast_mpd", "crop_mel_frames": 12, "upsample_initial_channel": 8}
SHIFTED = {**SMALL, "mini_nsf": True, "pc_aug": True, "noise_sigma": 0.1}

ALL = {
    "discriminators": "msd,mpd,mrd,fast_mpd,fast_mrd", "mrd_fft_sizes": [128], "mrd_hop_sizes": [16],
    "mrd_win_lengths": [64],
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_garbage_collection(monkeypatch):
    monkeypatch.setattr(graphs, "release_memory", lambda: None)


def recorded(state, recorder):
    state.graphs = StepGraphs.with_backend(state.recipe, state.runtime, recorder)
    return state


def weights(state):
    return {f"{n}.{k}": v.clone() for n, m in state.recipe.modules.items() for k, v in m.state_dict().items()}


def assert_equal_weights(ours, theirs):
    mine, expected = weights(ours), weights(theirs)
    different = [name for name in expected if not torch.equal(mine[name], expected[name])]
    assert not different


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (6, SHIFTED),
        (6, {**SMALL, "micro_batch_size": 2}),
        pytest.param(20, {**MUON}, marks=pytest.mark.slow),
        pytest.param(20, {**SHIFTED, **ALL, "micro_batch_size": 3}, marks=pytest.mark.slow),
        pytest.param(20, {**SMALL, "discriminator_start": 4}, marks=pytest.mark.slow),
        pytest.param(6, {**SMALL, "step_order": "alternating"}, marks=pytest.mark.slow),
    ],
    ids=["shifted", "accumulated", "all", "shifted, accumulated", "late discriminators", "alternating"],
)  # fmt: skip
def test_replayed_steps_are_eager_steps(tmp_path, count, options):
    """Losses and weights are equal bit for bit. A capture of the gradients is followed by one of each Muon's step."""
    recorder = RecordedGraphs()
    ours, theirs = recorded(begin(tmp_path, **options), recorder), begin(tmp_path, **options)
    assert steps(ours, count) == steps(theirs, count)
    assert_equal_weights(ours, theirs)
    if "discriminator_start" in options:  # The generator alone has a graph and a step from step 3 to step 4.
        assert (recorder.captures, recorder.replays) == (2 + 3, 2 + 3 * (count - 6))
    else:
        graphs_of_a_step = 2 + len(ours.recipe.step_groups)
        assert (recorder.captures, recorder.replays) == (graphs_of_a_step, graphs_of_a_step * (count - 3))


class FailingThird(RecordedGraphs):
    """The capture of the second Muon's step fails."""

    def __init__(self, message):
        super().__init__()
        self.message = message

    def capture(self, function):
        made = super().capture(function)
        if self.captures == 3:
            raise RuntimeError(self.message)
        return made


@pytest.mark.parametrize("message", ["CUDA out of memory", "CUDA error: operation not permitted"])
def test_a_step_whose_graph_fails_is_made_once(tmp_path, message):
    """Its weights and its momentum are those of the eager step."""
    ours, theirs = recorded(begin(tmp_path, **SMALL), FailingThird(message)), begin(tmp_path, **SMALL)
    assert steps(ours, 6) == steps(theirs, 6)
    assert_equal_weights(ours, theirs)
    assert (ours.graphs.make is None) == ("permitted" in message)


def test_a_wrong_step_of_matrices_ends_the_graphs(tmp_path, caplog):
    """A weight that a replay moves further than the eager step gets the eager step's value."""
    ours, theirs = begin(tmp_path, **SMALL), begin(tmp_path, **SMALL)
    moved = ours.recipe.step_groups[0].phases[0].optimizer.param_groups[0]["params"][0]

    class Wrong(RecordedGraphs):
        def capture(self, function):
            made, replay = super().capture(function)
            return made, lambda: (replay(), moved.detach().mul_(1.001) if self.captures == 2 else None)

    recorded(ours, Wrong())
    assert steps(ours, 5) == steps(theirs, 5)
    assert_equal_weights(ours, theirs)
    assert "the weights of a replayed step differ from those of a step" in caplog.text


@pytest.mark.parametrize(("products", "kept"), [(torch.bfloat16, True), (torch.float32, False)])
def test_a_step_of_matrices_is_compared_in_the_format_of_muons_products(tmp_path, products, kept):
    """A replay moves a weight by a hundredth further: half of the digits are 0.088 in bf16, 3.5e-4 in fp32."""
    ours = begin(tmp_path, **SMALL)
    muons = [phase.optimizer for phase in phases_of(ours.recipe)]
    for muon in muons:
        muon.product_dtype = products
    moved = muons[0].param_groups[0]["params"][0]

    class Inexact(RecordedGraphs):
        def capture(self, function):
            made, replay = super().capture(function)

            def replay_inexactly() -> None:
                before = moved.detach().clone()
                replay()
                moved.detach().lerp_(before, -0.01)

            return made, replay_inexactly

    steps(recorded(ours, Inexact()), 4)
    assert bool(ours.graphs.of_matrices) is kept


def test_going_back_to_a_checkpoint_forgets_the_graphs(tmp_path):
    """The optimizers' state is then in other tensors, and a step of both runs is the same afterwards."""
    recorder = RecordedGraphs()
    ours, theirs = recorded(begin(tmp_path, **SMALL), recorder), begin(tmp_path, **SMALL)
    for state in (ours, theirs):
        steps(state, 4)
        kept = copy.deepcopy(state.snapshot())
        steps(state, 2, first=4)
        state.restore(kept)
        steps(state, 6, first=4)
    assert recorder.captures == 6
    assert_equal_weights(ours, theirs)


def test_adamw_alone_has_one_graph(tmp_path):
    recorder = RecordedGraphs()
    options = {**SMALL, "generator_optimizer": "adamw", "discriminator_optimizer": "adamw"}
    ours, theirs = recorded(begin(tmp_path, **options), recorder), begin(tmp_path, **options)
    assert steps(ours, 5) == steps(theirs, 5)
    assert_equal_weights(ours, theirs)
    assert (recorder.captures, recorder.replays) == (1, 2)
    assert all(phase.optimizer.state for phase in phases_of(ours.recipe))
