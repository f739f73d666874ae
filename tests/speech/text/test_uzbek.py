"""Uzbek normalisation compared with expected words by the rules of the language, and with two independent packages."""

import re
from pathlib import Path

from gputrain.speech.text.uzbek import normalize
from gputrain.speech.text.uzbek.numbers import cardinal, ordinal
from tests.speech.text.peers import alifbe_differences, uztextnorm_differences
from tests.speech.text.spoken_cases import spoken_cases

PAGE = Path(__file__).parents[3] / "docs" / "uzbek.md"


def test_what_is_said_stays_as_it_is():
    texts = [said for _, said in spoken_cases("uzbek")]
    assert len(texts) > 400
    assert [normalize(text) for text in texts] == texts


def test_cardinals_can_be_read_back():
    """Parses number words independently: every number below 10^4, and powers with neighbours up to 10^21."""
    units = {"bir": 1, "ikki": 2, "uch": 3, "toʻrt": 4, "besh": 5, "olti": 6, "yetti": 7, "sakkiz": 8, "toʻqqiz": 9}
    tens = {"oʻn": 10, "yigirma": 20, "oʻttiz": 30, "qirq": 40, "ellik": 50}
    tens |= {"oltmish": 60, "yetmish": 70, "sakson": 80, "toʻqson": 90}
    scales = ["ming", "million", "milliard", "trillion", "kvadrillion", "kvintillion"]

    def read(words: str) -> int:
        total = group = 0
        for word in words.split():
            if word == "yuz":
                group = max(group, 1) * 100
            elif word in scales:
                total, group = total + max(group, 1) * 1000 ** (scales.index(word) + 1), 0
            else:
                group += units.get(word) or tens[word]
        return total + group

    numbers = [*range(1, 10_000), *(10**power + more for power in range(4, 21) for more in (-1, 0, 1, 100, 1000))]
    assert [read(cardinal(number)) for number in numbers] == numbers


def test_ordinals_end_in_inchi_or_nchi():
    assert all(re.search("([^ai]i|[ai])nchi$", ordinal(str(number))) for number in range(1, 2000))


def examples(page: str) -> list[tuple[str, str]]:
    return re.findall(r"^\| `(.+?)` \| `(.+?)` \|$", page, re.MULTILINE)


def test_the_page_says_what_the_code_does():
    shown = examples(PAGE.read_text(encoding="utf-8"))
    assert len(shown) > 90
    assert [(written, normalize(written)) for written, _ in shown] == shown


def explained(heading: str) -> set[str]:
    section = PAGE.read_text(encoding="utf-8").split(f"### {heading}\n")[1].split("\n##")[0]
    lists = [line.split(": `", 1)[1] for line in section.splitlines() if line.startswith("- ")]
    return {case for line in lists for case in re.findall(r"`([^`]+)`", "`" + line)}


def test_every_difference_to_uztextnorm_is_explained():
    assert explained("uztextnorm") == {case.strip() for case in uztextnorm_differences()}


def test_every_difference_to_alifbe_is_explained():
    assert explained("alifbe") == {case.strip() for case in alifbe_differences()}
