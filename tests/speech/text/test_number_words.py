"""Numbers in words by num2words, in languages without rules."""

import sys

import pytest

from gputrain.config import assemble
from gputrain.errors import UserError
from gputrain.speech.config import Normalize
from gputrain.speech.text.frontend import frontend
from gputrain.speech.text.lines import normalize_lines
from gputrain.speech.text.raw import RawRules, converter_of, raw_rules, with_number_words
from gputrain.speech.text.vocabulary import plain_words
from tests.tables import each_row

pytest.importorskip("num2words")


@each_row(
    ("tr", "Saat 5", "Saat beş"),
    ("de", "21 Tage", "einundzwanzig Tage"),
    ("fr", "80 ans", "quatre-vingts ans"),
    ("es", "1.000.000", "un millón"),
    ("de", "3,5 km", "drei Komma fünf km"),
    ("de", "-4 Grad", "minus vier Grad"),
    ("de", "007", "null null sieben"),
    ("de", "ohne", "ohne"),
    ("pt-BR", "2 dias", "dois dias"),
    ("kk", "2 күн", "екі күн"),
)
def test_numbers_of_other_languages(language, written, said):
    assert with_number_words(written, language) == said


def test_a_recogniser_of_such_a_language_has_no_digits():
    assert plain_words("Es sind 21 Tage!", "de", RawRules(number_words="de")) == "es sind einundzwanzig tage"


@each_row(
    ("th", "น้ำ ๕ แก้ว", "น้ำ ห้า แก้ว"),
    ("fa", "می\u200cخواهم ۵ کتاب", "می\u200cخواهم پنج کتاب"),
    ("bn", "র\u200d্যাব ৫", "র\u200d্যাব পাঁচ"),
    ("ja", "ＡＢ ５ ｶﾞ", "ａｂ 五 ｶﾞ"),
    ("fr", "1\u202f000 œufs ½ l’eau", "mille œufs ½ l'eau"),
    ("de", "\u22124 Grad", "minus vier grad"),
)
def test_numbers_in_words_change_no_other_character(language, written, said):
    """The same for a lexicon, whose words are characters of the text as well."""
    assert plain_words(written, language, RawRules(number_words=language)) == said
    reader = frontend("characters", texts=[written], raw=RawRules({"zzz": "y"}, language))
    assert reader.normalize(written).replace("’", "'") == said


def test_a_lexicon_replaces_whole_words_of_any_script():
    raw = RawRules({"น้ำ": "x", "क": "y"})
    assert plain_words("น้ำ, คน้ำ कि क", "th", raw) == "x คน้ำ कि y"


def test_normalize_writes_them():
    options = {"text": "5 Tage", "language": "characters", "number_words": "de"}
    assert list(normalize_lines(assemble(Normalize, options))) == ["fünf tage"]
    with pytest.raises(UserError, match="the rules of uz write numbers"):
        list(normalize_lines(assemble(Normalize, {**options, "language": "uz"})))


def test_unknown_languages_and_the_missing_package_are_named(monkeypatch):
    assert converter_of("tlh") == ""
    with pytest.raises(UserError, match="no numbers of the language 'tlh'"):
        raw_rules("characters", False, None, "tlh")
    monkeypatch.setitem(sys.modules, "num2words", None)
    with pytest.raises(UserError, match="numbers in words for 'de': the package num2words is not installed") as failure:
        with_number_words("5", "de")
    assert "pip install num2words" in str(failure.value.hint)
