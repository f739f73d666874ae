"""Prepared speech for tests of a recogniser."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gputrain.speech.config import ENCODER_RATE, STRIDE, encoder_frames
from gputrain.speech.store import Recording, SoundFormat, SpeechClip, SpeechFormat, SpeechWriter
from gputrain.speech.text.vocabulary import plain_words, vocabulary_of

LETTERS = "abcde"


def write_store(
    folder: Path,
    clips: Iterable[tuple[str, npt.NDArray[np.int16], str]],
    language: str = "en",
    most_seconds: float = 20,
) -> Path:
    """Writes (name, samples at 16 kHz, text) as a store, without clips that are too long or have too few frames."""
    named = [(name, wave, text, plain_words(text, language)) for name, wave, text in clips]
    vocabulary = vocabulary_of(language, [words for *_, words in named])
    writer = SpeechWriter(folder, SoundFormat(ENCODER_RATE, 0.0, 0.0))
    kept = []
    for name, wave, text, words in named:
        if encoder_frames(len(wave)) < vocabulary.frames_needed(words) or not words:
            continue
        if len(wave) > most_seconds * ENCODER_RATE:
            continue
        fingerprint = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
        recording = writer.append(Recording(name, fingerprint, 0, len(wave), ENCODER_RATE, 0.0), wave)
        kept.append(SpeechClip(name, fingerprint, recording.first_sample, len(wave), text, words, 0))
    writer.finish(SpeechFormat(vocabulary, ENCODER_RATE, STRIDE, ("speaker",), "asr"), kept)
    return folder


def spelled_clips(count: int, seed: int = 0) -> list[tuple[str, npt.NDArray[np.int16], str]]:
    """Returns clips in which each letter is a tone of its own, 80 ms long."""
    draws, clips = np.random.default_rng(seed), []
    for number in range(count):
        word = "".join(draws.choice(list(LETTERS), int(draws.integers(3, 12))))
        time = np.arange(1280) / ENCODER_RATE
        tones = [np.sin(2 * np.pi * 300 * (1 + LETTERS.index(letter)) * time) * np.hanning(1280) for letter in word]
        wave = np.concatenate([*tones, np.zeros(640)]) + draws.normal(0, 0.005, 1280 * len(word) + 640)
        clips.append((f"clip_{number}", (wave * 12000).astype(np.int16), word))
    return clips
