"""Frames of the encoder, against the convolutions of transformers' wav2vec 2.0."""

import torch

from gputrain.speech.config import FIELD, STRIDE, encoder_frames

KERNELS, STRIDES = (10, 3, 3, 3, 3, 2, 2), (5, 2, 2, 2, 2, 2, 2)


def test_frames_are_those_of_the_convolutions():
    for samples in [*range(FIELD, FIELD + 3 * STRIDE), 15999, 16000, 16001, 16079, 16080, 319999]:
        wave = torch.zeros(1, 1, samples)
        for kernel, stride in zip(KERNELS, STRIDES, strict=True):
            wave = torch.nn.functional.conv1d(wave, torch.zeros(1, 1, kernel), stride=stride)
        assert encoder_frames(samples) == wave.shape[-1], samples
    assert [encoder_frames(samples) for samples in (0, 1, 399, 400)] == [0, 0, 0, 1]
