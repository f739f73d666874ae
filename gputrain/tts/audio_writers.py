"""Audio outputs: a file that is renamed into place when complete, or a stream to a player."""

import os
import struct
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from gputrain.engine.data import writing
from gputrain.errors import UserError

AudioFormat = Literal["wav", "raw"]
Int16Samples = npt.NDArray[np.int16]
HEADER_BYTES = 44
UNKNOWN_BYTES = 0xFFFFFFFF  # maximum length in a header; players of streams treat it as unknown


def wav_header(rate_hz: int, sound_bytes: int) -> bytes:
    """Returns the header of a mono 16-bit wav file, as in "Multimedia Programming Interface and Data Specifications
    1.0" (IBM and Microsoft 1991)."""
    whole_bytes = min(sound_bytes + HEADER_BYTES - 8, UNKNOWN_BYTES)
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate_hz, 2 * rate_hz, 2, 16)
    return struct.pack("<4sI4s", b"RIFF", whole_bytes, b"WAVE") + form + struct.pack("<4sI", b"data", sound_bytes)


class SoundFile:
    """Audio file, written to a temporary name and renamed at the end of the block; no file without samples.

    Raises UserError if it cannot be written.
    """

    def __init__(self, path: Path, rate_hz: int, format: AudioFormat = "wav") -> None:
        self.path, self.rate_hz, self.format = path, rate_hz, format
        self.partial = path.with_name(f".partial-{path.name}")
        self.files: list[Path] = []
        self.file: BinaryIO | None = None
        self.sound_bytes = 0

    def __enter__(self) -> "SoundFile":
        return self

    @property
    def begun(self) -> bool:
        return self.file is not None

    def write(self, samples_T: Int16Samples) -> None:
        with writing(self.path):
            if self.file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.file = self.partial.open("wb")
                if self.format == "wav":
                    self.file.write(bytes(HEADER_BYTES))
            self.sound_bytes += self.file.write(samples_T.astype("<i2").tobytes())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.file is None:
            return
        with writing(self.path):
            try:
                if kind is None and self.format == "wav":
                    self.file.seek(0)
                    self.file.write(wav_header(self.rate_hz, self.sound_bytes))
                self.file.close()
                if kind is None:
                    os.replace(self.partial, self.path)
                    self.files.append(self.path)
            finally:
                self.file.close()
                self.partial.unlink(missing_ok=True)


class AudioStream:
    """Unbuffered audio stream; a wav header has no length. Raises UserError if the reader has closed the pipe."""

    def __init__(self, out: BinaryIO, rate_hz: int, format: AudioFormat = "raw") -> None:
        self.out, self.rate_hz, self.format = out, rate_hz, format
        self.files: list[Path] = []
        self.begun = False

    def __enter__(self) -> "AudioStream":
        return self

    def write(self, samples_T: Int16Samples) -> None:
        header = wav_header(self.rate_hz, UNKNOWN_BYTES) if self.format == "wav" and not self.begun else b""
        self.begun = True
        try:
            self.out.write(header + samples_T.astype("<i2").tobytes())
            self.out.flush()
        except BrokenPipeError:
            # The remaining buffer is discarded, so that Python does not report an error at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.out.fileno())
            raise UserError("standard output was closed before the end of the text") from None

    def __exit__(self, *raised: object) -> None:
        pass
