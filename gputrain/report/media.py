"""Pictures and sounds inside a report, within limits of bytes and time, and those of a page, which are kept in memory.

Pictures become JPEG files of at most PICTURE_SIDE pixels, sounds 16-bit wav files of one channel and at most
SOUND_SECONDS, on a page of LIVE_SECONDS. What does not fit within the limits is left out, and counted.
"""

import base64
import hashlib
import io
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image

from gputrain.audio.config import Mel
from gputrain.audio.mel import frequency_ticks, mel_decades
from gputrain.drawing import spectrogram_picture, with_axes
from gputrain.files import to_int16

T = TypeVar("T")

MEDIA_BYTES = 12_000_000  # All pictures and sounds of a report, as they are written into it.
PICTURE_SIDE = 1400
QUALITY = 92  # Quality of the JPEG files, which Pillow counts to 95: faults are those of the model, not of the file.
SOUND_SECONDS = 8.0
LIVE_SECONDS, LIVE_SOUND_BYTES = 60.0, 4_000_000  # A sound of a page is as long as both allow.
LIVE_BYTES, LIVE_FILES = 200_000_000, 20_000  # What is kept for pages: pictures and sounds, and what they were made of.
LONGEST_SIDE = 30_000  # Pixels of a picture that is read.
HIGHEST_RATE_HZ, MOST_CHANNELS = 400_000, 8  # Of a sound that is read: a file may claim more than fits into the memory.
SPECTROGRAM_FRAMES, SPECTROGRAM_BANDS, SHORTEST_HOP = 400, 64, 32
FAULTS = (OSError, ValueError, SyntaxError, RuntimeError, MemoryError, Image.DecompressionBombError)  # Of decoders.
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
        except FAULTS:
            self.unreadable += 1
            return None

    def of_file(self, path: Path, make: Callable[[], T | None], part: Hashable = None) -> T | None:
        """Return what `make` makes of a file or a part of it, as `attempt` does; a page keeps it."""
        return self.attempt(make)

    def seconds_of(self, rate_hz: int) -> float:
        """Return the longest duration of a sound."""
        return SOUND_SECONDS

    def uri(self, kind: str, content: bytes) -> str | None:
        """Return a data URI, or None if it does not fit any more."""
        uri = f"data:{kind};base64,{base64.b64encode(content).decode()}"
        if len(uri) > self.bytes_left:
            self.left_out += 1
            return None
        self.bytes_left -= len(uri)
        return uri

    def picture(self, image: Image.Image, alt: str) -> EmbeddedPicture | None:
        image = image.convert("RGB")
        image.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
        written = io.BytesIO()
        image.save(written, "JPEG", quality=QUALITY, subsampling=0)
        uri = self.uri("image/jpeg", written.getvalue())
        return EmbeddedPicture(uri, image.width, image.height, alt) if uri else None

    def sound(self, path: Path, title: str, *, with_spectrogram: bool = True) -> EmbeddedSound | None:
        """Return a sound, and its spectrogram if asked for; None if it is damaged or does not fit."""
        return self.of_file(path, lambda: self._sound(path, title, with_spectrogram), (title, with_spectrogram))

    def _sound(self, path: Path, title: str, with_spectrogram: bool) -> EmbeddedSound | None:
        import soundfile

        with soundfile.SoundFile(path) as file:
            rate, frames = file.samplerate, file.frames
            if rate > HIGHEST_RATE_HZ or file.channels > MOST_CHANNELS:
                raise ValueError("no recording")
            wave_T = file.read(int(self.seconds_of(rate) * rate), dtype="float32", always_2d=True).mean(axis=1)
        if not len(wave_T):
            raise ValueError("no samples")
        wave_T = np.nan_to_num(wave_T)
        written = io.BytesIO()
        soundfile.write(written, to_int16(wave_T), rate, subtype="PCM_16", format="WAV")
        uri = self.uri("audio/wav", written.getvalue())
        if uri is None:
            return None
        shown = None
        if with_spectrogram and len(wave_T) >= SHORTEST_HOP:
            shown = self.picture(spectrogram(torch.from_numpy(wave_T), rate), f"spectrogram of {title}")
        return EmbeddedSound(uri, shown, len(wave_T) / rate, title, is_cut=len(wave_T) < frames)


