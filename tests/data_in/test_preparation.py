"""Finding files and duplicates of a folder, and journals that were cut off or damaged."""

import json
import sys
from pathlib import Path

import pytest

from gputrain.data_in.preparation import (
    DataReport,
    Journal,
    RefusedItem,
    find_duplicates,
    read_quarantine,
    scan,
    source_files,
    write_quarantine,
)
from gputrain.data_in.split import FINGERPRINT_BLOCK, fingerprint
from gputrain.errors import UserError
from tests.process import killed_at
from tests.tables import each_row


def test_files_with_one_fingerprint_are_duplicates_only_if_their_content_is_equal(tmp_path: Path) -> None:
    """Fingerprints leave out what lies between the first, the middle and the last blocks."""
    content = bytes(10 * FINGERPRINT_BLOCK)
    other = bytearray(content)
    other[2 * FINGERPRINT_BLOCK] = 1
    for name, data in {"a": content, "b": other, "c": content, "d": other, "e": content[1:], "f": content}.items():
        (tmp_path / name).write_bytes(data)
    refused: list[RefusedItem] = []
    files = source_files(tmp_path, "abcdefg", refused)
    prints = {file.path: fingerprint(tmp_path / file.path) for file in files}
    assert len({prints[name] for name in "abcdf"}) == 1
    assert [one.path for one in refused] == ["g"]
    for known in (None, prints):
        found = find_duplicates(tmp_path, files, known)
        assert {name: one.repeats for name, one in found.items()} == {"c": "a", "d": "b", "f": "a"}
        assert found["c"] == RefusedItem("c", "duplicate", "has the content of a", "a")


@pytest.mark.skipif(sys.platform == "win32", reason="needs symbolic links")
def test_a_folder_with_several_names_is_read_once(tmp_path: Path) -> None:
    """The name nearest to the top is taken, of those the first."""
    for name in ("deep/x.wav", "deep/er/y.wav", "z.WAV", "note", ".hidden/h.wav", "__MACOSX/m.wav"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "a").mkdir()
    (tmp_path / "a/link").symlink_to(tmp_path / "deep")
    (tmp_path / "a/around").symlink_to(tmp_path)
    (tmp_path / "other").symlink_to(tmp_path / "deep/er")
    (tmp_path / "same").symlink_to(tmp_path / "deep/er")
    tree = scan(tmp_path, {".wav"})
    assert (tree.paths, tree.refused) == (["deep/x.wav", "other/y.wav", "z.WAV"], [])
    assert tree.ignored == {"without suffix": ["note"], "hidden/": [".hidden"], "__MACOSX/": ["__MACOSX"]}


def test_folders_of_programs_are_counted_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hidden = [".thumbnails", ".Trash-1000", ".git", ".ipynb_checkpoints", ".Spotlight-V100", ".@__thumb"]
    others = [
        "@eaDir", "#recycle", "__MACOSX", "$RECYCLE.BIN", "System Volume Information", "lost+found", "@Recycle",
        "@__thumb", "FOUND.000", "@EADIR", "Temporary Items",
    ]  # fmt: skip
    for folder in ("", "deep"):
        for name in ("mine", "#1 tag", "@home", *hidden, *others):
            (tmp_path / folder / name / "inside").mkdir(parents=True)
            (tmp_path / folder / name / "inside/a.png").touch()
            (tmp_path / folder / name / "b.png").touch()
    (tmp_path / "._c.png").touch()
    caplog.set_level("INFO")
    tree = scan(tmp_path, {".png"})
    assert {path.split("/")[-3 if "inside" in path else -2] for path in tree.paths} == {"mine", "#1 tag", "@home"}
    assert len(tree.paths) == 12
    ignored = {kind: len(names) for kind, names in tree.ignored.items()}
    assert ignored == {"hidden": 1, "hidden/": 2 * len(hidden), **{f"{name}/": 2 for name in others}}
    assert "folders of programs are not searched: 2 #recycle/, 2 $RECYCLE.BIN/" in caplog.text
    # A folder that is named itself is searched.
    assert scan(tmp_path / "@eaDir", {".png"}).paths == ["b.png", "inside/a.png"]


