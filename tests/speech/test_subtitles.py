"""Subtitles as people and programs write them: times, text, joined sentences, overlaps, faults."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gputrain.speech.subtitles import (
    OTHER,
    Subtitle,
    files_by_recording,
    form_of,
    join_sentences,
    parse_labels,
    parse_subtitles,
    split_overlapping,
)
from gputrain.speech.transcripts import read_transcripts
from gputrain.speech.utterances import TranscriptRules
from tests.tables import each_row

SRT = """1
00:00:01,000 --> 00:00:02,500
- Salom, <i>dunyo</i>!
{\\an8}Yaxshimisiz?

2
00:01:00,5 --> 01:00:01,25 X1:10
[eshik taqillaydi] Kim &amp; nima (kuladi)

3
00:00:05.000-->00:00:06.000
♪
4
00:00:07,000 --> 00:00:08,000
soʻnggi
"""
VTT = """WEBVTT - title

NOTE a comment
of two lines

STYLE
::cue { color: red }

intro
00:01.000 --> 00:02.000 align:start position:0%
<v.loud Ann Lee>Hi there</v>

00:03.000 --> 00:02.000
backwards

1:2 --> 00:09.000
no times
"""
ROLLING = """WEBVTT

00:00:00.160 --> 00:00:02.389 align:start position:0%
 
hello<00:00:00.480><c> big</c><00:00:01.000><c> world</c>

00:00:02.389 --> 00:00:02.399 align:start position:0%
hello big world
 

00:00:02.399 --> 00:00:05.000 align:start position:0%
hello big world
goes<00:00:03.000><c> on</c>

00:00:05.000 --> 00:00:05.010 align:start position:0%
goes on
 
