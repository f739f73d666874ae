"""Pictures and sounds inside a report, within limits of bytes and time.

Pictures become JPEG files of at most PICTURE_SIDE pixels, sounds 16-bit wav files of one channel and at most
SOUND_SECONDS. What does not fit within the limits is left out, and counted.
"""

import base64
import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import Image

from gputrain.audio.config import Mel
from gputrain.audio.mel import frequency_ticks, mel_decades
from gputrain.engine.data import to_int16
from gputrain.engine.drawing import spectrogram_picture, with_axes

T = TypeVar("T")

MEDIA_BYTES = 12_000_000  # All pictures and sounds of a report, as they are written into it.
PICTURE_SIDE = 1400
QUALITY = 85  # Quality of the JPEG files, which Pillow counts to 95.
SOUND_SECONDS = 8.0
LONGEST_SIDE = 30_000  # Pixels of a picture that is read.
SPECTROGRAM_FRAMES, SPECTROGRAM_BANDS = 400, 64
DECADES = (-5.0, 1.5)  # Powers of ten: mel magnitudes of the darkest and the brightest colour.


@dataclass(frozen=True)
class EmbeddedPicture:
    """A picture as a data URI, with its size in pixels and its description."""

    uri: str
    width: int
    height: int
    alt: str


@dataclass(frozen=True)
class EmbeddedSound:
    """A sound as a data URI, with its spectrogram, its length in seconds and what it is."""

    uri: str
    spectrogram: EmbeddedPicture | None
    seconds: float
    title: str
    is_cut: bool = False


@dataclass
class MediaBudget:
    """Limits for everything that is embedded. `deadline` is a time of time.monotonic."""

    deadline: float
    bytes_left: int = MEDIA_BYTES
    left_out: int = 0
    unreadable: int = 0

    @classmethod
    def of(cls, seconds: float) -> "MediaBudget":
        return cls(time.monotonic() + seconds)

    def attempt(self, make: Callable[[], T | None]) -> T | None:
        """Return what `make` makes, or None without time or if its file is damaged."""
        if time.monotonic() > self.deadline:
            self.left_out += 1
            return None
        try:
            return make()
        except (OSError, ValueError, SyntaxError, RuntimeError, MemoryError):  # Decoders raise all of them.
            self.unreadable += 1
            return None

    def uri(self, kind: str, content: bytes) -> str | None:
        """Return a data URI, or None if it does not fit any more."""
        uri = f"data:{kind};base64,{base64.b64encode(content).decode()}"
        if len(uri) > self.bytes_left:
            self.left_out += 1
            return None
        self.bytes_left -= len(uri)
        return uri

    def picture(self, image: Image.Image, alt: str, side: int = PICTURE_SIDE) -> EmbeddedPicture | None:
        image = image.convert("RGB")
        if max(image.size) > side:
            image.thumbnail((side, side))
        written = io.BytesIO()
        image.save(written, "JPEG", quality=QUALITY, optimize=True)
        uri = self.uri("image/jpeg", written.getvalue())
        return EmbeddedPicture(uri, image.width, image.height, alt) if uri else None

    def sound(self, path: Path, title: str, *, with_spectrogram: bool = True) -> EmbeddedSound | None:
        """Return a sound, and its spectrogram if asked for; None if it is damaged or does not fit."""
        return self.attempt(lambda: self._sound(path, title, with_spectrogram))

    def _sound(self, path: Path, title: str, with_spectrogram: bool) -> EmbeddedSound | None:
        import soundfile

        with soundfile.SoundFile(path) as file:
            rate, frames = file.samplerate, file.frames
            wave_T = file.read(int(SOUND_SECONDS * rate), dtype="float32", always_2d=True).mean(axis=1)
        if not len(wave_T):
            raise ValueError("no samples")
        wave_T = np.nan_to_num(wave_T)
        written = io.BytesIO()
        soundfile.write(written, to_int16(wave_T), rate, subtype="PCM_16", format="WAV")
        uri = self.uri("audio/wav", written.getvalue())
        if uri is None:
            return None
        shown = None
        if with_spectrogram:
            shown = self.picture(spectrogram(torch.from_numpy(wave_T), rate), f"spectrogram of {title}")
        return EmbeddedSound(uri, shown, len(wave_T) / rate, title, is_cut=len(wave_T) < frames)


def open_picture(path: Path) -> Image.Image:
    """Open a picture and read it whole. Raises OSError or ValueError if it is damaged or too large."""
    with Image.open(path, formats=["PNG", "JPEG"]) as image:
        if max(image.size) > LONGEST_SIDE:
            raise ValueError("too large")
        whole: Image.Image = image.copy()
        return whole


def spectrogram(wave_T: torch.Tensor, rate_hz: int) -> Image.Image:
    """Returns the mel spectrogram of a wave, of about SPECTROGRAM_FRAMES frames, with axes; low frequencies are at the
    bottom."""
    size = 1024
    hop = max(32, len(wave_T) // SPECTROGRAM_FRAMES)
    size = max(size, 1 << (hop - 1).bit_length())
    mel = Mel(rate_hz, SPECTROGRAM_BANDS, hop, size, size, 0, rate_hz / 2)
    values_MF = mel_decades(wave_T, mel)
    picture = spectrogram_picture(values_MF, *DECADES)
    return Image.fromarray(with_axes(picture, frequency_ticks(mel), values_MF.shape[1] * hop / rate_hz).numpy())
