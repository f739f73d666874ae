"""Reads the lines of a text file or of standard input. Imports no torch."""

import codecs
import logging
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from gputrain.errors import UserError

log = logging.getLogger(__name__)

# Marks at the start of a file, which Windows' editors and PowerShell write. That of UTF-32 begins with that of UTF-16.
MARKS = {
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
HINT = "save or convert it as UTF-8, as with iconv -f CP1251 -t UTF-8 for a Russian text of an older Windows"


def text_lines(file: Path | None) -> Iterable[str]:
    """Return the lines of a file, or an iterator over those of standard input as they arrive.

    Raises UserError if the file cannot be read, or with the line that is not UTF-8: a guess at another encoding would
    change letters silently. UTF-16 and UTF-32 are read by their marks, and what is typed as its terminal says.
    """
    if file is None:
        if sys.stdin is None:
            raise UserError("standard input is closed", hint="give the text with --text or --input-file")
        if sys.stdin.isatty():
            log.info("type the text, one paragraph per line; end with Ctrl-D (on Windows Ctrl-Z)")
            return decoded_lines(sys.stdin.buffer, "standard input", sys.stdin.encoding)
        return decoded_lines(sys.stdin.buffer, "standard input")
    try:
        return list(decoded_lines(file.read_bytes().splitlines(keepends=True), str(file)))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}", hint="--input-file takes a text file") from None


def decoded_lines(raw: Iterable[bytes], source: str, encoding: str = "utf-8") -> Iterator[str]:
    """Yield the lines of a text without their ends. Raises UserError if it is of another encoding."""
    lines = iter(raw)
    first = next(lines, b"")
    marked = next((name for mark, name in MARKS.items() if first.startswith(mark)), None)
    if marked:
        try:
            yield from b"".join(chain([first], lines)).decode(marked).splitlines()
        except UnicodeDecodeError:
            raise UserError(f"{source}: begins as {marked.upper()} and is not", hint=HINT) from None
        return
    if sum(byte < 9 for byte in first) > len(first) // 8:  # The halves of two-byte letters; no text has so many.
        raise UserError(f"{source}: looks like UTF-16 without the mark that it begins with", hint=HINT)
    whole = chain([first.removeprefix(codecs.BOM_UTF8)], lines)
    for number, line in enumerate((part for one in whole for part in one.splitlines()), start=1):
        try:
            yield line.decode(encoding)
        except UnicodeDecodeError as error:
            fault = f"{source}: line {number} is not {encoding.upper()} at its byte {error.start + 1}"
            raise UserError(fault, hint=HINT) from None
