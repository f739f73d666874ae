"""Loading a vocoder from a run, a checkpoint and openvpi's files, and errors for invalid files."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gputrain.audio.config import Mel
from gputrain.config import flatten
from gputrain.engine import checkpoint
from gputrain.engine.optim import Ema
from gputrain.errors import UserError
from gputrain.vocoder.config import Data, Model, TrainVocoder
from gputrain.vocoder.generator import Generator
from gputrain.vocoder.load import LoadedVocoder, load_vocoder, read_weights
from tests.tables import each_row
from tests.toy import whole_checkpoint
from tests.vocoder.test_generator import TINY, build, largest, stored, variants

CPU = torch.device("cpu")
SETTINGS = TrainVocoder(data=Data(data_path=(Path("sound"),)), model=Model(upsample_initial_channel=32, mini_nsf=True))


def loaded(name: str, **changes: Any) -> LoadedVocoder:
    """Returns a vocoder with the oracle's weights, as `load_vocoder` does."""
    architecture = replace(TINY[name], **changes)
    generator = Generator(architecture)
    generator.load_state_dict(build(TINY[name]).state_dict())
    return LoadedVocoder(generator.eval().requires_grad_(False), None, "here")


def openvpi_folder(folder: Path, name: str = "full", **changes: Any) -> Path:
    """Writes a model as openvpi does; `changes` are those of config.json, where None removes a key."""
    generator = build(TINY[name])
    architecture = asdict(generator.architecture)
    values = {**architecture.pop("mel"), **architecture, "resblock": "1", "discriminator_periods": [3, 5]}
    values |= {"num_gpus": 0, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in values.items() if v is not None}), encoding="utf-8"
    )
    torch.save({"generator": generator.state_dict()}, folder / "model.ckpt")
    return folder


