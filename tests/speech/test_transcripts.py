"""Transcripts in all supported formats, and with all kinds of damage."""

import csv
import io
import json
import math
import shutil
from pathlib import Path
from typing import get_args

import pytest

from gputrain.errors import UserError
from gputrain.speech.sound_finder import SoundFinder
from gputrain.speech.transcript_tables import TranscriptColumn, columns_of, is_header, roles_of, span_of
from gputrain.speech.transcripts import read_transcripts
from tests.tables import each_row

PROVERBS = ("still waters run deep", "better late than never", "haste makes waste", "time will tell", "no news yet")


def folder_of(tmp_path: Path, transcript: str | bytes = "", name: str = "metadata.csv", sounds=("a", "b", "c")) -> Path:
    """Creates a folder with empty files for recordings, which are not opened here."""
    (tmp_path / "wavs").mkdir(parents=True, exist_ok=True)
    for sound in sounds:
        (tmp_path / f"wavs/{sound}.wav").touch()
    if transcript:
        content = transcript.encode() if isinstance(transcript, str) else transcript
        (tmp_path / name).write_bytes(content)
    return tmp_path


def read(folder: Path, **choices):
    paths = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.wav"))
    return read_transcripts(folder, paths, **choices)


def texts_of(transcripts) -> dict[str, str]:
    return {utterance.path: utterance.text for utterance in transcripts.utterances}


def reasons(transcripts) -> list[tuple[str, str]]:
    return [(refusal.path, refusal.reason) for refusal in transcripts.refused]


ABC = {"wavs/a.wav": "One.", "wavs/b.wav": "Two two.", "wavs/c.wav": "It is 3."}


@each_row(
    "a|One.\nb|Two two.\nc|It is 3.\n",
    "\ufeffa|One.\r\nb|Two two.\r\nc|It is 3.",
    "a.wav|One.\rb.wav|Two two.\rc.wav|It is 3.\r",
    "wavs/a.wav|One.\n\n./wavs/b|Two two.\n/data/old/place/wavs/c.wav|It is 3.\n\n",
    "C:\\voice\\wavs\\a.wav|One.\nb| Two  two. \nc|It is 3.\n",
    "id|text\na|One.\nb|Two two.\nc|It is 3.\n",
    "Audio File|Speaker Name|Text\na.wav||One.\nb.wav||Two two.\nc.wav||It is 3.\n",
    '"a"|One.\n"b"|Two two.\n"c"|It is 3.\n',
)
def test_a_table_of_two_columns(tmp_path, transcript):
    transcripts = read(folder_of(tmp_path, transcript))
    assert texts_of(transcripts) == ABC
    assert transcripts.refused == []
    assert transcripts.source.startswith("metadata.csv, a table of audio, ")


def test_ljspeech_gives_its_third_column_and_else_the_second(tmp_path):
    table = "a|Dr. Who|doctor who\nb|In 1984 it was|in nineteen eighty four it was\nc|Just so|\n"
    transcripts = read(folder_of(tmp_path, table))
    assert texts_of(transcripts) == {
        "wavs/a.wav": "doctor who", "wavs/b.wav": "in nineteen eighty four it was", "wavs/c.wav": "Just so",
    }  # fmt: skip
    assert "audio, text, normalized" in transcripts.source
    assert {utterance.speaker for utterance in transcripts.utterances} == {""}


def test_piper_gives_speakers(tmp_path):
    transcripts = read(folder_of(tmp_path, "a.wav|ann|So it is\nb.wav|bob|Not now\nc.wav|ann|Ann will come\n"))
    assert [(each.path, each.speaker, each.text) for each in transcripts.utterances] == [
        ("wavs/a.wav", "ann", "So it is"), ("wavs/b.wav", "bob", "Not now"), ("wavs/c.wav", "ann", "Ann will come"),
    ]  # fmt: skip
    assert "audio, speaker, text" in transcripts.source


LJSPEECH, PIPER = ("audio", "text", "normalized"), ("audio", "speaker", "text")


