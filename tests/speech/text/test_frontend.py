"""Symbols and ids, compared with stock Piper's, and with bad input."""

import json
import sys
import time
import unicodedata

import pytest

from gputrain.errors import UserError
from gputrain.speech.text.frontend import Frontend, frontend
from gputrain.speech.text.plain import plain_words
from gputrain.speech.text.raw import RawRules
from tests.speech.text.spoken_cases import spoken_cases
from tests.tables import each_row

LANGUAGES = ("uz", "en", "ru")


def pipers_ids(reader: Frontend, text: str) -> list[int]:
    """Returns the ids of a text in stock Piper, for a voice of phoneme_type text."""
    phoneme_ids = pytest.importorskip("piper.phoneme_ids")
    return list(phoneme_ids.phonemes_to_ids(list(unicodedata.normalize("NFD", text)), reader.id_map()))


def test_ids_are_pipers_for_normalized_text():
    uzbek, russian = frontend("uz"), frontend("ru")
    for written, said in spoken_cases("uzbek"):
        if said:
            assert uzbek.ids(uzbek.normalize(written)) == pipers_ids(uzbek, said)
    text = russian.normalize("Ёлка 2024 года, район йода")
    assert russian.ids(text) == pipers_ids(russian, text)


def test_ids_stand_between_pads():
    reader = frontend("en")
    a, b = reader.symbols.index("a"), reader.symbols.index("b")
    assert reader.symbols[:3] == ("_", "^", "$")
    assert reader.ids("ab") == [1, 0, a, 0, b, 0, 2]


@each_row(
    ("OʻZBEKISTON", "oʻzbekiston"),
    ("O'zbek o’zbek oʼzbek o`zbek o´zbek", "oʻzbek oʻzbek oʻzbek oʻzbek oʻzbek"),
    ("ma'no, ma’no, maʻno", "maʼno, maʼno, maʼno"),
    ("Шаҳар чой", "shahar choy"),
    ("Қишлоқ ғалаба", "qishloq gʻalaba"),
    ("шеър", "sheʼr"),
    ("Windows", "vindovs"),
    ("25", "ikki besh "),
    ("ota–ona", "ota-ona"),
    ("kuting…", "kuting..."),
)
def test_raw_uzbek_in_stock_piper(raw, like):
    reader = frontend("uz")
    got = pipers_ids(reader, raw)
    # NFD separates the breve of й, which Piper then reads as и.
    assert got == pipers_ids(reader, like.replace("choy", "choi") if "чой" in raw else like)
    assert all(isinstance(number, int) and number < len(reader.symbols) for number in got)


def test_raw_english_and_russian_in_stock_piper():
    english, russian = frontend("en"), frontend("ru")
    assert pipers_ids(english, "DON’T go") == english.ids("don't go")
    assert pipers_ids(russian, "ЁЛКА Йод") == russian.ids("ёлка йод")
    assert pipers_ids(russian, "sh") == russian.ids("сх")


@each_row(*LANGUAGES)
def test_every_reading_can_be_spoken(language):
    reader = frontend(language)
    id_map = reader.id_map()
    assert all(len(char) == len(unicodedata.normalize("NFD", char)) == 1 for char in id_map if char not in "ЙЎЁйўё")
    assert all(len(ids) % 2 == 1 and set(ids[1::2]) <= {0} for ids in id_map.values())
    assert [id_map[symbol] for symbol in reader.symbols] == [[number] for number in range(len(reader.symbols))]


def test_both_apostrophes_share_a_symbol():
    reader = frontend("uz")
    assert reader.id_map()["ʻ"] == reader.id_map()["ʼ"] == reader.id_map()["'"] == [reader.symbols.index("ʻ")]
    assert len(set(reader.symbols)) == len(reader.symbols)


def test_json_gives_it_back(tmp_path):
    table = tmp_path / "alphabet.yaml"
    table.write_text("sh: ʃ\n", encoding="utf-8")
    for reader in (frontend("uz", alphabet=table), frontend("characters", texts=["Ёж"]), frontend("ru")):
        again = Frontend.from_json(json.loads(json.dumps(reader.to_json())))
        assert again == reader
        assert again.id_map() == reader.id_map()
    for broken in ({}, {**frontend("en").to_json(), "language": "tlh"}, {**frontend("en").to_json(), "symbols": ["a"]}):
        with pytest.raises(UserError):
            Frontend.from_json(broken)


def test_characters_take_their_symbols_from_the_texts():
    reader = frontend("characters", texts=["Grüße, Ёж_$!", "안"])
    assert reader.normalize("GRÜSSE _ Ёж") == "grüsse ёж"
    assert reader.normalize("Grü\u00adße\0 می\u200cخواهم\u200c ශ්\u200dරී") == "grüße می\u200cخواهم ශ්\u200dරී"
    assert reader.unknown("grüße ёж!, 안") == []
    assert reader.unknown("grab") == ["a", "b"]
    assert reader.ids("u\u0308") == reader.ids("ü")


