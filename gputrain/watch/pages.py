"""Renders the live pages of runs: the overview and the report of one or several runs, whole or by the parts that have
changed; and does what a page asks for, with --allow-control: requests to a training, and notes on a run."""

import threading
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from gputrain.engine.callbacks.requests import Action, send
from gputrain.errors import UserError
from gputrain.files import write_text
from gputrain.report.curves import MOST_POINTS
from gputrain.report.media import LiveMedia
from gputrain.report.page import ChartGroup, Parts, RunView, chart_groups, content_of, page_assets
from gputrain.report.records import LONGEST_NOTES, NOTES
from gputrain.watch.runs import Runs

T = TypeVar("T")

MEDIA_SECONDS = 1.0  # Time of a page or an update to read new pictures and sounds; the rest follows.
MOST_VIEWS = 24  # Pages of different runs whose parts are kept.
MOST_MADE = 1_000  # Charts, tables and lists of samples that are kept.
SCRIPTS = "report.js watch.js"
LOADS = "; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"


class Pages:
    """The pages of all runs. What was made for a page is kept, and made again only if its files have changed."""

    def __init__(self, runs: Runs, media: LiveMedia, *, controls: bool = False) -> None:
        self.runs, self.media, self.controls = runs, media, controls
        self._made: dict[Hashable, tuple[object, Any]] = {}  # What was made of some files, and their versions.
        self._pages: dict[Hashable, Parts] = {}  # By the ids of the runs.
        # The charts of some runs, and what they were drawn from: the last steps, and all else.
        self._charts: dict[Hashable, tuple[object, list[int], list[ChartGroup]]] = {}

    def page(self, ids: Sequence[str]) -> tuple[str, str]:
        """Returns a page about these runs as HTML, and its content-security policy; without ids, the overview, or the
        page of the only run. Raises KeyError for an unknown id."""
        with self.runs.lock:
            html, _, values = self._render(ids)
        return html, values["policy"]

    def update(self, ids: Sequence[str], have: Collection[str]) -> dict[str, Any]:
        """Returns the names of the parts of a page, and those whose hashes a browser does not have: hash and HTML by
        name. Raises KeyError for an unknown id."""
        with self.runs.lock:
            _, parts, values = self._render(ids)
            changed = {name: part for name, part in parts.shown.items() if part[0] not in have}
            return {"now": time.time(), "title": values["tab"], "order": [*parts.shown], "parts": changed}

    def _render(self, ids: Sequence[str]) -> tuple[str, Parts, dict[str, Any]]:
        every = self._sorted()
        self.media.renew(MEDIA_SECONDS)
        shown = tuple(ids) or (tuple(every) if len(every) != 1 else (every[0],))
        overview = not ids and len(shown) != 1
        views = [RunView(self.runs.record(id), index, self.media, self._keep, id) for index, id in enumerate(shown)]
        groups = [] if overview else self._groups(shown, views)
        values = {
            **content_of(views, groups),
            **page_assets("'self' data:", SCRIPTS, 0 if overview else len(views), LOADS),
        }
        values |= {"overview": overview, "budget": self.media}
        if overview:
            values["title"] = f"{len(every)} runs" if every else "No runs yet"
        progress = views[0].progress if len(views) == 1 else None
        share = progress.share if progress else None
        values["tab"] = values["title"] if share is None else f"{100 * share:.0f} % {values['title']}"
        key = () if overview else shown
        parts = _renew(self._pages, key, self._pages.get(key) or Parts(is_live=True))
        live = {
            "now": time.time(), "controls": self.controls, "runs": len(every),
            "folders": ", ".join(map(str, self.runs.folders)),
        }  # fmt: skip
        return parts.render(live=live, **values), parts, values

    def _sorted(self) -> list[str]:
        """Returns the ids of all runs: those that train, the latest start first, and the others by their last news."""

        def rank(id: str) -> tuple[bool, float]:
            record = self.runs.record(id)
            trains = record.status.state == "running"
            return not trains, -(record.started_at if trains else record.changed_at)

        return sorted(self.runs.ids(), key=rank)

    def _keep(self, key: Hashable, version: object, make: Callable[[], Any]) -> Any:
        version, before = (version, self.media.dropped), self._made.get(key)
        if before and before[0] == version:
            return before[1]
        left_out, made = self.media.left_out, make()
        if self.media.left_out == left_out:  # Otherwise the next page may have time for what this one has left out.
            _renew(self._made, key, (version, made), MOST_MADE)
        return made

    def _groups(self, ids: tuple[str, ...], views: Sequence[RunView]) -> list[ChartGroup]:
        """Returns the charts of some runs. They are drawn anew when a curve has grown by one of its points, or has
        changed otherwise: a line of metrics more changes nothing that can be seen in a long curve."""
        records = [view.record for view in views]
        tables = [record.metrics for record in records]
        steps = [table.last_step for table in tables]
        basis = [
            (view.at("plan", "history"), table.names, table.identity, table.evaluations)
            for view, table in zip(views, tables, strict=True)
        ]
        before = self._charts.get(ids)
        if before and before[0] == basis and not any(map(_grows, before[1], steps)):
            return before[2]
        return _renew(self._charts, ids, (basis, steps, chart_groups(records)))[2]


def _renew(kept: dict[Hashable, T], key: Hashable, value: T, most: int = MOST_VIEWS) -> T:
    """Keep a value as the one that was used last, and drop the one that was not used for the longest time."""
    kept.pop(key, None)
    kept[key] = value
    while len(kept) > most:
        kept.pop(next(iter(kept)))
    return value


def _grows(before: int, now: int) -> bool:
    """Returns True if a curve that was drawn to a step has a visible point more, or was shortened."""
    return now < before or (now - before) * MOST_POINTS >= max(1, now)


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