@each_row(
    ([(f"id{n}", text.title() + "!", text) for n, text in enumerate(PROVERBS)], LJSPEECH),
    ([("a.wav", "Yes.", "yes"), ("b.wav", "No!", "no")], LJSPEECH),
    ([("a", text, str(len(text))) for text in PROVERBS], None),
    ([(f"{n}.wav", "John Smith", text) for n, text in enumerate(PROVERBS)], PIPER),
    ([(f"{n}.wav", str(n % 2), text) for n, text in enumerate(PROVERBS)], PIPER),
    ([("1.wav", "ann", "so it is"), ("2.wav", "bob", "not now"), ("3.wav", "bob", "time will tell")], PIPER),
    ([("a", text, "en"[n % 2 :]) for n, text in enumerate(PROVERBS)], None),
    ([("a", text, f"{2 + n / 9:.2f}") for n, text in enumerate(PROVERBS)], None),
    ([("a", text, ("ann", "bob")[n % 2]) for n, text in enumerate(PROVERBS)], None),
    ([("a", text, "stɪl wɔtɚz") for text in PROVERBS], None),
    # Repeated sentences are no speakers, whatever follows them.
    ([("a", PROVERBS[n % 3], f"{2 + n / 9:.2f} seconds") for n in range(9)], None),
    ([("a", PROVERBS[n % 3], ("Ann Lee", "Bob")[n % 2]) for n in range(9)], None),
    ([("a", ("yes", "no")[n % 2], ("j ɛ s", "n oʊ w")[n % 2]) for n in range(9)], None),
    ([("a", "O'zbek tili", "ўзбек тили"), ("b", "Bir ikki", "бир икки")], None),
    ([("a", "2.31"), ("b", "0,5 s"), ("c", "12.7")], None),
    ([("1.wav", "", "so it is"), ("2.wav", "", "not now")], PIPER),
    ([("a", "so it is", ""), ("b", "not now", "")], LJSPEECH),
)
def test_columns_without_a_header_are_recognised_by_their_content_or_refused(rows, columns):
    if columns:
        assert columns_of(Path("metadata.csv"), rows) == columns
        return
    with pytest.raises(UserError, match="without a header") as error:
        columns_of(Path("metadata.csv"), rows)
    assert " | ".join(rows[0]) in error.value.message
    given = error.value.hint.rpartition("--transcript-columns ")[2]
    assert len(given.split(",")) == len(rows[0])
    assert set(given.split(",")) <= set(get_args(TranscriptColumn))


def test_three_columns_that_may_be_either_are_refused(tmp_path):
    table = "a.wav|1984|nineteen eighty four\nb|7|seven\nc|8|eight\n"
    folder = folder_of(tmp_path, table)
    with pytest.raises(UserError, match="nothing tells what its 3 columns hold"):
        read(folder)
    assert texts_of(read(folder, columns=LJSPEECH))["wavs/b.wav"] == "seven"
    assert read(folder, columns=PIPER).utterances[1].speaker == "7"


def test_headers():
    assert [is_header(cells) for cells in (["file", "Text"], ["a", "The text"], ["path", "x"])] == [True, False, False]
    assert roles_of(["client_id", "path", "up_votes"]) == {"path": "audio", "client_id": "speaker", "up_votes": "other"}
    assert roles_of(["Locale", "do-not-use"]) == {"Locale": "language", "do-not-use": "exclude"}


def test_of_several_columns_for_one_thing_the_first_that_is_filled_is_used(tmp_path):
    """A path rather than an identifier, and a normalised text rather than the text as written."""
    table = "id,sentence,text,normalized_text,Path\n7,x,One.,,a.wav\n8,Two two.,,,\n9,x,y,It is 3.,c.wav\n"
    folder = folder_of(tmp_path, table, sounds=("a", "8", "c"))
    transcripts = read(folder)
    assert texts_of(transcripts) == {"wavs/a.wav": "One.", "wavs/8.wav": "Two two.", "wavs/c.wav": "It is 3."}
    assert set(transcripts.columns.values()) == {"audio", "text", "normalized"}


def test_a_tab_separated_table_with_many_columns(tmp_path):
    table = "client_id\tpath\tsentence\tup\nx1\ta.wav\tOne.\t2\nx2\tb.wav\tTwo, two | two.\t\nx1\tc.wav\tIt.\t0\n"
    transcripts = read(folder_of(tmp_path, table, "validated.tsv"))
    assert texts_of(transcripts)["wavs/b.wav"] == "Two, two | two."
    assert [each.speaker for each in transcripts.utterances] == ["x1", "x2", "x1"]


