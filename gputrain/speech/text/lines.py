"""Reads text files and standard input, and normalises their lines. Imports no torch."""

import codecs
import logging
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from gputrain.errors import UserError
from gputrain.speech.config import Normalize

log = logging.getLogger(__name__)

# The longer ones first: that of UTF-32 begins with that of UTF-16.
BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
HINT = "save or convert it as UTF-8, as with iconv -f CP1251 -t UTF-8 for a Russian text of an older Windows"


def encoding_of(content: bytes) -> str:
    """Returns the encoding of a text by its byte order mark. Without one it is UTF-8: a guess would change letters
    silently."""
    return next((name for mark, name in BYTE_ORDER_MARKS.items() if content.startswith(mark)), "utf-8")


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
    """Returns the lines of a file, or an iterator over those of standard input as they arrive, in UTF-8. Raises
    UserError as `read_text` does. What is typed is decoded as its terminal says."""
    if file is not None:
        text = read_text(file, "--input-file takes a text file").removesuffix("\n")
        return text.split("\n") if text else []
    if sys.stdin is None:
        raise UserError("standard input is closed", hint="give the text with --text or --input-file")
    if sys.stdin.isatty():
        log.info("type the text, one paragraph per line; end with Ctrl-D (on Windows Ctrl-Z)")
        return (line.decode(sys.stdin.encoding).rstrip("\r\n") for line in sys.stdin.buffer)
    return (
        _decoded_or_refused(line, "standard input", number).rstrip("\n")
        for number, line in enumerate(sys.stdin.buffer, start=1)
    )


def normalize_lines(settings: Normalize) -> Iterator[str]:
    """Yields the normalised text of each line."""
    # The rules take longer to load than `gputrain --help` may.
    from gputrain.speech.text.frontend import frontend
    from gputrain.speech.text.raw import raw_rules

    has_rules = settings.language != "characters"
    raw = raw_rules(settings.language, has_rules, settings.lexicon, settings.number_words)
    lines = _lines(settings) if has_rules else list(_lines(settings))
    made = frontend(
        settings.language,
        espeak_voice=settings.espeak_voice,
        texts=() if has_rules else lines,
        raw=raw,
    )
    keeps_digits = not has_rules and not settings.espeak_voice
    for line in lines:
        normalized = made.normalize(line)
        if keeps_digits and any(char.isdecimal() for char in normalized):
            keeps_digits = False
            log.warning("%r keeps its digits: --number-words LANGUAGE writes numbers in words", normalized)
        yield normalized


def _lines(settings: Normalize) -> Iterable[str]:
    if settings.text:
        return settings.text.splitlines()
    return text_lines(settings.input_file)
