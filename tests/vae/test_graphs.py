"""The VAE's steps as CUDA graphs, recorded and replayed on the CPU with real values."""

import pytest
import torch

from tests.comparison import assert_same
from tests.recorded_graphs import RecordedGraphs
from tests.tables import slow
from tests.vae.test_recipe import weights_after

pytestmark = pytest.mark.usefixtures("no_garbage_collection")
EARLY = {"discriminator_start": 0, "discriminator_warmup_steps": 0, "lecam_weight": 0.1}


@pytest.mark.parametrize(
    ("count", "options"),
    [
        slow(6, EARLY),
        slow(20, {}),
        slow(20, {**EARLY, "micro_batch_size": 3}),
        slow(20, {**EARLY, "recompute_norms": False, "train_part": "decoder"}),
    ],
    ids=["adversarial", "late", "accumulated", "plain decoder"],
)
def test_replayed_steps_are_eager_steps(tmp_path, count, options):
    """The adversarial loss has an adaptive weight, and the discriminator sees what the autoencoder's graph has made."""
    recorder, how = RecordedGraphs(), {"dtype": torch.float32, "batch_size": 4, **options}
    (ours, _), (theirs, _) = (weights_after(count, tmp_path, graphs=one, **how) for one in (recorder, None))
    assert_same(ours, theirs)
    if options:
        assert (recorder.captures, recorder.replays) == (2, 2 * (count - 3))
    else:  # Batches change at step 2, and losses at step 5; the two phases before are too short for a graph.
        assert (recorder.captures, recorder.replays) == (2, 2 * (count - 7))
