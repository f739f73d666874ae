"""Losses, norms of gradients and sums of weights of the steps of each model equal those on record, so that no change of
the code changes the arithmetic unnoticed: of the steps by which everything has started, and of all twenty if there is
time."""

import json
from pathlib import Path

import pytest

from tests.golden.runs import RUNS, STEPS, Record, record
from tests.tables import slow

EXACT = 1e-9  # Relative. SSE2, AVX2 and AVX-512 differ by at most 1e-11 after these steps.
# Steps until the warm-up of four is over; the autoencoder's discriminator counts from step 8.
FEWER = {"asr": 6, "tts": 6, "vae": 10, "vocoder_adamw": 6}
DRAWN = 1e-6  # Relative, for random numbers that torch draws in float32.


def file_of(name: str) -> Path:
    return Path(__file__).parents[1] / "data" / f"golden_{name}.json"


def differences(found: Record, expected: Record, tolerance: float) -> list[str]:
    """Returns a line for each row that differs, with the first step at which it does."""
    wrong = [f"{name}: only on one side" for name in found.keys() ^ expected.keys()]
    for name in found.keys() & expected.keys():
        scale = max(map(abs, expected[name]))
        for step, (one, two) in enumerate(zip(found[name], expected[name], strict=True)):
            if not abs(one - two) <= tolerance * max(abs(two), 1e-3 * scale):
                wrong.append(f"{name}: {one!r} instead of {two!r} at step {step}")
                break
    return sorted(wrong)


# Muon, on the same model as AdamW, is slow.
@pytest.mark.parametrize(
    ("name", "steps"),
    [*FEWER.items()] + [slow(name, STEPS) for name in RUNS],
)
def test_losses_and_weights_are_those_on_record(name, steps):
    whole = json.loads(file_of(name).read_text(encoding="utf-8"))
    assert {len(row) for rows in whole.values() for row in rows.values()} == {STEPS}
    expected = {place: {key: row[:steps] for key, row in rows.items()} for place, rows in whole.items()}
    found = record(name, steps)
    wrong = {
        place: differences(found[place], expected[place], DRAWN if place == "drawn" else EXACT) for place in expected
    }
    lines = "\n".join(line for place in wrong.values() for line in place)
    assert not lines, f"{lines}\nIf this change is meant: python -m tests.golden {name}"
