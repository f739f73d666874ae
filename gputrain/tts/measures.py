"""Objective distances between synthesised speech and a recording of the same sentence, on the CPU.

The timing of a voice differs from the recording, so frames are compared along a path that pairs similar frames.

Shapes: T samples, F frames of a sound, M mel bands, C coefficients, P steps of a path, S symbols.
"""

import unicodedata
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gputrain.audio.config import Mel
from gputrain.audio.f0 import CEILING_HZ, FLOOR_HZ, Floats, Method, f0
from gputrain.audio.io import Samples
from gputrain.audio.metrics import CEPSTRUM, PitchMatch, log_mel_of, mel_cepstral_distortion, pitch_match
from gputrain.errors import UserError

Integers: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class SpeechMatch:
    """Comparison of synthesised speech with its recording.

    - `mcd_db`: mel-cepstral distortion (see `audio.metrics`) along the path, averaged over its steps.
    - `pitch`: agreement of pitches along the path.
    - `duration_ratio`: synthesised duration / recorded duration.
    """

    mcd_db: float
    pitch: PitchMatch
    duration_ratio: float


def compare(
    made_T: Samples,
    real_T: Samples,
    mel: Mel,
    *,
    f0_method: Method | None = None,
    floor_hz: float = FLOOR_HZ,
    ceiling_hz: float = CEILING_HZ,
    with_pitch: bool = True,
) -> SpeechMatch:
    """Compares two waves at the sampling rate of `mel`; `with_pitch` False leaves out their pitches, which take longer
    than the rest. Raises UserError if one is shorter than a frame, and as `audio.f0.f0`."""
    for name, wave_T in (("made", made_T), ("recorded", real_T)):
        if len(wave_T) < mel.hop_size:
            raise UserError(
                f"the {name} sound has {len(wave_T)} samples, less than a frame of {mel.hop_size}",
                hint="leave such clips out",
            )
    made_MF, real_MF = (log_mel_of(wave_T, mel) for wave_T in (made_T, real_T))
    made_P, real_P = warping_path(made_MF, real_MF)
    pitch = PitchMatch()
    if with_pitch:
        made_F, real_F = (
            f0(wave_T, mel.sampling_rate, mel.hop_size, f0_method, floor_hz=floor_hz, ceiling_hz=ceiling_hz)
            for wave_T in (made_T, real_T)
        )
        pitch = pitch_match(made_F[made_P], real_F[real_P])
    mcd_db = mel_cepstral_distortion(made_MF[:, made_P], real_MF[:, real_P])
    return SpeechMatch(mcd_db, pitch, duration_ratio=len(made_T) / len(real_T))


def warping_path(made_MF: Floats, real_MF: Floats) -> tuple[Integers, Integers]:
    """Returns made_P and real_P: the paired frames of both waves, from the first pair to the last.

    It is dynamic time warping (Sakoe and Chiba 1978, https://doi.org/10.1109/TASSP.1978.1163055) with the steps (1, 1),
    (0, 1) and (1, 0), of equal weights, over the distances of mel-cepstra without loudness. It takes 9 bytes per pair
    of frames: 0.5 GB for two clips of 86 s in frames of 12 ms.
    """
    import scipy.fft
    import scipy.spatial

    # The coefficients 1 to 25 of a log-mel's cosine series, as in `mel_cepstral_distortion`.
    made_CF, real_CF = (scipy.fft.dct(mel_MF, axis=0)[1 : CEPSTRUM + 1] / len(mel_MF) for mel_MF in (made_MF, real_MF))
    return cheapest_path(scipy.spatial.distance.cdist(made_CF.T, real_CF.T))


def cheapest_path(cost_RC: Floats) -> tuple[Integers, Integers]:
    """Returns the rows and columns of the path with the smallest sum of costs from the first to the last cell.

    Among equal sums, a step to the next row and column is preferred, then one to the next column. Sums are computed
    one antidiagonal at a time, since they depend only on the two antidiagonals before.
    """
    rows, columns = cost_RC.shape
    steps_RC = np.zeros((rows, columns), np.int8)
    # The sum of row r is at index r + 1, so that the entry before row 0 stays infinite.
    two_before, before = np.full(rows + 1, np.inf), np.full(rows + 1, np.inf)
    before[1] = cost_RC[0, 0]
    for diagonal in range(1, rows + columns - 1):
        first, last = max(0, diagonal - columns + 1), min(rows - 1, diagonal)
        row = np.arange(first, last + 1)
        sums_3R = np.stack([two_before[first : last + 1], before[first + 1 : last + 2], before[first : last + 1]])
        steps_RC[row, diagonal - row] = sums_3R.argmin(axis=0)
        sums = np.full(rows + 1, np.inf)
        sums[first + 1 : last + 2] = sums_3R.min(axis=0) + cost_RC[row, diagonal - row]
        two_before, before = before, sums
    path = [(rows - 1, columns - 1)]
    while path[-1] != (0, 0):
        at, step = path[-1], steps_RC[path[-1]]
        path.append((at[0] - (step != 1), at[1] - (step != 2)))
    pairs_P2 = np.array(path[::-1])
    return pairs_P2[:, 0], pairs_P2[:, 1]


def alignment_gain(scores_FS: Floats, durations_S: Integers) -> float:
    """Returns the log-likelihood gain of the alignment over a uniform one, in nats a frame; about 0 for a model that
    does not distinguish symbols. `scores_FS` are those of `align.alignment_scores` for the clip's own frames and
    symbols."""
    frames, symbols = scores_FS.shape
    at_F = np.arange(frames)
    found_F = np.repeat(np.arange(symbols), durations_S)
    return float((scores_FS[at_F, found_F].astype(np.float64) - scores_FS[at_F, at_F * symbols // frames]).mean())


APOSTROPHES = "'\u2018\u2019\u02bb\u02bc`\u00b4"


def plain(text: str) -> str:
    """Returns only the words: lower case, one kind of apostrophe, no punctuation, single spaces. Both arguments of
    `word_edits` need it, after the normaliser of their language, since one may have numbers as words and the other as
    digits."""
    text = unicodedata.normalize("NFC", text).casefold()
    text = text.translate({ord(apostrophe): "'" for apostrophe in APOSTROPHES})
    kept = (c if c == "'" or unicodedata.category(c)[0] in "LMN" else " " for c in text)
    return " ".join(word.strip("'") for word in "".join(kept).split() if word.strip("'"))
