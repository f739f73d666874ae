"""Tests pretrained weights from every kind of file, with every naming, and errors for weights that do not fit."""

import logging
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gputrain.errors import UserError
from gputrain.vocoder.config import Discriminators
from gputrain.vocoder.discriminators import KINDS
from gputrain.vocoder.generator import Generator
from gputrain.vocoder.load import Weights, read_weights
from tests.vocoder.test_generator import TINY, build
from tests.vocoder.test_load import openvpi_folder, run_folder

SMALL = Discriminators(
    discriminator_periods=(2, 3), msd_channels=16, mpd_channels=2, fast_mpd_init_channel=2, fast_mrd_init_channel=2,
    mrd_channels=2,
)  # fmt: skip


def discriminators(*kinds: str) -> dict[str, dict[str, Tensor]]:
    torch.manual_seed(0)
    return {kind: {name: torch.randn_like(t) for name, t in KINDS[kind](SMALL).state_dict().items()} for kind in kinds}


def trainers_file(path: Path, groups: dict[str, dict[str, Tensor]], generator: nn.Module | None = None) -> Path:
    """Writes a checkpoint as openvpi's trainer does: everything in a state_dict, a compiled generator, a loss that has
    a buffer."""
    state = {f"generator._orig_mod.{k}": v for k, v in (generator or build(TINY["full"])).state_dict().items()}
    state |= {f"discriminator.{group}.{k}": v for group, tensors in groups.items() for k, v in tensors.items()}
    torch.save({"state_dict": {**state, "mix_loss.window": torch.ones(3)}, "epoch": 3}, path)
    return path


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_generator_alone(tmp_path: Path) -> None:
    folder = openvpi_folder(tmp_path)
    (folder / "config.json").unlink()  # The options define the model.
    weights = read_weights(folder / "model.ckpt")
    assert weights.discriminators == {}
    assert same(weights.generator, build(TINY["full"]).state_dict())
    made = Generator(TINY["full"])
    assert weights.fit("generator", made) == []
    assert same(made.state_dict(), weights.generator)


@pytest.mark.parametrize(
    "called",
    [
        {"msd": "msd", "mpd": "mpd"},  # nsf_HiFigan_task
        {"mrd": "fast_mrd", "mpd": "fast_mpd"},  # nsf_HiFigan_fast_task
        {"mrd": "msd", "mpd": "mpd"},  # univnet_nsf_msd
    ],
)
def test_openvpis_training_checkpoints(tmp_path: Path, called: dict[str, str]) -> None:
    """The task's names of its discriminators do not identify their kinds."""
    stored = discriminators(*called.values())
    path = trainers_file(tmp_path / "model_ckpt_steps_10.ckpt", {name: stored[kind] for name, kind in called.items()})
    weights = read_weights(path)
    assert same(weights.generator, build(TINY["full"]).state_dict())
    assert weights.discriminators.keys() == stored.keys()
    for kind in stored:
        module = KINDS[kind](SMALL)
        assert weights.fit(kind, module) == []
        assert same(module.state_dict(), stored[kind])


def test_univnets_layers_have_other_names(tmp_path: Path) -> None:
    stored = discriminators("mrd")["mrd"]
    names = {name: name.replace(".convs.", ".discriminators.").replace(".conv_post.", ".out.") for name in stored}
    theirs = {names[name]: tensor for name, tensor in stored.items()}
    assert "discriminators.2.out.weight_g" in theirs
    path = trainers_file(tmp_path / "a.ckpt", {"mrd": {**theirs, "discriminators.0.window": torch.ones(600)}})
    assert same(read_weights(path).discriminators["mrd"], stored)


def test_what_no_part_of_a_vocoder_takes_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = trainers_file(tmp_path / "a.ckpt", {})
    content = torch.load(path)
    content["state_dict"]["mel.basis"] = torch.ones(2)
    torch.save(content, path)
    with caplog.at_level(logging.INFO):
        read_weights(path)
    assert f"{path}: not used: mix_loss (1), mel (1)" in caplog.text


