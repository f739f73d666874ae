"""The comparisons of the voice with Piper's training and of the vocoder with openvpi's, as far as they go without the
peers' code: against that, each program compares losses and gradients itself before it times anything."""

import argparse
import importlib
import itertools
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gputrain.bench import step_bench
from gputrain.bench.runner import BenchResult
from gputrain.tts.architecture import voice_architecture
from gputrain.tts.model import Voice, segment_starts
from gputrain.vocoder.kind import VocoderWork
from tests.toy import cpu_runtime

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
vits_peer = importlib.import_module("vits_peer")
vits_versus = importlib.import_module("vits_vs_piper")
rtf = importlib.import_module("voice_rtf")
vocoder_peer = importlib.import_module("vocoder_peer")
vocoder_versus = importlib.import_module("vocoder_vs_openvpi")

ROW = {"configuration": "medium", "batch_size": 2, "seconds": 0.6, "sizes": vits_versus.TINY, "device": "cpu"}
TINY = {"changes": {"batch_size": 2, "crop_mel_frames": 8}, "channels": 32, "device": "cpu"}


# -------------------------------------------------------------------------------------------------------- the voice


def test_checks_come_first_and_sides_take_turns():
    options = argparse.Namespace(
        peer_root=Path("peer"), preset=["high", "medium"], device="cpu", threads=[2], sides=["peer", "ours"],
        check=True, batch_size=4, seconds=5.0, sizes={}, rounds=2, warmup=1, steps=3,
    )  # fmt: skip
    rows = list(vits_versus.rows(options, Path("scratch")))
    assert [row.label for row in rows] == [
        "high: check", "medium: check", *2 * ["high, 2 threads: peer", "high, 2 threads: ours",
                                             "medium, 2 threads: peer", "medium, 2 threads: ours"]
    ]  # fmt: skip
    assert rows[0].settings["weights"] == rows[2].settings["weights"] != rows[1].settings["weights"]


@pytest.mark.parametrize("preset", ["high", "medium"])
def test_every_tensor_has_a_name_of_its_own(preset):
    with torch.device("meta"):
        ours = list(Voice(voice_architecture(preset, num_symbols=8)).state_dict())
    theirs = [name for one in ours for name in vits_peer.names_of(one)]
    assert len(set(theirs)) == len(theirs) == len(ours) + 2 * 2 * 6  # queries, keys and values of six layers are apart


def test_losses_of_the_voice_and_gradients_of_both_phases_without_a_step(tmp_path):
    train = vits_versus.training(ROW, **vits_versus.PLAIN, discriminator_channels=8)
    trial = vits_versus.begin(ROW, train, cpu_runtime(), tmp_path)
    batch = trial.recipe.prepare(trial.loaded, 0)
    recipe = trial.recipe
    before = [p.detach().clone() for module in recipe.modules.values() for p in module.parameters()]
    losses, gradients = vits_peer.losses_and_gradients(trial, batch)
    after = [p for module in recipe.modules.values() for p in module.parameters()]
    assert all(itertools.starmap(torch.equal, zip(before, after, strict=True)))
    assert losses.keys() == vits_peer.LOGGED.keys()
    assert gradients["generator"].keys() == {name for name, _ in recipe.voice.named_parameters()}
    discriminators = recipe.by_kind["waves"]
    starts_B = segment_starts(batch.places_B, batch.frames_B, 32)
    with torch.no_grad():
        posterior, _ = recipe.voice.encode_sound(batch.spectrogram_BNT, batch.frames_B, batch.noise_BCT)
        latents = torch.stack([posterior.latent_BCT[i, :, s : s + 32] for i, s in enumerate(starts_B.tolist())])
        made_B1L = recipe.voice.decoder(latents)
        persuasion = sum((discriminator(made_B1L)[0] - 1).square().mean() for discriminator in discriminators)
    assert losses["generator/waves"] == pytest.approx(persuasion.item(), rel=1e-4)  # features are apart


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


# ------------------------------------------------------------------------------------------------------ the vocoder


def test_both_sides_read_the_users_files_at_the_size_of_the_row():
    standard = {"configuration": "standard", "changes": {}, "channels": 0, "device": "cpu"}
    train, content = vocoder_versus.training(standard), vocoder_versus.profile(standard)
    assert (train.schedule.global_batch_size, train.data.crop_mel_frames) == (16, 48)
    assert train.discriminators.discriminators == ("msd", "mpd")
    assert (content["batch_size"], content["crop_mel_frames"], content["pl_trainer_precision"]) == (16, 48, "32-true")
    small = {**TINY, "configuration": "optimised"}
    train, content = (
        vocoder_versus.training(small, **vocoder_versus.OURS["ours-compiled-bf16"]),
        vocoder_versus.profile(small),
    )
    assert (train.schedule.global_batch_size, train.data.crop_mel_frames) == (2, 8)
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
    (found,) = vocoder_versus.summaries([result("check", 1), *results, result("ours", 0, reason="out of memory")])
    assert found["sides"]["peer"]["seconds_per_step"] == 4
    assert found["sides"]["peer"]["seconds_of_rows"] == [9, 3, 4]
    assert found["sides"]["ours"]["seconds_per_step"] == 1.5
    assert found["sides"]["ours"]["rows"] == 2
    assert found["sides"]["ours"]["reasons"] == ["out of memory"]
    assert found["ratios"]["ours"] == {"seconds_per_step": 0.375, "audio_seconds_per_second": 3, "peak_gb": 1}


def test_absent_packages_are_stood_in_for_and_others_are_not(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [vocoder_peer.Absent(), *sys.meta_path])
    before = set(sys.modules)
    callbacks = importlib.import_module("lightning.pytorch.callbacks")
    rank_zero = importlib.import_module("lightning.pytorch.utilities.rank_zero")
    for name in set(sys.modules) - before:
        monkeypatch.delitem(sys.modules, name)
    assert issubclass(type("Bar", (callbacks.TQDMProgressBar,), {}), vocoder_peer.StandIn)
    assert isinstance(rank_zero.rank_zero_only(print), vocoder_peer.StandIn)
    assert not hasattr(callbacks, "__wrapped__")
    assert vocoder_peer.Absent().find_spec("lightning_fabric") is None
    assert vocoder_peer.Absent().find_spec("torch") is None


def test_a_step_under_the_loss_scale_is_the_plain_one_and_an_overflow_none():
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    task = vocoder_peer.ManualOptimization()
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


@pytest.mark.slow
def test_losses_of_the_vocoder_and_gradients_of_both_phases_without_a_step(tmp_path):
    settings = vocoder_versus.training({**TINY, "configuration": "optimised"}, **vocoder_versus.PLAIN)
    trial = step_bench.begin_bench(VocoderWork(), settings, cpu_runtime(), tmp_path)
    recipe = trial.recipe
    batch = recipe.prepare(trial.loaded, 0)
    before = [parameter.detach().clone() for parameter in recipe.generator.parameters()]
    losses, gradients = vocoder_peer.losses_and_gradients(trial, batch)
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
