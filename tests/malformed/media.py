"""Malformed pictures, sounds and transcripts among good ones: each is left out by name, and the rest is prepared."""

import io
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import soundfile
import tifffile
from PIL import Image

from tests.command import gputrain_here
from tests.malformed.case import Case
from tests.png import png
from tests.speech.speech import hum

RATE_HZ = 16000


def picture_bytes(format: str = "PNG", size: tuple[int, int] = (64, 48)) -> bytes:
    columns, rows = np.meshgrid(np.arange(size[0]), np.arange(size[1]))
    pixels = np.stack([5 * columns, 3 * rows, 40 * size[0] + columns * rows], axis=-1).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format)
    return file.getvalue()


def flipped(content: bytes, at: float = 0.5) -> bytes:
    changed = bytearray(content)
    changed[int(len(content) * at)] ^= 0x10
    return bytes(changed)


def sound_bytes(seconds: float = 1.0, **how: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, hum(seconds), RATE_HZ, **{"format": "WAV", **how})
    return file.getvalue()


def wav(
    samples: bytes, *, rate_hz: int = RATE_HZ, channels: int = 1, kind: int = 1, bits: int = 16, says: int = -1
) -> bytes:
    """Returns a WAV with any header; `says` is the size of the samples that it states."""
    says = len(samples) if says < 0 else says
    align = max(1, channels * bits // 8)
    form = struct.pack("<HHIIHH", kind, channels, rate_hz, (rate_hz * align) & 0xFFFFFFFF, align & 0xFFFF, bits)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", says & 0xFFFFFFFF) + samples
    return b"RIFF" + struct.pack("<I", len(body) & 0xFFFFFFFF) + body


def floats(*values: float) -> bytes:
    wave = hum(1.0)
    wave[100 : 100 + len(values)] = values
    return wav(wave.astype("<f4").tobytes(), kind=3, bits=32)


def tiff_bytes(samples: np.ndarray) -> bytes:
    written = io.BytesIO()
    tifffile.imwrite(written, samples, photometric="minisblack")
    return written.getvalue()


PICTURES: dict[str, tuple[str, bytes]] = {
    "empty": ("bad.png", b""),
    "truncated PNG": ("bad.png", picture_bytes()[:-400]),
    "truncated JPEG": ("bad.jpg", picture_bytes("JPEG")[:400]),
    "truncated WebP": ("bad.webp", picture_bytes("WEBP")[:200]),
    "truncated BMP": ("bad.bmp", picture_bytes("BMP")[:3000]),
    "truncated TIFF": ("bad.tiff", picture_bytes("TIFF")[:60]),
    "PNG with a flipped bit": ("bad.png", flipped(picture_bytes())),
    "PNG without a pixel": ("bad.png", png(0, 10)),
    "PNG of an unknown colour type": ("bad.png", png(40, 40, color=5)),
    "PNG with too few pixels": ("bad.png", png(64, 64, rows=b"\0" * 100)),
    "decompression bomb": ("bad.png", png(60000, 60000)),
    "signature alone": ("bad.png", b"\x89PNG\r\n\x1a\n"),
    "text as a picture": ("bad.jpg", b"<html>404 Not Found</html>" * 20),
    "program as a picture": ("bad.png", b"\x7fELF" + bytes(range(256)) * 8),
    "zeros": ("bad.png", bytes(4096)),
    "smaller than the limit": ("bad.png", picture_bytes(size=(64, 8))),
    "HEIC by the name of JPEG": ("bad.jpg", b"\0\0\0\x18ftypheic" + bytes(400)),
    "TIFF of samples below zero": ("bad.tif", tiff_bytes(np.arange(-2048, 2048, dtype=np.int16).reshape(64, 64))),
}
SOUNDS: dict[str, tuple[str, bytes]] = {
    "empty": ("bad.wav", b""),
    "header alone": ("bad.wav", sound_bytes()[:44]),
    "truncated header": ("bad.wav", b"RIFF\x24\x00\x00\x00WAVEfmt "),
    "no samples": ("bad.wav", wav(b"")),
    "text as a sound": ("bad.wav", b"<html>404 Not Found</html>" * 20),
    "zeros": ("bad.wav", bytes(4096)),
    "NaN among its samples": ("bad.wav", floats(float("nan"))),
    "infinity among its samples": ("bad.wav", floats(float("inf"), float("-inf"))),
    "floating point of an unknown scale": ("bad.wav", floats(50.0, -49.5)),
    "floating point beyond every scale": ("bad.wav", floats(1e30, -1e30)),
    "rate of 0 Hz": ("bad.wav", wav(bytes(32000), rate_hz=0)),
    "no channel": ("bad.wav", wav(bytes(32000), channels=0)),
    "40000 channels": ("bad.wav", wav(bytes(32000), channels=40000)),
    "unknown codec": ("bad.wav", wav(bytes(32000), kind=0x7777)),
    "truncated FLAC": ("bad.flac", sound_bytes(format="FLAC")[:100]),
    "FLAC with a flipped bit": ("bad.flac", flipped(sound_bytes(format="FLAC"), 0.1)),
    "truncated Ogg": ("bad.ogg", sound_bytes(format="OGG")[:300]),
    "garbage as MP3": ("bad.mp3", flipped(bytes(range(256)) * 16)),
    "too short for a frame": ("bad.wav", wav(b"\1\0")),
}


def among_good(kind: str, name: str, content: bytes, folder: Path) -> tuple[list[object], Path]:
    """Writes a file beside good ones, and returns the command that prepares the folder."""
    source = folder / "in"
    source.mkdir()
    for number in range(2):
        if kind == "vae":
            (source / f"{number}.png").write_bytes(picture_bytes(size=(64 + number, 48)))
        else:
            (source / f"{number}.wav").write_bytes(sound_bytes(1 + 0.25 * number))
    (source / name).write_bytes(content)
    return prepare(kind, folder), source / name


def prepare(kind: str, folder: Path) -> list[object]:
    words: list[object] = ["prepare-data", "--kind", kind, "--input-dir", folder / "in", "--output-dir", folder / "out"]
    words += ["--num-workers", 1]
    if kind == "vae":
        return [*words, "--target-size", 32]
    if kind == "tts":
        return [*words, "--language", "en", "--audio-sample-rate", RATE_HZ]
    if kind == "asr":
        return [*words, "--language", "en"]
    return [*words, "--audio-sample-rate", RATE_HZ, "--hop-size", 256, "--f0-method", "pyworld"]


def special(
    kind: str, suffix: str, place: Callable[[Path], None], name: str = "bad"
) -> Callable[[Path], tuple[list[object], Path]]:
    """Returns a `make` whose faulty path is created by `place`."""

    def make(folder: Path) -> tuple[list[object], Path]:
        words, _ = among_good(
            kind, f"good{suffix}", picture_bytes(size=(70, 50)) if kind == "vae" else sound_bytes(1.1), folder
        )
        path = folder / "in" / f"{name}{suffix}"
        place(path)
        return words, path

    return make


def loop(path: Path) -> None:
    path.symlink_to(path)


def broken(path: Path) -> None:
    path.write_bytes(b"broken")


SPECIAL: dict[str, tuple[Callable[[Path], None], str]] = {
    "symbolic link to itself": (loop, "bad"),
    "symbolic link to nothing": (lambda path: path.symlink_to(path.with_name("nothing")), "bad"),
    "line break in the name": (broken, "bad\nerror: name"),
    "escape sequence in the name": (broken, "bad\x1b[2Jname"),
    "markup in the name": (broken, "bad[red]name"),
    "name that is no UTF-8": (broken, os.fsdecode(b"bad\xff\xfename")),
}
IGNORED: dict[str, Callable[[Path], None]] = {
    "a folder with the name of a file": lambda path: path.mkdir(),
    "a FIFO": lambda path: os.mkfifo(path),
    "a device": lambda path: path.symlink_to("/dev/zero"),
}
SAID = {
    "line break in the name": "bad\\nerror: name", "escape sequence in the name": "bad\\x1b[2Jname",
    "name that is no UTF-8": "bad\\udcff\\udcfename",
}  # fmt: skip


def transcripts(
    content: str | bytes, name: str = "metadata.csv", kind: str = "tts"
) -> Callable[[Path], tuple[list[object], Path]]:
    """Returns a `make` of two good recordings, 0 and 1, with this file of transcripts."""

    def make(folder: Path) -> tuple[list[object], Path]:
        among_good(kind, "2.wav", sound_bytes(1.3), folder)
        path = folder / "in" / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return prepare(kind, folder), path

    return make


def subtitles(content: str | bytes, *more: object) -> Callable[[Path], tuple[list[object], Path]]:
    """Returns a `make` of three recordings, of which 0 has good subtitles and 2 has these."""

    def make(folder: Path) -> tuple[list[object], Path]:
        words, path = transcripts(content, "2.srt", "asr")(folder)
        (folder / "in" / "0.vtt").write_text(f"WEBVTT\n\n{CUE}")
        (folder / "in" / "1.txt").write_text("so it is said")
        return [*words, *more], path

    return make


def reused(kind: str, command: list[object]) -> Callable[[Path], tuple[list[object], Path]]:
    """Returns a `make` that gives a store prepared for one kind of model to a command for another."""

    def make(folder: Path) -> tuple[list[object], Path]:
        words, _ = transcripts(GOOD, kind=kind)(folder)
        assert gputrain_here(*words, *(["--trim-db", 0] if kind == "tts" else [])).returncode == 0
        places = {"IN": folder / "in", "STORE": folder / "out", "RUN": folder / "run"}
        return [places.get(str(word), word) for word in command], folder / "out"

    return make


CUT = '{{"audio": "2.wav", "offset": {}, "duration": {}, "text": "it is late"}}\n'
GOOD = "0|so it is said\n1|two words and more\n"
ROW = (
    json.dumps({"audio": "0.wav", "text": "so it is said"})
    + "\n"
    + json.dumps({"audio": "1.wav", "text": "an owl"})
    + "\n"
)
CUE = "00:00:00.000 --> 00:00:00.900\nSo it is said.\n\n"
SUBTITLES_LEFT_OUT: dict[str, tuple[str | bytes, str]] = {
    "an end before the beginning": (CUE + "00:00:01.200 --> 00:00:01.000\nhello\n", "line 4"),
    "times that are none": (CUE + "00:00:aa --> 00:00:02.000\nhello\n", "line 4: no times in"),
    "times of 99 hours": (CUE + "99:00:00.000 --> 99:00:01.000\nhello\n", "356400.00 to 356401.00 seconds"),
    "times that overlap": (CUE + "00:00:00.500 --> 00:00:01.200\nhello\n", "overlapping subtitles"),
    "a subtitle without words": (CUE + "00:00:01.000 --> 00:00:01.200\n[music]\n", "no words in '[music]'"),
    "a NUL": (CUE + "00:00:01.000 --> 00:00:01.300\nhel\0lo\n", "invalid characters"),
    "too many letters for its time": (CUE + f"00:00:01.000 --> 00:00:01.300\n{'wow ' * 9}\n", "line 4"),
    "a text of unknown symbols": (CUE + "00:00:00.900 --> 00:00:01.300\n日本語\n", "line 4"),
    "no UTF-8": (CUE.encode() + b"00:00:01.000 --> 00:00:01.300\n\xff\xfe\n", "line 5: not UTF-8"),
    "a text": ("so it is said", "no subtitle"),
    "empty": ("", "no subtitle"),
}  # fmt: skip
STORES_OF_OTHERS: dict[str, tuple[str, list[object], str]] = {
    "a recogniser's for a voice": (
        "asr", ["train-tts", "--data-path", "STORE", "--output-dir", "RUN"], "prepared for a recogniser (--kind asr)",
    ),
    "a recogniser's, validated for a voice": (
        "asr", ["validate", "--kind", "tts", "--input-dir", "STORE"], "not for a voice",
    ),
    "a voice's, validated for a recogniser": (
        "tts", ["validate", "--kind", "asr", "--input-dir", "STORE"], "not for a recogniser",
    ),
    "a voice's, prepared again for a recogniser": (
        "tts", ["prepare-data", "--kind", "asr", "--language", "en", "--input-dir", "IN", "--output-dir", "STORE"],
        "holds speech prepared with --kind tts",
    ),
}  # fmt: skip
LEFT_OUT: dict[str, tuple[str, str, str]] = {
    "a row of one column": (GOOD + "2\n", "metadata.csv", "line 3"),
    "a row of five columns": (GOOD + "2|a|b|c|d\n", "metadata.csv", "line 3"),
    "a row of no recording": (GOOD + "ghost|it is late\n", "metadata.csv", "ghost: no such recording"),
    "a row without a name": (GOOD + "|it is late\n", "metadata.csv", "names no recording"),
    "a row without a text": (GOOD + "2|\n", "metadata.csv", "its text is empty"),
    "a NUL in a text": (GOOD + "2|it is\0late\n", "metadata.csv", "invalid characters"),
    "two texts of one recording": (GOOD + "2|it is late\n2|all is well\n", "metadata.csv", "doubled transcript"),
    "a text of unknown symbols": (GOOD + "2|日本語\n", "metadata.csv", "2.wav"),
    "a text of 100 000 letters": (GOOD + f"2|{'word ' * 20000}\n", "metadata.csv", "2.wav"),
    "JSON lines that are no objects": (ROW + "[1, 2]\n17\nnull\n", "metadata.jsonl", "line 5"),
    "JSON lines cut off": (ROW + '{"audio": "2.wav", "te', "metadata.jsonl", "line 3"),
    "JSON lines too deeply nested": (ROW + "[" * 100_000 + "\n", "metadata.jsonl", "line 3"),
    "JSON lines with a huge number": (ROW + '{"audio": ' + "9" * 5000 + ', "text": "a"}\n', "metadata.jsonl", "line 3"),
    "a clip before its recording": (ROW + CUT.format(-1, 2), "metadata.jsonl", "begins at -1 seconds"),
    "a clip after the end of its recording": (ROW + CUT.format(60, 2), "metadata.jsonl", "outside the recording"),
    "a clip of no length": (ROW + CUT.format(0.5, 0), "metadata.jsonl", "begins at 0.5 seconds and ends at 0.5"),
    "a time that is no number": (ROW + CUT.format('"soon"', 2), "metadata.jsonl", "'soon' is no number of seconds"),
    "CSV with a quote that is not closed": (
        'text,file_name\nso it is said,0.wav\nit is so,1.wav\n"it is late,2.wav\n', "metadata.csv",
        "line 4: a quote is not closed",
    ),
    "JSON lines without a recording": (ROW + '{"text": "it is late"}\n', "metadata.jsonl", "names no recording"),
    "JSON lines with half a surrogate": (ROW + '{"audio": "2.wav", "text": "\\ud800"}\n', "metadata.jsonl", "invalid"),
    "JSON lines with a mapping for a name": (ROW + '{"audio": {"a": 1}, "text": "b"}\n', "metadata.jsonl", "line 3"),
}  # fmt: skip
REFUSED: dict[str, tuple[str | bytes, str, str]] = {
    "empty": ("", "metadata.csv", "empty"),
    "blank lines alone": ("\n\n \n", "metadata.csv", "empty"),
    "times in milliseconds": ("path,text,start_ms\n0.wav,so it is,100\n", "metadata.csv", "start_ms is not in seconds"),
    "no UTF-8": (GOOD.encode() + b"2|\xff\xfe\n", "metadata.csv", "line 3: not UTF-8"),
    "Windows-1251": (GOOD.encode() + "2|время\n".encode("cp1251"), "metadata.csv", "line 3: not UTF-8"),
    "binary": (bytes(range(256)) * 4, "metadata.csv", "not UTF-8"),
    "no line that can be read": ("{}\n[]\n", "metadata.jsonl", ""),
}  # fmt: skip


def cases() -> list[Case]:
    found = []
    for kind, group, files in (("vae", "picture", PICTURES), ("vocoder", "sound", SOUNDS)):
        for title, (name, content) in files.items():
            make = lambda folder, kind=kind, name=name, content=content: among_good(kind, name, content, folder)  # noqa: E731
            found.append(Case(group, title, make, code=0))
        suffix = ".png" if kind == "vae" else ".wav"
        for title, (place, name) in SPECIAL.items():
            make = special(kind, suffix, place, name)
            found.append(Case(group, title, make, SAID.get(title, ""), code=0, names_path=title not in SAID))
        for title, place in IGNORED.items():
            named = title != "a folder with the name of a file"  # It is searched, and is no file.
            found.append(Case(group, title, special(kind, suffix, place), code=0, names_path=named))
    for title, (content, name, says) in LEFT_OUT.items():
        found.append(Case("transcripts", title, transcripts(content, name), says, code=0))
        found.append(Case("transcripts of a recogniser", title, transcripts(content, name, "asr"), says, code=0))
    for title, (text, name, says) in REFUSED.items():
        found.append(Case("transcripts", title, transcripts(text, name), says))
        found.append(Case("transcripts of a recogniser", title, transcripts(text, name, "asr"), says))
    nothing = "0|?!\n1|...\n"
    found.append(Case("transcripts of a recogniser", "without a letter", transcripts(nothing, kind="asr"), "empty"))
    for title, (text, says) in SUBTITLES_LEFT_OUT.items():
        found.append(Case("subtitles", title, subtitles(text), says, code=0))
    found.append(
        Case(
            "subtitles",
            "with trimmed ends",
            subtitles(CUE, "--trim-db", 40),
            "silence at both ends is kept",
            code=0,
            names_path=False,
        )
    )
    for title, (kind, command, says) in STORES_OF_OTHERS.items():
        found.append(Case("stores of another kind", title, reused(kind, command), says))
    return found
