"""Checks the texts that a recogniser is trained on: rare symbols, mixed scripts, texts that are unlikely to be said."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from gputrain.speech.clip_filter import ONE_WRITING
from gputrain.speech.store import SpeechClip
from gputrain.speech.text.frontend import shortened
from gputrain.speech.text.unicode_cleanup import APOSTROPHES, script_of
from gputrain.speech.text.vocabulary import SPECIAL, Vocabulary

RARE = 20  # minimum number of occurrences for a symbol to be learnt
MOST_NAMED = 8  # maximum number of symbols named in a sentence
REPEATED = 3  # minimum number of clips with the same text that is reported
SHORT = 60  # maximum number of characters of an excerpt
# Remarks about a sound, and what programs write for a missing text.
ANNOTATION = re.compile(r"\[[^\[\]]+\]|<[^<>]+>|\{[^{}]+\}|\*[^*]+\*|\(\([^()]*\)\)|♪|^(?:nan|NaN|None|null|NULL|N/A)$")

SuspicionReason = Literal["digits", "mixed scripts", "annotation", "repeated text", "text differs"]


@dataclass(frozen=True)
class SuspiciousText:
    """A text that may not be what is said. `path` names the clip."""

    path: str
    reason: SuspicionReason
    detail: str


def symbol_counts(clips: Iterable[SpeechClip], vocabulary: Vocabulary) -> dict[str, int]:
    """Returns the occurrences of every symbol but the blank and the unknown one, the most frequent first."""
    found = Counter(number for clip in clips for number in vocabulary.ids(clip.normalized))
    hidden = {vocabulary.blank, vocabulary.unknown_id}
    counts = {one: found[number] for number, one in enumerate(vocabulary.symbols) if number not in hidden}
    return dict(sorted(counts.items(), key=lambda pair: -pair[1]))


def vocabulary_findings(clips: Sequence[SpeechClip], vocabulary: Vocabulary) -> Iterator[str]:
    """Yields what is odd about the symbols of the texts, with examples."""
    counts = symbol_counts(clips, vocabulary)
    rare = [symbol for symbol, count in counts.items() if 0 < count < RARE and symbol not in SPECIAL]
    if rare:
        examples = _examples(clips, rare)
        named = [f"{symbol} ({counts[symbol]}: {examples[symbol]!r})" for symbol in rare[-MOST_NAMED:]]
        more = f" and {len(rare) - MOST_NAMED} more" if len(rare) > MOST_NAMED else ""
        yield f"symbols that occur less than {RARE} times, too rarely to be learnt: {', '.join(named)}{more}"
    scripts = Counter[str]()
    for symbol, count in counts.items():
        if script := script_of(symbol):
            scripts[script] += count
    if len(scripts) > 1 and not scripts.keys() <= ONE_WRITING:
        (main, _), *others = scripts.most_common()
        foreign = {name: [one for one in counts if script_of(one) == name] for name, _ in others}
        parts = [f"{' '.join(foreign[name][:MOST_NAMED])} ({name})" for name, _ in others]
        yield f"letters of other scripts than {main}, which may only look alike: {', '.join(parts)}"
    marks = [mark for mark in APOSTROPHES if mark in counts]
    # The standard Uzbek alphabet has two: ʻ is a part of letters, ʼ stands between them.
    if len(marks) > 1 and {*marks} != {"ʻ", "ʼ"}:
        yield f"several signs for an apostrophe: {', '.join(f'{mark} (U+{ord(mark):04X})' for mark in marks)}"


def _examples(clips: Iterable[SpeechClip], symbols: Iterable[str]) -> dict[str, str]:
    """Returns a word with each symbol."""
    wanted, found = set(symbols), dict.fromkeys(symbols, "")
    for clip in clips:
        if wanted.isdisjoint(clip.normalized):
            continue
        for word in clip.normalized.split():
            for symbol in wanted & set(word):
                found[symbol] = shortened(word, 30)
                wanted.discard(symbol)
    return found


def suspicious_texts(clips: Sequence[SpeechClip], names: Sequence[str]) -> list[SuspiciousText]:
    """Returns the texts of clips, whose names are given, that may differ from what is said."""
    found = [
        SuspiciousText(name, reason, detail)
        for clip, name in zip(clips, names, strict=True)
        for reason, detail in _odd_text(clip.text, clip.normalized)
    ]
    texts = Counter(clip.normalized for clip in clips)
    first = dict(reversed([(clip.normalized, name) for clip, name in zip(clips, names, strict=True)]))
    for text, count in texts.most_common():
        if count < REPEATED:
            break
        found.append(SuspiciousText(first[text], "repeated text", f"{shortened(text)!r} is the text of {count} clips"))
    return found


def _odd_text(text: str, normalized: str) -> Iterator[tuple[SuspicionReason, str]]:
    digits = [place for place, char in enumerate(text) if unicodedata.category(char)[0] == "N"]
    if digits:
        is_read = len(text) <= SHORT and not any(text[place] in normalized for place in digits)
        yield "digits", f"{around(text, digits[0])!r}" + (f", read as {shortened(normalized)!r}" if is_read else "")
    if remark := ANNOTATION.search(text):
        yield "annotation", f"{around(text, remark.start())!r}"
    scripts = Counter(filter(None, map(script_of, text)))
    if len(scripts) > 1 and not scripts.keys() <= ONE_WRITING:
        (main, _), *others = scripts.most_common()
        words = [word for word in text.split() if {script_of(char) for char in word} - {"", main}]
        foreign = ", ".join(f"{count} {name}" for name, count in others)
        yield "mixed scripts", f"{foreign} letters in {shortened(' '.join(words))!r}"


def around(text: str, place: int) -> str:
    """Returns an excerpt of a text around a place."""
    first = max(0, min(place - SHORT // 2, len(text) - SHORT))
    before, after = "…" * bool(first), "…" * (first + SHORT < len(text))
    return f"{before}{text[first : first + SHORT]}{after}"
