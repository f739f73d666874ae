"""Transcripts in all supported formats, and with all kinds of damage."""

import json
from pathlib import Path

import pytest

from gputrain.errors import UserError
from gputrain.speech.transcript_columns import columns_of, header_of
from gputrain.speech.transcripts import SoundFinder, read_transcripts
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
    # The third column is in another alphabet and shares no word, but there are too many names for speakers.
    ([("a.wav", "O'zbek tili", "ўзбек тили"), ("b.wav", "Bir ikki", "бир икки")], LJSPEECH),
    ([("a", "1984", "nineteen eighty four"), ("b", "7", "seven")], LJSPEECH),
    ([(f"{n}.wav", "John Smith", text) for n, text in enumerate(PROVERBS)], PIPER),
    ([(f"{n}.wav", str(n % 2), text) for n, text in enumerate(PROVERBS)], PIPER),
    ([("1.wav", "ann", "so it is"), ("2.wav", "bob", "not now")], PIPER),
    ([("1.wav", "", "so it is"), ("2.wav", "", "not now")], PIPER),
    ([("a", "so it is", ""), ("b", "not now", "")], LJSPEECH),
)
def test_three_columns_are_distinguished_by_their_content(rows, columns):
    assert columns_of(Path("metadata.csv"), rows) == columns


def test_three_columns_that_may_be_either_are_refused(tmp_path):
    table = "a.wav|1984|nineteen eighty four\nb|7|seven\nc|8|eight\n"
    folder = folder_of(tmp_path, table)
    with pytest.raises(UserError, match="second column may hold texts or speakers") as error:
        read(folder)
    assert "--transcript-columns" in error.value.hint
    assert texts_of(read(folder, columns=LJSPEECH))["wavs/b.wav"] == "seven"
    assert read(folder, columns=PIPER).utterances[1].speaker == "7"


def test_headers():
    assert header_of(["client_id", "path", "sentence", "up_votes"]) == ("speaker", "audio", "text", "other")
    assert header_of(["file", "transcription", "normalized_transcription"]) == ("audio", "text", "normalized")
    assert header_of(["id", "normalized_text"]) == ("audio", "text")
    assert header_of(["file", "text", "sentence"]) == ("audio", "text", "other")
    assert header_of(["a", "The text"]) is None


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


def test_damaged_json_lines_cost_themselves_alone(tmp_path):
    lines = [
        '{"audio": "a", "text": "One.", "speaker": 7}',
        '{"audio": "b", "text": ',
        "[1, 2]",
        "[" * 100_000,
        '{"audio": "b", "text": "\\u0000"}',
        '{"audio": "b", "text": "half \\ud83d"}',
        '{"audio": "b", "text": null}',
        '{"audio": ["b"], "text": "list"}',
        '{"text": "nobody"}',
        '{"audio": "c", "text": "It is 3.", "speaker": ""}',
    ]
    transcripts = read(folder_of(tmp_path, "\n".join(lines), "all.jsonl"))
    assert [(each.path, each.speaker) for each in transcripts.utterances] == [("wavs/a.wav", "7")]
    assert reasons(transcripts) == [
        *((f"all.jsonl, line {line}", "malformed") for line in (2, 3, 4, 5, 6)),
        ("all.jsonl, line 7", "no transcript"), ("all.jsonl, line 8", "malformed"), ("all.jsonl, line 9", "malformed"),
        ("all.jsonl, line 10", "no speaker"),
    ]  # fmt: skip


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
    assert "3 columns, expected 2: audio, text" in next(
        refusal.detail for refusal in transcripts.refused if refusal.path == "metadata.csv, line 3"
    )


def test_other_encodings_are_named_with_their_line(tmp_path):
    folder = folder_of(tmp_path, b"a|One.\n" + "b|привет\n".encode("cp1251"))
    with pytest.raises(UserError, match=r"metadata\.csv, line 2: not UTF-8"):
        read(folder)
    (folder / "metadata.csv").write_bytes("a|One.\n".encode("utf-16"))
    with pytest.raises(UserError, match=r"metadata\.csv, line 1: not UTF-8"):
        read(folder)


def test_a_transcript_is_looked_for_and_several_are_refused(tmp_path):
    folder = folder_of(tmp_path, "a|One.\n")
    (folder / "notes.txt").write_text("bought a microphone | very good\n")
    (folder / "speakers.csv").write_text("ann|f\n")
    assert read(folder).source == "metadata.csv, a table of audio, text"
    (folder / "train.list").write_text("b|Two two.\n")
    with pytest.raises(UserError, match=r"several places: metadata\.csv, train\.list") as error:
        read(folder)
    assert "--transcripts" in error.value.hint
    assert texts_of(read(folder, file=folder / "train.list")) == {"wavs/b.wav": "Two two."}
    (folder / "metadata.csv").unlink()
    (folder / "train.list").unlink()
    with pytest.raises(UserError, match="no transcripts"):
        read(folder)
    (folder / "metadata.csv").write_text("\n \n")
    with pytest.raises(UserError, match="empty"):
        read(folder)
    (folder / "wavs/a.txt").write_text("One.")
    with pytest.raises(UserError, match="text files of recordings"):
        read(folder)


@each_row("just a line\nand another\n", "a|b|c|d\ne|f|g|h\n")
def test_a_file_that_is_no_table(tmp_path, table):
    with pytest.raises(UserError) as error:
        read(folder_of(tmp_path, table))
    assert "--transcript-columns" in error.value.hint


def test_a_header_alone(tmp_path):
    transcripts = read(folder_of(tmp_path, "id|text\n", sounds="ab"))
    assert (transcripts.utterances, reasons(transcripts)) == (
        [], [("wavs/a.wav", "no transcript"), ("wavs/b.wav", "no transcript")],
    )  # fmt: skip


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"nothing\.csv"):
        read(folder_of(tmp_path), file=tmp_path / "nothing.csv")


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