def test_a_journal_is_read_up_to_an_incomplete_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    assert (journal.head, journal.rows, journal.is_damaged) == (None, [], False)
    journal.head = {"of": "x"}
    journal.rewrite([{"n": 1}])
    journal.append({"n": 2})
    whole = path.read_text()
    assert list(map(json.loads, whole.splitlines())) == [{"of": "x"}, {"n": 1}, {"n": 2}]
    for cut in range(1, len('{"n": 2}\n')):
        path.write_text(whole[:-cut])
        again = Journal(path)
        assert (again.head, again.rows, again.is_damaged) == ({"of": "x"}, [{"n": 1}], False)
    again.rewrite(again.rows)
    again.append({"n": 2})
    assert path.read_text() == whole


@each_row("fsync", "replace")
def test_a_kill_while_a_journal_is_rewritten_loses_no_row(tmp_path: Path, moment: str) -> None:
    path = tmp_path / "journal.jsonl"
    whole = '{"of": "x"}\n' + "".join(f'{{"n": {number}}}\n' for number in range(2000))
    path.write_text(whole + '{"n": 20')
    again = Journal(path)
    assert killed_at(moment, lambda: again.rewrite(again.rows))
    assert path.read_text() == whole + '{"n": 20'
    again.rewrite(again.rows)
    before = (path.stat().st_ino, path.stat().st_mtime_ns)
    assert path.read_text() == whole
    again.rewrite(again.rows)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == before  # What is as it should be is not written.


@each_row(
    (b"", {}, []),
    (b"{\n", {}, []),
    (b'[1]\n{"n": 1}\n', {}, [{"n": 1}]),
    (b'{"of": 1}\n{"n": 1\n{"n": 2}\n', {"of": 1}, [{"n": 2}]),
    (b'{"of": 1}\n{"n": "\xff"}\n', {"of": 1}, [{"n": "\ufffd"}]),
)
def test_a_damaged_journal_is_known(tmp_path: Path, content: bytes, head: object, rows: object) -> None:
    (tmp_path / "journal.jsonl").write_bytes(content)
    journal = Journal(tmp_path / "journal.jsonl")
    assert (journal.head, journal.rows, journal.is_damaged) == (head, rows, True)


def test_a_quarantine_is_read_back_and_one_of_other_fields_is_refused(tmp_path: Path) -> None:
    refused = [RefusedItem("a", "duplicate", "has the content of b", "b"), RefusedItem("c", "silent", "so")]
    write_quarantine(tmp_path, refused)
    assert read_quarantine(tmp_path) == refused
    (tmp_path / "quarantine.jsonl").write_text('{"path": "a", "reason": "silent", "detail": "x"}\n')
    with pytest.raises(UserError, match=r"quarantine\.jsonl: .*written by another version"):
        read_quarantine(tmp_path)


def test_an_account_names_what_is_used_and_ignored_in_lines_of_a_terminal() -> None:
    columns = {"audio": "audio", "sentence": "text", "source": "", **{f"column {number}": "" for number in range(20)}}
    ignored = {".txt": [f"in/{number}.txt" for number in range(1234)], ".svg": ["logo.svg"], "hidden": [".a"]}
    report = DataReport(input_dir="in", ignored=ignored, refused=[], columns=columns)
    account = report.account()
    assert account == {
        "used": "audio, sentence",
        "ignored": "source, column 0, column 1, column 2 and 17 more",
        "ignored files": "1234 .txt such as 0.txt, logo.svg, 1 hidden",
    }
    assert max(len(f"  height in pixels  {text}") for text in account.values()) <= 80
    assert (report.to_json()["columns"], report.to_json()["ignored"]) == (columns, ignored)
    assert DataReport(input_dir="in", ignored={}, refused=[]).account() == {}
