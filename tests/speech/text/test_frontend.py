"""Symbols and ids, compared with stock Piper's, and with bad input."""

import json
import sys
import time
import unicodedata

import pytest

from gputrain.errors import UserError
from gputrain.speech.text.frontend import Frontend, frontend
from gputrain.speech.text.raw import RawRules
from gputrain.speech.text.vocabulary import plain_words
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


def test_json_gives_it_back():
    for reader in (frontend("uz"), frontend("characters", texts=["Ёж"]), frontend("ru")):
        again = Frontend.from_json(json.loads(json.dumps(reader.to_json())))
        assert again == reader
        assert again.id_map() == reader.id_map()
    for changed in ({"language": "tlh"}, {"symbols": ["a"]}, {"alphabet": {"sh": "ʃ"}}):
        with pytest.raises(UserError):
            Frontend.from_json({**frontend("en").to_json(), **changed})
    with pytest.raises(UserError):
        Frontend.from_json({})


def test_characters_take_their_symbols_from_the_texts():
    reader = frontend("characters", texts=["Grüße, Ёж_$!", "안"])
    assert reader.normalize("GRÜSSE _ Ёж") == "grüsse ёж"
    assert reader.normalize("Grü\u00adße\0 می\u200cخواهم\u200c ශ්\u200dරී") == "grüße می\u200cخواهم ශ්\u200dරී"
    assert reader.unknown("grüße ёж!, 안") == []
    assert reader.unknown("grab") == ["a", "b"]
    assert reader.ids("u\u0308") == reader.ids("ü")


def test_bad_input_is_named():
    reader = frontend("uz")
    assert reader.normalize("sa\u00adlo\0m\u200b") == "salom"
    assert frontend("ru").normalize("при\x07вет") == "привет"
    for text in ("", "   ", "🎉🎉", "日本", "\u200b"):
        assert reader.normalize(text) == ""
        with pytest.raises(UserError, match="no symbol of the voice"):
            reader.ids(reader.normalize(text))
    with pytest.raises(UserError, match="'tlh' is unknown"):
        frontend("tlh")


# Decimal commas, abbreviations, capitals, quotation marks, dashes and times; tones, which espeak-ng writes as digits.
ESPEAK_TEXTS = {
    "de": ("Das kostet 3,5 Euro.", "Wir treffen uns z. B. um 9:30 Uhr.", "Die USA - und die EU?", "„Guten Tag!“"),
    "fr": ("Il y a 3,5 km.", "La SNCF dit : « Bonjour ! »"),
    "pl": ("Np. 3,5 m.", "USA i UE."),
    "ru": ("ООН имеет 25 лет.", "Т. е. 3,5 км.", "США!"),
    "tr": ("TBMM 3,5 TL.", "IŞIK yandı; İstanbul'da."),
    "kk": ("БҰҰ: 3,5 км.", "АҚШ пен ЕО."),
    "en-us": ("The USA has 50 states.", "Dr. Smith paid $3.50, e.g. at 9:30 a.m."),
    "vi": ("ma má mà mả mã mạ",),
    "cmn": ("你好,世界。",),
    "yue": ("你好。",),
    "th": ("สวัสดี",),
}


def test_the_symbols_of_an_espeak_voice_are_those_of_stock_piper():
    piper = pytest.importorskip("piper")
    faults = []
    for voice, texts in ESPEAK_TEXTS.items():
        reader = frontend(voice[:2] if voice in ("ru", "en-us") else "characters", espeak_voice=voice)
        config = piper.config.PiperConfig(1, 1, 1, voice, reader.id_map(), piper.config.PhonemeType.ESPEAK)
        stock = piper.PiperVoice(session=None, config=config)
        for text in texts:
            ours, space = reader.normalize(text), reader.ids(" ")[2:4]
            sentences = [stock.phonemes_to_ids(one)[2:-1] for one in stock.phonemize(text)]
            expected = [number for sentence in sentences for number in [*space, *sentence]][2:]
            if reader.unknown(ours) or reader.ids(ours)[2:-1] != expected or reader.piper_differences([text]):
                faults.append((voice, text, ours))
    assert not faults
    reader = frontend("characters", espeak_voice="vi")
    assert len({reader.normalize(one) for one in ESPEAK_TEXTS["vi"][0].split()}) == 6


