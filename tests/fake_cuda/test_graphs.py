"""CUDA graphs of real training steps on a card that is not there: the calls of torch.cuda, and what is in a capture."""

from dataclasses import replace

import pytest
import torch

from gputrain.engine import cuda_graph
from gputrain.engine.cuda_graph import replay_gradients_if_planned
from gputrain.engine.recipe import Term
from gputrain.engine.state import TrainState
from gputrain.engine.step import update
from gputrain.hw.plan import Hardware, decide
from gputrain.hw.probe import probe
from gputrain.hw.runtime import apply
from tests.fake_cuda.device import UNAVAILABLE, fake_cuda
from tests.fake_cuda.steps import LATE, vae, vocoder, voice
from tests.fake_cuda.tensors import Generator
from tests.tables import slow
from tests.tts.test_train import small_presets

pytestmark = pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE)
EAGER = Hardware(use_torch_compile=False)
GRAPHS = Hardware(use_torch_compile=False, use_cuda_graphs=True)
MUON = {"generator_optimizer": "muon", "discriminator_optimizer": "adamw"}
CAPTURE = "capture on stream 1 into pool (0, 1), thread_local"
SIDE = ["stream 1 waits for 0", "stream 0 waits for 1"]  # The eager pass before a capture is made on its stream.


def trained(card, build, steps, *, hardware=GRAPHS, micro_batch=4):
    runtime = apply(decide(probe(), hardware))
    recipe, loaded = build(runtime)
    state = TrainState.for_measurement(recipe, runtime)
    replay_gradients_if_planned(state)
    state.gradient_clip = 1.0
    state.micro_batch = {group.name: micro_batch for group in recipe.step_groups}
    for step in range(LATE, LATE + steps):
        batch = recipe.prepare(loaded, step)
        with card.watched() as copies:
            update(state, batch, step, 1e-4)
    return state, copies


@pytest.fixture(autouse=True)
def no_garbage_collection(monkeypatch):
    monkeypatch.setattr(cuda_graph, "release_memory", lambda: torch.cuda.empty_cache())


@pytest.mark.slow
def test_the_vocoder_has_a_graph_of_gradients():
    """The calls in their order: no copy between device and host is in a capture, and a replayed step has none."""
    with fake_cuda() as card:
        build = vocoder(mini_nsf=True, pc_aug=True, noise_sigma=0.1, batch_size=2, discriminators=["mpd"], **MUON)
        state, copies = trained(card, build, 5, micro_batch=1)
        assert card.graphs.log == [*SIDE, CAPTURE, "end of capture", "replay", "replay"]
        assert not copies.made
        assert card.graphs.current is card.graphs.default
        (graph,) = state.gradients.graphs.values()
        gradients = [gradient for _, gradient in graph.gradients if gradient is not None]
        assert {gradient.device for gradient in gradients} == {torch.device("cuda", 0)}
        assert state.runtime.plan.cuda_graphs.value


@pytest.mark.slow
def test_the_vae_has_two_graphs_that_share_a_pool():
    with fake_cuda() as card:
        state, copies = trained(card, vae(adversarial_weight=0.5, lecam_weight=0.1), 5)
        assert card.graphs.log == [*2 * [*SIDE, CAPTURE, "end of capture", "replay"], "replay", "replay"]
        assert not copies.made
        assert [key.group for key in state.gradients.graphs] == ["autoencoder", "discriminator"]


@pytest.mark.slow
def test_the_voice_has_a_graph_of_gradients():
    """With dropout and the search for an alignment; no copy between device and host is in the capture."""
    with fake_cuda() as card, small_presets():
        state, copies = trained(card, voice(2), 5)
        assert card.graphs.log == [*SIDE, CAPTURE, "end of capture", "replay", "replay"]
        assert not copies.made
        assert state.runtime.plan.cuda_graphs.value


@pytest.mark.parametrize("reads", [slow("mean"), "cpu"])
def test_a_loss_that_reads_from_the_device_is_not_captured(reads, caplog):
    """CUDA makes the whole capture invalid; the allocator is informed of its end, the stream is the default one, and
    random numbers are drawn as if there had been no capture."""
    with fake_cuda() as card:
        ended = []
        torch._C._cuda_endAllocateToPool = lambda device, pool: ended.append((device, pool))
        torch._C._cuda_releasePool = lambda device, pool: ended.append("released")
        try:

            def build(runtime):
                recipe, loaded = vae()(runtime)
                (weight, *_) = recipe.autoencoder.parameters()

                def reading(batch, step):
                    float(batch.noise_BLhw.mean()) if reads == "mean" else batch.noise_BLhw.cpu()
                    yield Term("squares", weight.square().sum() / batch.global_items)

                recipe.step_groups = [replace(recipe.step_groups[0], loss=reading)]
                return recipe, loaded

            state, _ = trained(card, build, 4)
            torch.nn.functional.dropout(torch.zeros(3, device="cuda"))
            seed = state.recipe.settings.schedule.seed
            assert torch.equal(torch.cuda.default_generators[0].get_state(), Generator().manual_seed(seed).get_state())
        finally:
            del torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool
        assert ended == [(0, (0, 1)), "released"]
        assert card.graphs.log.count(CAPTURE) == 1
        assert "replay" not in card.graphs.log
        assert card.graphs.current is card.graphs.default
        assert state.runtime.plan.cuda_graphs.value is False
        assert "previous error during capture" in state.runtime.plan.cuda_graphs.reason
        assert "CUDA graphs are off" in caplog.text


@pytest.mark.slow
def test_nothing_is_captured_unless_asked_for():
    with fake_cuda() as card:
        state, _ = trained(card, vae(), 5, hardware=EAGER)
        assert not card.graphs.log
        assert "no gain has been measured" in state.runtime.plan.cuda_graphs.reason
