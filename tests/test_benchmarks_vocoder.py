"""The comparison with openvpi's vocoder, as far as it goes without a checkout of theirs."""

import argparse
import importlib
import itertools
import math
import sys
from pathlib import Path

import pytest
import torch

from gputrain.bench import step_bench
from gputrain.bench.runner import BenchResult
from gputrain.vocoder.config import Discriminators
from gputrain.vocoder.discriminators import FastPeriodDiscriminator
from gputrain.vocoder.work import VocoderWork
from tests.toy import cpu_runtime

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
peer = importlib.import_module("vocoder_peer")
versus = importlib.import_module("vocoder_vs_openvpi")

TINY = {"changes": {"batch_size": 2, "crop_mel_frames": 8}, "channels": 32, "device": "cpu"}


def options(**changes):
    given = {
        "peer": Path("peer"), "device": "cpu", "configurations": ["standard", "optimised"], "threads": [1, 2],
        "sides": ["peer", "ours"], "rounds": 2, "batch_size": 1, "crop_frames": 32, "channels": None, "warmup": 1,
        "steps": 3,
    }  # fmt: skip
    return argparse.Namespace(**{**given, **changes})


def test_checks_come_first_and_sides_take_turns():
    rows = list(versus.rows(options(), Path("scratch")))
    assert [(row.settings["configuration"], row.settings["side"]) for row in rows[:2]] == [
        ("standard", "check"), ("optimised", "check")
    ]  # fmt: skip
    assert [row.label for row in rows[2:10]] == [
        "standard, 1 threads: peer", "standard, 1 threads: ours",
        "standard, 2 threads: peer", "standard, 2 threads: ours",
        "optimised, 1 threads: peer", "optimised, 1 threads: ours",
        "optimised, 2 threads: peer", "optimised, 2 threads: ours",
    ]  # fmt: skip
    assert [row.settings for row in rows[10:]] == [row.settings for row in rows[2:10]]
    assert rows[2].settings["weights"] == rows[0].settings["weights"] != rows[1].settings["weights"]


def test_both_sides_read_the_users_files_at_the_size_of_the_row():
    standard = {"configuration": "standard", "changes": {}, "channels": 0, "device": "cpu"}
    train, content = versus.training(standard), versus.profile(standard)
    assert (train.schedule.whole_batch, train.data.crop_mel_frames) == (16, 48)
    assert train.discriminators.discriminators == ("msd", "mpd")
    assert (content["batch_size"], content["crop_mel_frames"], content["pl_trainer_precision"]) == (16, 48, "32-true")
    small = {**TINY, "configuration": "optimised"}
    train, content = versus.training(small, **versus.OURS["ours-compiled-bf16"]), versus.profile(small)
    assert (train.schedule.whole_batch, train.data.crop_mel_frames) == (2, 8)
    assert train.model.upsample_initial_channel == content["model_args"]["upsample_initial_channel"] == 32
    assert train.hardware.precision == "bf16"
    assert train.hardware.use_torch_compile
    assert content["model_args"]["fast_mpd_strides"] == [4, 4, 4]  # the others of the block stay


def result(side, seconds, reason=""):
    settings = {"configuration": "standard", "threads": 1, "side": side}
    figures = {} if reason else {"seconds_per_step": seconds, "audio_seconds_per_second": 6 / seconds, "peak_gb": 2.0}
    return BenchResult(side, settings, figures, reason)


def test_medians_of_rows_and_ratios_to_the_first_side():
    results = [result("peer", 9), result("ours", 2), result("peer", 3), result("ours", 1), result("peer", 4)]
    (found,) = versus.summaries([result("check", 1), *results, result("ours", 0, reason="out of memory")])
    assert found["sides"]["peer"]["seconds_per_step"] == 4
    assert found["sides"]["peer"]["seconds_of_rows"] == [9, 3, 4]
    assert found["sides"]["ours"]["seconds_per_step"] == 1.5
    assert found["sides"]["ours"]["rows"] == 2
    assert found["sides"]["ours"]["reasons"] == ["out of memory"]
    assert found["ratios"]["ours"] == {"seconds_per_step": 0.375, "audio_seconds_per_second": 3, "peak_gb": 1}


def test_absent_packages_are_stood_in_for_and_others_are_not(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [peer.Absent(), *sys.meta_path])
    before = set(sys.modules)
    callbacks = importlib.import_module("lightning.pytorch.callbacks")
    rank_zero = importlib.import_module("lightning.pytorch.utilities.rank_zero")
    for name in set(sys.modules) - before:
        monkeypatch.delitem(sys.modules, name)
    assert issubclass(type("Bar", (callbacks.TQDMProgressBar,), {}), peer.StandIn)
    assert isinstance(rank_zero.rank_zero_only(print), peer.StandIn)
    assert not hasattr(callbacks, "__wrapped__")
    assert peer.Absent().find_spec("lightning_fabric") is None
    assert peer.Absent().find_spec("torch") is None


