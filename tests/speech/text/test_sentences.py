"""Splitting of texts into sentences."""

from gputrain.speech.text.frontend import frontend
from gputrain.speech.text.language import split_sentences
from tests.tables import each_row


@each_row(
    ("uz", "Salom. Qalaysiz? Yaxshi!", ["Salom.", "Qalaysiz?", "Yaxshi!"]),
    ("uz", "Prof. Karimov keldi. U 3.5 kg oldi.", ["Prof. Karimov keldi.", "U 3.5 kg oldi."]),
    ("uz", "A. Navoiy tug‘ilgan. Bu 1441-yil.", ["A. Navoiy tug‘ilgan.", "Bu 1441-yil."]),
    ("uz", "olma va h.k. sotiladi", ["olma va h.k. sotiladi"]),
    ("uz", "bir\nikki\n\n", ["bir", "ikki"]),
    ("uz", "Kutdim… Keldi; ketdi", ["Kutdim…", "Keldi;", "ketdi"]),
    ("en", "Dr. Smith is here. It costs $3.50! Go.", ["Dr. Smith is here.", "It costs $3.50!", "Go."]),
    ("ru", "Это ул. Ленина. Да.", ["Это ул. Ленина.", "Да."]),
    ("uz", "“Keldi.” Ketdi.", ["“Keldi.”", "Ketdi."]),
    ("uz", " \n ", []),
    # The dot of an abbreviation, an initial or a numeral also ends a sentence before a word that begins sentences.
    (
        "en",
        "She left at 5 p.m. He works at Acme Inc. It is big.",
        ["She left at 5 p.m.", "He works at Acme Inc.", "It is big."],
    ),
    ("en", "It was I. He and J. K. Rowling met Dr. Brown.", ["It was I.", "He and J. K. Rowling met Dr. Brown."]),
    ("en", "Take vitamin C. I'm fine.", ["Take vitamin C.", "I'm fine."]),
    (
        "ru",
        "Он жил в 1950 г. Потом уехал. В 1961 г. Гагарин.",
        ["Он жил в 1950 г.", "Потом уехал.", "В 1961 г. Гагарин."],
    ),
    ("ru", "Группа А. Она и А. С. Пушкин.", ["Группа А.", "Она и А. С. Пушкин."]),
    ("uz", "Narxi 5 mln. Bu B. U va A. Navoiy.", ["Narxi 5 mln.", "Bu B.", "U va A. Navoiy."]),
    ("characters", "今日は。「はい。」明日！", ["今日は。", "「はい。」", "明日！"]),
    ("characters", "नमस्ते। आप कैसे हैं? خوب۔ ہاں", ["नमस्ते।", "आप कैसे हैं?", "خوب۔", "ہاں"]),
)
def test_sentences(language, text, parts):
    assert frontend(language).sentences(text) == parts


def test_long_sentences_are_cut_at_commas_then_spaces_then_anywhere():
    assert split_sentences("aaa bbb, cc dd eee", longest=12) == ["aaa bbb,", "cc dd eee"]
    assert split_sentences("aaa bbb ccc", longest=8) == ["aaa bbb", "ccc"]
    assert split_sentences("a" * 25, longest=10) == ["a" * 10, "a" * 10, "a" * 5]