class LiveMedia(MediaBudget):
    """Pictures and sounds of pages: their bytes stay in memory, and pages name them by addresses. An unchanged file is
    read once. `renew` begins a page; a lock keeps pages apart."""

    def __init__(self) -> None:
        super().__init__(math.inf)
        self._contents: OrderedDict[str, tuple[str, bytes]] = OrderedDict()  # By names, the least recently used first.
        self._made: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()  # And how many files were unreadable.
        self._bytes = 0
        self.dropped = 0  # Number of contents that are not kept any more.

    def renew(self, seconds: float) -> None:
        """Give the next page a time for files that it is the first to show; the others are left out until later."""
        self.deadline, self.left_out, self.unreadable = time.monotonic() + seconds, 0, 0

    def get(self, name: str) -> tuple[str, bytes] | None:
        """Return the kind and the content at an address that a page names by "media/" and this name."""
        return self._contents.get(name)

    def of_file(self, path: Path, make: Callable[[], T | None], part: Hashable = None) -> T | None:
        try:
            stat = os.stat(path)
        except OSError:
            self.unreadable += 1
            return None
        key = (path, stat.st_mtime_ns, stat.st_size, part)
        if key in self._made and self._is_kept(self._made[key][0]):
            self._made.move_to_end(key)
            kept: tuple[T | None, int] = self._made[key]
            self.unreadable += kept[1]
            return kept[0]
        left_out, unreadable = self.left_out, self.unreadable
        made = self.attempt(make)
        if self.left_out == left_out:
            self._made[key] = made, self.unreadable - unreadable
            while len(self._made) > LIVE_FILES:
                self._made.popitem(last=False)
        return made

    def _is_kept(self, made: object) -> bool:
        """Return True if no content of a picture or a sound has been dropped, and note that it was used."""
        names = [medium.uri.removeprefix("media/") for medium in _media_in(made)]
        for name in names:
            if name in self._contents:
                self._contents.move_to_end(name)
        return all(name in self._contents for name in names)

    def seconds_of(self, rate_hz: int) -> float:
        return min(LIVE_SECONDS, LIVE_SOUND_BYTES / 2 / rate_hz)

    def uri(self, kind: str, content: bytes) -> str | None:
        name = hashlib.sha256(content).hexdigest()[:32] + KINDS[kind]
        if name not in self._contents:
            self._bytes += len(content)
        self._contents[name] = kind, content
        self._contents.move_to_end(name)
        while self._bytes > LIVE_BYTES:
            _, (_, content) = self._contents.popitem(last=False)
            self._bytes -= len(content)
            self.dropped += 1
        return f"media/{name}"


def _media_in(made: object) -> Iterator[EmbeddedPicture | EmbeddedSound]:
    if isinstance(made, (EmbeddedPicture, EmbeddedSound)):
        yield made
    for part in made if isinstance(made, (list, tuple)) else [getattr(made, "spectrogram", None)]:
        if part is not None:
            yield from _media_in(part)


KINDS = {"image/jpeg": ".jpg", "audio/wav": ".wav"}


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
    hop = max(SHORTEST_HOP, len(wave_T) // SPECTROGRAM_FRAMES)
    size = max(size, 1 << (hop - 1).bit_length())
    mel = Mel(rate_hz, SPECTROGRAM_BANDS, hop, size, size, 0, rate_hz / 2)
    values_MF = mel_decades(wave_T, mel)
    picture = spectrogram_picture(values_MF, *DECADES)
    return Image.fromarray(with_axes(picture, frequency_ticks(mel), values_MF.shape[1] * hop / rate_hz).numpy())
