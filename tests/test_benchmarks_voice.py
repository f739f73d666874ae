"""The voice's benchmarks, as far as they go without a GPU and without the peer's code."""

import argparse
import importlib
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gputrain.audio.mel import log_mel
from gputrain.bench.runner import BenchResult
from gputrain.tts.align import path_from_durations
from gputrain.tts.architecture import voice_architecture
from gputrain.tts.model import Voice, segment_starts
from tests.tables import each_row
from tests.toy import cpu_runtime

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
peer = importlib.import_module("vits_peer")
versus = importlib.import_module("vits_vs_piper")
rtf = importlib.import_module("voice_rtf")
precision = importlib.import_module("precision")

ROW = {"configuration": "medium", "batch_size": 2, "seconds": 0.6, "sizes": versus.TINY, "device": "cpu"}


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    """No test makes a step."""
    train = versus.training(ROW, **versus.PLAIN, discriminator_channels=8)
    return versus.begin(ROW, train, cpu_runtime(), tmp_path_factory.mktemp("run"))


@pytest.fixture
def batch(trial):
    return trial.recipe.prepare(trial.loaded, 0)


def test_checks_come_first_and_sides_take_turns():
    options = argparse.Namespace(
        peer_root=Path("peer"), preset=["high", "medium"], device="cpu", threads=[2], sides=["peer", "ours"],
        check=True, batch_size=4, seconds=5.0, sizes={}, rounds=2, warmup=1, steps=3,
    )  # fmt: skip
    rows = list(versus.rows(options, Path("scratch")))
    assert [row.label for row in rows] == [
        "high: check", "medium: check", *2 * ["high, 2 threads: peer", "high, 2 threads: ours",
                                             "medium, 2 threads: peer", "medium, 2 threads: ours"]
    ]  # fmt: skip
    assert rows[0].settings["weights"] == rows[2].settings["weights"] != rows[1].settings["weights"]


@each_row(
    ("text_encoder.embedding.weight", ["enc_p.emb.weight"]),
    ("text_encoder.layers.4.attention.query_key_value.bias",
     [f"enc_p.encoder.attn_layers.4.conv_{part}.bias" for part in "qkv"]),
    ("text_encoder.layers.0.attention.relative_keys", ["enc_p.encoder.attn_layers.0.emb_rel_k"]),
    ("text_encoder.layers.5.attention_norm.weight", ["enc_p.encoder.norm_layers_1.5.gamma"]),
    ("text_encoder.layers.1.convolutions.narrow.weight", ["enc_p.encoder.ffn_layers.1.conv_2.weight"]),
    ("posterior_encoder.wavenet.layers.15.out.weight_g", ["enc_q.enc.res_skip_layers.15.weight_g"]),
    ("flow.couplings.3.post.bias", ["flow.flows.6.post.bias"]),
    ("duration_predictor.text_post.weight", ["dp.proj.weight"]),
    ("duration_predictor.posterior_stack.layers.2.pointwise_norm.bias", ["dp.post_convs.norms_2.2.beta"]),
    ("duration_predictor.flow.log_scale", ["dp.flows.0.logs"]),
    ("duration_predictor.posterior_flow.couplings.1.stack.layers.0.depthwise.weight",
     ["dp.post_flows.3.convs.convs_sep.0.weight"]),
    ("decoder.head.post.weight", ["dec.conv_post.weight"]),
    ("decoder.resblocks.8.convs.1.weight_v", ["dec.resblocks.8.convs.1.weight_v"]),
)  # fmt: skip
def test_names_of_the_peer(ours, theirs):
    assert peer.names_of(ours) == theirs


@pytest.mark.parametrize("preset", ["high", "medium"])
def test_every_tensor_has_a_name_of_its_own(preset):
    with torch.device("meta"):
        ours = list(Voice(voice_architecture(preset, num_symbols=8)).state_dict())
    theirs = [name for one in ours for name in peer.names_of(one)]
    assert len(set(theirs)) == len(theirs) == len(ours) + 2 * 2 * 6  # queries, keys and values of six layers are apart


def test_noise_is_what_the_peer_draws_next(batch):
    noisy = peer.with_noise_of_the_peer(batch)
    torch.manual_seed(0)
    assert torch.equal(noisy.noise_BCT, torch.randn(2, 16, 52))
    assert torch.equal(noisy.duration_noise_B2S, torch.randn(2, 2, 18))
    assert torch.equal(noisy.places_B, torch.rand(2))