def test_another_alphabet(tmp_path):
    table = tmp_path / "alphabet.json"
    table.write_text(json.dumps({"sh": "ʃ", "o'": "ö", "ch": "c", "ng": "ɲ"}), encoding="utf-8")
    reader = frontend("uz", alphabet=table)
    assert reader.normalize("Shoʻrva ichdi, 4 Choy, Is’hoq") == "ʃörva icdi, tört coy, isʼhoq"
    assert reader.normalize("Ʃörva Ö'sha cicero") == "ʃörva öʃa cicero"
    assert reader.normalize("Toɲ TOƝ tong") == "toɲ toɲ toɲ"
    assert {"ʃ", "\u0308", "c"} <= set(reader.symbols)
    assert reader.unknown("ʃörva isʼhoq") == []
    assert reader.id_map()["ш"] == [reader.symbols.index("ʃ")]


@each_row(
    ("sch: š", "not a letter"),
    ("sh: 5", "lower-case letters"),
    ("sh: 'Š'", "lower-case letters"),
    ("sh: '_'", "lower-case letters"),
    ("sh: s", "are both spelled s"),
    ("- sh", "expected a mapping"),
)
def test_alphabets_that_are_none(tmp_path, table, said):
    path = tmp_path / "alphabet.yaml"
    path.write_text(table, encoding="utf-8")
    with pytest.raises(UserError, match=said):
        frontend("uz", alphabet=path)


def test_bad_input_is_named(tmp_path, monkeypatch):
    reader = frontend("uz")
    assert reader.normalize("sa\u00adlo\0m\u200b") == "salom"
    assert frontend("ru").normalize("при\x07вет") == "привет"
    for text in ("", "   ", "🎉🎉", "日本", "\u200b"):
        assert reader.normalize(text) == ""
        with pytest.raises(UserError, match="no symbol of the voice"):
            reader.ids(reader.normalize(text))
    with pytest.raises(UserError, match="'tlh' is unknown"):
        frontend("tlh")
    with pytest.raises(UserError, match="only Uzbek"):
        frontend("ru", alphabet=tmp_path / "a.yaml")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="espeak-ng is not installed"):
        frontend("en", espeak_voice="en-us").normalize("Hello")


@pytest.mark.skipif(sys.platform == "win32", reason="the program is a shell script")
def test_espeak_program_is_asked_clause_by_clause(tmp_path, monkeypatch):
    """A fake espeak-ng reverses its last argument: order and punctuation of clauses are kept."""
    program = tmp_path / "espeak-ng"
    program.write_text('#!/bin/sh\nfor last; do :; done\necho "$last" | /usr/bin/rev\n', encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    reader = frontend("uz", espeak_voice="uz")
    assert reader.normalize("Salom, 5 dost!") == "molas, tsod hseb!"
    assert reader.phoneme_type == "espeak"
    assert "ˈ" in reader.symbols
    assert frontend("uz").phoneme_type == "text"


@each_row(
    "oʻzbek tili 2024-yil. ", "1", "1 - ", "a-", "A1", "XIV", "я", "а. ", "a@b.", "www.", "1/", "1 мая ", "<!--", " "
)  # fmt: skip
def test_time_grows_in_proportion_to_the_length(unit):
    """Four times the letters take four times as long: of a pattern that looks at each letter from each, sixteen."""

    def seconds(read, length):
        start = time.process_time()
        read((unit * length)[:length])
        return time.process_time() - start

    for language in LANGUAGES:
        read = frontend(language).normalize
        if seconds(read, 8_000) > 0.05:  # Less is not measured exactly enough.
            ratios = (seconds(read, 8_000) / seconds(read, 2_000) for _ in range(3))
            assert any(ratio < 9 for ratio in ratios), language


def test_long_lines_are_read_to_their_end():
    """Digits beyond the largest number are read one by one, sentences are cut, and nested tags are removed."""
    for language, one in (("uz", "bir"), ("en", "one"), ("ru", "один")):
        assert frontend(language).normalize("1" * 10_000) == " ".join([one] * 10_000)
    assert plain_words("1" * 10_000, "de", RawRules(number_words="de")) == " ".join(["eins"] * 10_000)
    assert frontend("en").normalize("1," + "000," * 10 + "000th") != ""
    assert all(len(part) <= 300 for part in frontend("en").sentences("A1b. " * 1_000 + "a" * 10_000))
    assert frontend("characters", texts=["a"]).normalize("<s" * 3_000 + ">" * 3_000 + "a").endswith("a")
