"""Tags of SSML in raw texts."""

from gputrain.speech.text.frontend import frontend
from gputrain.speech.text.plain import plain_words
from gputrain.speech.text.raw import without_tags
from tests.tables import each_row


@each_row(
    ("<speak>Hello <emphasis level='strong'>big</emphasis> world</speak>", "Hello big world"),
    ('wait<break time="0.5s"/>go', "wait, go"),
    ('<sub alias="World Wide Web">WWW</sub> day', "World Wide Web day"),
    ("<p><s>One.</s><s>Two.</s></p>", "One.\nTwo.\n\n"),
    ('<say-as interpret-as="date">1/2/2024</say-as>', "1/2/2024"),
    ("<amazon:effect name='whispered'>hi</amazon:effect>", "hi"),
    ("<!-- a note --><speak>Tom &amp; Jerry</speak>", "Tom & Jerry"),
    ('<?xml version="1.0"?><speak>x</speak>', "x"),
    ("a < b and c > d", "a < b and c > d"),
    ("x <y> z &amp;", "x <y> z &amp;"),
    ("1<2", "1<2"),
    ("<<p>p>a", "a"),
)
def test_only_elements_of_ssml_are_tags(written, plain):
    assert without_tags(written) == plain


def test_every_reader_strips_them():
    text = '<speak>Salom.<break time="1s"/> Dunyo</speak>'
    assert frontend("uz").normalize(text) == "salom. dunyo"
    assert frontend("characters", texts=[text]).normalize(text) == "salom., dunyo"
    assert plain_words(text, "kk") == "salom dunyo"
    assert frontend("en").sentences("<p><s>One fox</s><s>Two</s></p>") == ["One fox", "Two"]
