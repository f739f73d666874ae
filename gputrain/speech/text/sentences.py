"""Splits text into sentences for synthesis."""

import re

from gputrain.speech.text.language import CHARACTERS, Language, ends_sentence

LONGEST = 300  # maximum number of characters: about 20 seconds of speech
_END = re.compile(r"[.!?…;؟۔।॥።။]+[\"'»”’)\]]*(?= |$)|[。！？]+[」』”’)]*|\n")
_LAST_WORD = re.compile(r"[^\s(\"'«“]+$")


def split_sentences(text: str, language: Language = CHARACTERS, longest: int = LONGEST) -> list[str]:
    """Returns the sentences of a raw text, none empty or longer than `longest` characters.

    A sentence ends at . ! ? … ; before a space, at a full stop of Chinese or Japanese, and at a new line. A dot after
    an abbreviation (known words, initials) ends it only before a word that begins sentences, and before a lower-case
    letter it does not. Longer sentences are split at commas, then at spaces, then anywhere.
    """
    found: list[str] = []
    start = 0
    for end in _END.finditer(text):
        if end[0] == "\n" or not _continues_sentence(text, start, end, language):
            found.append(text[start : end.end()])
            start = end.end()
    found.append(text[start:])
    tidy = (" ".join(sentence.split()) for sentence in found)
    return [part for sentence in tidy if sentence for part in _short(sentence, longest)]


def _continues_sentence(text: str, start: int, end: re.Match[str], language: Language) -> bool:
    """Returns True if the dot belongs to an abbreviation, an initial or an ordinal of a list."""
    if end[0] != ".":
        return False
    word = _LAST_WORD.search(text, max(start, end.start() - 40), end.start())
    if word is None:
        return False
    if text[end.end() : end.end() + 2].strip()[:1].islower():
        return True
    is_short = word[0].lower() in language.abbreviations or (len(word[0]) == 1 and word[0].isupper())
    return is_short and not ends_sentence(text, end.end(), language.starts)


def _short(sentence: str, longest: int) -> list[str]:
    parts = []
    while len(sentence) > longest:
        head = sentence[:longest]
        at = max(head.rfind(", "), head.rfind(": ")) + 1
        at = at if at > longest // 4 else head.rfind(" ")
        at = at if at > 0 else longest
        parts.append(sentence[:at].strip())
        sentence = sentence[at:].strip()
    return [*parts, sentence] if sentence else parts
