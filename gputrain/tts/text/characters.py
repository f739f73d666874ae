"""Front end for any language by characters, without normalisation rules."""

import re
import unicodedata

from gputrain.tts.text.language import Language

_RESERVED = re.compile(r"[_^$]")  # PAD, BOS and EOS cannot be characters of a text.
_DROPPED = ("C", "So", "Sk", "Co")
_SPOKEN_SIGNS = "/\\@%&#*§‰†"


def is_sign(char: str) -> bool:
    """Returns True if a character stands for a word that it does not spell: a digit, a symbol such as + or €, or / and
    %."""
    return unicodedata.category(char)[0] in "NS" or char in _SPOKEN_SIGNS


def normalize(text: str) -> str:
    """Returns NFC in lower case, without control characters, emoji and repeated spaces."""
    text = unicodedata.normalize("NFC", _RESERVED.sub(" ", text))
    kept = (" " if unicodedata.category(char).startswith(_DROPPED) else char for char in text)
    return unicodedata.normalize("NFC", " ".join("".join(kept).lower().split()))


CHARACTERS = Language("characters", normalize, "")
