"""Uzbek test cases: written text and expected words, by the rules of the language."""

from pathlib import Path

TABLE = Path(__file__).parents[2] / "data" / "uzbek.tsv"
ROWS = [line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines()[1:]]
CASES = [(written, said) for _, written, said in ROWS]


def of_kind(*kinds: str) -> list[tuple[str, str]]:
    return [(written, said) for kind, written, said in ROWS if kind in kinds]
