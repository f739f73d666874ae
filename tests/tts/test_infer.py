"""Inference of the voice in torch. Shape suffixes: B items, S symbols, T frames, L samples."""

import pytest
import torch
from torch import Tensor

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
