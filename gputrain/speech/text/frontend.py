"""Front end: converts written text to symbol ids.

Symbols are single code points after NFD, because stock Piper reads a text of phoneme_type "text" by code points,
without converting it to lower case or numbers to words, and drops code points that its map does not have.
"""

import atexit
import json
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from importlib.metadata import version
from string import ascii_lowercase
from typing import Any

from gputrain.errors import UserError, require
from gputrain.serialization import unreadable
from gputrain.speech.text.english import ENGLISH
from gputrain.speech.text.language import CHARACTERS, Language, split_sentences
from gputrain.speech.text.raw import RawRules
from gputrain.speech.text.russian import RUSSIAN
from gputrain.speech.text.unicode_cleanup import (
    APOSTROPHES,
    PUNCTUATION,
    is_removed,
    unify_letters,
    visible,
)
from gputrain.speech.text.uzbek import UZBEK

PAD, BOS, EOS = "_", "^", "$"
RESERVED = (PAD, BOS, EOS)
PAD_ID, BOS_ID, EOS_ID = range(3)
LANGUAGES: dict[str, Language] = {language.name: language for language in (UZBEK, ENGLISH, RUSSIAN, CHARACTERS)}


# Letters, IPA (0x250 to 0x2AF) and its combining marks, and the digits that stand for tones: as code points after NFD,
# the output of espeak-ng for all of its languages.
_IPA = "".join(map(chr, (*range(0x250, 0x2B0), *range(0x300, 0x362))))
_ESPEAK = f"{ascii_lowercase}{_IPA}æçðøħŋœǀǁǂǃβεθχᵻⱱʰʲʷˈˌːˑ˞ˠˡˤⁿᵝ↑↓0123456789\"#'()[]`ANSXZ"
IPA_SYMBOLS = "".join(sorted({*unicodedata.normalize("NFD", _ESPEAK)}))