def test_torchs_newer_names_of_norms(tmp_path: Path) -> None:
    stored = discriminators("msd")["msd"]
    spectral = {name.removesuffix(".weight_orig") for name in stored if name.endswith(".weight_orig")}

    def newer(name: str) -> str:
        layer, _, last = name.rpartition(".")
        inside = {"weight_orig": "original", "weight_u": "0._u", "weight_v": "0._v"}
        if layer not in spectral:
            inside = {"weight_g": "original0", "weight_v": "original1"}
        return f"{layer}.parametrizations.weight.{inside[last]}" if last in inside else name

    renamed = {newer(name): tensor for name, tensor in stored.items()}
    assert len(renamed.keys() - stored.keys()) == 8 * 3 + 16 * 2
    weights = read_weights(trainers_file(tmp_path / "a.ckpt", {"msd": renamed}))
    assert same(weights.discriminators["msd"], stored)


@pytest.mark.parametrize("averaged", [False, True])
def test_a_run_of_ours(tmp_path: Path, averaged: bool) -> None:
    stored = discriminators("fast_mrd", "fast_mpd")
    flat = {f"{kind}.{name}": tensor for kind, tensors in stored.items() for name, tensor in tensors.items()}
    run = run_folder(tmp_path, averaged=averaged, discriminators=flat)
    for path in (run, run / "checkpoint_last.pt"):
        weights = read_weights(path)
        assert same(weights.generator, build(TINY["mini"]).state_dict())
        assert weights.discriminators.keys() == stored.keys()
        assert all(same(weights.discriminators[kind], stored[kind]) for kind in stored)


def test_ignored_tensors_are_reinitialised(tmp_path: Path) -> None:
    """They have openvpi's names; its fast task calls fast_mpd `mpd`."""
    path = trainers_file(tmp_path / "a.ckpt", {"mpd": discriminators("fast_mpd")["fast_mpd"]})
    weights = read_weights(path, ["generator.ups.", "discriminator.mpd.discriminators.1", "discriminator.msd"])
    made = Generator(TINY["full"])
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    left = weights.fit("generator", made)
    assert left == [name for name in before if name.startswith("ups.")]
    assert len(left) == 15
    for name, tensor in made.state_dict().items():
        assert torch.equal(tensor, before[name] if name in left else weights.generator[name])
    left = weights.fit("fast_mpd", KINDS["fast_mpd"](SMALL))
    assert left
    assert all(name.startswith("discriminators.1.") for name in left)


def test_what_is_ignored_may_differ(tmp_path: Path) -> None:
    """Weights of a full model fit a mini one if the sources are ignored on both sides."""
    path = trainers_file(tmp_path / "a.ckpt", {})
    ignored = ["generator.m_source", "generator.noise_convs", "generator.source_conv"]
    assert read_weights(path, ignored).fit("generator", Generator(TINY["mini"])) == [
        "source_conv.weight",
        "source_conv.bias",
    ]
    with pytest.raises(UserError, match=r"m_source\.l_linear\.weight is unknown"):
        read_weights(path, ignored[1:]).fit("generator", Generator(TINY["mini"]))


def test_shapes_that_differ() -> None:
    given = build(TINY["full"]).state_dict()
    given["conv_pre.weight_v"] = torch.zeros(32, 80, 7)
    del given["conv_post.bias"]
    weights = Weights(given, {}, "old.ckpt")
    made = Generator(TINY["full"])
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    with pytest.raises(UserError) as raised:
        weights.fit("generator", made)
    assert raised.value.message == (
        "old.ckpt: its generator differs in 2 tensors: conv_pre.weight_v is (32, 80, 7), expected (32, 128, 7); "
        "conv_post.bias is missing"
    )
    assert same(made.state_dict(), before)  # Nothing was loaded.
    assert weights.fit("generator", made, strict_shapes=False) == ["conv_pre.weight_v", "conv_post.bias"]
    assert torch.equal(made.conv_pre.weight_v, before["conv_pre.weight_v"])
    assert torch.equal(made.conv_pre.weight_g, given["conv_pre.weight_g"])


def test_nothing_that_fits_is_an_error_even_so() -> None:
    with pytest.raises(UserError, match="old: its generator differs in 293 tensors"):
        Weights({}, {}, "old").fit("generator", Generator(TINY["mini"]), strict_shapes=False)


def test_no_vocoder(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"diffusion.weight": torch.ones(2)}}, path)
    with pytest.raises(UserError, match=re.escape(f"{path}: holds no generator")):
        read_weights(path)
    torch.save([1, 2], path)
    with pytest.raises(UserError, match="does not contain named tensors"):
        read_weights(path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="truncated or damaged"):
        read_weights(path)