def test_an_espeak_voice_reads_as_piper_unless_a_lexicon_does_not(monkeypatch):
    pytest.importorskip("piper")
    reader = frontend("en", espeak_voice="en-us", raw=RawRules({"gputrain": "gee pee you train"}))
    assert reader.phoneme_type == "espeak"
    assert Frontend.from_json(reader.to_json()) == reader
    assert reader.phonemizer.startswith("piper-tts ")
    assert reader.piper_differences(["gputrain!", "It is."]).startswith("1 of 2 texts, such as 'gputrain!': it reads '")
    with pytest.raises(UserError, match="cannot phonemise with the voice 'xx-nope'"):
        frontend("en", espeak_voice="xx-nope").normalize("a")
    monkeypatch.setitem(sys.modules, "piper", None)
    with pytest.raises(UserError, match="the package piper-tts is not installed") as missing:
        frontend("en", espeak_voice="en-us")
    assert missing.value.hint == "pip install piper-tts, or leave out the espeak voice"


def test_what_piper_reads_otherwise_is_told():
    """Numbers in words are ours alone."""
    for language, text in (("en", "It is 25."), ("ru", "Это 25."), ("uz", "Bu 25.")):
        reader = frontend(language)
        assert reader.piper_differences([text.replace(" 25", "")]) == ""
        assert f"1 of 1 texts, such as {text!r}" in reader.piper_differences([text])


LOOKALIKES = (
    ("ar", "كتـــاب", "كتاب"), ("tr", "şey", "şey"),
    ("kk", "қaзaқ іс iс əке", "қазақ іс іс әке"), ("kk", "maktab", "maktab"), ("ru", "первoe", "первое"),
    ("und", "ma˥ ma˦ a˞ ↗ ꜛ", "ma˥ ma˦ a˞ ↗ ꜛ"),
)  # fmt: skip


def test_letters_that_an_orthography_takes_for_one():
    found = [(language, text, plain_words(text, language)) for language, text, _ in LOOKALIKES]
    assert found == list(LOOKALIKES)
    assert frontend("characters", texts=["كتاب"]).lost("كتـــاب ★") == {"★"}
    assert frontend("characters", texts=["ma˥ ma˦ a˞ ↗"]).normalize("Ma˦ a˞") == "ma˦ a˞"
    turkish = frontend("characters", texts=["Işık İzmir"], raw=RawRules(number_words="tr"))
    assert turkish.normalize("IŞIK İzmir I\u0307ZM\u0130R") == "ışık izmir izmir"
    assert turkish.piper_differences(["IRAK", "ŞIK"]) == ""
    assert "İzmir" in turkish.piper_differences(["İzmir"])


def test_letters_by_their_shape_are_letters():
    """Ligatures of PDF files, and Arabic letters by their place in a word."""
    reader = frontend("characters", texts=["Oﬃzier µ ﻻ ﻣﺮﺣﺒﺎ tʰ"])
    assert reader.normalize("Oﬃzier µ ﻻ ﻣﺮﺣﺒﺎ tʰ") == "offizier μ لا مرحبا tʰ"
    assert reader.piper_differences(["oﬃzier"]) == ""


def test_apostrophes_of_a_voice_by_characters_share_a_symbol():
    reader = frontend("characters", texts=["l'eau l’eau"])
    assert "’" not in reader.symbols
    assert reader.lost("l’eau l‘eau") == set()
    assert reader.ids(reader.normalize("L’eau")) == reader.ids("l'eau") == pipers_ids(reader, "L’eau")
    okina = frontend("characters", texts=["Hawaiʻi 'ae'"])
    assert len(set(okina.ids("'ʻ"))) == 2 + 3


def test_piper_reads_capitals_as_the_voice():
    for text, capitals in (("straße", "STRAẞE"), ("σας", "ΣΑΣ"), ("ışık iz", "IZ")):
        reader = frontend("characters", texts=[text])
        assert reader.unknown(reader.normalize(capitals)) == []
        expected = {"ΣΑΣ": "σασ"}.get(capitals, reader.normalize(capitals))
        assert pipers_ids(reader, capitals) == reader.ids(expected)


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
    """Digits beyond the largest number are read one by one, and sentences are cut."""
    for language, word in (("uz", "bir"), ("en", "one"), ("ru", "один")):
        assert frontend(language).normalize("1" * 10_000) == " ".join([word] * 10_000)
    assert plain_words("1" * 10_000, "de", RawRules(number_words="de")) == " ".join(["eins"] * 10_000)
    assert frontend("en").normalize("1," + "000," * 10 + "000th") != ""
    assert all(len(part) <= 300 for part in frontend("en").sentences("A1b. " * 1_000 + "a" * 10_000))
