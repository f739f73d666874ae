"""Tests exports: their tensor names, their waves, and the noise that the graph draws."""

import functools
import json
import math
import sys
import zipfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import yaml
from torch import Tensor

from gputrain.audio.config import Mel
from gputrain.audio.export import LARGEST_DIFFERENCE
from gputrain.errors import UserError
from gputrain.vocoder import generator as generators
from gputrain.vocoder.config import NsfHifiganArchitecture
from gputrain.vocoder.export import (
    _session_with_noise_outputs,
    export_onnx,
    export_openvpi,
    export_oudep,
    largest_difference,
    probe_inputs,
    write_graph,
)
from gputrain.vocoder.generator import Generator
from gputrain.vocoder.load import LoadedVocoder, load_vocoder
from tests.command import ProgressSeen
from tests.tables import slow
from tests.vocoder.stock_forward import stock_difference, stock_forward, stock_tensors
from tests.vocoder.test_generator import TINY, build, stored, variants
from tests.vocoder.test_load import CPU, gives_the_oracle, loaded, run_folder


@variants
def test_openvpis_files(tmp_path: Path, name: str) -> None:
    progress = ProgressSeen()
    done = export_openvpi(loaded(name), tmp_path / "out", progress)
    assert progress.leads_to(2)
    assert done.figures["largest difference of a sample"] == 0
    assert 0 < stock_difference(loaded(name).generator, tmp_path / "out") < 1e-6
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.ckpt"]
    assert set(done.files) == set((tmp_path / "out").iterdir())
    weights = torch.load(tmp_path / "out" / "model.ckpt", weights_only=True)
    oracle = build(TINY[name]).state_dict()
    assert weights.keys() == {"generator"}
    assert weights["generator"].keys() == oracle.keys()
    assert all(torch.equal(weights["generator"][key], tensor) for key, tensor in oracle.items())
    assert gives_the_oracle(load_vocoder(tmp_path / "out", CPU))
    assert any("so-vits-svc" in note for note in done.notes) == (name == "mini")


@variants
def test_the_stock_forward_pass_gives_the_oracle(name: str) -> None:
    """The reference that exports are compared with is right by itself: the weights, inputs and wave of the peer, whose
    phases in fp32 make the difference."""
    oracle = stored(TINY[name])
    weights = {key[7:]: tensor.double() for key, tensor in oracle.items() if key.startswith("weight.")}
    config = asdict(TINY[name]) | asdict(TINY[name].mel)
    assert {key: tuple(tensor.shape) for key, tensor in weights.items()} == stock_tensors(config)
    for mel_MF, f0_F, wave_1T in zip(oracle["mel"], oracle["f0"], oracle["wav"], strict=True):
        silent = torch.zeros(wave_1T.shape[-1], 9, dtype=torch.float64)
        made = stock_forward(weights, config, mel_MF[None].double(), f0_F[None].double(), silent[0], silent, mel_MF)
        assert (made[0] - wave_1T).abs().max() < LARGEST_DIFFERENCE


def odd(**changes: Any) -> NsfHifiganArchitecture:
    return replace(NsfHifiganArchitecture(upsample_initial_channel=32), **changes)


STOCK_REFUSES = {
    "two dilations": (odd(resblock_dilation_sizes=((1, 3), (1, 3), (1, 3))), "a block of 2 dilations"),
    "four dilations": (odd(resblock_dilation_sizes=((1, 3, 5), (1, 3, 5, 7), (1, 3, 5))), "a block of 4 dilations"),
    "an odd difference": (odd(upsample_kernel_sizes=(16, 16, 5, 4, 4)), "kernel of 5 for a rate of 2"),
    "an odd stride": (
        odd(upsample_rates=(8, 8, 2, 3), upsample_kernel_sizes=(16, 16, 4, 7), mel=Mel(hop_size=384)),
        "leave 3 samples for each of stage 3",
    ),
}


