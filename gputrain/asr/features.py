"""The features that w2v-BERT reads: Kaldi's log-mel filter banks, normalised over the clip, two frames side by side.

The arithmetic is that of transformers' SeamlessM4TFeatureExtractor, in fp64: the bins of a frame differ by eight powers
of ten, more than TF32 or 16 bit can hold, and neither touches fp64. Removing a frame's mean, pre-emphasis, the window
and the Fourier transform are linear, so that one matrix product does them all, on any device and in a graph of ONNX.
Clips are computed one by one: a clip's features do not depend on its batch, and need little memory.

Shapes: B clips, L samples, M frames of filter banks, K samples of one, S coefficients, C bins, T frames of the encoder.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gputrain.asr.architecture import FEATURE_FIELD, FEATURES
from gputrain.speech.frames import ENCODER_RATE, STRIDE

BANK_FIELD, BANK_STRIDE, BINS = 400, 160, FEATURES // 2
BLOCK = 80  # samples; of such blocks, frames have five
FOURIER = 512
PRE_EMPHASIS = 0.97
LEAST_ENERGY = 1.192092955078125e-07
FULL_SCALE = 32768.0  # Kaldi reads samples of 16 bits.
NORMALIZING_EPSILON = 1e-7


@functools.cache
def _matrices() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the matrices from a frame to its Fourier coefficients, real parts before imaginary ones, (K, S), and from
    their powers to the bins, (S / 2, C)."""
    from transformers.audio_utils import mel_filter_bank, window_function

    frames_KK = np.eye(BANK_FIELD) - 1 / BANK_FIELD
    before_KK = np.concatenate([frames_KK[:, :1], frames_KK[:, :-1]], axis=1)
    frames_KK = (frames_KK - PRE_EMPHASIS * before_KK) * window_function(BANK_FIELD, "povey", periodic=False)
    fourier_KS = np.fft.rfft(frames_KK, FOURIER)
    filters = mel_filter_bank(
        FOURIER // 2 + 1,
        BINS,
        20,
        ENCODER_RATE // 2,
        ENCODER_RATE,
        norm=None,
        mel_scale="kaldi",
        triangularize_in_mel_space=True,
    )
    return np.concatenate([fourier_KS.real, fourier_KS.imag], axis=1), filters


def matrices_on(device: torch.device) -> list[Tensor]:
    return [torch.tensor(matrix).to(device, non_blocking=True) for matrix in _matrices()]


def filter_banks(wave_BL: Tensor, matrices: Sequence[Tensor] = ()) -> Tensor:
    """Returns the logarithms of the energies in the bins of waves in [-1, 1], fp64 (B, M, C)."""
    fourier_KS, filters_SC = matrices or matrices_on(wave_BL.device)
    # Frames of five blocks begin every second block; ONNX has no operator that makes overlapping frames.
    frames, blocks = (wave_BL.shape[1] - BANK_FIELD) // BANK_STRIDE + 1, wave_BL.shape[1] // BLOCK
    blocks_BNK = (wave_BL[:, : blocks * BLOCK].double() * FULL_SCALE).reshape(len(wave_BL), -1, BLOCK)
    shifts = range(BANK_FIELD // BLOCK)
    frames_BMK = torch.cat([blocks_BNK[:, shift : shift + 2 * frames - 1 : 2] for shift in shifts], dim=2)
    real_BMS, imaginary_BMS = (frames_BMK @ fourier_KS).square().chunk(2, dim=2)
    return ((real_BMS + imaginary_BMS) @ filters_SC).clamp(min=LEAST_ENERGY).log()


def stacked(banks_BMC: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Returns normalised filter banks, two side by side, (B, T, 2 C); the last one of an odd number is left out."""
    clips, frames, _ = banks_BMC.shape
    made_BMC = (banks_BMC - mean) / (variance + NORMALIZING_EPSILON).sqrt()
    return made_BMC[:, : frames // 2 * 2].reshape(clips, frames // 2, FEATURES)


def features_of_equal(wave_BL: Tensor, matrices: Sequence[Tensor] = ()) -> Tensor:
    """Returns the features of waves of equal length, in their data type, (B, T, 2 C)."""
    banks_BMC = filter_banks(wave_BL, matrices)
    moments = banks_BMC.mean(dim=1, keepdim=True), banks_BMC.var(dim=1, keepdim=True, correction=1)
    return stacked(banks_BMC, *moments).to(wave_BL.dtype)


def features_of(wave_BL: Tensor, samples: Sequence[int]) -> Tensor:
    """Returns the features of clips of so many samples, zero beyond their ends, for the frames of the longest one."""
    most = max(1, (max(samples) - FEATURE_FIELD) // STRIDE + 1)
    made_BTC, matrices = wave_BL.new_zeros(len(samples), most, FEATURES), matrices_on(wave_BL.device)
    for row, count in enumerate(samples):
        if count >= FEATURE_FIELD:
            own_1TC = features_of_equal(wave_BL[row : row + 1, :count], matrices)
            made_BTC[row, : own_1TC.shape[1]] = own_1TC[0]
    return made_BTC


def bank_blocks(blocks: Iterable[NDArray[np.float32]]) -> Iterator[NDArray[np.float64]]:
    """Yields the filter banks (M, C) of a recording that comes in blocks of samples."""
    held_L = np.empty(0, np.float32)
    for block_L in blocks:
        held_L = np.concatenate([held_L, block_L])
        if len(held_L) >= BANK_FIELD:
            banks_MC = filter_banks(torch.from_numpy(held_L)[None])[0].numpy()
            held_L = held_L[len(banks_MC) * BANK_STRIDE :]
            yield banks_MC
