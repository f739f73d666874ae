"""Columns that change what a line means: they are honoured, or refused with an advice that can be followed."""

import json
import re
from pathlib import Path

import pytest

from gputrain.errors import UserError
from gputrain.speech.transcripts import read_transcripts
from gputrain.speech.utterances import TranscriptRules
from tests.tables import each_row


def read(folder: Path, name: str, values: list, columns=(), *, as_json: bool, language: str = "en"):
    """Reads a table of recordings 0.wav and so on, one for each value of the column `name`."""
    folder.mkdir(exist_ok=True)
    names = [f"{number}.wav" for number in range(len(values))]
    if as_json:
        lines = [{"audio": one, "text": "So.", name: value} for one, value in zip(names, values, strict=True)]
        (folder / "m.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    else:
        rows = (f"{one},So.,{value}\n" for one, value in zip(names, values, strict=True))
        (folder / "m.csv").write_text(f"audio,text,{name}\n" + "".join(rows))
    rules = TranscriptRules(language=language)
    return read_transcripts(folder, names, file=next(folder.glob("m.*")), columns=columns, rules=rules)


@each_row(
    ("split", ["train", "test", "dev", "train"], [0, 3], "other split"),
    ("subset", ["train-clean-100", "validated", "", "test"], [0, 2], "other split"),
    ("set", ["test", "test"], [0, 1], "alone"),
    ("subset", ["clean", "noisy"], [0, 1], ""),
    ("locale", ["en-US", "de", "en_GB", "en"], [0, 2, 3], "other language"),
    ("lang", ["English", "English"], [0, 1], ""),
    ("language", ["eng", "eng"], [0, 1], ""),
    ("do_not_use", [True, False, 0, 1], [1, 2], "excluded"),
    ("rejected", ["noise", "", "no"], [1, 2], "excluded"),
    ("is_valid", ["True", True], [0, 1], ""),
    ("status", ["approved", "approved", ""], [0, 1, 2], ""),
    ("weight", [2, 2, 2], [0, 1, 2], ""),
)
def test_lines_are_left_out_by_their_columns_and_named(tmp_path, name, values, used, reason):
    for as_json in (True, False):
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        transcripts = read(folder, name, values, as_json=as_json)
        assert [int(Path(one.path).stem) for one in transcripts.utterances] == used
        assert [one.reason for one in transcripts.refused] == [reason] * (len(values) - len(used))
        assert ["has the split test alone, which is taken" in note for note in transcripts.notes] == [True] * (
            reason == "alone"
        )
        # A column without an effect is ignored by its name.
        assert bool(transcripts.columns[name]) == bool(reason), transcripts.columns


@each_row(
    ("split", ["dev", "test"], "the splits test and validation, and none for training"),
    ("lang", ["de", "de"], "all lines are of another language than en: de"),
    ("language", ["English", "German"], "several languages, English, German"),
    ("num_repeats", [1, 1, 3], "a weight \\(1, 3\\)"),
    ("is_valid", [1, 0, 1], "whether it is used \\(0, 1\\)"),
    ("is_valid", [False, False], "whether it is used \\(False\\)"),
    ("status", ["", "rejected"], "whether it is used \\(rejected\\)"),
)
def test_what_cannot_be_decided_is_refused_and_its_advice_can_be_followed(tmp_path, name, values, fault):
    folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
    with pytest.raises(UserError, match=fault) as error:
        read(folder, name, values, as_json=False)
    given = re.search(r"--transcript-columns (\S+)", error.value.hint)[1]
    transcripts = read(folder, name, values, tuple(given.split(",")), as_json=False)
    assert len(transcripts.utterances) == len(values)
    assert transcripts.columns == {"audio": "audio", "text": "text", name: ""}
    if asked := re.search("--language (\\w+)", error.value.hint):
        assert len(read(folder, name, values, as_json=False, language=asked[1]).utterances) == len(values)
    with pytest.raises(UserError, match=fault) as error:
        read(tmp_path / f"{len(list(tmp_path.iterdir()))}", name, values, as_json=True)
    assert "take the key of the" in error.value.hint
