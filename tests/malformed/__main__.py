"""Writes the table of malformed input and what the commands answer: benchmarks/results/malformed_input.md.

python -m tests.malformed [WORD ...]    only prints the cases whose titles contain a word
"""

import sys
import tempfile
from pathlib import Path

from tests.malformed.case import faults, outcome
from tests.malformed.test_malformed import CASES
from tests.tts.test_train import small_presets

TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "malformed_input.md"
HEAD = """# Malformed input

Each case is read by a command in a fresh folder. Exit code 2 is an error of the input; with 0, the file is left out by
name and the rest is done. Written by `python -m tests.malformed`, which fails if an outcome is not the expected one.

| case | command | exit code | message |
|---|---|---|---|
"""


def cell(text: str, most: int = 160) -> str:
    text = " ".join(text.split())
    return (text if len(text) <= most else text[: most - 3] + "...").replace("|", "\\|").replace("<", "&lt;")


rows, wrong = [], []
with small_presets():
    for case in CASES:
        if sys.argv[1:] and not any(word in case.title for word in sys.argv[1:]):
            continue
        with tempfile.TemporaryDirectory() as name:
            try:
                found, faulty = outcome(case, Path(name))
            except AssertionError as error:
                wrong.append(f"{case.title}: {error}")
                continue
            wrong += [
                f"{case.title}: {one}\n    {found.said[-600:]!r}" for one in faults(case, found, faulty, Path(name))
            ]
            rows.append(
                f"| {case.title} | `{cell(found.command.split()[0])}` | {found.code} | {cell(found.first_line)} |"
            )
table = HEAD + "\n".join(rows) + "\n"
if sys.argv[1:]:
    print(table)
elif not wrong:
    TABLE.write_text(table, encoding="utf-8")
print(f"{len(rows)} cases, {len(wrong)} faults\n" + "\n".join(wrong), file=sys.stderr)
sys.exit(bool(wrong))