@dataclass(frozen=True)
class Frontend:
    """Text front end of a voice: its language, and its symbols by id (PAD, BOS and EOS come first).

    With an `espeak_voice` the symbols are those of IPA, and `normalize` returns phonemes. `raw` are a user's lexicon
    and the language of numbers in words. `phonemizer` is the program that phonemised the data of the voice.
    """

    language: str
    symbols: tuple[str, ...]
    espeak_voice: str = ""
    raw: RawRules = field(default_factory=RawRules)
    phonemizer: str = ""

    @property
    def phoneme_type(self) -> str:
        """Piper's name of the symbol type."""
        return "espeak" if self.espeak_voice else "text"

    @property
    def orthography(self) -> str:
        """The code of the language that the texts are written in; `characters` if it is not known."""
        return self.raw.number_words or self.language

    def normalize(self, text: str) -> str:
        """Normalises a text: NFC, lower case, numbers and abbreviations as words; "" if nothing is left.

        Normalised text does not change. With an espeak voice, returns the phonemes of the text as it is written, since
        Piper gives it to espeak-ng with its capitals, numbers and abbreviations. Raises UserError if piper-tts is
        needed but not installed.
        """
        language = LANGUAGES[self.language]
        text = self.raw(text, language)
        if self.espeak_voice:
            phonemes = piper_phonemes(" ".join(text.split()), self.espeak_voice)
            return unicodedata.normalize("NFC", " ".join(sentence.strip() for sentence in phonemes))
        return unicodedata.normalize("NFC", language.normalize(unify_letters(text, self.orthography)))

    def unknown(self, normalized: str) -> list[str]:
        """Returns the code points of a normalised text without a symbol, sorted."""
        return sorted(set(unicodedata.normalize("NFD", normalized)) - self._known.keys())

    def lost(self, text: str, known: AbstractSet[str] = frozenset()) -> set[str]:
        """Returns the characters of a raw text without a symbol, `known` ones aside: those of the normalised text, and
        the letters, digits, marks and signs that the rules remove before."""
        signs = {char for char in set(text) - known if unicodedata.category(char)[0] in "LNMS"}
        removed = {char for char in signs if is_removed(char, self.normalize)}
        return removed.union(self.unknown(self.normalize(text))) - known

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
        return [BOS_ID, PAD_ID, *(number for symbol in known for number in (symbol, PAD_ID)), EOS_ID]

    def frames_needed(self, normalized: str) -> int:
        """Returns the smallest number of frames that the symbols can be aligned to: one for each."""
        return len(self.ids(normalized))

    def spoken(self, normalized: str) -> int:
        """Returns the number of spoken symbols, without PAD, BOS and EOS."""
        return sum(number >= len(RESERVED) for number in self.ids(normalized))

    def sentences(self, text: str) -> list[str]:
        """Splits a raw text into sentences that are synthesised separately."""
        return split_sentences(text, LANGUAGES[self.language])

    def id_map(self) -> dict[str, list[int]]:
        """Returns Piper's phoneme_id_map, from code points to ids, for raw and normalised text.

        Piper adds a PAD after all ids of a code point, so a reading of several symbols contains the PADs between them.
        Readings with symbols that the voice lacks are left out.
        """
        ids = {symbol: [number] for number, symbol in enumerate(self.symbols)}
        ids |= {char: [number] for char, number in self._known.items()}
        if self.espeak_voice:
            return ids
        capitals = {char.upper(): char for char in self._known} | {"ẞ": "ß"}
        lower = {char: unify_letters(char, self.orthography).lower() for char in capitals}
        readings = {char: lowered if self.unknown(lower[char]) else lower[char] for char, lowered in capitals.items()}
        readings |= LANGUAGES[self.language].readings
        readings |= {char: visible(char) for char in "µﬀﬁﬂﬃﬄ"}
        for char, reading in readings.items():
            if len(char) == 1 and char not in ids and not self.unknown(reading):
                ids[char] = [number for symbol in self._ids_of(reading) for number in (symbol, PAD_ID)][:-1]
        return ids

    def piper_differences(self, texts: Sequence[str]) -> str:
        """Returns how many raw texts stock Piper reads with other symbols than the voice, with the shortest as an
        example; "" for none. Raises UserError as `normalize` does."""
        ids = self.id_map()

        def symbols(text: str) -> str:
            numbers = (number for char in unicodedata.normalize("NFD", text) for number in ids.get(char, ()))
            return "".join(self.symbols[number] for number in numbers if number != PAD_ID)

        def sent(text: str) -> str:
            return " ".join(piper_phonemes(text, self.espeak_voice)) if self.espeak_voice else text

        pairs = ((text, symbols(sent(text)), symbols(self.normalize(text))) for text in texts)
        if other := [pair for pair in pairs if pair[1] != pair[2]]:
            text, theirs, ours = min(other, key=lambda pair: len(pair[0]))
            return f"{len(other)} of {len(texts)} texts, such as {text!r}: it reads {theirs!r}, the voice {ours!r}"
        return ""

    def to_json(self) -> dict[str, Any]:
        return {
            "language": self.language,
            "symbols": list(self.symbols),
            "alphabet": {},  # Runs of earlier versions, which had tables of spellings, are resumed with the same text.
            "espeak_voice": self.espeak_voice,
            **({"phonemizer": self.phonemizer} if self.phonemizer else {}),
            **self.raw.to_json(),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Frontend":
        """Restores a front end from `to_json`. Raises UserError if the content is invalid."""
        try:
            names = content["language"], tuple(content["symbols"]), content["espeak_voice"]
            made = cls(*names, RawRules.from_json(content), content.get("phonemizer", ""))
        except (KeyError, TypeError, ValueError):
            raise unreadable("the voice's text settings", "prepare the data again", "invalid") from None
        if made.language not in LANGUAGES or made.symbols[: len(RESERVED)] != RESERVED:
            raise UserError(f"this version of gputrain has no text settings of the language {made.language!r}")
        if content.get("alphabet"):
            raise UserError(
                "the texts have the spellings of an alphabet table, which this version of gputrain does not read",
                hint="prepare the data again without it, and train on them",
            )
        return made

    @cached_property
    def _known(self) -> dict[str, int]:
        """Ids of all code points of normalised text."""
        own = {symbol: number for number, symbol in enumerate(self.symbols) if symbol not in RESERVED}
        same = dict(LANGUAGES[self.language].same)
        if self.language == CHARACTERS.name and not self.espeak_voice:  # Other apostrophes are the first of the voice.
            same |= dict.fromkeys({*APOSTROPHES} - own.keys(), next((mark for mark in APOSTROPHES if mark in own), ""))
        return own | {char: own[symbol] for char, symbol in same.items() if symbol in own}

    def _ids_of(self, normalized: str) -> list[int]:
        return [self._known[char] for char in unicodedata.normalize("NFD", normalized) if char in self._known]


def shortened(text: str, longest: int = 60) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def frontend(
    language: str,
    *,
    espeak_voice: str = "",
    texts: Iterable[str] = (),
    raw: RawRules | None = None,
) -> Frontend:
    """Returns the front end of a language.

    `espeak_voice` is a voice of espeak-ng (`de`, `en-us`), whose phonemes become the symbols; `texts` are raw texts
    that define the symbols of `characters`; `raw` are rules before those of the language. Raises UserError for invalid
    arguments.
    """
    if language not in LANGUAGES:
        raise UserError(f"language {language!r} is unknown", hint=f"known languages: {', '.join(LANGUAGES)}")
    rules, raw = LANGUAGES[language], raw or RawRules()
    letters = IPA_SYMBOLS if espeak_voice else rules.letters
    if not letters:
        reading = Frontend(language, RESERVED, raw=raw)
        found = {char for text in texts for char in reading.normalize(text)}
        marks = [mark for mark in APOSTROPHES if mark in found and unicodedata.category(mark) != "Lm"]
        letters = "".join(found.difference(marks[1:]))  # All but those that are letters share a symbol.
    points = {rules.same.get(char, char) for char in unicodedata.normalize("NFD", letters)}
    symbols = (*RESERVED, *PUNCTUATION, *sorted(points - set(PUNCTUATION)))
    return Frontend(language, symbols, espeak_voice, raw, phonemizer_version() if espeak_voice else "")


# -------------------------------------------------------------------------------------------------- phonemes of Piper


# They are made by stock Piper's own code and the espeak-ng that it contains, so that a voice hears in training what its
# player sends. piper-tts is under the GPL, and therefore runs as a program of its own, which answers each line of JSON
# with one.
_PROGRAM = """
import json, sys
sys.path[:] = [folder for folder in sys.path if folder]
from piper import PiperVoice
from piper.config import PhonemeType, PiperConfig
for line in sys.stdin:
    text, voice = json.loads(line)
    config = PiperConfig(num_symbols=1, num_speakers=1, sample_rate=1, espeak_voice=voice, phoneme_id_map={},
                         phoneme_type=PhonemeType.ESPEAK)
    try:
        sentences = PiperVoice(session=None, config=config).phonemize(text)
        answer = {"sentences": ["".join(sentence) for sentence in sentences]}
    except Exception as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)
"""
_HINT = 'install a newer one: pip install "piper-tts>=1.3"'


def phonemizer_version() -> str:
    """Returns the name and the version of the phonemiser. Raises UserError if it is not installed."""
    require("piper", needed_by="the espeak voice", otherwise="leave out the espeak voice")
    return f"piper-tts {version('piper-tts')}"


@cache
def _phonemizer() -> "subprocess.Popen[str]":
    phonemizer_version()
    log = tempfile.TemporaryFile()  # noqa: SIM115  The program keeps it for as long as it runs.
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
    )
    atexit.register(process.kill)
    return process


@lru_cache(maxsize=1 << 16)
def piper_phonemes(text: str, voice: str) -> tuple[str, ...]:
    """Returns the phonemes and the punctuation of each sentence of a text, as Piper separates them.

    Raises UserError if piper-tts is not installed, or its espeak-ng does not have the voice.
    """
    process = _phonemizer()
    assert process.stdin is not None  # Both are pipes.
    assert process.stdout is not None
    try:
        print(json.dumps([text, voice]), file=process.stdin, flush=True)
        answer = json.loads(process.stdout.readline())
    except (OSError, ValueError):
        _phonemizer.cache_clear()
        raise UserError(f"the phonemiser of {phonemizer_version()} does not start", hint=_HINT) from None
    if "error" in answer:
        raise UserError(
            f"Piper's espeak-ng cannot phonemise with the voice {voice!r}: {answer['error']}",
            hint="name a voice of espeak-ng, such as de, en-us or pt-br",
        )
    return tuple(answer["sentences"])
