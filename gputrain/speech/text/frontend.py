"""Front end: converts written text to symbol ids.

Symbols are single code points after NFD, because stock Piper reads a text of phoneme_type "text" by code points,
without converting it to lower case or numbers to words, and drops code points that its map does not have.
"""

import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from gputrain.errors import UserError
from gputrain.speech.text import espeak
from gputrain.speech.text.alphabet import read_alphabet, respelled, standard
from gputrain.speech.text.english import ENGLISH
from gputrain.speech.text.language import CHARACTERS, PUNCTUATION, Language
from gputrain.speech.text.raw import RawRules
from gputrain.speech.text.russian import RUSSIAN
from gputrain.speech.text.sentences import split_sentences
from gputrain.speech.text.ssml import without_tags
from gputrain.speech.text.uzbek import UZBEK

PAD, BOS, EOS = "_", "^", "$"
RESERVED = (PAD, BOS, EOS)
PAD_ID, BOS_ID, EOS_ID = range(3)
LANGUAGES: dict[str, Language] = {one.name: one for one in (UZBEK, ENGLISH, RUSSIAN, CHARACTERS)}


@dataclass(frozen=True)
class Frontend:
    """Text front end of a voice: its language, its symbols by id (PAD, BOS and EOS come first), and its spellings.

    With an `espeak_voice` the symbols are those of IPA, and `normalize` returns phonemes. `raw` are a user's lexicon
    and the language of numbers in words.
    """

    language: str
    symbols: tuple[str, ...]
    alphabet: Mapping[str, str] = field(default_factory=dict)
    espeak_voice: str = ""
    raw: RawRules = field(default_factory=RawRules)

    @property
    def phoneme_type(self) -> str:
        """Piper's name of the symbol type."""
        return "espeak" if self.espeak_voice else "text"

    def normalize(self, text: str) -> str:
        """Normalises a text: NFC, lower case, numbers and abbreviations as words; "" if nothing is left.

        Normalised text does not change. Raises UserError if espeak-ng is needed but not installed.
        """
        language = LANGUAGES[self.language]
        text = self.raw(text, language)
        words = language.normalize(standard(text, self.alphabet, language.alphabet))
        if self.espeak_voice:
            return espeak.phonemes(words, self.espeak_voice)
        return unicodedata.normalize("NFC", respelled(words, self.alphabet, language.alphabet))

    def unknown(self, normalized: str) -> list[str]:
        """Returns the code points of a normalised text without a symbol, sorted."""
        return sorted(set(unicodedata.normalize("NFD", normalized)) - self._known.keys())

    def ids(self, normalized: str) -> list[int]:
        """Returns symbol ids in Piper's order: BOS, PAD, then every symbol followed by a PAD, EOS.

        Unknown symbols are dropped. Raises UserError if none is left.
        """
        known = self._ids_of(normalized)
        if not known:
            raise UserError(
                f"no symbol of the voice in {shortened(normalized)!r}",
                hint=f"its symbols are {' '.join(self.symbols[len(RESERVED) :])}",
            )
        return [BOS_ID, PAD_ID, *(number for one in known for number in (one, PAD_ID)), EOS_ID]

    def frames_needed(self, normalized: str) -> int:
        """Returns the smallest number of frames that the symbols can be aligned to: one for each."""
        return len(self.ids(normalized))

    def spoken(self, normalized: str) -> int:
        """Returns the number of spoken symbols, without PAD, BOS and EOS."""
        return sum(number >= len(RESERVED) for number in self.ids(normalized))

    def sentences(self, text: str) -> list[str]:
        """Splits a raw text into sentences that are synthesised separately; tags of SSML are removed."""
        return split_sentences(without_tags(text), LANGUAGES[self.language].abbreviations)

    def id_map(self) -> dict[str, list[int]]:
        """Returns Piper's phoneme_id_map, from code points to ids, for raw and normalised text.

        Piper adds a PAD after all ids of a code point, so a reading of several symbols contains the PADs between them.
        Readings with symbols that the voice lacks are left out.
        """
        ids = {symbol: [number] for number, symbol in enumerate(self.symbols)}
        ids |= {char: [number] for char, number in self._known.items()}
        if self.espeak_voice:
            return ids
        language = LANGUAGES[self.language]
        readings = {char.upper(): char for char in self._known} | dict(language.readings)
        for char, reading in readings.items():
            spelled = respelled(reading, self.alphabet, language.alphabet)
            if len(char) == 1 and char not in ids and not self.unknown(spelled):
                ids[char] = [number for one in self._ids_of(spelled) for number in (one, PAD_ID)][:-1]
        return ids

    def to_json(self) -> dict[str, Any]:
        return {
            "language": self.language,
            "symbols": list(self.symbols),
            "alphabet": dict(self.alphabet),
            "espeak_voice": self.espeak_voice,
            **self.raw.to_json(),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Frontend":
        """Restores a front end from `to_json`. Raises UserError if the content is invalid."""
        try:
            names = content["language"], tuple(content["symbols"])
            made = cls(*names, dict(content["alphabet"]), content["espeak_voice"], RawRules.from_json(content))
        except (KeyError, TypeError, ValueError):
            raise UserError("the voice's text settings are invalid", hint="prepare the data again") from None
        if made.language not in LANGUAGES or made.symbols[: len(RESERVED)] != RESERVED:
            raise UserError(f"this version of gputrain has no text settings of the language {made.language!r}")
        return made

    @cached_property
    def _known(self) -> dict[str, int]:
        """Ids of all code points of normalised text."""
        own = {symbol: number for number, symbol in enumerate(self.symbols) if symbol not in RESERVED}
        same = LANGUAGES[self.language].same
        return own | {char: own[symbol] for char, symbol in same.items() if symbol in own}

    def _ids_of(self, normalized: str) -> list[int]:
        return [self._known[char] for char in unicodedata.normalize("NFD", normalized) if char in self._known]


def shortened(text: str, longest: int = 60) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def frontend(
    language: str,
    *,
    alphabet: Path | None = None,
    espeak_voice: str = "",
    texts: Iterable[str] = (),
    raw: RawRules | None = None,
) -> Frontend:
    """Returns the front end of a language.

    `alphabet` is a table of spellings; `espeak_voice` is a voice of espeak-ng (`uz`, `en-us`), whose phonemes become
    the symbols; `texts` are raw texts that define the symbols of `characters`; `raw` are rules before those of the
    language. Raises UserError for invalid arguments.
    """
    if language not in LANGUAGES:
        raise UserError(f"language {language!r} is unknown", hint=f"known languages: {', '.join(LANGUAGES)}")
    rules, raw = LANGUAGES[language], raw or RawRules()
    if alphabet is not None and (not rules.alphabet or espeak_voice):
        raise UserError("only Uzbek supports an alphabet table", hint="use --language uz, without an espeak voice")
    table = read_alphabet(alphabet, rules.alphabet) if alphabet is not None else {}
    letters = "".join(table.get(letter, letter) for letter in rules.alphabet) or rules.letters
    if espeak_voice:
        letters = espeak.SYMBOLS
    elif not letters:
        letters = "".join({char for text in texts for char in rules.normalize(raw(text, rules))})
    points = {rules.same.get(char, char) for char in unicodedata.normalize("NFD", letters)}
    return Frontend(language, (*RESERVED, *PUNCTUATION, *sorted(points - set(PUNCTUATION))), table, espeak_voice, raw)
