"""The generator as an ONNX graph, and the proof that the graph is the generator.

The graph draws its noise itself, as those that DiffSinger and OpenUtau come with do. To compare it with torch, what it
has drawn is made an output too, and torch is given the same.

Shape suffixes: B items (one), M mel bands, F frames, T samples, H harmonics, C channels.
"""

import importlib
import math
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gputrain.errors import UserError
from gputrain.vocoder.generator import HARMONICS, Generator, Noise, weights_made_once

OPSET = 17
EXAMPLE_FRAMES = 10


class Sung(nn.Module):
    """The generator with the inputs and the output that the graph has, and with noise."""

    def __init__(self, generator: Generator) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, mel_BFM: Tensor, f0_BF: Tensor) -> Tensor:
        wave_B1T: Tensor = self.generator(mel_BFM.transpose(1, 2), f0_BF, self.noise(f0_BF))
        return wave_B1T.squeeze(1)

    def noise(self, f0_BF: Tensor) -> Noise:
        """As `draw_noise`, of a size that follows the input; where there is none of a part, nothing is drawn."""
        architecture = self.generator.architecture
        phase_BH, source_BTH, features_BCF = f0_BF[:, :0], f0_BF[:, :0, None], f0_BF[:, None][:, :0]
        if not architecture.mini_nsf:
            phase_BH = F.pad(torch.rand(1, HARMONICS - 1), (1, 0))
            like_BFN = f0_BF[..., None].expand(-1, -1, architecture.mel.hop_size * HARMONICS)
            source_BTH = torch.randn_like(like_BFN).reshape(1, -1, HARMONICS)
        if architecture.noise_sigma:
            like_BCF = f0_BF[:, None].expand(-1, architecture.upsample_initial_channel, -1)
            features_BCF = torch.randn_like(like_BCF)
        return Noise(phase_BH, source_BTH, features_BCF)


def write_graph(generator: Generator, path: Path) -> None:
    """Write the graph of a generator on the CPU, its weights as they are convolved with, for any count of frames.

    Raises UserError if onnx is not installed.
    """
    onnx = package("onnx")
    frames, bands = EXAMPLE_FRAMES, generator.architecture.mel.num_mels
    with warnings.catch_warnings(), torch.no_grad(), weights_made_once(generator):
        # The exporter of torch.export writes opset 18 at the least, and what loads these graphs asks for 17.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Sung(generator).eval(),
            (torch.zeros(1, frames, bands), torch.full((1, frames), 440.0)),
            path,
            input_names=["mel", "f0"],
            output_names=["waveform"],
            dynamic_axes={"mel": {1: "n_frames"}, "f0": {1: "n_frames"}, "waveform": {1: "n_samples"}},
            opset_version=OPSET,
            dynamo=False,
        )
    model = onnx.load(path)
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 1  # which the exporter does not see through
    onnx.save(model, path)


@torch.no_grad()
def largest_difference(generator: Generator, path: Path, inputs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Between the waves of the graph in onnxruntime and of the generator, for mels (M, F) and pitches (F,).

    Raises UserError if onnx or onnxruntime is not installed, RuntimeError if the graph does not draw its noise as the
    generator asks for it, or makes no wave of the right length.
    """
    session, drawn = _session_that_tells(path)
    worst = 0.0
    for mel_MF, f0_F in inputs:
        fed = {"mel": mel_MF.T[None].contiguous().numpy(), "f0": f0_F[None].numpy()}
        graph_BT, *numbers = map(torch.from_numpy, session.run(["waveform", *drawn], fed))
        wave_BT = generator(mel_MF[None], f0_F[None], _as_drawn(generator, numbers, len(f0_F)))[:, 0]
        if graph_BT.shape != wave_BT.shape:
            raise RuntimeError(f"{path}: a wave {tuple(graph_BT.shape)}, expected {tuple(wave_BT.shape)}")
        worst = max(worst, (graph_BT - wave_BT).abs().nan_to_num(math.inf).max().item())
    return worst


def _as_drawn(generator: Generator, numbers: list[Tensor], frames: int) -> Noise:
    """What the graph has drawn, in the order in which `Sung.noise` draws it."""
    architecture = generator.architecture
    expected = 2 * (not architecture.mini_nsf) + bool(architecture.noise_sigma)
    if len(numbers) != expected:
        raise RuntimeError(f"the graph draws {len(numbers)} times, expected {expected}")
    left = iter(numbers)
    phase_BH, source_BTH, features_BCF = torch.zeros(1, 0), torch.zeros(1, 0, 0), torch.zeros(1, 0, frames)
    if not architecture.mini_nsf:
        phase_BH, source_BTH = F.pad(next(left), (1, 0)), next(left).reshape(1, -1, HARMONICS)
    if architecture.noise_sigma:
        features_BCF = next(left)
    return Noise(phase_BH, source_BTH, features_BCF)


def _session_that_tells(path: Path) -> tuple[Any, list[str]]:
    """The graph in onnxruntime, and the names of what it draws, which are outputs of it here."""
    onnx, onnxruntime = package("onnx"), package("onnxruntime")
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    drawn = [node.output[0] for node in model.graph.node if node.op_type.startswith("Random")]
    model.graph.output.extend(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in drawn)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]), drawn


def package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"ONNX needs a package that cannot be imported: {error}", hint="pip install onnx onnxruntime"
        ) from None
