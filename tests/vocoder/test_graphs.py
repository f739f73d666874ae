"""The vocoder's steps as CUDA graphs, recorded and replayed on the CPU with real values."""

import copy

import pytest

from gputrain.engine.cuda_graph import replay_gradients
from tests.comparison import assert_same
from tests.recorded_graphs import RecordedGraphs
from tests.tables import slow
from tests.toy import weights
from tests.vocoder.test_train import begin, steps

pytestmark = pytest.mark.usefixtures("no_garbage_collection")
MUON = {"generator_optimizer": "muon", "discriminator_optimizer": "muon", "weight_decay": 0.01}
SMALL = {**MUON, "discriminators": "fast_mpd", "crop_mel_frames": 12, "upsample_initial_channel": 8}
SHIFTED = {**SMALL, "mini_nsf": True, "pc_aug": True, "noise_sigma": 0.1}

ALL = {
    "discriminators": "msd,mpd,mrd,fast_mpd,fast_mrd", "mrd_fft_sizes": [128], "mrd_hop_sizes": [16],
    "mrd_win_lengths": [64],
}  # fmt: skip


def recorded(state, recorder):
    replay_gradients(state, recorder)
    return state


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (6, SHIFTED),
        slow(6, {**SMALL, "micro_batch_size": 2}),
        slow(20, {**MUON}),
        slow(20, {**SHIFTED, **ALL, "micro_batch_size": 3}),
        slow(20, {**SMALL, "discriminator_start": 4}),
    ],
    ids=["shifted", "accumulated", "all", "shifted, accumulated", "late discriminators"],
)  # fmt: skip
def test_replayed_steps_are_eager_steps(tmp_path, count, options):
    """Losses and weights are equal bit for bit, those that Muon steps too."""
    recorder = RecordedGraphs()
    ours, theirs = recorded(begin(tmp_path, **options), recorder), begin(tmp_path, **options)
    assert steps(ours, count) == steps(theirs, count)
    assert_same(weights(ours.recipe), weights(theirs.recipe))
    groups = len(ours.recipe.step_groups)
    if "discriminator_start" in options:  # Other losses begin at step 4.
        assert (recorder.captures, recorder.replays) == (2 * groups, groups * (count - 5))
    else:
        assert (recorder.captures, recorder.replays) == (groups, groups * (count - 3))


@pytest.mark.slow
def test_graphs_stay_when_a_checkpoint_is_loaded(tmp_path):
    """Its weights are copied into the tensors that the graphs read, and the steps are those of an eager run."""
    recorder = RecordedGraphs()
    ours, theirs = recorded(begin(tmp_path, **SMALL), recorder), begin(tmp_path, **SMALL)
    for state in (ours, theirs):
        steps(state, 4)
        kept = copy.deepcopy(state.snapshot())
        steps(state, 2, first=4)
        state.restore(kept)
        steps(state, 6, first=4)
    assert recorder.captures == 1
    assert_same(weights(ours.recipe), weights(theirs.recipe))
