"""The features of w2v-BERT against transformers' SeamlessM4TFeatureExtractor, which rounds what it computes to fp32."""

import numpy as np
import torch

from gputrain.asr.features import bank_blocks, features_of, features_of_equal, filter_banks
from tests.tables import each_row

LENGTHS = (9999, 560, 12000, 880, 4000, 719)  # Of odd and of even numbers of frames of filter banks.


def waves() -> torch.Tensor:
    """Returns samples of 16 bits in fp64, whose loudness grows by three powers of ten; zero beyond the clips."""
    draws = torch.Generator().manual_seed(0)
    wave_BL = torch.randn(len(LENGTHS), max(LENGTHS), generator=draws, dtype=torch.float64)
    wave_BL = (wave_BL * torch.logspace(0, 3, max(LENGTHS)) * 8 + 300).round() / 32768
    return wave_BL * (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None])


def test_features_are_those_of_transformers():
    from transformers import SeamlessM4TFeatureExtractor

    ours_BTC = features_of(waves(), LENGTHS)
    stock = SeamlessM4TFeatureExtractor()
    clips = [wave_L[:count].numpy() for wave_L, count in zip(waves(), LENGTHS, strict=True)]
    theirs = stock([clip.astype(np.float32) for clip in clips], sampling_rate=16000, return_tensors="pt")
    inside_BT = theirs["attention_mask"].bool()
    assert inside_BT.sum(1).tolist() == [(count - 560) // 320 + 1 for count in LENGTHS]
    assert ours_BTC.shape[1] == inside_BT.sum(1).max()
    inside_BT = inside_BT[:, : ours_BTC.shape[1]]
    theirs_BTC = theirs["input_features"][:, : ours_BTC.shape[1]].double()
    assert (ours_BTC - theirs_BTC)[inside_BT].abs().max() < 5e-5  # They round logarithms of up to 23 to fp32.
    assert theirs_BTC[inside_BT].std() > 0.9
    assert not ours_BTC[~inside_BT].any()


def test_features_in_fp32_differ_by_their_rounding():
    """Products are in fp64, since the bins of a frame differ by many powers of ten."""
    exact_BTC, rounded_BTC = features_of(waves(), LENGTHS), features_of(waves().float(), LENGTHS)
    assert rounded_BTC.dtype == torch.float32
    assert (exact_BTC - rounded_BTC).abs().max() <= 2**-24 * exact_BTC.abs().max()


def test_a_clip_does_not_depend_on_its_batch():
    together_BTC = features_of(waves().float(), LENGTHS)
    for row, count in enumerate(LENGTHS):
        alone_1TC = features_of_equal(waves().float()[row : row + 1, :count])
        assert torch.equal(together_BTC[row : row + 1, : alone_1TC.shape[1]], alone_1TC)
    assert features_of(waves(), [559] * len(LENGTHS)).shape == (len(LENGTHS), 1, 160)


def test_digital_silence_is_finite():
    assert features_of_equal(torch.zeros(1, 4000)).abs().max() < 1e-3


@each_row(1, 399, 400, 1000, 5000)
def test_a_recording_in_blocks_has_the_same_filter_banks(block):
    wave_L = waves()[0, : LENGTHS[0]].float().numpy()
    blocks = (wave_L[first : first + block] for first in range(0, len(wave_L), block))
    whole_MC = filter_banks(torch.from_numpy(wave_L)[None])[0].numpy()
    np.testing.assert_allclose(np.concatenate(list(bank_blocks(blocks))), whole_MC, rtol=1e-12)
