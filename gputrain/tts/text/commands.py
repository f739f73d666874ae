"""Options of `gputrain normalize`, and what it prints. Imports no torch."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from gputrain.config import config, opt
from gputrain.errors import UserError
from gputrain.tts.text.frontend import Frontend, frontend

LanguageName = Literal["uz", "en", "ru", "characters"]


@config(panel="Text")
class Normalize:
    language: LanguageName = opt(default="uz", help="Whose rules; characters is any language as it is written.")
    text: str = opt(default="", help="What to normalise; without it and input_file, the lines of standard input.")
    input_file: Path | None = opt(default=None, help="A text file, UTF-8; a line at a time.")
    alphabet: Path | None = opt(default=None, help="YAML or JSON table that spells Uzbek letters otherwise: sh: ş.")
    espeak_voice: str = opt(default="", help="Sounds of this espeak-ng voice, where that program is installed.")
    symbols: bool = opt(default=False, help="Print the symbols with their ids too, and what has none.")

    def __post_init__(self) -> None:
        if self.text and self.input_file:
            raise UserError("text and input_file are both given", hint="give one of them")


def normalize(settings: Normalize) -> Iterator[str]:
    """What the model would see of each line, one for one; with `symbols`, its ids on a line below."""
    lines = list(_lines(settings)) if settings.language == "characters" else _lines(settings)
    made = frontend(
        settings.language,
        alphabet=settings.alphabet,
        espeak_voice=settings.espeak_voice,
        texts=lines if settings.language == "characters" else (),
    )
    for line in lines:
        normalized = made.normalize(line)
        yield normalized
        if settings.symbols:
            yield _described(made, normalized)


def _described(made: Frontend, normalized: str) -> str:
    unknown = made.unknown(normalized)
    missing = f"; no symbol for {' '.join(map(repr, unknown))}" if unknown else ""
    if len(unknown) == len(set(normalized)):
        return "no symbols" + missing
    return " ".join(map(str, made.ids(normalized))) + missing


def _lines(settings: Normalize) -> Iterable[str]:
    if settings.text:
        return settings.text.splitlines()
    if settings.input_file is None:
        return (line.rstrip("\r\n") for line in sys.stdin)
    try:
        return settings.input_file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{settings.input_file}: {error.strerror}", hint="--input-file takes a text file") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{settings.input_file}: not UTF-8 at byte {error.start}", hint="save the file as UTF-8"
        ) from None