def test_mels_that_the_peer_is_handed_are_ours_at_the_segments(trial, batch, monkeypatch):
    module = SimpleNamespace()
    monkeypatch.setitem(sys.modules, peer.TASK, module)
    peer.hand_over_mel(batch, trial.recipe.mel)
    whole_BMT = module.spec_to_mel_torch(batch.spectrogram_BNT, 1024, 80)
    assert whole_BMT.shape == (2, 80, 52)
    for item, start in enumerate(segment_starts(batch.places_B, batch.frames_B, 32).tolist()):
        segment_1L = batch.wave_B1L[item, :, start * 256 : (start + 32) * 256]
        torch.testing.assert_close(whole_BMT[item, :, start : start + 32], log_mel(segment_1L, trial.recipe.mel)[0])


class Task(peer.ManualOptimization):
    """A task with the peer's way of a step, and one weight a net."""

    def __init__(self, rate: float = 0.5, **unused: object) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model_g, self.model_d = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        for model in (self.model_g, self.model_d):
            nn.init.ones_(model.weight)

    def configure_optimizers(self):
        made = [torch.optim.SGD(model.parameters(), lr=self.hparams.rate) for model in (self.model_g, self.model_d)]
        return made, []

    def training_step(self, batch, index):
        generator, discriminators = self.optimizers()
        loss_g, loss_d = self.model_d(self.model_g(batch)).sum(), 3 * self.model_d(batch).sum()
        self.log_dict({name: torch.tensor(float(place)) for place, name in enumerate(peer.LOGGED.values(), 1)})
        for optimizer, loss in ((generator, loss_g), (discriminators, loss_d)):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()


def test_a_task_steps_as_under_lightning():
    task = Task(rate=0.25)
    assert vars(task.hparams) == {"rate": 0.25, "unused": {}}
    peer.stepping(task, torch.full((1, 1), 2.0))()
    assert task.model_g.weight.item() == 1 - 0.25 * 2
    assert task.model_d.weight.item() == 1 - 0.25 * 3 * 2  # Gradients of the generator's loss are dropped.


def test_recorded_are_gradients_and_losses_under_our_names_without_a_step():
    task = Task()
    losses, gradients = peer.record(task, torch.full((1, 1), 2.0))
    assert losses == dict(
        zip(peer.LOGGED, (1, 2, 3, 4, 5, 3), strict=True)
    )  # The loss of the discriminators is half of 6.
    assert [gradients[name]["weight"].item() for name in ("generator", "discriminator")] == [2, 6]
    assert task.model_g.weight.item() == task.model_d.weight.item() == 1


def test_losses_and_gradients_of_both_phases_without_a_step(trial, batch):
    recipe = trial.recipe
    before = [p.detach().clone() for module in recipe.modules.values() for p in module.parameters()]
    losses, gradients = peer.losses_and_gradients(trial, batch)
    after = [p for module in recipe.modules.values() for p in module.parameters()]
    assert all(itertools.starmap(torch.equal, zip(before, after, strict=True)))
    assert losses.keys() == peer.LOGGED.keys()
    assert gradients["generator"].keys() == {name for name, _ in recipe.voice.named_parameters()}
    discriminators = recipe.by_kind["waves"]
    starts_B = segment_starts(batch.places_B, batch.frames_B, 32)
    with torch.no_grad():
        posterior, _ = recipe.voice.encode_sound(batch.spectrogram_BNT, batch.frames_B, batch.noise_BCT)
        latents = torch.stack([posterior.latent_BCT[i, :, s : s + 32] for i, s in enumerate(starts_B.tolist())])
        made_B1L = recipe.voice.decoder(latents)
        persuasion = sum((discriminator(made_B1L)[0] - 1).square().mean() for discriminator in discriminators)
    assert losses["generator/waves"] == pytest.approx(persuasion.item(), rel=1e-4)  # features are apart


