"""Measures of sound for the learning races, by packages of neither side: librosa, parselmouth (Praat), pesq and
pocketsphinx.

Shapes: T samples, F frames, M mel bands, K coefficients, P pairs of aligned frames.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import jiwer
import librosa
import numpy as np
import numpy.typing as npt
import parselmouth
import scipy.fft

try:
    import pesq
except ImportError:  # It is optional: without it there is no PESQ.
    pesq = None
try:
    import pocketsphinx
except ImportError:  # It is optional: without it there is no character error rate.
    pocketsphinx = None

HAS_PESQ = pesq is not None
Samples = npt.NDArray[np.float32]
Values = npt.NDArray[np.float64]

MEL_BANDS, FFT, HOP = 80, 1024, 256
QUIETEST = 1e-4  # Lower magnitudes of mel bands are raised to this, so that silence has a logarithm.
COEFFICIENTS = 13  # Mel-cepstral coefficients that are compared, without the 0th, which is the loudness.
PITCH_HZ = 60.0, 500.0
GROSS = 0.2  # A pitch that is off by a larger share is a gross error.
SILENCE = 0.25  # Seconds before and after what the recogniser hears.


def as_saved(wave_T: Any) -> Samples:
    """Returns a wave with the values that a file of 16 bits holds. NaN, of a diverged model, is silence."""
    wave_T = np.nan_to_num(np.asarray(wave_T, dtype=np.float64))
    return (np.clip(np.round(wave_T * 32767), -32768, 32767) / 32767).astype(np.float32)


def log_mel(wave_T: Samples, rate_hz: int) -> Values:
    """Returns the natural logarithm of librosa's mel magnitudes: MF."""
    mel_MF = librosa.feature.melspectrogram(
        y=wave_T, sr=rate_hz, n_fft=FFT, hop_length=HOP, n_mels=MEL_BANDS, power=1.0
    )
    return np.log(np.maximum(mel_MF, QUIETEST))


def mel_distance(made_T: Samples, real_T: Samples, rate_hz: int) -> float:
    """Returns the mean absolute difference of log-mels of two waves of equal length."""
    return float(np.abs(log_mel(made_T, rate_hz) - log_mel(real_T, rate_hz)).mean())


def quality(made_T: Samples, real_T: Samples, rate_hz: int) -> float | None:
    """Returns wideband PESQ at 16 kHz; None without the package, or where it finds no speech."""
    if pesq is None or rate_hz != 16000:
        return None
    try:
        return float(pesq.pesq(rate_hz, real_T, made_T, "wb"))
    except pesq.PesqError:
        return None


def pitch(wave_T: Samples, rate_hz: int) -> Values:
    """Returns the pitch in Hz by frames of HOP samples, 0 where unvoiced (Praat's autocorrelation)."""
    floor_hz, ceiling_hz = PITCH_HZ
    sound = parselmouth.Sound(wave_T.astype(np.float64), sampling_frequency=rate_hz)
    track = sound.to_pitch_ac(time_step=HOP / rate_hz, pitch_floor=floor_hz, pitch_ceiling=ceiling_hz)
    times_F = np.arange(1 + len(wave_T) // HOP) * HOP / rate_hz
    found_F = np.array([track.get_value_at_time(time) for time in times_F])
    return np.nan_to_num(found_F)


def pitch_errors(made_P: Values, real_P: Values) -> dict[str, float]:
    """Returns counts for the F0 frame error (Chu and Alwan 2009): frames whose voicing differs or whose pitch is off by
    more than a fifth, and the squared cents of the others that are voiced."""
    both_P = (made_P > 0) & (real_P > 0)
    ratio_P = np.where(both_P, made_P, 1) / np.where(both_P, real_P, 1)
    gross_P = both_P & (np.abs(ratio_P - 1) > GROSS)
    cents_P = 1200 * np.log2(ratio_P[both_P & ~gross_P])
    return {
        "frames": len(real_P), "wrong": float(((made_P > 0) != (real_P > 0)).sum() + gross_P.sum()),
        "fine": len(cents_P), "squared_cents": float((cents_P**2).sum()),
    }  # fmt: skip


def pitch_figures(counts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the F0 frame error in percent, and the root mean square of the fine error in cents, over all clips."""
    total = {name: sum(one[name] for one in counts) for name in counts[0]}
    figures = {"f0_frame_error": 100 * total["wrong"] / max(1, total["frames"])}
    if total["fine"]:
        figures["f0_rmse_cents"] = (total["squared_cents"] / total["fine"]) ** 0.5
    return figures


def cepstra(wave_T: Samples, rate_hz: int) -> Values:
    """Returns mel-cepstral coefficients 1 to COEFFICIENTS: the log-mel is the sum of c(k) cos(k w): KF."""
    log_MF = log_mel(wave_T, rate_hz)
    coefficients_KF: Values = scipy.fft.dct(log_MF, axis=0, type=2)[1 : COEFFICIENTS + 1] / len(log_MF)
    return coefficients_KF


def aligned(made_T: Samples, real_T: Samples, rate_hz: int) -> tuple[float, npt.NDArray[np.int64]]:
    """Returns the mel-cepstral distortion in dB along the path of dynamic time warping, and the path: P2.

    It is 10 / ln 10 * sqrt(2 * sum of squared differences) (Kubichek 1993), the mean over the path.
    """
    made_KF, real_KF = cepstra(made_T, rate_hz), cepstra(real_T, rate_hz)
    _, path_P2 = librosa.sequence.dtw(X=made_KF, Y=real_KF, metric="euclidean")
    difference_KP = made_KF[:, path_P2[:, 0]] - real_KF[:, path_P2[:, 1]]
    distortion_P = 10 / np.log(10) * np.sqrt(2 * (difference_KP**2).sum(axis=0))
    return float(distortion_P.mean()), path_P2


def check_recogniser() -> None:
    """Leaves the program if there is no recogniser."""
    if pocketsphinx is None:
        raise SystemExit("the character error rate needs a recogniser: pip install pocketsphinx, or use --no-cer")


def recognised(waves: Iterable[Samples], rate_hz: int) -> list[str]:
    """Returns the words that pocketsphinx finds, with its own models of American English."""
    decoder = pocketsphinx.Decoder(samprate=rate_hz, loglevel="FATAL")
    found = []
    for wave_T in waves:
        padded_T = np.pad(wave_T, round(SILENCE * rate_hz))
        decoder.start_utt()
        decoder.process_raw((padded_T * 32767).astype(np.int16).tobytes(), full_utt=True)
        decoder.end_utt()
        best = decoder.hyp()
        found.append(best.hypstr if best else "")
    return found


def character_error_rate(texts: Sequence[str], found: Sequence[str]) -> float:
    """Returns the wrong, missing and additional characters in percent of those of the texts; more than 100 if there are
    many additional ones. Only letters, apostrophes and single spaces count."""
    return 100 * float(jiwer.cer([letters_of(text) for text in texts], [letters_of(text) for text in found]))


def letters_of(text: str) -> str:
    return " ".join(re.sub("[^a-z']+", " ", text.lower()).split())
