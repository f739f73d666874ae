"""Written texts and how they are spoken, by the rules of each language."""

from pathlib import Path

FOLDER = Path(__file__).parents[2] / "data"


def spoken_cases(language: str, *kinds: str) -> list[tuple[str, str]]:
    """Return pairs of written and spoken text, of some kinds where the file of the language names them."""
    lines = (FOLDER / f"{language}.tsv").read_text(encoding="utf-8").splitlines()[1:]
    rows = [line.split("\t") for line in lines]
    return [(row[-2], row[-1]) for row in rows if not kinds or row[0] in kinds]