def test_gradients_of_the_peer_take_our_names():
    ours = {
        "text_encoder.layers.0.attention.query_key_value.weight": torch.zeros(6, 2),
        "discriminators.0.b": torch.zeros(1),
    }
    theirs = {f"enc_p.encoder.attn_layers.0.conv_{part}.weight": torch.full((2, 2, 1), number)
              for number, part in enumerate("qkv", 1)} | {"discriminators.0.b": torch.ones(1)}  # fmt: skip
    found = peer.under_our_names(theirs, ours)
    assert found["text_encoder.layers.0.attention.query_key_value.weight"][:, 0].tolist() == [1, 1, 2, 2, 3, 3]
    with pytest.raises(ValueError, match="of the peer alone: more"):
        peer.under_our_names({**theirs, "more": torch.ones(1)}, ours)


def test_sizes_that_the_peer_cannot_have_are_refused(tmp_path):
    sizes = replace(voice_architecture("medium", num_symbols=8), posterior_layers=3)
    with pytest.raises(ValueError, match="posterior_layers is 16 in the peer, not 3"):
        peer.load(tmp_path, sizes, 1, torch.device("cpu"))


def test_the_peer_is_found_in_a_checkout_or_where_it_is_installed(tmp_path):
    assert peer.root_of(tmp_path) is None
    task = tmp_path / "src" / "piper" / "train" / "vits" / "lightning.py"
    task.parent.mkdir(parents=True)
    task.touch()
    assert peer.root_of(tmp_path) == peer.root_of(tmp_path / "src") == tmp_path / "src"


def spoken(voice, factor, reason=""):
    figures = {} if reason else {"real_time_factor": factor, "frames_per_symbol": 3.0}
    return BenchResult(voice, {"voice": voice}, figures, reason)


def test_factors_are_medians_over_rows_and_kept_to_their_targets():
    results = [
        spoken("high", 0.2),
        spoken("joe", 0.9),
        spoken("high", 0.3),
        spoken("high", 0.26),
        spoken("fast", 0.017),
    ]
    found = rtf.summaries([*results, spoken("joe", 0, "stopped")])
    assert found["high"]["real_time_factor"] == 0.26
    assert found["high"]["factors_of_rows"] == [0.2, 0.3, 0.26]
    assert (found["high"]["target"], found["high"]["met"], found["fast"]["met"]) == (0.25, False, True)
    assert found["joe"] == {"rows": 1, "real_time_factor": 0.9, "frames_per_symbol": 3.0, "factors_of_rows": [0.9],
                            "reasons": ["stopped"]}  # fmt: skip


def test_the_tempo_is_fitted_to_the_frames_of_a_symbol():
    speaker = rtf.Speaker.__new__(rtf.Speaker)
    speaker.length_scale = 1.0
    # Each symbol lasts a frame at the least, as its duration is rounded up.
    speaker.say = lambda ids: SimpleNamespace(frames=len(ids) * (0.5 + 0.4 * speaker.length_scale))
    speaker.fit_tempo([[1], [1] * 40])
    assert speaker.say([1] * 10).frames == pytest.approx(10 * rtf.FRAMES_PER_SYMBOL, rel=0.01)


def test_the_second_side_has_the_alignment_of_the_first():
    counts = torch.tensor([3]), torch.tensor([6])
    one, other = (path_from_durations(torch.tensor([each]), 6).float() for each in ([4, 1, 1], [1, 2, 3]))
    with precision.aligned_as([]):
        found = [precision.recipes.search(scores, *counts).tolist() for scores in (one, other)]
    assert found == [[[4, 1, 1]]] * 2
    assert precision.recipes.search(other, *counts).tolist() == [[1, 2, 3]]


def test_a_gpu_has_more_sides_and_the_check_may_be_left_out():
    options = argparse.Namespace(
        peer_root=Path("peer"), preset=["high"], device="cuda", threads=[0], sides=versus.SIDES["cuda"], check=False,
        batch_size=64, seconds=4.7, sizes={}, rounds=1, warmup=1, steps=3,
    )  # fmt: skip
    rows = list(versus.rows(options, Path("scratch")))
    assert [row.label for row in rows] == ["high: peer", "high: peer-bf16", "high: ours", "high: ours-compiled"]
    assert not any(row.settings["checked"] for row in rows)


@pytest.mark.slow
def test_our_time_is_predicted_beside_the_measured_one(tmp_path):
    row = {**ROW, "side": "ours", "checked": False, "warmup_steps": 1, "steps": 1}
    figures = versus.measure_ours(row, tmp_path)
    assert figures["predicted_seconds_per_step"] > 0
    assert figures["seconds_per_step"] > 0
