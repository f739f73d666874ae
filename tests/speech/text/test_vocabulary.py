"""The recogniser's vocabulary: text rules, labels, vocabularies of other programs, matching by symbol."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gputrain.errors import UserError
from gputrain.speech.text.language import check_language
from gputrain.speech.text.vocabulary import ABSENT, Vocabulary, match_symbols, plain_words, vocabulary_of
from tests.tables import each_row


@each_row(
    ("uz", "Oʻzbekiston — 2024-yil, «gʻalaba»!", "oʻzbekiston ikki ming yigirma toʻrtinchi yil gʻalaba"),
    ("uz", "O'ZBEK maʼno, bora-bora.", "oʻzbek maʼno bora-bora"),
    ("ru", "Кто-то сказал: «5 рублей»…", "кто-то сказал пять рублей"),
    ("en", "Don't e-mail 21 'friends'.", "don't e mail twenty one friends"),
    ("en-US", "No. 5", "number five"),
    ("kk", "Қазақстан – БІЗ-дің ел! 12 жыл", "қазақстан біз-дің ел 12 жыл"),
    ("fr", "L’été, c'est «ÇA» — peut-être_100%", "l'été c'est ça peut-être 100"),
    ("tr", "IĞDIR, İzmir", "ığdır izmir"),
    ("de", "İzmir STRASSE straße \u00adso\u00adgar", "izmir strasse straße sogar"),
    ("el", "ΟΔΟΣ", "οδος"),
    ("hi", "नमस्ते, दुनिया!", "नमस्ते दुनिया"),
    ("haw", "ʻOkina", "ʻokina"),
    ("vi", "Tie\u0302\u0301ng 'Vie\u0302\u0323t'", "tiếng việt"),
    ("pl", "❤\ufe0f -tak- a\u200bb", "tak a b"),
    ("und", "?!…", ""),
    # Joiners between letters are spelling; beside a space they are not, unless a virama precedes them.
    ("fa", "می\u200cخواهم کتاب\u200c، \u200dنه", "می\u200cخواهم کتاب نه"),
    ("si", "ශ්\u200dරී ලංකා!", "ශ්\u200dරී ලංකා"),
    ("hi", "क्\u200dष क्\u200cष।", "क्\u200dष क्\u200cष"),
    ("bn", "র\u200d্যাব", "র\u200d্যাব"),
    ("ml", "അവന്\u200d വന്നു.", "അവന്\u200d വന്നു"),
    ("th", "น้ำ กำลัง", "น้ำ กำลัง"),
    ("ja", "ＡＢ ｶﾞ。", "ａｂ ｶﾞ"),
    ("km", "ភាសា\u200bខ្មែរ", "ភាសា ខ្មែរ"),
    ("ca", "Col·legi · 1", "col·legi 1"),
    ("he", "צה״ל, ג׳ירפה ״כן״", "צה״ל ג׳ירפה כן"),
    ("hy", "Ինչո՞ւ", "ինչու"),
    ("kk", "са\0лем әл\x07ем\tиә", "салем әлем иә"),
    ("en", "he\0llo wor\x1bld", "hello world"),
)
def test_words(language, text, words):
    assert plain_words(text, language) == words
    assert plain_words(words, language) == words


@settings(max_examples=200)
@given(st.text(max_size=60), st.sampled_from(["uz", "ru", "en", "kk", "tr", "fa"]))
def test_words_do_not_change_again(text, language):
    words = plain_words(text, language)
    assert plain_words(words, language) == words
    assert words == " ".join(words.split()).lower() or language in ("kk", "fa")  # Some capitals have no lower case.
    assert not set(words) & set('.,!?;:"()«»|<>')


def test_labels_and_their_text():
    vocabulary = vocabulary_of("uz", ["salom dunyo", "oʻzim"])
    assert vocabulary.symbols == ("<pad>", "<unk>", "|", *"adilmnosuyzʻ")
    assert vocabulary.symbols.index("a") == 3
    ids = vocabulary.ids("salom oʻz")
    assert [vocabulary.symbols[number] for number in ids] == list("salom|oʻz")
    assert vocabulary.text_of([2, *ids, 2]) == "salom oʻz"
    assert vocabulary.ids("sabr")[2:] == [1, 1]
    assert vocabulary.unknown("sabr b") == ["b", "r"]
    assert Vocabulary.from_json(json.loads(json.dumps(vocabulary.to_json()))) == vocabulary
    with pytest.raises(UserError, match="the vocabulary is empty"):
        vocabulary_of("uz", ["", " "])


@each_row("a", "aa", "aaa", "abba", "a a", "baab  bb".replace("  ", " "), "abcabc")
def test_frames_needed_are_where_the_loss_becomes_finite(text):
    """The reference is torch's CTC loss."""
    vocabulary = vocabulary_of("und", ["abc"])
    ids = torch.tensor([vocabulary.ids(text)])
    needed = vocabulary.frames_needed(text)
    for frames, is_finite in ((needed - 1, False), (needed, True)):
        if frames:
            log_probs_TNV = torch.zeros(frames, 1, len(vocabulary.symbols)).log_softmax(-1)
            loss = torch.nn.functional.ctc_loss(
                log_probs_TNV, ids, torch.tensor([frames]), torch.tensor([ids.shape[1]]), reduction="sum"
            )
            assert bool(loss.isfinite()) == is_finite, frames


@each_row({"symbols": ["a", "a"]}, {"blank": -1}, {"blank": 99}, {"symbols": None}, {"upper": 1}, {"blank": "0"})
def test_malformed_json_of_a_vocabulary(change):
    content = vocabulary_of("uz", ["salom"]).to_json()
    with pytest.raises(UserError, match="vocabulary: invalid"):
        Vocabulary.from_json({**content, **change})


def test_vocabularies_are_matched_by_symbol():
    old = Vocabulary("ru", ("А", " ", "Б", "[UNK]", "[PAD]"), blank=4, unknown_id=3, delimiter=1, upper=True)
    new = vocabulary_of("ru", ["бабая"])
    assert new.symbols == ("<pad>", "<unk>", "|", "а", "б", "я")
    assert match_symbols(old, new) == ((4, 3, 1, 0, 2, ABSENT), ("я",))
    without = Vocabulary("zh", ("<pad>", "字"), unknown_id=ABSENT, delimiter=ABSENT)
    assert match_symbols(without, new) == ((0, ABSENT, ABSENT, ABSENT, ABSENT, ABSENT), new.symbols[1:])
    assert without.ids("字 x字") == [1, 1]


@each_row("characters", "", "u", "uz_UZ", "../x", "uz-")
def test_codes_that_are_no_language(code):
    with pytest.raises(UserError, match="not the code of a language"):
        check_language(code)


@each_row("uz", "kk", "pt-BR", "zh-CN", "uz-Cyrl", "haw", "und", "nan-tw")
def test_codes_of_languages(code):
    check_language(code)