"""  # noqa: W293


def test_subrip():
    cues, faults = parse_subtitles(SRT)
    assert cues == [
        Subtitle(1.0, 2.5, "- Salom, dunyo! Yaxshimisiz?", 2), Subtitle(60.5, 3601.25, "Kim & nima", 7),
        Subtitle(7.0, 8.0, "soʻnggi", 14),
    ]  # fmt: skip
    assert [(fault.line, fault.detail) for fault in faults] == [(11, "no words in '♪'")]


def test_webvtt():
    cues, faults = parse_subtitles(VTT)
    assert cues == [Subtitle(1.0, 2.0, "Hi there", 10, "Ann Lee")]
    assert sorted(faults) == [
        (13, "ends at 2.00 seconds, and begins at 3.00"), (16, "no times in '1:2 --> 00:09.000'")
    ]  # fmt: skip


def test_rolling_captions_have_each_line_once():
    cues, faults = parse_subtitles(ROLLING)
    assert [(cue.begin, cue.end, cue.text) for cue in cues] == [
        (0.16, 2.389, "hello big world"), (2.399, 5.0, "goes on")
    ]  # fmt: skip
    assert faults == []


def test_overlapping_subtitles_are_left_out_in_pairs():
    cues = [
        Subtitle(0, 5, "a", 1),
        Subtitle(1, 2, "b", 2),
        Subtitle(4.95, 6, "c", 3),
        Subtitle(6, 7, "d", 4),
        Subtitle(6.5, 8, "e", 5),
    ]
    kept, faults = split_overlapping([*reversed(cues)])
    assert [cue.text for cue in kept] == ["c"]
    assert [(fault.line, fault.detail) for fault in faults] == [
        (1, "lasts until 5.00 seconds, and line 2 begins at 1.00"),
        (2, "line 1 lasts until 5.00 seconds, and line 2 begins at 1.00"),
        (4, "lasts until 7.00 seconds, and line 5 begins at 6.50"),
        (5, "line 4 lasts until 7.00 seconds, and line 5 begins at 6.50"),
    ]


def test_sentences_are_joined():
    rows = [
        (0, 2, "This is"), (2.5, 4, "one."), (4, 5, "Two"), (6.5, 7, "after a gap"), (7, 8, "another", "Ann"),
        (8, 12, "too long", "Ann"), (12, 15.5, "end?»", "Ann"),
    ]  # fmt: skip
    cues = [Subtitle(*row[:3], number, *row[3:]) for number, row in enumerate(rows, start=1)]
    joined = join_sentences(cues, 8.0)
    assert [(cue.begin, cue.end, cue.text, cue.line) for cue in joined] == [
        (0, 4, "This is one.", 1), (4, 5, "Two", 3), (6.5, 7, "after a gap", 4), (7, 12, "another too long", 5),
        (12, 15.5, "end?»", 7),
    ]  # fmt: skip


def test_files_of_a_recording():
    files = ["a.vtt", "a.srt", "b.en.vtt", "b.uz.srt", "c.de.srt", "c.en.srt", "d.SRT", "x.srt", "sub/a.en.srt"]
    found = files_by_recording(["a.wav", "b.mp3", "c.wav", "d.wav", "e.wav", "sub/a.wav"], files, "uz")
    assert found == {
        "a.wav": ["a.srt"], "b.mp3": ["b.uz.srt"], "c.wav": ["c.de.srt", "c.en.srt"], "d.wav": ["d.SRT"],
        "sub/a.wav": ["sub/a.en.srt"],
    }  # fmt: skip
    found = files_by_recording(["A.wav", "b.wav", "B.wav", "Film.MP3"], ["a.SRT", "b.srt", "FILM.uz.srt"], "uz")
    assert found == {"A.wav": ["a.SRT"], "b.wav": ["b.srt"], "Film.MP3": ["FILM.uz.srt"]}


TIMES = "00:01,0 --> 00:02,0", "00:02.000 --> 00:01.000 x", "-->"
LINES = st.sampled_from(["", " ", "7", "hi", "<b", "WEBVTT", *TIMES])


@settings(max_examples=100)
@given(st.lists(LINES | st.text(max_size=10), max_size=20))
def test_no_text_is_too_malformed(lines):
    """Every line of times becomes a subtitle or a fault."""
    content = "\n".join(lines).replace("\r", "")
    cues, faults = parse_subtitles(content)
    times = [number for number, line in enumerate(content.split("\n"), start=1) if "-->" in line]
    assert sorted([cue.line for cue in cues] + [fault.line for fault in faults]) == times
    assert all(cue.begin < cue.end and cue.text == " ".join(cue.text.split()) for cue in cues)


@each_row("", "WEBVTT", "{}", "00:00:01 -> 00:00:02\nhi\n")
def test_no_subtitle(content):
    assert parse_subtitles(content) == ([], [])


def test_subtitles_of_another_language_are_no_text(tmp_path):
    for name in ("a.de.vtt", "b.en-GB.vtt", "c.v2.vtt"):
        (tmp_path / name).write_text("WEBVTT\n\n00:01.000 --> 00:02.000\nSo it is.\n")
    rules = TranscriptRules(reads_subtitles=True, language="en")
    found = read_transcripts(tmp_path, ["a.wav", "b.wav", "c.wav"], rules=rules)
    assert [one.path for one in found.utterances] == ["b.wav", "c.wav"]
    refused = ("a.wav", "other language", "a.de.vtt is de, not en")
    assert [(one.path, one.reason, one.detail) for one in found.refused] == [refused]


LABELS = "0.500000\t2.500000\tSo it is\n\\\t200.0\t4000.0\n3,0\t5,25\t not now \n6.0\t6.0\tA point\n7.0\t8.0\t\n"


def test_a_label_track_of_audacity():
    cues, faults = parse_labels(LABELS)
    assert cues == [Subtitle(0.5, 2.5, "So it is", 1), Subtitle(3.0, 5.25, "not now", 3)]
    assert faults == [(4, "a point at 6.00 seconds, without an end"), (5, "no words from 7.00 to 8.00 seconds")]


@each_row(
    (LABELS, "a label track"), (SRT, "subtitles"), (VTT, "subtitles"),
    ("[ti:A song]\n[00:12.00]So it is\n[00:17.20]not now\n", OTHER),
    ("ann\t\t00:00:01.0\tSo\nann\t\t00:00:02.0\tit\n", OTHER),
    ("start\tend\ttext\n0\t1200\tSo it is\n", OTHER),
    ("0:01\nSo it is\n0:04\nnot now\n", OTHER),
    ("[00:00.000 --> 00:04.000]  So it is\n[00:04.000 --> 00:07.000]  not now\n", OTHER),
    ("0 46797 So it is\n", OTHER), ("0 500000 sil\n500000 2100000 s\n", OTHER), ("0 to 100 is a lot\n", ""),
    ('File type = "ooTextFile"\nObject class = "TextGrid"\n', OTHER), ('{"text": "So it is"}', OTHER),
    ('[{"text": "So it is"}]', OTHER), ("So it is\nat 12:30\n", ""), ("12:30 is the time\n", ""), ("[laughs] So", ""),
    ("{unclear} so", ""), ("1984\n", ""), ("", ""),
)  # fmt: skip
def test_a_text_beside_a_recording_is_cut_by_the_times_in_it_or_refused_by_its_form(tmp_path, content, form):
    assert form_of(content) == form
    (tmp_path / "a.txt").write_text(content)
    for reads in (True, False):
        found = read_transcripts(tmp_path, ["a.wav"], rules=TranscriptRules(reads_subtitles=reads))
        is_cut = form == "a label track" or (form == "subtitles" and reads)
        assert bool(found.utterances) == (is_cut or (not form and bool(content)))
        assert all(bool(one.span) == is_cut for one in found.utterances)
        if form and not is_cut:
            assert [one.detail for one in found.refused] == [f"holds {form}, not the plain text of its recording"]
    if form == "a label track":  # Labels are clips as somebody has set them.
        assert [(one.text, one.span) for one in found.utterances] == [
            ("So it is", (0.5, 2.5)),
            ("not now", (3.0, 5.25)),
        ]