@each_row("audio", "audio_filepath", "wav", "file")
def test_json_lines(tmp_path, key):
    rows = [{key: "wavs/a.wav", "text": "One."}, {key: "b.wav", "text": "Two two."}, {key: "c", "text": "It is 3."}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    transcripts = read(folder_of(tmp_path, lines, "train.jsonl"))
    assert texts_of(transcripts) == ABC
    assert transcripts.source == "train.jsonl, JSON lines"


def test_pairs(tmp_path):
    for place in ("x/deep", "y"):
        (tmp_path / place).mkdir(parents=True)
    for stem, text in (("x/deep/a", "One\ntwo.\n"), ("y/b", "\ufeffThree."), ("y/empty", " \n"), ("y/alone", None)):
        (tmp_path / f"{stem}.wav").touch()
        if text is not None:
            (tmp_path / f"{stem}.txt").write_text(text, encoding="utf-8")
    (tmp_path / "y/cyrillic.wav").touch()
    (tmp_path / "y/cyrillic.txt").write_bytes("привет".encode("cp1251"))
    transcripts = read(tmp_path)
    assert texts_of(transcripts) == {"x/deep/a.wav": "One two.", "y/b.wav": "Three."}
    assert sorted(reasons(transcripts)) == [
        ("y/alone.wav", "no transcript"), ("y/cyrillic.wav", "malformed"), ("y/empty.txt", "no transcript"),
    ]  # fmt: skip


def test_the_name_of_a_text_may_differ_in_capitals_from_that_of_its_recording(tmp_path):
    """But a text of the same name belongs to its recording alone."""
    folder = folder_of(tmp_path, "", "notes.md", sounds=("a", "B", "c", "C", "d"))
    for name in ("a.TXT", "b.txt", "c.txt", "D.txt", "d.Txt"):
        (folder / "wavs" / name).write_text(f"Text {name[0]}.")
    transcripts = read(folder)
    assert texts_of(transcripts) == {
        "wavs/a.wav": "Text a.", "wavs/B.wav": "Text b.", "wavs/c.wav": "Text c.", "wavs/d.wav": "Text d.",
    }  # fmt: skip
    assert sorted(reasons(transcripts)) == [
        ("wavs/C.wav", "no transcript"), ("wavs/D.txt", "no sound"),
    ]  # fmt: skip


def test_missing_values_of_a_manifest(tmp_path):
    """Python writes NaN for what is missing in a table, and an empty text beside the one that is meant."""
    row = '{{"audio": "{0}.wav", "text": {1}, "transcription": "Text {0}.", "duration": NaN, "speaker": NaN}}\n'
    folder = folder_of(
        tmp_path, "".join(row.format(*pair) for pair in (("a", '""'), ("b", "NaN"), ("c", "null"))), "m.jsonl"
    )
    transcripts = read(folder)
    assert [(one.text, one.speaker, one.span) for one in transcripts.utterances] == [
        ("Text a.", "", None), ("Text b.", "", None), ("Text c.", "", None),
    ]  # fmt: skip


def test_a_line_with_two_texts_is_refused(tmp_path):
    lines = '{"audio": "a", "text": "One.", "text": "Two."}\n{"audio": "b", "text": "Good."}\n'
    transcripts = read(folder_of(tmp_path, lines, "m.jsonl"))
    assert texts_of(transcripts) == {"wavs/b.wav": "Good."}
    assert ("m.jsonl, line 1", "malformed") in reasons(transcripts)


def test_a_text_file_of_a_recording_is_no_table(tmp_path):
    for name, text in (("a", "b|One."), ("b", "Two.")):
        (tmp_path / f"{name}.wav").touch()
        (tmp_path / f"{name}.txt").write_text(text)
    assert texts_of(read(tmp_path)) == {"a.wav": "b|One.", "b.wav": "Two."}


def test_every_damage_of_a_table_is_named_with_its_line_and_costs_itself_alone(tmp_path):
    table = (
        "a|One.\n"  # good
        "missing|No such sound\n"
        "b|A text | with a separator\n"
        "no separator at all\n"
        "c|  \n"
        'd|"Quoted, he said, and not closed\n'  # good: quotes have no special meaning
        "e|NUL \0 inside\n"
        "f|Twice the same\nf|Twice the same\n"  # good once
        "g|One text\ng|Another text\n"
        "|A text without a sound\n"
        "h|Good again\n"
    )
    transcripts = read(folder_of(tmp_path, table, sounds="abcdefgh"))
    assert texts_of(transcripts) == {
        "wavs/a.wav": "One.", "wavs/d.wav": '"Quoted, he said, and not closed', "wavs/f.wav": "Twice the same",
        "wavs/h.wav": "Good again",
    }  # fmt: skip
    assert sorted(reasons(transcripts)) == sorted([
        ("metadata.csv, line 2", "no sound"), ("metadata.csv, line 3", "malformed"),
        ("metadata.csv, line 4", "malformed"), ("metadata.csv, line 5", "no transcript"),
        ("metadata.csv, line 7", "malformed"), ("metadata.csv, line 9", "doubled transcript"),
        ("metadata.csv, line 10", "doubled transcript"), ("metadata.csv, line 11", "doubled transcript"),
        ("metadata.csv, line 12", "malformed"),
    ])  # fmt: skip
    details = {refusal.path: refusal.detail for refusal in transcripts.refused}
    assert details["metadata.csv, line 3"] == "3 columns, expected 2: audio, text"
    assert details["metadata.csv, line 4"] == "1 column, expected 2: audio, text"


CSV_ROWS = [("a", "One, two; three."), ("b", 'He said "hi" | to me'), ("c", "Two\nlines")]


def csv_text(
    separator: str, header: list[str], *, quoting: int = csv.QUOTE_MINIMAL, end: str = "\n", further=()
) -> str:
    """Returns the rows of CSV_ROWS under a header that has `audio` and `text` in any order."""
    written = io.StringIO()
    table = csv.writer(written, delimiter=separator, quoting=quoting, lineterminator=end)
    table.writerow(header)
    for name, text in CSV_ROWS:
        known = {"text": text, "sentence": text, "Transcription": text}
        table.writerow([*(known.get(column, f"{name}.wav" if "i" in column else "x") for column in header), *further])
    return written.getvalue()


@each_row(
    csv_text(",", ["audio", "text"]),
    csv_text(",", ["File Name", "Transcription"], end="\r\n"),
    csv_text(";", ["speaker", "sentence", "audio"]),
    csv_text("\t", ["audio", "text"], quoting=csv.QUOTE_ALL),
    csv_text("|", ["text", "audio"]),
    csv_text(",", ["audio", "text"], further=[""]),
    csv_text(",", ["", "audio", "text"]),
    csv_text(",", ["audio", "text"]).replace(".wav", ".mp3").replace("a.", "A."),
    csv_text(",", ["audio", "text"]).encode("utf-16"),
    csv_text(",", ["audio", "text"]).encode("utf-8-sig"),
    json.dumps([{"audio": name, "text": text} for name, text in CSV_ROWS], indent=1),
    json.dumps([{"path": f"in/wavs/{name}.wav", "text": text, "words": []} for name, text in CSV_ROWS]),
    json.dumps([{"audio": {"path": name}, "text": text} for name, text in CSV_ROWS]),
)
def test_csv_and_json_as_programs_write_them(tmp_path, content):
    transcripts = read(folder_of(tmp_path, content))
    assert texts_of(transcripts) == {f"wavs/{name}.wav": text.replace("\n", " ") for name, text in CSV_ROWS}
    assert transcripts.refused == []


def test_rows_that_end_with_a_separator_and_commas_of_texts_without_quotes(tmp_path):
    piper = read(folder_of(tmp_path / "p", "a.wav|ann|So it is|\nb.wav|bob|Not now|\nc.wav|ann|Ann will come|\n"))
    assert [(one.speaker, one.text) for one in piper.utterances][:2] == [("ann", "So it is"), ("bob", "Not now")]
    commas = read(folder_of(tmp_path / "c", "a.wav,One.\nb.wav,Two, two\nc.wav,It costs 3,000\n"))
    assert texts_of(commas) == {"wavs/a.wav": "One.", "wavs/b.wav": "Two, two", "wavs/c.wav": "It costs 3,000"}


def test_capitals_and_the_parent_folder_tell_recordings_apart_only_where_they_must():
    sounds = SoundFinder(["a.wav", "A.wav", "x/b.wav", "y/b.wav", "c.sph.wav"])
    assert [sounds.find(name) for name in ("A.wav", "a", "x/B")] == [["A.wav"], ["a.wav"], ["x/b.wav"]]
    assert SoundFinder(["Ab.wav", "aB.wav"]).find("AB") == ["Ab.wav", "aB.wav"]
    assert sounds.find("recordings/y/b.wav") == ["y/b.wav"]
    assert sounds.find("c.sph") == ["c.sph.wav"]


TIMES = {
    (None, None, None): None, ("", "", ""): None, (0, None, None): None, (0, None, 2): (0, 2),
    (1.5, None, "2"): (1.5, 3.5), ("1,5", None, 2): (1.5, 3.5), (None, None, 0): None,
    (1, 3, None): (1, 3), (1, 3, 2.05): (1, 3),
    (1, None, None): (1, math.inf), (None, 4, None): (0, 4),
}  # fmt: skip


def test_times_of_a_clip():
    assert {times: span_of(*times) for times in TIMES} == TIMES
    faults = [
        (-1, None, 3),
        (3, 2, None),
        (0, None, 0),
        ("x", None, 1),
        (1, 3, 9),
        (math.nan, 1, None),
        (True, 2, None),
    ]
    for times in faults:
        with pytest.raises(ValueError, match="seconds"):
            span_of(*times)


@each_row(
    (
        "cut.jsonl",
        '{"audio_filepath": "a.wav", "offset": 1.5, "duration": 2, "text": "One."}\n'
        '{"audio_filepath": "a.wav", "offset": 3.5, "duration": null, "text": "Two two."}\n',
    ),
    ("metadata.csv", "path,start,end,sentence\na.wav,1.5,3.5,One.\na.wav,3.5,,Two two.\n"),
    ("metadata.csv", "text|duration|offset|audio\nOne.|2|1.5|a\nTwo two.||3.5|a\n"),
)
def test_manifests_with_times_cut_clips_out_of_a_recording(tmp_path, name, content):
    folder = folder_of(tmp_path, content, name, sounds="a")
    transcripts = read(folder, file=folder / name)
    assert [(one.text, one.span) for one in transcripts.utterances] == [
        ("One.", (1.5, 3.5)),
        ("Two two.", (3.5, math.inf)),
    ]
    assert transcripts.refused == []


def test_times_under_other_names_cut_clips_too(tmp_path):
    chunk = {"audio": "a.wav", "text": "one"}
    times = {"seg_start": 0.5, "seg_end": 2}
    found = read(folder_of(tmp_path, json.dumps(chunk | times) + "\n", "m.jsonl", ["a"]))
    assert [one.span for one in found.utterances] == [(0.5, 2.0)]
    assert "" not in found.columns.values()


def test_two_columns_of_one_name_are_refused_with_columns_that_can_be_given(tmp_path):
    folder = folder_of(tmp_path, "file|text|text\na|One.|1\nb|Two two.|2\nc|It is 3.|3\n")
    with pytest.raises(UserError, match="several columns are called text") as error:
        read(folder)
    columns = tuple(error.value.hint.rpartition("--transcript-columns ")[2].split(","))
    found = read(folder, file=folder / "metadata.csv", columns=columns)
    assert texts_of(found) == ABC
    assert found.columns == {"file": "audio", "column 2": "text", "column 3": ""}


def test_times_that_cannot_be_right_are_named(tmp_path):
    row = '{{"audio": "a.wav", "start": {}, "duration": {}, "text": "{}"}}\n'.format
    content = row(-1, 2, "x") + row(0, 2, "y") + row(1, 2, "z") + row(2.95, 2, "w")
    transcripts = read(folder_of(tmp_path, content, "cut.json", sounds="a"))
    assert [one.text for one in transcripts.utterances] == ["y", "z", "w"]
    assert transcripts.refused[0].detail == "a.wav: begins at -1 seconds, before its recording"
    with pytest.raises(UserError, match="start_ms is not in seconds"):
        read(folder_of(tmp_path / "ms", "audio,text,start_ms,end_ms\na,One.,100,2000\n", sounds="a"))


def test_a_transcript_is_looked_for_and_several_are_refused(tmp_path):
    folder = folder_of(tmp_path, "a|One.\n")
    (folder / "notes.txt").write_text("bought a microphone | very good\n")
    (folder / "speakers.csv").write_text("ann|f\n")
    (folder / "report.json").write_text(
        json.dumps({"clips": 2, "refused": [{"path": "wavs/a.wav", "reason": "silent"}]})
    )
    (folder / "lengths.json").write_text('{"a.wav": {"duration": 3.5}}')
    assert read(folder).source == "metadata.csv, a table of audio, text"
    (folder / "metadata.csv").unlink()
    (folder / "train.list").write_text("b|Two two.\n")
    with pytest.raises(UserError, match=r"several places: speakers\.csv, train\.list") as error:
        read(folder)
    assert "--transcripts" in error.value.hint
    assert texts_of(read(folder, file=folder / "train.list")) == {"wavs/b.wav": "Two two."}
    for name in ("train.list", "speakers.csv", "report.json", "lengths.json"):
        (folder / name).unlink()
    (folder / "notes.txt").rename(folder / "notes.md")
    with pytest.raises(UserError, match="no transcripts"):
        read(folder)
    (folder / "metadata.csv").write_text("\n \n")
    with pytest.raises(UserError, match="empty"):
        read(folder)
    (folder / "wavs/a.txt").write_text("One.")
    with pytest.raises(UserError, match="text files of recordings"):
        read(folder)


@each_row(
    ("just a line\nand another\n", "NAME|TEXT"), ("a|b|c|d\ne|f|g|h\n", "--transcript-columns audio,text,other,other")
)
def test_a_file_that_is_no_table(tmp_path, table, hint):
    with pytest.raises(UserError) as error:
        read(folder_of(tmp_path, table))
    assert error.value.hint.endswith(hint)


def test_sounds_are_found_by_what_they_are_called():
    sounds = SoundFinder(
        ["wavs/a.wav", "old/a.wav", "x/b.1.flac", "x/c.wav", "y/c.wav", "wavs/Кай.wav", "d.wav", "d.mp3"]
    )
    assert sounds.find("a") == ["wavs/a.wav"]
    assert sounds.find("old/a") == ["old/a.wav"]
    assert sounds.find("b.1") == sounds.find("b.1.wav") == ["x/b.1.flac"]
    assert sounds.find("c") == ["x/c.wav", "y/c.wav"]
    assert sounds.find("y/c.wav") == ["y/c.wav"]
    assert sounds.find("Каи\u0306") == ["wavs/Кай.wav"]
    assert SoundFinder(["wavs/Каи\u0306.wav"]).find("Кай") == ["wavs/Каи\u0306.wav"]
    assert sounds.find("d.mp3") == ["d.mp3"]
    assert sounds.find("d") == ["d.wav", "d.mp3"]
    assert sounds.find("e") == sounds.find("") == []


def test_a_sound_of_two_names_is_refused(tmp_path):
    for place in ("x", "y"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "a.wav").touch()
    (tmp_path / "metadata.csv").write_text("a|One.\ny/a|Two.\n")
    transcripts = read(tmp_path)
    assert texts_of(transcripts) == {"y/a.wav": "Two."}
    assert reasons(transcripts) == [("metadata.csv, line 1", "ambiguous sound"), ("x/a.wav", "no transcript")]


def test_a_transcript_in_a_folder_of_its_own_names_what_lies_there(tmp_path):
    for place in ("x", "y"):
        folder_of(tmp_path / place, sounds="a")
    (tmp_path / "y/metadata.csv").write_text("a|One.\n")
    assert texts_of(read(tmp_path, file=tmp_path / "y/metadata.csv")) == {"y/wavs/a.wav": "One."}


def test_texts_without_a_recording_are_named(tmp_path):
    for name in ("x/a.wav", "y/b.wav", "y/c.m4a"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for name in ("x/a.txt", "x/left.txt", "y/c.txt", "z.txt"):
        (tmp_path / name).write_text("A text.")
    transcripts = read_transcripts(tmp_path, ["x/a.wav", "y/b.wav", "y/c.m4a"])
    # The recording itself is reported as unreadable elsewhere.
    assert texts_of(transcripts) == {"x/a.wav": "A text.", "y/c.m4a": "A text."}
    assert sorted(reasons(transcripts)) == [("x/left.txt", "no sound"), ("y/b.wav", "no transcript")]


def test_absolute_paths_and_paths_out_of_the_folder_are_followed(tmp_path):
    corpus = folder_of(tmp_path / "corpus", sounds=("a", "b", "c"))
    folder = folder_of(tmp_path / "in", sounds=("a", "d"))
    (folder / "link").symlink_to(folder / "wavs", target_is_directory=True)
    lines = [
        f"{corpus}/wavs/a.wav|The other a.", "../corpus/wavs/b.wav|It is b.", f"{folder}/wavs/d.wav|It is d.",
        f"{tmp_path}/gone/c.wav|Not there.", "/gone/wavs/a.wav|The own a.",
    ]  # fmt: skip
    (folder / "metadata.csv").write_text("\n".join(lines))
    transcripts = read_transcripts(folder, ["wavs/a.wav", "wavs/d.wav"])
    assert {(folder / path).resolve(): text for path, text in texts_of(transcripts).items()} == {
        corpus / "wavs/a.wav": "The other a.", corpus / "wavs/b.wav": "It is b.",
        folder / "wavs/d.wav": "It is d.", folder / "wavs/a.wav": "The own a.",
    }  # fmt: skip
    assert reasons(transcripts) == [("metadata.csv, line 4", "no sound")]
    assert transcripts.refused[0].detail == f"{tmp_path}/gone/c.wav: no such recording"


def test_of_two_formats_the_one_that_can_be_decoded_is_meant():
    sounds = SoundFinder(["a.m4a", "a.wav", "b.m4a"])
    assert sounds.find("a") == ["a.wav"]
    assert sounds.find("a.m4a") == ["a.m4a"]
    assert sounds.find("b") == ["b.m4a"]


def test_an_object_beside_each_recording_has_its_text(tmp_path):
    """As in WebDataset; a single table of JSON with the name of a recording stays one."""
    folder = folder_of(tmp_path)
    for sound, row in {
        "a": {"text": "One.", "speaker": 7},
        "b": {"sentence": "Two two.", "voice": 8},
        "c": {"n": 1},
    }.items():
        (folder / f"wavs/{sound}.json").write_text(json.dumps(row))
    transcripts = read(folder)
    assert [(one.text, one.speaker) for one in transcripts.utterances] == [("One.", "7"), ("Two two.", "8")]
    assert ("wavs/c.json", "no transcript") in reasons(transcripts)
    shutil.rmtree(folder / "wavs")
    (folder / "a.wav").touch()
    (folder / "a.json").write_text(json.dumps([{"audio": "a.wav", "text": "All."}]))
    assert texts_of(read(folder)) == {"a.wav": "All."}


@each_row(
    ({"text": "It.", "normalized_text": "it"}, "it"),
    ({"text_original": "It 1.", "text_normalized": "It one."}, "It one."),
    ({"raw_transcription": "It.", "gender": "x"}, "It."),
    ({"Transcript": "It."}, "It."),
)
def test_columns_of_the_hub_name_texts_in_json(tmp_path, row, expected):
    line = json.dumps({"audio": "a", "client_id": "v", **row})
    folder = folder_of(tmp_path / str(len(list(tmp_path.iterdir()))), line, "metadata.jsonl", "a")
    (utterance,) = read(folder).utterances
    assert (utterance.text, utterance.speaker) == (expected, "v")


def test_rows_without_any_text_name_their_columns(tmp_path):
    folder = folder_of(tmp_path, '{"audio": "a", "label": 1}\n{"audio": "b", "label": 2}\n', "metadata.jsonl")
    with pytest.raises(UserError, match=r"no column of texts; columns: audio, label") as error:
        read(folder)
    assert error.value.hint == "name it text or transcript or transcription or sentence"


def test_corpora_whose_layout_is_not_read_are_named(tmp_path):
    for name, texts in (("LibriSpeech", "84/12/84-12.trans.txt"), ("VCTK", "txt/p1/p1_001.txt"), ("Kaldi", "wav.scp")):
        folder = tmp_path / name
        (folder / texts).parent.mkdir(parents=True)
        (folder / texts).write_text("84-12-0000 A TEXT\n")
        with pytest.raises(UserError, match=f"no transcripts: .*it has the layout of {name}, which is not read: write"):
            read_transcripts(folder, ["84/12/84-12-0000.flac"] if name == "LibriSpeech" else [])
