"""The layers of an exported voice against the voice's own. Shape suffixes as in gputrain/tts/export_layers.py."""

import pytest
import torch
from torch import nn

from gputrain.audio.weight_norm import WeightNormed
from gputrain.tts.architecture import VoicePreset, voice_architecture
from gputrain.tts.decoder import WaveDecoder
from gputrain.tts.export_layers import OneRow, RowDecoder, RowStage, faster_in_onnxruntime, joined, overlapping
from gputrain.tts.model import PlainConvolution, inference_copy
from tests.tables import each_row
from tests.tts.voices import build, small


@each_row(1, 2, 8)
def test_rows_overlap_and_are_joined_again(rows: int) -> None:
    for length in (1, 3, 8, 40, 41, 203):
        x_BCL = torch.arange(2.0 * length).reshape(1, 2, length)
        rows_BCRL, starts = overlapping(x_BCL, rows, halo=5)
        assert rows_BCRL.shape[:3] == (1, 2, rows)
        for row, start in enumerate(map(int, starts)):
            cut = rows_BCRL.shape[3]
            assert torch.equal(rows_BCRL[:, :, row], x_BCL[:, :, start : start + cut])
        assert torch.equal(joined(rows_BCRL, starts, length), x_BCL)
    assert rows == 1 or rows_BCRL.shape[3] == -(-203 // rows) + 10


@torch.no_grad()
@pytest.mark.parametrize("preset", ["high", "medium", "fast"])
def test_a_decoder_in_rows_gives_the_same_wave(preset: VoicePreset) -> None:
    voice = inference_copy(build(small(preset, 3)))
    decoder = voice.double().decoder
    in_rows = RowDecoder(decoder, voice.architecture.upsample_rates).double()
    stages: list[RowStage] = list(in_rows.stages)  # type: ignore[arg-type]
    assert stages[-1].rows == (4 if preset == "fast" else 8)
    for frames in (1, 2, 5, 30):
        latent_BCF = torch.randn(2, voice.architecture.latent_channels, frames, dtype=torch.float64)
        speaker_BG1 = voice.speaker(torch.tensor([0, 2]))
        expected_B1T = decoder(latent_BCF, speaker_BG1)
        assert expected_B1T.std() > 1e-3
        assert torch.allclose(in_rows(latent_BCF, speaker_BG1), expected_B1T, rtol=0, atol=1e-12)


@torch.no_grad()
def test_only_convolutions_that_see_one_position_stay_one_dimensional() -> None:
    voice = inference_copy(build(small("medium")))
    fast = faster_in_onnxruntime(voice)
    kept = [layer for part in (fast.flow, fast.text_encoder) for layer in part.modules()]
    plain = [layer for layer in kept if isinstance(layer, (PlainConvolution, nn.Conv1d))]
    assert {layer.weight.shape[2] for layer in plain} == {1}
    assert sum(isinstance(layer, OneRow) for layer in kept) == 8  # Four of each.
    given = (torch.tensor([[3, 1, 4, 1, 5]]), torch.tensor([5]))
    expected_B1T, expected_BS = voice.infer(*given, noise_scale=0.0, noise_w=0.0)
    wave_B1T, durations_BS = fast.infer(*given, noise_scale=0.0, noise_w=0.0)
    assert torch.equal(durations_BS, expected_BS)
    assert torch.allclose(wave_B1T, expected_B1T, rtol=0, atol=1e-5)
    assert not any(isinstance(layer, OneRow) for layer in voice.modules())


@each_row(("high", [1, 4, 8, 8]), ("medium", [2, 8, 8]), ("fast", [1, 4]))
def test_rows_of_the_presets(preset: VoicePreset, rows: list[int]) -> None:
    """A layer has eight parts where they lengthen a sentence of 100 frames by a quarter at the most."""
    sizes = voice_architecture(preset, num_symbols=12)
    with torch.device("meta"):
        decoder = WaveDecoder(sizes)
    count, short = decoder.kernels, 100
    for stage, rate in enumerate(sizes.upsample_rates):
        short *= rate
        blocks = [folded(block) for block in decoder.resblocks[count * stage : count * (stage + 1)]]
        made = RowStage(blocks, short)
        assert made.rows == rows[stage]
        assert (made.rows - 1) * 2 * made.halo <= short / 4


def folded(module: nn.Module) -> nn.Module:
    for part in list(module.modules()):
        for name, layer in list(part.named_children()):
            if isinstance(layer, WeightNormed):
                setattr(part, name, PlainConvolution(layer))
    return module