def run_folder(folder: Path, *, averaged: bool = False, discriminators: dict[str, Tensor] | None = None) -> Path:
    """Writes a run of SETTINGS with the oracle's weights; with an EMA, the trained weights differ."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = build(SETTINGS.architecture)
    modules: dict[str, Any] = {"generator": generator.state_dict(), "discriminators": discriminators or {}}
    if averaged:
        modules["ema"] = Ema(generator, build(SETTINGS.architecture), 0.9).state_dict()
        modules["generator"] = {key: tensor + 1 for key, tensor in modules["generator"].items()}
    checkpoint.save(folder, whole_checkpoint(kind="vocoder", config=flatten(SETTINGS), modules=modules))
    return folder


def gives_the_oracle(model: LoadedVocoder) -> bool:
    oracle = stored(model.generator.architecture)
    assert not model.generator.training
    assert not any(parameter.requires_grad for parameter in model.generator.parameters())
    return largest(model.generator(oracle["mel"], oracle["f0"]) - oracle["wav"]) < 1e-5


@variants
def test_openvpis_folder_and_file(tmp_path: Path, name: str) -> None:
    folder = openvpi_folder(tmp_path, name)
    for path in (folder, folder / "model.ckpt"):
        model = load_vocoder(path, CPU)
        assert gives_the_oracle(model)
        assert model.generator.architecture == TINY[name]
        assert (model.training, model.source) == (None, str(folder / "model.ckpt"))


def test_a_file_of_another_name(tmp_path: Path) -> None:
    folder = openvpi_folder(tmp_path)
    (folder / "model.ckpt").rename(folder / "singer.ckpt")
    assert load_vocoder(folder, CPU).source == str(folder / "singer.ckpt")
    (folder / "other.ckpt").write_bytes(b"")
    with pytest.raises(UserError, match=r"holds other\.ckpt, singer\.ckpt"):
        load_vocoder(folder, CPU)


def test_the_first_release_names_its_file_model(tmp_path: Path) -> None:
    folder = openvpi_folder(tmp_path)
    (folder / "model.ckpt").rename(folder / "model")
    assert load_vocoder(folder, CPU).source == str(folder / "model")
    assert read_weights(folder).generator.keys() == read_weights(folder / "model").generator.keys()


def test_older_models_lack_the_newest_keys(tmp_path: Path) -> None:
    folder = openvpi_folder(tmp_path, mini_nsf=None, noise_sigma=None, pc_aug=None, fmin=0)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "fmax": None}))
    model = load_vocoder(folder, CPU)
    assert model.generator.architecture == replace(TINY["full"], mel=Mel(fmin=0, fmax=22050))


@pytest.mark.parametrize("averaged", [False, True])
def test_a_run_and_its_checkpoint(tmp_path: Path, averaged: bool) -> None:
    run = run_folder(tmp_path / "run", averaged=averaged)
    for path in (run, run / "checkpoint_last.pt"):
        model = load_vocoder(path, CPU)
        assert gives_the_oracle(model)
        assert model.training == SETTINGS
        assert model.source == str(run / "checkpoint_last.pt")


def test_differing_tensors_are_listed(tmp_path: Path) -> None:
    folder = openvpi_folder(tmp_path, upsample_initial_channel=64)
    with pytest.raises(UserError) as raised:
        load_vocoder(folder, CPU)
    assert "noise_convs.0.weight is (16, 1, 128), expected (32, 1, 128)" in raised.value.message
    assert raised.value.message.count("expected") == 6
    names = build(TINY["full"]).state_dict()
    with torch.device("meta"):
        wider = Generator(replace(TINY["full"], upsample_initial_channel=64)).state_dict()
    count = sum(names[name].shape != wider[name].shape for name in names)
    assert f"differs in {count} tensors" in raised.value.message
    assert raised.value.message.endswith(f"and {count - 6} more")


def test_a_full_model_called_mini(tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        load_vocoder(openvpi_folder(tmp_path, mini_nsf=True), CPU)
    assert "source_conv.weight is missing" in raised.value.message
    assert "m_source.l_linear.weight is unknown" in raised.value.message


@each_row(
    ("sampling_rate", None, "sampling_rate is missing"),
    ("upsample_rates", None, "upsample_rates is missing"),
    ("num_mels", "many", "num_mels is 'many', expected a whole number"),
    ("upsample_rates", [8, 8, 2, 2], "upsample_rates and upsample_kernel_sizes differ in length"),
    ("hop_size", 256, "make 512 samples of a frame, and hop_size is 256"),
    ("resblock", "2", "resblock is '2'"),
    ("resblock_dilation_sizes", [[1, 3, 5], [1, 3.5], [1]], "expected a list of lists of whole numbers"),
    ("fmax", 44100, "do not fit below half of 44100 Hz"),
)
def test_a_config_that_describes_no_model(tmp_path: Path, key: str, value: object, said: str) -> None:
    with pytest.raises(UserError, match=r"config\.json: ") as raised:
        load_vocoder(openvpi_folder(tmp_path, **{key: value}), CPU)
    assert said in raised.value.message


def test_no_model(tmp_path: Path) -> None:
    folder = openvpi_folder(tmp_path)
    whole = (folder / "model.ckpt").read_bytes()
    (folder / "model.ckpt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"model\.ckpt: truncated or damaged"):
        load_vocoder(folder, CPU)
    (folder / "model.ckpt").write_bytes(whole)
    weights = build(TINY["full"]).state_dict()
    weights["conv_pre.bias"][3] = float("nan")
    torch.save({"generator": weights}, folder / "model.ckpt")
    with pytest.raises(UserError, match=r"conv_pre\.bias: not all weights are finite"):
        load_vocoder(folder, CPU)
    torch.save({"generator": Path("code")}, folder / "model.ckpt")
    with pytest.raises(UserError, match="could run code"):
        load_vocoder(folder, CPU)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: not valid JSON"):
        load_vocoder(folder, CPU)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json: no such file"):
        load_vocoder(folder, CPU)
    (folder / "model.ckpt").unlink()
    with pytest.raises(UserError, match=r"holds neither model\.ckpt nor a checkpoint"):
        load_vocoder(folder, CPU)
    with pytest.raises(UserError, match="no such file or folder"):
        load_vocoder(folder / "elsewhere", CPU)
