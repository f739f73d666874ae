"""Malformed input of every kind ends with a message that names it, and loses nothing."""

import pytest

from tests.malformed import files, media, recognisers
from tests.malformed.case import Case, faults, outcome
from tests.tts.test_train import small_presets

CASES = [*media.cases(), *files.cases(), *recognisers.cases()]


@pytest.fixture(autouse=True, scope="module")
def _small_voice():
    with small_presets():
        yield


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_malformed_input_is_named(case: Case, tmp_path):
    found, faulty = outcome(case, tmp_path)
    assert not faults(case, found, faulty, tmp_path), found.said
