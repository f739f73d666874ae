"""Spellings by word: a user's lexicon, and how it is stored with a front end and a vocabulary."""

import json

import pytest

from gputrain.config import assemble
from gputrain.errors import UserError
from gputrain.speech.config import Normalize
from gputrain.speech.text.frontend import Frontend, frontend
from gputrain.speech.text.lines import normalize_lines
from gputrain.speech.text.raw import Lexicon, RawRules, read_lexicon
from gputrain.speech.text.vocabulary import Vocabulary, vocabulary_of
from tests.tables import each_row

WORDS = {"Korzinka": "karzinka", "IT": "ay ti", "New York": "nyu york", "C++": "si plyus plyus"}


@each_row(
    ("Korzinka", "karzinka"),
    ("KORZINKA va korzinka", "karzinka va karzinka"),
    ("Korzinkalar", "Korzinkalar"),
    ("superKorzinka", "superKorzinka"),
    ("IT kompaniya", "ay ti kompaniya"),
    ("it hurdi, It", "it hurdi, It"),
    ("New York shahri", "nyu york shahri"),
    ("C++ tili, C+", "si plyus plyus tili, C+"),
    ("korzinka.", "karzinka."),
    ("info@korzinka.uz, korzinka.uz", "info@korzinka.uz, korzinka.uz"),
)
def test_whole_words_match_and_capitals_match_only_capitals(written, said):
    assert Lexicon(WORDS)(written) == said


def test_uzbek_endings_stay():
    raw = RawRules({"Tiktok": "tiktuk", "Makro": "makro market"})
    reader = frontend("uz", raw=raw)
    assert reader.normalize("Tiktokda") == "tiktukda"
    assert reader.normalize("tiktok'ga, TIKTOK-dan") == "tiktukka, tiktukdan"
    assert frontend("ru", raw=RawRules({"Tiktok": "тикток"})).normalize("Tiktok") == "тикток"


def test_a_user_takes_precedence_over_the_names_of_the_package():
    assert frontend("uz").normalize("Facebook") == "feysbuk"
    assert frontend("uz", raw=RawRules({"facebook": "feys"})).normalize("Facebook'da") == "feysda"


@each_row(
    ("a.yaml", "Facebook: feysbuk\nIT: ay ti\n"),
    ("a.json", '{"Facebook": "feysbuk", "IT": "ay ti"}'),
)
def test_files(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    assert read_lexicon(path) == {"Facebook": "feysbuk", "IT": "ay ti"}


@each_row(
    ("a.yaml", "Facebook: 5\n", "'Facebook' is spelled 5, expected a word"),
    ("a.yaml", "Facebook: ''\n", "expected a word and its spelling"),
    ("a.yaml", "'!': undov\n", "'!' is spelled 'undov'"),
    ("a.yaml", "a: b\nb: c\n", "the spelling of a, b, contains a word of the lexicon"),
    ("none.yaml", None, "No such file"),
)
def test_files_that_are_none(tmp_path, name, content, said):
    path = tmp_path / name
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=said):
        read_lexicon(path)


def test_the_lexicon_is_stored_with_the_text_settings():
    raw = RawRules({"Makro": "makra"}, "tr")
    for reader in (frontend("uz", raw=RawRules({"Makro": "makra"})), frontend("characters", texts=["a"], raw=raw)):
        assert Frontend.from_json(json.loads(json.dumps(reader.to_json()))) == reader
    vocabulary = vocabulary_of("tr", ["abc"], raw)
    assert Vocabulary.from_json(json.loads(json.dumps(vocabulary.to_json()))) == vocabulary
    with pytest.raises(UserError):
        Frontend.from_json({**frontend("uz").to_json(), "lexicon": {"a": 1}})


def test_normalize_takes_a_lexicon(tmp_path):
    path = tmp_path / "words.yaml"
    path.write_text("Makro: makra\n", encoding="utf-8")
    assert list(normalize_lines(assemble(Normalize, {"text": "Makroga 5 kishi", "lexicon": path}))) == [
        "makraga besh kishi"
    ]