def test_a_step_under_the_loss_scale_is_the_plain_one_and_an_overflow_none():
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    task = peer.ManualOptimization()
    task.configure_optimizers = lambda: [torch.optim.SGD([weight], lr=0.5)]
    task.begin(torch.device("cpu"), fp16=True)
    (stepper,) = task.optimizers()
    for loss in ((weight**2).sum(), (weight * math.inf).sum()):
        stepper.zero_grad()
        task.manual_backward(loss)
        stepper.step()
    assert torch.equal(weight.detach(), torch.zeros(2))  # w - 0.5 * 2 w
    assert task.made == [True, False]
    assert task.global_step == 2
    assert task.scaler.get_scale() == 32768


@pytest.fixture
def trial(tmp_path):
    settings = versus.training({**TINY, "configuration": "optimised"}, **versus.PLAIN)
    return step_bench.begin_bench(VocoderWork(), settings, cpu_runtime(), tmp_path)


def test_noise_is_what_the_peers_source_draws_next(trial):
    batch = trial.recipe.prepare(trial.loaded, 0)
    noise = peer.noise_of_the_peer(batch)
    phase = torch.rand(1, 1, 9)  # one for the batch
    phase[..., 0] = 0
    assert torch.equal(noise.phase_BH, phase[0].expand(2, 9))
    assert torch.equal(noise.source_BTH, torch.randn(2, 8 * 512, 9))
    assert torch.equal(noise.features_BCF, batch.noise.features_BCF)


def test_a_discriminator_whose_ends_are_cut_is_its_own_on_the_beginning():
    torch.manual_seed(0)
    sizes = Discriminators(fast_mpd_init_channel=2, fast_mpd_strides=(4, 2, 2))
    discriminator = FastPeriodDiscriminator(5, sizes)  # 5 * 16 = 80 samples
    wave = torch.randn(2, 1, 500)
    whole, beginning = discriminator(wave)[0], discriminator(wave[..., :480])[0]
    peer.cut_end(discriminator)
    assert torch.equal(discriminator(wave)[0], beginning)
    assert whole.shape != beginning.shape


def test_distance_of_gradients_by_the_peers_norm():
    theirs = {"a": torch.tensor([6.0, 8.0]), "b": torch.tensor([0.5])}
    ours = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.5])}
    found = peer.distance(ours, theirs, factor=2)
    assert found["relative"] == pytest.approx(0.5 / math.hypot(10, 0.5))
    assert (found["largest_relative"], found["largest_in"]) == (1, "b")
    with pytest.raises(ValueError, match="without a gradient: b"):
        peer.distance({"a": ours["a"]}, theirs, factor=2)


def test_logged_figures_take_our_names_and_factors(trial):
    names = [*("Gmrdloss", "Gmrd_feature_loss", "DmrdlossF", "DmrdlossT"),
             *("Gmpdloss", "Gmpd_feature_loss", "DmpdlossF", "DmpdlossT")]  # fmt: skip
    found = peer.under_our_names({"aux_mel_loss": 90.0, **dict(zip(names, itertools.count(1)))}, trial.recipe)
    assert found == {
        "generator/mel": 2, "generator/fast_mrd": 1, "generator/fast_mrd_features": 2, "discriminator/fast_mrd": 3.5,
        "generator/fast_mpd": 5, "generator/fast_mpd_features": 6, "discriminator/fast_mpd": 7.5,
    }  # fmt: skip


@pytest.mark.slow
def test_losses_and_gradients_of_both_phases_without_a_step(trial):
    recipe = trial.recipe
    batch = recipe.prepare(trial.loaded, 0)
    before = [parameter.detach().clone() for parameter in recipe.generator.parameters()]
    losses, gradients = peer.losses_and_gradients(trial, batch)
    assert all(torch.equal(*pair) for pair in zip(before, recipe.generator.parameters(), strict=True))
    assert gradients.keys() == {"generator", "fast_mrd", "fast_mpd"}
    assert gradients["generator"].keys() == {name for name, _ in recipe.generator.named_parameters()}
    discriminators = recipe.by_kind["fast_mpd"]
    made_B1T = recipe._make(batch).detach()
    persuasion = sum(((discriminator(made_B1T)[0] - 1) ** 2).mean() for discriminator in discriminators)
    assert losses["generator/fast_mpd"] == pytest.approx(persuasion.item(), rel=1e-5)  # features are apart
    discriminators.requires_grad_(True)
    real = sum(((discriminator(batch.real_B1T)[0] - 1) ** 2).mean() for discriminator in discriminators)
    fake = sum((discriminator(made_B1T)[0] ** 2).mean() for discriminator in discriminators)
    loss = 0.5 * (real + fake)
    assert losses["discriminator/fast_mpd"] == pytest.approx(loss.item(), rel=1e-5)
    loss.backward()
    for name, parameter in discriminators.named_parameters():
        torch.testing.assert_close(gradients["fast_mpd"][name], parameter.grad.double(), rtol=1e-3, atol=1e-6)
