"""What the actions of a page do to run folders."""

import json
import os
import platform

import pytest

from gputrain.errors import UserError
from gputrain.report.records import LONGEST_NOTES
from gputrain.watch.pages import SENTENCES, act
from gputrain.watch.runs import Runs, id_of
from tests.report.runs import make_run, start_row, write_rows
from tests.tables import each_row


@pytest.fixture
def folder(tmp_path):
    return make_run(tmp_path / "runs" / "run", "vae", steps=3)


@pytest.fixture
def runs(folder):
    found = Runs([folder.parent])
    found.look()
    return found


def test_notes_are_written_shown_and_removed(runs, folder):
    run, notes = id_of(folder), folder / "notes.md"
    before = sorted(folder.iterdir())
    for text in ("# süß\r\nline", "x" * LONGEST_NOTES, "half a letter \ud83d", "\x00"):
        assert act(runs, {"action": "note", "run": run, "text": text}) == SENTENCES["note"]
        expected = text.replace("\r\n", "\n").replace("\ud83d", "?")
        assert notes.read_bytes().decode() == expected
        runs.read()
        assert runs.record(run).user_notes == expected
    assert sorted(folder.iterdir()) == sorted([*before, notes])
    for empty in (" \n", ""):
        act(runs, {"action": "note", "run": run, "text": empty})
        assert not notes.exists()


def test_a_note_never_follows_a_link(runs, folder, tmp_path):
    private = tmp_path / "private"
    private.write_text("mine")
    for name in ("notes.md", "notes.md.partial"):
        (folder / name).symlink_to(private)
        act(runs, {"action": "note", "run": id_of(folder), "text": "new"})
        assert private.read_text() == "mine"
        assert (folder / "notes.md").read_text() == "new"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="the administrator may write everywhere")
def test_a_folder_that_may_not_be_written(runs, folder):
    folder.chmod(0o500)
    with pytest.raises(UserError, match="Permission denied"):
        act(runs, {"action": "note", "run": id_of(folder), "text": "new"})


def test_requests_reach_a_training_that_runs(runs, folder):
    run = id_of(folder)
    with pytest.raises(UserError, match="no training is known to run"):
        act(runs, {"action": "stop", "run": run})
    write_rows(folder / "history.jsonl", [start_row(0, host=platform.node(), process=os.getpid())])
    for action, steps in (("save", 0), ("cooldown", 7), ("stop", 0)):
        (folder / "request.json").unlink(missing_ok=True)
        assert act(runs, {"action": action, "run": run, "steps": steps}) == SENTENCES[action]
        written = json.loads((folder / "request.json").read_text())
        assert (written["action"], written["steps"]) == (action, steps)


@each_row(
    ({}, "no such action"),
    ({"action": ["save"]}, "no such action"),
    ({"action": "send"}, "no such action"),
    ({"action": "close"}, "no such action"),
    ({"action": "save"}, "not there any more"),
    ({"action": "save", "run": "../run"}, "not there any more"),
    ({"action": "save", "run": {"a": 1}}, "not there any more"),
    ({"action": "note", "run": "RUN"}, "at most 20,000"),
    ({"action": "note", "run": "RUN", "text": 5}, "at most 20,000"),
    ({"action": "note", "run": "RUN", "text": "x" * 20_001}, "at most 20,000"),
    ({"action": "cooldown", "run": "RUN", "steps": "7"}, "whole number"),
    ({"action": "cooldown", "run": "RUN", "steps": 7.5}, "whole number"),
    ({"action": "cooldown", "run": "RUN", "steps": True}, "whole number"),
    ({"action": "cooldown", "run": "RUN", "steps": -1}, "-1 steps"),
    ({"action": "cooldown", "run": "RUN", "steps": 10**30}, "0 steps"),
)
def test_what_is_no_action_changes_nothing(runs, folder, content, words):
    write_rows(folder / "history.jsonl", [start_row(0, host=platform.node(), process=os.getpid())])
    before = sorted(folder.rglob("*"))
    content = {name: id_of(folder) if value == "RUN" else value for name, value in content.items()}
    with pytest.raises(UserError, match=words):
        act(runs, content)
    assert sorted(folder.rglob("*")) == before
