"""16-bit wav files."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gputrain.errors import UserError

FULL_SCALE = 32768  # Magnitude of the largest 16-bit sample.


def to_int16(wave_T: npt.NDArray[Any]) -> npt.NDArray[np.int16]:
    """16-bit samples of a wave in [-1, 1]; what lies beyond is clipped. Raises ValueError on NaN."""
    if np.isnan(wave_T).any():
        raise ValueError("a wave with NaN has no 16-bit samples")
    samples_T: npt.NDArray[np.int16] = np.rint(wave_T * FULL_SCALE).clip(-FULL_SCALE, FULL_SCALE - 1).astype(np.int16)
    return samples_T


def write_wav(path: Path, wave_T: npt.NDArray[Any], rate_hz: int) -> None:
    """Write one channel as 16-bit wav. Raises UserError if the file cannot be written, ValueError on NaN."""
    import soundfile  # A training of pictures does without it.

    samples_T = to_int16(wave_T)
    try:
        soundfile.write(path, samples_T, rate_hz, subtype="PCM_16", format="WAV")
    except soundfile.LibsndfileError as error:
        raise UserError(f"{path}: cannot be written: {error.error_string}") from None
