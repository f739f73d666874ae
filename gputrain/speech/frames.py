"""Frames of a recogniser's encoder: those of wav2vec 2.0, XLS-R and MMS, which read samples at 16 kHz."""

ENCODER_RATE = 16000  # Hz
STRIDE = 320  # samples from one frame to the next: the product of the strides 5, 2, 2, 2, 2, 2, 2
FIELD = 400  # samples that a frame reads


def encoder_frames(samples: int) -> int:
    """Returns the exact number of frames that the seven convolutions make of a wave, which has no padding.

    Source: Baevski et al. 2020 (https://arxiv.org/abs/2006.11477), section 4.2. floor((floor((n - a) / b) + 1 - c) / d)
    of nested convolutions equals one floor of the whole, so this equals the frames layer by layer.
    """
    return max(0, (samples - FIELD) // STRIDE + 1)
