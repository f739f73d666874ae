"""Speech of tones: every letter is a sine of its own frequency, so that a recogniser is exact without a training."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gputrain.asr.checking import CtcChecker
from gputrain.audio.io import resample
from gputrain.files import write_wav
from gputrain.speech.config import FIELD, STRIDE, encoder_frames
from gputrain.speech.text.vocabulary import Vocabulary

RATE = 16000
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = Vocabulary("en", ("<pad>", "<unk>", "|", *LETTERS))
LETTER_SECONDS, GAP_SECONDS, WORD_SECONDS = 0.06, 0.04, 0.1


def frequency(letter: str) -> float:
    return 400.0 + 200.0 * LETTERS.index(letter)


def said(text: str, rate_hz: int = RATE, loudness: float = 0.3) -> NDArray[np.float32]:
    """Returns the tones of the letters of a text, with gaps between them and longer ones between words. It begins and
    ends with a letter."""
    parts: list[NDArray[np.float32]] = []
    time = np.arange(round(LETTER_SECONDS * rate_hz)) / rate_hz
    window = np.minimum(1, np.minimum(time, time[::-1]) / 0.005)
    for word in VOCABULARY.normalize(text).split():
        parts.append(np.zeros(round(WORD_SECONDS * rate_hz), np.float32)) if parts else None
        for place, letter in enumerate(word):
            parts.append(np.zeros(round(GAP_SECONDS * rate_hz), np.float32)) if place else None
            parts.append((loudness * window * np.sin(2 * np.pi * frequency(letter) * time)).astype(np.float32))
    return np.concatenate(parts)


def rest(seconds: float, rate_hz: int = RATE) -> NDArray[np.float32]:
    return np.zeros(round(seconds * rate_hz), np.float32)


def write_said(path: Path, *parts: NDArray[np.float32], rate_hz: int = RATE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_wav(path, np.concatenate(parts), rate_hz)


class ToneChecker(CtcChecker):
    """Recognises tones by the energy at their frequencies; silence is a blank, or a delimiter where it is long."""

    def __init__(self) -> None:
        recogniser: Any = SimpleNamespace(vocabulary=VOCABULARY, sampling_rate=RATE, source="tones")
        super().__init__(recogniser)

    def log_probs(self, wave_T: NDArray[np.float32], rate_hz: int) -> NDArray[np.float32]:
        wave_T = resample(wave_T, rate_hz, RATE)
        frames = encoder_frames(len(wave_T))
        windows = np.lib.stride_tricks.sliding_window_view(wave_T, FIELD)[::STRIDE][:frames] * np.hanning(FIELD)
        time = np.arange(FIELD) / RATE
        waves = np.stack([np.exp(-2j * np.pi * frequency(letter) * time) for letter in LETTERS], axis=1)
        energy = np.abs(windows @ waves) / FIELD
        loud = energy.max(axis=1) > 0.01
        best = np.where(loud, energy.argmax(axis=1) + 3, 0)
        quiet = np.flatnonzero(~loud)
        for run in np.split(quiet, np.flatnonzero(np.diff(quiet) > 1) + 1):
            if len(run) >= 3:
                best[run[len(run) // 2]] = VOCABULARY.delimiter
        log_probs = np.full((frames, len(VOCABULARY.symbols)), np.log(0.01 / (len(VOCABULARY.symbols) - 1)))
        log_probs[np.arange(frames), best] = np.log(0.99)
        return log_probs.astype(np.float32)
