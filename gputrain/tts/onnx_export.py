"""Exports a voice as the ONNX graph that Piper loads, and compares its output with torch's.

Shape suffixes: B items, S symbols, T samples, 1 a dimension.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gputrain.audio.export import load_checked_onnx, run_onnx, wave_difference, write_onnx
from gputrain.tts.model import Voice

OPSET = 16
EXAMPLE_SYMBOLS = 11
AXES = {
    "input": {0: "batch", 1: "phonemes"},
    "input_lengths": {0: "batch"},
    "sid": {0: "batch"},
    "output": {0: "batch", 3: "time"},
}
DRAWS = 2  # number of noises that the graph draws: for durations and latents
CLEAR = 1e-4  # relative change of the tempo that must not change any duration, so that rounding cannot either


class ComparisonText(NamedTuple):
    """Input of a comparison without noise: symbols of one item, its speaker and its length scale."""

    ids_1S: Tensor
    speaker_1: Tensor
    length_scale: float

    def inputs(self, voice: Voice) -> dict[str, Tensor]:
        """Returns the inputs by Piper's names."""
        lengths_1 = torch.tensor([self.ids_1S.shape[1]])
        inputs = {"input": self.ids_1S, "input_lengths": lengths_1, "scales": torch.tensor([0, self.length_scale, 0])}
        return inputs | ({"sid": self.speaker_1} if voice.architecture.num_speakers > 1 else {})


class PiperGraph(nn.Module):
    """Wraps a voice with the inputs and the output of Piper's graphs."""

    def __init__(self, voice: Voice) -> None:
        super().__init__()
        self.voice = voice

    def forward(self, ids_BS: Tensor, lengths_B: Tensor, scales: Tensor, speaker_B: Tensor | None = None) -> Tensor:
        """Returns waves (B, 1, 1, T); `scales` has noise_scale, length_scale and noise_w."""
        noise_scale, length_scale, noise_w = scales.unbind()
        wave_B1T, _ = self.voice.infer(
            ids_BS, lengths_B, speaker_B, noise_scale=noise_scale, length_scale=length_scale, noise_w=noise_w
        )
        return wave_B1T[:, None]


def write_piper_graph(voice: Voice, path: Path) -> None:
    """Writes the graph of a speaking copy on the CPU. Raises UserError if onnx is not installed."""
    example = comparison_text(voice, EXAMPLE_SYMBOLS, seed=0).inputs(voice)
    write_onnx(
        PiperGraph(voice),
        tuple(example.values()),
        path,
        input_names=list(example),
        output_names=["output"],
        dynamic_axes={name: axes for name, axes in AXES.items() if name in example or name == "output"},
        opset_version=OPSET,
    )


@torch.no_grad()
def largest_wave_difference(
    voice: Voice, path: Path, lengths: Iterable[int], progress: Callable[[], None] = lambda: None
) -> float:
    """Returns the largest difference between the waves of the graph in onnxruntime and of the voice, without noise, for
    texts with these numbers of symbols.

    Raises UserError if onnx or onnxruntime is not installed, RuntimeError if the graph does not draw both noises, or a
    wave has another shape.
    """
    model = load_checked_onnx(path)
    draws = sum(node.op_type == "RandomNormalLike" for node in model.graph.node)
    if draws != DRAWS:
        raise RuntimeError(f"{path}: the graph draws noise {draws} times, expected {DRAWS}")
    session = run_onnx(model)
    worst, spoken = 0.0, PiperGraph(voice)
    for symbols in lengths:
        given = comparison_text(voice, symbols, seed=symbols).inputs(voice)
        (graph,) = session.run(["output"], {name: tensor.numpy() for name, tensor in given.items()})
        graph_B11T, wave_B11T = torch.from_numpy(graph), spoken(*given.values())
        worst = max(worst, wave_difference(path, graph_B11T, wave_B11T))
        progress()
    return worst


@torch.no_grad()
def comparison_text(voice: Voice, symbols: int, seed: int) -> ComparisonText:
    """Returns a random text whose durations are equal in every library: before rounding up, none is so close to a whole
    number of frames that fp32 rounding errors could change it. Raises RuntimeError if none is found."""
    sizes, random = voice.architecture, torch.Generator().manual_seed(seed)
    for attempt in range(100):
        made = ComparisonText(
            torch.randint(0, sizes.num_symbols, (1, symbols), generator=random),
            torch.randint(0, sizes.num_speakers, (1,), generator=random),
            length_scale=1 + attempt / 100,
        )
        text = voice.encode_text(made.ids_1S, torch.tensor([symbols]))
        slower, faster = (
            voice.predict_durations(
                text, voice.speaker(made.speaker_1), length_scale=made.length_scale * factor, noise_w=0.0
            )
            for factor in (1 + CLEAR, 1 - CLEAR)
        )
        if torch.equal(slower, faster):
            return made
    raise RuntimeError(f"no text of {symbols} symbols has durations clear of rounding")
