"""Normalisation of texts whose spoken words are known."""

import pytest

from gputrain.speech.text import english, russian, uzbek
from tests.speech.text.spoken_cases import spoken_cases
from tests.tables import check_rows

NORMALIZE = {"english": english.normalize, "russian": russian.normalize, "uzbek": uzbek.normalize}


@pytest.mark.parametrize("language", NORMALIZE)
def test_texts_are_spoken_by_the_rules_of_their_language(language):
    def check(written, said):
        assert NORMALIZE[language](written) == said

    check_rows(spoken_cases(language), check)
