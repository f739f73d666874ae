"""Russian texts without the dictionary of word forms."""

import sys

import pytest

from gputrain.errors import UserError
from gputrain.speech.text.russian import grammar, normalize


def test_without_the_dictionary_numbers_are_refused_and_other_texts_are_read(monkeypatch):
    monkeypatch.setitem(sys.modules, "pymorphy3", None)
    grammar._dictionary.cache_clear()
    grammar._readings.cache_clear()
    grammar.noun.cache_clear()
    try:
        assert normalize("Мама мыла раму.") == "мама мыла раму."
        with pytest.raises(UserError, match="numbers in Russian texts: the package pymorphy3") as raised:
            normalize("из 21 книги")
        assert "pip install pymorphy3" in raised.value.hint
    finally:
        monkeypatch.undo()
        for known in (grammar._dictionary, grammar._readings, grammar.noun):
            known.cache_clear()
