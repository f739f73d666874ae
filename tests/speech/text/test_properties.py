"""Properties of normalisation for arbitrary strings, in every language with rules."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gputrain.speech.text.frontend import frontend

# Half of the code points are those in the rules.
ODD = "abcdegoskhnqyzlmrvtwIVXAQSh'’ʻ`0123456789.,:;-–—/%$€°+ \n()!?&@№²½…ўғқҳеёцъьюяЦБМТЕг"
TEXTS = st.text(st.one_of(st.sampled_from(ODD), st.characters()), max_size=40)


@pytest.mark.parametrize("language", ["uz", "en", "ru"])
def test_any_string_becomes_known_symbols_and_stays_so(language):
    reader = frontend(language)

    @settings(max_examples=400)
    @given(TEXTS)
    def check(text):
        normalized = reader.normalize(text)
        assert reader.unknown(normalized) == []
        assert reader.normalize(normalized) == normalized

    check()


@settings(max_examples=200)
@given(TEXTS)
def test_characters_know_the_texts_they_are_made_from(text):
    reader = frontend("characters", texts=[text])
    normalized = reader.normalize(text)
    assert reader.unknown(normalized) == []
    assert reader.normalize(normalized) == normalized


@settings(max_examples=200)
@given(TEXTS)
def test_sentences_lose_nothing_but_spaces(text):
    parts = frontend("uz").sentences(text * 20)
    assert "".join("".join(parts).split()) == "".join((text * 20).split())
    assert all(0 < len(part) <= 300 for part in parts)
