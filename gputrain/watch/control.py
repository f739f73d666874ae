"""Actions that a page asks for, with --allow-control: requests to a training, and notes on a run."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from gputrain.engine.requests import Action, send
from gputrain.engine.run_folder import write_text
from gputrain.errors import UserError
from gputrain.report.records import LONGEST_NOTES, NOTES
from gputrain.watch.runs import Runs

writing = threading.Lock()
SENTENCES = {
    "save": "The training saves a checkpoint after this step.",
    "stop": "The training finishes this step, saves and stops; it can be resumed.",
    "cooldown": "The training cools down from the next step on, and then ends.",
    "note": "The notes are saved.",
}


def act(runs: Runs, content: Mapping[str, object]) -> str:
    """Do what a page asks for. Returns a sentence that says what happens now; raises UserError if it cannot be done."""
    action, run, steps = content.get("action"), str(content.get("run")), content.get("steps", 0)
    if not isinstance(action, str) or action not in SENTENCES:
        raise UserError("there is no such action", hint=f"one of {', '.join(SENTENCES)}")
    try:
        if action == "note":
            with writing:  # Not the lock of the pages, which would wait for the disk.
                _write_notes(runs.record(run).folder / NOTES, content.get("text"))
        elif isinstance(steps, bool) or not isinstance(steps, int):
            raise UserError("the steps of a cool-down are no whole number", hint="0: a fifth of all steps")
        else:
            send(runs.record(run).folder, cast("Action", action), steps)
    except KeyError:
        raise UserError("this run is not there any more", hint="the page shows those that are") from None
    return SENTENCES[action]


def _write_notes(path: Path, text: object) -> None:
    if not isinstance(text, str) or len(text) > LONGEST_NOTES:
        raise UserError(f"notes are a text of at most {LONGEST_NOTES:,} characters", hint="keep longer ones elsewhere")
    try:
        if text.strip():
            write_text(path, text.replace("\r\n", "\n").encode("utf-8", "replace").decode())
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}", hint="make the folder writable") from None
