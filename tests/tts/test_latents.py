"""The WaveNet of posterior encoder and flow, whose transformed weights put its channels last in memory."""

import pytest
import torch
from torch import Tensor

from gputrain.audio.weight_norm import weights_made_once
from gputrain.tts.architecture import VoiceArchitecture
from gputrain.tts.latents import WaveNet

CHANNELS, SPEAKER, LAYERS = 128, 16, 3  # The fewest channels whose convolutions are transformed.


def wavenet(speakers: int, *, checkpointing: bool) -> WaveNet:
    torch.manual_seed(0)
    sizes = VoiceArchitecture(8, num_speakers=speakers, hidden_channels=CHANNELS, speaker_channels=SPEAKER)
    return WaveNet(sizes, LAYERS, checkpointing=checkpointing).double()


def results(model: WaveNet, speaker_BG1: Tensor | None, *, transformed: bool) -> list[Tensor]:
    """Returns the output and all gradients in a step."""
    generator = torch.Generator().manual_seed(1)
    mask_B1T = torch.tensor([13, 21]).unsqueeze(1) > torch.arange(21)
    x_BCT = torch.randn(2, CHANNELS, 21, dtype=torch.float64, generator=generator) * mask_B1T[:, None]
    model.zero_grad()
    with weights_made_once(model, winograd=transformed):
        made = model(x_BCT.requires_grad_(), mask_B1T[:, None], speaker_BG1)
        made.backward(torch.randn(made.shape, dtype=torch.float64, generator=generator))
    return [made.detach(), x_BCT.grad, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("speakers", [1, 2])
def test_channels_in_another_order_change_nothing(monkeypatch, speakers, checkpointing):
    monkeypatch.setattr("gputrain.audio.winograd_1d.has_mkl", lambda: True)
    model = wavenet(speakers, checkpointing=checkpointing)
    speaker_BG1 = torch.randn(2, SPEAKER, 1, dtype=torch.float64) if speakers > 1 else None
    expected = results(model, speaker_BG1, transformed=False)
    found = results(model, speaker_BG1, transformed=True)
    assert found[0].is_contiguous()
    for ours, torchs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-11, atol=1e-11 * float(torchs.abs().max()))


def test_layers_with_transformed_weights_never_put_channels_first(monkeypatch):
    """Neither their values nor the gradients: each order would be copied into the other."""
    monkeypatch.setattr("gputrain.audio.winograd_1d.has_mkl", lambda: True)
    model, orders = wavenet(1, checkpointing=False), []

    def note(_, given: tuple[Tensor], made: Tensor | tuple[Tensor]) -> None:
        orders.extend(one.stride(1) for one in (*given, *(made if isinstance(made, tuple) else (made,))))

    for layer in model.layers:
        for module in (layer.conv, layer.out):
            module.register_forward_hook(note)
            module.register_full_backward_hook(note)
    results(model, None, transformed=True)
    assert len(orders) == LAYERS * 2 * 2 * 2
    assert set(orders) == {1}
