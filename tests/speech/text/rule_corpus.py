"""Corpus of text rules: written and spoken text by published rules of each language, in two shares.

`python -m tests.speech.text.rule_corpus` prints the failures of the development share, and the counts of both.
"""

import hashlib
import sys
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parents[2] / "data" / "text_rules"
LANGUAGES = ("uz", "ru", "en")
HELD_OUT, UNSUPPORTED = "held-out", "unsupported"


class RuleCase(NamedTuple):
    """A line of the corpus; `share` is development, held-out, or unsupported (of the development share)."""

    category: str
    written: str
    spoken: str
    source: str
    share: str


def cases(language: str) -> list[RuleCase]:
    lines = (FOLDER / f"{language}.tsv").read_text(encoding="utf-8").splitlines()[1:]
    return [RuleCase(*line.split("\t")) for line in lines]


def is_held_out(language: str, written: str) -> bool:
    """Returns True for about 30 % of the cases, by the first byte of a hash."""
    return hashlib.sha256(f"{language}:{written}".encode()).digest()[0] < 77


def without_pauses(text: str) -> str:
    """Returns a text without hyphens and commas, which differ only by the lengths of their pauses, and without a final
    dot, since that of an abbreviation may or may not end a sentence."""
    return " ".join(text.replace("-", " ").replace(",", " ").split()).removesuffix(".")


def failures(language: str) -> list[tuple[RuleCase, str]]:
    """Returns the cases whose normalised text differs from what is spoken, with the normalised text."""
    from gputrain.speech.text.frontend import frontend

    normalize = frontend(language).normalize
    found = ((case, normalize(case.written)) for case in cases(language))
    return [(case, said) for case, said in found if without_pauses(said) != without_pauses(case.spoken)]


def right(language: str, *, held_out: bool) -> tuple[int, int]:
    """Returns the number of right cases of a share, and the number of its cases."""
    total = sum((case.share == HELD_OUT) == held_out for case in cases(language))
    return total - sum((case.share == HELD_OUT) == held_out for case, _ in failures(language)), total


def main(languages: list[str]) -> None:
    for language in languages or LANGUAGES:
        for case, said in failures(language):
            if case.share != HELD_OUT:
                print(f"{language} {case.category}: {case.written!r}\n    {said}\n    {case.spoken}")
        for held_out in (False, True):
            good, total = right(language, held_out=held_out)
            print(f"{language} {'held-out' if held_out else 'development'}: {good} of {total}, {good / total:.1%}")


if __name__ == "__main__":
    main(sys.argv[1:])
