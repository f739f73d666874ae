"""Exports the generator as an ONNX graph and compares the graph with the generator.

The graph draws its noise itself, like the graphs of DiffSinger and OpenUtau. To compare it with torch, its noise is
made an additional output and passed to torch.

Shape suffixes: B items (one), M mel bands, F frames, T samples, H harmonics, C channels.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gputrain.audio.export import import_onnx_package, load_checked_onnx, run_onnx, wave_difference, write_onnx
from gputrain.audio.weight_norm import weights_made_once
from gputrain.vocoder.generator import HARMONICS, Generator, Noise

OPSET = 17
EXAMPLE_FRAMES = 10


class OnnxGenerator(nn.Module):
    """Wraps the generator with the inputs and the output of the graph; it draws its own noise."""

    def __init__(self, generator: Generator) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, mel_BFM: Tensor, f0_BF: Tensor) -> Tensor:
        wave_B1T: Tensor = self.generator(mel_BFM.transpose(1, 2), f0_BF, self.noise(f0_BF))
        return wave_B1T.squeeze(1)

    def noise(self, f0_BF: Tensor) -> Noise:
        """Draws noise as `draw_noise` does, with sizes that depend on the input; unused parts stay empty."""
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
    """Writes the graph of a generator on the CPU, with weight norm already applied, for any number of frames.

    Raises UserError if onnx is not installed.
    """
    frames, bands = EXAMPLE_FRAMES, generator.architecture.mel.num_mels
    with weights_made_once(generator):
        write_onnx(
            OnnxGenerator(generator),
            (torch.zeros(1, frames, bands), torch.full((1, frames), 440.0)),
            path,
            input_names=["mel", "f0"],
            output_names=["waveform"],
            dynamic_axes={"mel": {1: "n_frames"}, "f0": {1: "n_frames"}, "waveform": {1: "n_samples"}},
            opset_version=OPSET,
        )
    onnx = import_onnx_package("onnx")
    model = onnx.load(path)
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 1  # The exporter cannot derive it.
    onnx.save(model, path)


@torch.no_grad()
def largest_difference(generator: Generator, path: Path, inputs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Returns the largest difference between the waves of the graph in onnxruntime and of the generator, for mels (M,
    F) and pitches (F,).

    Raises UserError if onnx or onnxruntime is not installed, RuntimeError if the graph draws other noise than the
    generator needs or a wave has a wrong length.
    """
    session, drawn = _session_with_noise_outputs(path)
    worst = 0.0
    for mel_MF, f0_F in inputs:
        fed = {"mel": mel_MF.T[None].contiguous().numpy(), "f0": f0_F[None].numpy()}
        graph_BT, *numbers = map(torch.from_numpy, session.run(["waveform", *drawn], fed))
        wave_BT = generator(mel_MF[None], f0_F[None], _noise_of_graph(generator, numbers, len(f0_F)))[:, 0]
        worst = max(worst, wave_difference(path, graph_BT, wave_BT))
    return worst


def _noise_of_graph(generator: Generator, numbers: list[Tensor], frames: int) -> Noise:
    """Returns the noise that the graph has drawn, in the order of `OnnxGenerator.noise`."""
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


def _session_with_noise_outputs(path: Path) -> tuple[Any, list[str]]:
    """Loads the graph in onnxruntime with its noise as additional outputs; also returns their names."""
    onnx, model = import_onnx_package("onnx"), load_checked_onnx(path)
    drawn = [node.output[0] for node in model.graph.node if node.op_type.startswith("Random")]
    model.graph.output.extend(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in drawn)
    return run_onnx(model), drawn
