"""Reads text files and standard input. Imports no torch."""

import codecs
import logging
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from gputrain.errors import UserError

log = logging.getLogger(__name__)

BYTE_ORDER_MARKS = {  # The longer ones first: that of UTF-32 begins with that of UTF-16.
    codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
HINT = "save or convert it as UTF-8, as with iconv -f CP1251 -t UTF-8 for a Russian text of an older Windows"


def encoding_of(content: bytes) -> str:
    """Returns the encoding of a text by its byte order mark. Without one it is UTF-8, or UTF-16 where every second byte
    of the beginning is small, as of Latin, Greek and Cyrillic; a guess at others would change letters silently."""
    if marked := next((name for mark, name in BYTE_ORDER_MARKS.items() if content.startswith(mark)), ""):
        return marked
    begin = content[:100]
    small = [sum(byte < 9 for byte in begin[at::2]) for at in (0, 1)]
    wide = {(True, False): "utf-16-be", (False, True): "utf-16-le"}
    return wide.get((small[0] > len(begin) / 4, small[1] > len(begin) / 4), "utf-8") if 0 in small else "utf-8"


def decoded(content: bytes, errors: str = "strict") -> str:
    """Returns bytes as text with Unix line ends."""
    text = content.decode(encoding_of(content), errors).removeprefix("\ufeff")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_text(file: Path, hint: str) -> str:
    """Returns the text of a file with Unix line ends. Raises UserError if it cannot be read, with the `hint`, or with
    the line that cannot be decoded."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}", hint=hint) from None
    return _decoded_or_refused(content, str(file))


def _decoded_or_refused(content: bytes, source: str, first_line: int = 1) -> str:
    try:
        return decoded(content)
    except UnicodeDecodeError as error:
        number = first_line + content.count(b"\n", 0, error.start)
        raise UserError(f"{source}, line {number}: not {encoding_of(content).upper()}", hint=HINT) from None


def text_lines(file: Path | None) -> Iterable[str]:
    """Returns the lines of a file, or an iterator over those of standard input as they arrive. Raises UserError as
    `read_text` does. What is typed is decoded as its terminal says."""
    if file is not None:
        return _lines_of(read_text(file, "--input-file takes a text file"))
    if sys.stdin is None:
        raise UserError("standard input is closed", hint="give the text with --text or --input-file")
    if sys.stdin.isatty():
        log.info("type the text, one paragraph per line; end with Ctrl-D (on Windows Ctrl-Z)")
        return (line.decode(sys.stdin.encoding).rstrip("\r\n") for line in sys.stdin.buffer)
    return _piped_lines(sys.stdin.buffer)


def _piped_lines(raw: Iterable[bytes]) -> Iterator[str]:
    lines = iter(raw)
    for number, line in enumerate(lines, start=1):
        if number == 1 and encoding_of(line) != "utf-8":  # Its line ends are no single bytes.
            line += b"".join(lines)
        yield from _lines_of(_decoded_or_refused(line, "standard input", number))


def _lines_of(text: str) -> list[str]:
    return text.removesuffix("\n").split("\n") if text else []
