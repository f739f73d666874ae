"""Inference of the voice, in torch and as an ONNX graph. Shape suffixes: B items, S symbols, T frames, L samples."""

import io
import warnings
from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from gputrain.tts.architecture import VoicePreset
from gputrain.tts.model import Voice, inference_copy
from tests.tts.voices import build, small


def some_ids(symbols: int, items: int = 1) -> Tensor:
    return torch.randint(0, 12, (items, symbols), generator=torch.Generator().manual_seed(symbols))


@torch.no_grad()
def test_noise_is_an_argument_or_drawn() -> None:
    voice, ids_BS, lengths_B = build(small()).eval(), some_ids(9), torch.tensor([9])
    noise_B2S, noise_BCT = torch.randn(1, 2, 9), torch.randn(1, 8, 400)
    noise = {"duration_noise_B2S": noise_B2S, "noise_BCT": noise_BCT}
    wave_B1L, durations_BS = voice.infer(ids_BS, lengths_B, **noise)
    assert torch.equal(voice.infer(ids_BS, lengths_B, **noise)[0], wave_B1L)
    assert wave_B1L.shape == (1, 1, 256 * int(durations_BS.sum()))
    drawn = [voice.infer(ids_BS, lengths_B, duration_noise_B2S=noise_B2S)[0] for _ in range(2)]
    assert (drawn[0] - drawn[1]).abs().max() > 1e-3
    assert not torch.equal(*(voice.infer(ids_BS, lengths_B)[1] for _ in range(2)))
    still = [voice.infer(ids_BS, lengths_B, noise_scale=0.0, noise_w=0.0)[0] for _ in range(2)]
    assert torch.equal(*still)


@torch.no_grad()
def test_scales() -> None:
    voice, ids_BS, lengths_B = build(small()).eval(), some_ids(200), torch.tensor([200])
    text = voice.encode_text(ids_BS, lengths_B)
    plain, slow = (voice.predict_durations(text, length_scale=scale, noise_w=0.0) for scale in (1.0, 2.0))
    assert torch.equal(plain, plain.round())
    assert ((2 * plain - slow >= 0) & (2 * plain - slow <= 1)).all()  # Each duration is rounded up.
    noise_B2S = torch.randn(1, 2, 200)
    spread = [voice.predict_durations(text, noise_w=w, noise_B2S=noise_B2S).std().item() for w in (0.3, 0.8)]
    assert spread[1] > 1.5 * spread[0]


@torch.no_grad()
def test_items_of_a_batch_speak_as_alone() -> None:
    """Compares up to the decoder's receptive field before the end: 13 frames."""
    voice = build(small("medium", 3)).eval()
    ids_BS, lengths_B, speaker_B = some_ids(40, items=2), torch.tensor([40, 25]), torch.tensor([2, 1])
    wave_B1L, durations_BS = voice.infer(ids_BS, lengths_B, speaker_B, noise_scale=0.0, noise_w=0.0)
    alone, durations = voice.infer(ids_BS[1:, :25], lengths_B[1:], speaker_B[1:], noise_scale=0.0, noise_w=0.0)
    assert torch.equal(durations_BS[1, :25], durations[0])
    assert not durations_BS[1, 25:].any()
    sure = 256 * (int(durations.sum()) - 13)
    assert sure > 10_000
    assert (wave_B1L[1, 0, :sure] - alone[0, 0, :sure]).abs().max() < 1e-5


def test_a_speaker_must_be_named() -> None:
    with pytest.raises(ValueError, match="one of 3 speakers"):
        build(small("high", 3)).infer(some_ids(4), torch.tensor([4]))


class Piper(nn.Module):
    """A module with the inputs and the output of Piper's graphs."""

    def __init__(self, voice: Voice) -> None:
        super().__init__()
        self.voice = voice

    def forward(self, ids_BS: Tensor, lengths_B: Tensor, scales: Tensor, speaker_B: Tensor | None = None) -> Tensor:
        noise_scale, length_scale, noise_w = scales.unbind()
        scales = {"noise_scale": noise_scale, "length_scale": length_scale, "noise_w": noise_w}
        wave_B1L: Tensor = self.voice.infer(ids_BS, lengths_B, speaker_B, **scales)[0]
        return wave_B1L[:, None]


@pytest.mark.parametrize(
    ("preset", "num_speakers", "opset"),
    [
        pytest.param("high", 1, 15, marks=pytest.mark.slow),
        pytest.param("medium", 3, 16, marks=pytest.mark.slow),
        pytest.param("fast", 1, 17, marks=pytest.mark.slow),
        ("fast", 3, 15),
    ],
)
def test_the_graph_of_onnx_speaks_alike(preset: VoicePreset, num_speakers: int, opset: int, tmp_path: Path) -> None:
    speaking = Piper(inference_copy(build(small(preset, num_speakers)))).eval()
    names = ["input", "input_lengths", "scales", "sid"][: 3 + (num_speakers > 1)]

    def inputs(symbols: int, items: int, scales: tuple[float, float, float]) -> tuple[Tensor, ...]:
        lengths_B = torch.tensor([symbols, 3][:items])
        speaker_B = torch.tensor([2, 1][:items])
        return (some_ids(symbols, items), lengths_B, torch.tensor(scales), speaker_B)[: len(names)]

    graph = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            speaking, inputs(6, 1, (0.667, 1.0, 0.8)), graph, input_names=names, output_names=["output"],
            opset_version=opset, dynamo=False, dynamic_axes={
                "input": {0: "batch", 1: "phonemes"}, "input_lengths": {0: "batch"}, "sid": {0: "batch"},
                "output": {0: "batch", 3: "time"},
            },
        )  # fmt: skip
    session = onnxruntime.InferenceSession(graph.getvalue(), providers=["CPUExecutionProvider"])
    for symbols, items in ((6, 1), (1, 1), (53, 1), (17, 2)):
        still = inputs(symbols, items, (0.0, 1.3, 0.0))
        (wave,) = session.run(None, {name: tensor.numpy() for name, tensor in zip(names, still, strict=True)})
        with torch.no_grad():
            expected = speaking(*still)
        assert wave.shape == expected.shape
        assert (torch.from_numpy(wave) - expected).abs().max() < 1e-4
        assert expected.std() > 1e-3
    lively = {name: tensor.numpy() for name, tensor in zip(names, inputs(53, 1, (0.667, 1.0, 0.8)), strict=True)}
    first, second = (session.run(None, lively)[0] for _ in range(2))
    assert first.shape != second.shape or abs(first - second).max() > 1e-3
