"""Actions that a page asks for, with --allow-control: requests to a training, notes on a run, and the queue."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, get_args

from gputrain.engine.requests import Action, send
from gputrain.engine.run_folder import write_text
from gputrain.errors import UserError
from gputrain.report.records import LONGEST_NOTES, NOTES
from gputrain.watch.runs import Runs

if TYPE_CHECKING:
    from gputrain.watch.queue import Queue

SENTENCES = {
    "save": "The training saves a checkpoint after this step.",
    "stop": "The training finishes this step, saves and stops; it can be resumed.",
    "cooldown": "The training cools down from the next step on, and then ends.",
    "note": "The notes are saved.",
    "queue-start": "The queue goes on.",
    "queue-pause": "The queue starts no further training; one that runs goes on.",
    "queue-skip": "The queue leaves this training out; if it runs, it saves and stops.",
    "queue-retry": "The training waits for its turn again.",
}


def act(runs: Runs, queue: "Queue | None", content: Mapping[str, object]) -> str:
    """Do what a page asks for. Returns a sentence that says what happens now; raises UserError if it cannot be done."""
    action = content.get("action")
    if not isinstance(action, str) or action not in SENTENCES:
        raise UserError("there is no such action", hint=f"one of {', '.join(SENTENCES)}")
    try:
        if action.startswith("queue-"):
            _act_on(queue, action, str(content.get("entry")))
        elif action == "note":
            with runs.lock:  # Two pages never write at once.
                _write_notes(runs, str(content.get("run")), content.get("text"))
        else:
            steps = content.get("steps", 0)
            if isinstance(steps, bool) or not isinstance(steps, int):
                raise UserError("the steps of a cool-down are no whole number", hint="0: a fifth of all steps")
            folder = runs.record(str(content.get("run"))).folder
            send(folder, next(one for one in get_args(Action) if one == action), steps)
    except KeyError:
        raise UserError("this run or entry is not there any more", hint="the page shows those that are") from None
    return SENTENCES[action]


def _act_on(queue: "Queue | None", action: str, entry: str) -> None:
    if queue is None:
        raise UserError("there is no queue", hint="gputrain watch --queue FOLDER --allow-control")
    skip_or_retry: dict[str, Callable[[str], None]] = {"queue-skip": queue.skip, "queue-retry": queue.retry}
    if action in skip_or_retry:
        skip_or_retry[action](entry)
    else:
        (queue.start if action == "queue-start" else queue.pause)()


def _write_notes(runs: Runs, run: str, text: object) -> None:
    path = runs.record(run).folder / NOTES
    if not isinstance(text, str) or len(text) > LONGEST_NOTES:
        raise UserError(f"notes are a text of at most {LONGEST_NOTES:,} characters", hint="keep longer ones elsewhere")
    text = text.replace("\r\n", "\n").encode("utf-8", "replace").decode()
    try:
        if text.strip():
            write_text(path, text)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}", hint="make the folder writable") from None
