"""Synthetic speech for tests: hums for words, with given pauses."""

from pathlib import Path

import numpy as np
import soundfile

RATE_HZ = 16000


def hum(seconds: float, *, hz: float = 150.0, rate_hz: int = RATE_HZ, loud: float = 0.3) -> np.ndarray:
    """Returns harmonics whose amplitude oscillates four times a second, never to silence."""
    time = np.arange(round(seconds * rate_hz)) / rate_hz
    wave = sum(np.sin(2 * np.pi * hz * k * time) / k for k in range(1, 6))
    wave *= 0.7 + 0.3 * np.sin(8 * np.pi * time)
    return (loud * wave / np.abs(wave).max()).astype(np.float32)


def rest(seconds: float, rate_hz: int = RATE_HZ) -> np.ndarray:
    return np.zeros(round(seconds * rate_hz), np.float32)


def speak(path: Path, *parts: np.ndarray, rate_hz: int = RATE_HZ, text: str = "") -> Path:
    """Writes a recording, and its text next to it if there is one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, np.concatenate(parts), rate_hz)
    if text:
        path.with_suffix(".txt").write_text(text, encoding="utf-8")
    return path