@pytest.mark.parametrize("name", STOCK_REFUSES)
def test_a_model_that_the_stock_generator_cannot_load_is_refused(tmp_path: Path, name: str) -> None:
    """Its tensors and the stock forward pass differ from such a model too."""
    architecture, said = STOCK_REFUSES[name]
    generator = Generator(architecture).eval().requires_grad_(False)
    with pytest.raises(UserError, match="openvpi's generator cannot load this model") as raised:
        export_openvpi(LoadedVocoder(generator, None, ""), tmp_path / "out")
    assert said in raised.value.message
    assert not (tmp_path / "out").exists()
    weights = {key: tensor.double() for key, tensor in generator.state_dict().items()}
    config = asdict(architecture) | asdict(architecture.mel) | {"resblock": "1"}
    if {key: tuple(tensor.shape) for key, tensor in weights.items()} == stock_tensors(config):
        mel_MF, f0_F = (values.double() for values in probe_inputs(generator, 3))
        noise = torch.zeros(3 * architecture.mel.hop_size, 9, dtype=torch.float64)
        with pytest.raises(RuntimeError, match="must match the size"):
            stock_forward(weights, config, mel_MF[None], f0_F[None], noise[0], noise, mel_MF)


@pytest.mark.parametrize(
    "changes",
    [
        {"mini_nsf": True, "noise_sigma": 0.3, "pc_aug": True},
        {"noise_sigma": 0.3, "resblock_kernel_sizes": (5,), "resblock_dilation_sizes": ((2, 1, 4),)},
        {"upsample_rates": (4, 8, 16), "upsample_kernel_sizes": (4, 12, 32), "mini_nsf": True},
        {"upsample_rates": (8, 16, 4), "upsample_kernel_sizes": (10, 16, 8)},
    ],
    ids=["mini with noise", "noise and one block", "mini of three stages", "full of three stages"],
)
def test_other_shapes_are_exported_as_the_stock_code_reads_them(tmp_path: Path, changes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    generator = Generator(odd(**changes)).eval().requires_grad_(False)
    export_openvpi(LoadedVocoder(generator, None, ""), tmp_path)
    assert 0 < stock_difference(generator, tmp_path) < 1e-6


def test_a_generator_that_computes_otherwise_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the files back cannot show it, because the same code computes both waves."""
    monkeypatch.setattr(generators, "LAST_SLOPE", 0.1)
    export_openvpi(loaded("full"), tmp_path)
    assert stock_difference(loaded("full").generator, tmp_path) > LARGEST_DIFFERENCE


VOCODER_YAML = {
    "sample_rate": 44100, "hop_size": 512, "win_size": 2048, "fft_size": 2048, "num_mel_bins": 128, "mel_fmin": 40,
    "mel_fmax": 16000, "mel_base": "e", "mel_scale": "slaney", "pitch_controllable": False, "force_on_cpu": False,
}  # fmt: skip


def test_a_package_for_openutau(tmp_path: Path) -> None:
    """OpenUtau unpacks it into a folder of the name in oudep.yaml, and reads vocoder.yaml and its model."""
    progress = ProgressSeen()
    written = export_oudep(loaded("mini"), tmp_path / "out", "My_Voice", progress)
    assert progress.leads_to(4)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["My_Voice.oudep"]
    assert written.figures["largest difference of a sample"] < 1e-4
    assert written.figures["files"] == "My_Voice.oudep, with My_Voice.onnx, vocoder.yaml in it"
    assert not [note for note in written.notes if "InferenceSession" in note]  # The package is not for onnxruntime.
    with zipfile.ZipFile(written.files[0]) as archive:
        assert archive.testzip() is None
        package = yaml.safe_load(archive.read("oudep.yaml"))
        archive.extractall(tmp_path / package["name"])
    assert (package["name"], package["id"], package["version"]) == ("My_Voice", "my-voice", "1.0")
    described = yaml.safe_load((tmp_path / "My_Voice" / "vocoder.yaml").read_text(encoding="utf-8"))
    assert described == VOCODER_YAML | {"name": "My_Voice", "model": "My_Voice.onnx"}
    model = described["model"]
    inputs = [probe_inputs(loaded("mini").generator, 5)]
    assert largest_difference(loaded("mini").generator, tmp_path / "My_Voice" / model, inputs) < 1e-4
    with pytest.raises(UserError, match="is no name of a package"):
        export_oudep(loaded("mini"), tmp_path / "out", "my voice")


def test_config_json(tmp_path: Path) -> None:
    """The keys and values are those that openvpi's exporter writes."""
    export_openvpi(load_vocoder(run_folder(tmp_path / "run"), CPU), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8")) == {
        "mini_nsf": True,
        "noise_sigma": 0.0,
        "upsample_rates": [8, 8, 2, 2, 2],
        "upsample_kernel_sizes": [16, 16, 4, 4, 4],
        "upsample_initial_channel": 32,
        "resblock_kernel_sizes": [3, 7, 11],
        "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5], [1, 3, 5]],
        "discriminator_periods": [2, 3, 5, 7, 11],
        "resblock": "1",
        "sampling_rate": 44100,
        "num_mels": 128,
        "hop_size": 512,
        "n_fft": 2048,
        "win_size": 2048,
        "fmin": 40,
        "fmax": 16000,
        "pc_aug": False,
    }


def test_an_export_that_differs_is_not_left_behind(tmp_path: Path) -> None:
    """The generator has other dilations than config.json."""
    (tmp_path / "model.ckpt").write_text("of yesterday")
    model = loaded("full")
    model.generator.architecture = replace(model.generator.architecture, resblock_dilation_sizes=((1, 1, 1),) * 3)
    with pytest.raises(RuntimeError, match="read back, a wave differs by"):
        export_openvpi(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.ckpt"]
    assert (tmp_path / "model.ckpt").read_text() == "of yesterday"


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    model = loaded("mini")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        export_openvpi(model, tmp_path / "file")
    with pytest.raises(UserError, match="is not a file name"):
        export_onnx(model, tmp_path, "a/b")
    model.generator.conv_pre.bias[3] = math.inf
    for write in (export_openvpi, export_onnx):
        with pytest.raises(UserError, match=r"conv_pre\.bias: not all weights are finite"):
            write(model, tmp_path)


@variants
def test_onnx(tmp_path: Path, name: str) -> None:
    done = export_onnx(loaded(name, pc_aug=name == "mini"), tmp_path, "singer")
    assert 0 < done.figures["largest difference of a sample"] < 1e-4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["singer.onnx", "vocoder.yaml"]
    assert yaml.safe_load((tmp_path / "vocoder.yaml").read_text(encoding="utf-8")) == VOCODER_YAML | {
        "name": "singer", "model": "singer.onnx", "pitch_controllable": name == "mini",
    }  # fmt: skip
    graph = onnx.load(tmp_path / "singer.onnx")
    assert [(entry.domain, entry.version) for entry in graph.opset_import] == [("", 17)]
    sides = {
        value.name: [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim]
        for value in (*graph.graph.input, *graph.graph.output)
    }
    assert sides == {"mel": [1, "n_frames", 128], "f0": [1, "n_frames"], "waveform": [1, "n_samples"]}
    (line,) = [note.removeprefix("Load it: ") for note in done.notes if note.startswith("Load it: ")]
    inputs = {"mel": np.zeros((1, 4, 128), np.float32), "f0": np.zeros((1, 4), np.float32)}
    (made,) = eval(line, {"onnxruntime": onnxruntime, **inputs})
    assert made.shape == (1, 4 * 512)


GraphOf = Callable[[str, float], Path]


@pytest.fixture(scope="module")
def graph_of(tmp_path_factory: pytest.TempPathFactory) -> GraphOf:
    """Writes the graph of a generator by its name and noise_sigma, once."""

    @functools.cache
    def written(name: str, noise_sigma: float) -> Path:
        path = tmp_path_factory.mktemp("graph") / "a.onnx"
        write_graph(loaded(name, noise_sigma=noise_sigma).generator, path)
        return path

    return written


@pytest.mark.parametrize(
    ("name", "noise_sigma"),
    [
        ("mini", 0.1),
        *(slow(*case) for case in (("full", 0.1), ("mini", 0.0), ("full", 0.0))),
    ],
)
def test_the_graphs_wave_is_torchs(graph_of: GraphOf, name: str, noise_sigma: float) -> None:
    """The noise is that of the graph; lengths, voicing and pitch vary up to the highest pitch."""
    generator, graph = loaded(name, noise_sigma=noise_sigma).generator, graph_of(name, noise_sigma)
    for frames in (1, 2, 7, 40):
        mel_MF, f0_F = probe_inputs(generator, frames)
        assert frames < 40 or (f0_F.max() > 1500 and (f0_F == 0).any())
        silent = torch.zeros(frames)
        inputs = [(mel_MF, f0_F), (mel_MF, silent), (mel_MF, silent + generator.m_source.rate_hz / 2 * 0.999)]
        assert largest_difference(generator, graph, inputs) < 1e-4


@pytest.mark.slow
@variants
def test_the_graph_stays_in_tune(tmp_path: Path, name: str) -> None:
    """In half a minute, a phase summed in fp32 drifts."""
    generator = loaded(name).generator
    write_graph(generator, tmp_path / "a.onnx")
    assert largest_difference(generator, tmp_path / "a.onnx", [probe_inputs(generator, 3000)]) < 5e-5


def test_the_comparison_sees_another_wave(graph_of: GraphOf) -> None:
    generator, graph = loaded("full", noise_sigma=0.1).generator, graph_of("full", 0.1)
    inputs = [probe_inputs(generator, 20)]
    assert largest_difference(generator, graph, inputs) < 1e-4
    for changed in (loaded("full", noise_sigma=0.2), loaded("full", noise_sigma=0.1)):
        changed.generator.m_source.l_linear.weight[0, 8] += 0.01
        assert largest_difference(changed.generator, graph, inputs) > 1e-4
    with pytest.raises(RuntimeError, match="the graph draws 3 times, expected 2"):
        largest_difference(loaded("full").generator, graph, inputs)


def test_the_graph_draws_what_the_generator_asks_for(graph_of: GraphOf) -> None:
    """Phases are uniform over a cycle, the rest is standard normal, and each run draws new values."""
    session, drawn = _session_with_noise_outputs(graph_of("full", 0.1))
    fed = {"mel": torch.zeros(1, 20, 128).numpy(), "f0": torch.zeros(1, 20).numpy()}
    runs = [[torch.from_numpy(x) for x in session.run(drawn, fed)] for _ in range(40)]
    phases_RH = torch.cat([run[0] for run in runs])
    assert phases_RH.shape == (40, 8)
    assert phases_RH.min() >= 0
    assert phases_RH.max() <= 1
    assert phases_RH.mean().item() == pytest.approx(0.5, abs=0.07)
    assert phases_RH.unique().numel() > 300  # Of 320, some are equal by chance.
    for numbers, size in ((runs[0][1], 20 * 512 * 9), (runs[0][2], 20 * 32)):
        assert numbers.numel() == size
        assert numbers.mean().item() == pytest.approx(0, abs=5 / math.sqrt(size))
        assert numbers.std().item() == pytest.approx(1, abs=5 / math.sqrt(size))
    assert not torch.equal(runs[0][1], runs[1][1])


def test_a_mini_graph_draws_nothing(tmp_path: Path) -> None:
    """Its wave in onnxruntime is the oracle's."""
    oracle = stored(loaded("mini").generator.architecture)
    write_graph(loaded("mini").generator, tmp_path / "a.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "a.onnx"))
    for mel_MF, f0_F, wave_1T in zip(oracle["mel"], oracle["f0"], oracle["wav"], strict=True):
        fed = {"mel": mel_MF.T[None].contiguous().numpy(), "f0": f0_F[None].numpy()}
        made: Tensor = torch.from_numpy(session.run(None, fed)[0])
        assert (made - wave_1T).abs().max() < 1e-4


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UserError, match="onnx") as raised:
        export_onnx(loaded("mini"), tmp_path)
    assert raised.value.hint == "pip install onnx"
    assert not list(tmp_path.iterdir())
