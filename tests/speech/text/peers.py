"""Two independent packages for Uzbek text, if they are installed, in a form comparable with ours."""

import warnings

import pytest

from tests.speech.text.spoken_cases import spoken_cases


def plain(text: str) -> str:
    """Removes differences without meaning: kinds of apostrophes, case, and a final dot."""
    for mark in "ʻʼ‘’`":
        text = text.replace(mark, "'")
    return " ".join(text.lower().split()).strip(" .")


def uztextnorm_differences() -> dict[str, tuple[str, str]]:
    """Returns (ours, theirs) for all cases."""
    theirs = pytest.importorskip("uztextnorm").UzbekTextNormalizer()
    said = {written: (plain(ours), plain(theirs.normalize(written))) for written, ours in spoken_cases("uzbek")}
    return {written: pair for written, pair in said.items() if pair[0] != pair[1]}


def alifbe_differences() -> dict[str, tuple[str, str]]:
    """Returns (ours, theirs) for the cases that have only letters, since it reads no numbers."""
    alifbe = pytest.importorskip("alifbe")

    def theirs(written: str) -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return str(alifbe.normalize_apostrophes(str(alifbe.cyrillic_to_latin(written))))

    letters = [
        pair for pair in spoken_cases("uzbek", "Cyrillic", "apostrophes") if not any(char.isdigit() for char in pair[0])
    ]
    said = {written: (plain(ours), plain(theirs(written))) for written, ours in letters}
    return {written: pair for written, pair in said.items() if pair[0] != pair[1]}
