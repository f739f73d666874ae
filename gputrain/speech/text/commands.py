"""Options and implementation of `gputrain normalize`. Imports no torch."""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gputrain.config import config, opt
from gputrain.errors import UserError
from gputrain.speech.text.lines import text_lines

if TYPE_CHECKING:
    pass

log = logging.getLogger(__name__)

LanguageName = Literal["uz", "en", "ru", "characters"]
LEXICON_HELP = "File of spellings by word. YAML or JSON, such as Facebook: feysbuk; whole words match."
ESPEAK_HELP = "Phonemise with this voice of espeak-ng. That of Piper."
NUMBER_WORDS_HELP = "Language in which num2words writes numbers. Only where texts have no rules, such as tr."


@config(panel="Text")
class Normalize:
    language: LanguageName = opt(
        default="uz", help="uz, en, ru or characters. characters: any other, without normalisation rules."
    )
    text: str = opt(default="", help="Text to normalise; default: standard input. Each line is a text.")
    input_file: Path | None = opt(default=None, help="UTF-8 text file, read line by line.")
    lexicon: Path | None = opt(default=None, help=LEXICON_HELP)
    number_words: str = opt(default="", help=NUMBER_WORDS_HELP)
    espeak_voice: str = opt(default="", help=ESPEAK_HELP)

    def __post_init__(self) -> None:
        if self.text and self.input_file:
            raise UserError("text and input_file are both given", hint="give one of them")


def normalize_lines(settings: Normalize) -> Iterator[str]:
    """Yields the normalised text of each line."""
    # The rules take longer to load than `gputrain --help` may.
    from gputrain.speech.text.frontend import frontend
    from gputrain.speech.text.raw import RawRules, checked_language

    if settings.number_words and settings.language != "characters":
        raise UserError(f"the rules of {settings.language} write numbers in words", hint="drop --number-words")
    raw = RawRules(number_words=checked_language(settings.number_words) if settings.number_words else "")
    lines = list(_lines(settings)) if settings.language == "characters" else _lines(settings)
    made = frontend(
        settings.language,
        espeak_voice=settings.espeak_voice,
        texts=lines if settings.language == "characters" else (),
        raw=raw.with_words(settings.lexicon),
    )
    keeps_digits = settings.language == "characters" and not settings.espeak_voice
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
