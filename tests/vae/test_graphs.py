"""The VAE's steps as CUDA graphs, recorded and replayed on the CPU with real values."""

import pytest
import torch

from gputrain.engine import cuda_graph
from gputrain.engine.cuda_graph import replay_gradients
from gputrain.engine.run_folder import Run
from gputrain.engine.state import TrainState
from gputrain.engine.step import update
from gputrain.vae.lpips import Lpips
from gputrain.vae.recipe import VaeRecipe
from tests.recorded_graphs import RecordedGraphs
from tests.toy import cpu_runtime, quiet
from tests.vae.test_recipe import crops, settings_of

EARLY = {"discriminator_start": 0, "discriminator_warmup_steps": 0, "lecam_weight": 0.1, "batch_size": 4}


@pytest.fixture(autouse=True)
def no_garbage_collection(monkeypatch):
    monkeypatch.setattr(cuda_graph, "release_memory", lambda: None)


def trained(tmp_path, count, recorder=None, **changes):
    """Returns the weights and the losses of some steps."""
    settings = settings_of(**changes)
    lpips = Lpips.without_values() if settings.losses.uses_lpips else None
    runtime = cpu_runtime()
    recipe = VaeRecipe(settings, runtime, [], lpips)
    state = TrainState.begin(recipe, settings.schedule, runtime, Run(tmp_path, quiet(tmp_path), {}, ""))
    if recorder:
        replay_gradients(state, recorder)
    rows = []
    for step in range(count):
        images = crops(step, settings.schedule.batch_size)
        rows.append(update(state, recipe.prepare(images, step), step, 1e-4))
        recipe.average(step)
    weights = {f"{n}.{k}": v for n, m in recipe.modules.items() for k, v in m.state_dict().items()}
    return weights, [{name: float(value) for name, value in row.items()} for row in rows]


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (6, EARLY),
        pytest.param(20, {}, marks=pytest.mark.slow),
        pytest.param(20, {**EARLY, "micro_batch_size": 3, "discriminator_norm": "spectral"}, marks=pytest.mark.slow),
        pytest.param(8, {**EARLY, "step_order": "alternating"}, marks=pytest.mark.slow),
        pytest.param(20, {**EARLY, "lean": False, "train_part": "decoder"}, marks=pytest.mark.slow),
    ],
    ids=["adversarial", "late", "accumulated", "alternating", "plain decoder"],
)
def test_replayed_steps_are_eager_steps(tmp_path, count, options):
    """The adversarial loss has an adaptive weight, and the discriminator sees what the autoencoder's graph has made."""
    recorder = RecordedGraphs()
    ours, rows = trained(tmp_path, count, recorder, **options)
    theirs, expected = trained(tmp_path, count, **options)
    assert rows == expected
    assert not [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    if options:
        assert (recorder.captures, recorder.replays) == (2, 2 * (count - 3))
    else:  # Batches change at step 2, and losses at step 5; the two phases before are too short for a graph.
        assert (recorder.captures, recorder.replays) == (2, 2 * (count - 7))
