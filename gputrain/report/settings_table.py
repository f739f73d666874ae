"""Tables of a report: settings of runs side by side, plans, and what happened at every start of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gputrain import config
from gputrain.engine.run_folder import NO_CHANGE
from gputrain.kinds import kinds
from gputrain.report.records import RunRecord, is_count, short_time

MISSING = "–"


@dataclass(frozen=True)
class TableRow:
    """A setting: its value in each run, and whether runs differ in it or one has another value than the default."""

    name: str
    values: list[str]
    help: str = ""
    differs: bool = False
    is_default: bool = True


@dataclass
class SettingsTable:
    """All settings by panel, and those that are worth a look."""

    panels: dict[str, list[TableRow]] = field(default_factory=dict)

    @property
    def rows(self) -> list[TableRow]:
        return [row for rows in self.panels.values() for row in rows]

    @property
    def differing(self) -> list[TableRow]:
        return [row for row in self.rows if row.differs]

    @property
    def chosen(self) -> list[TableRow]:
        return [row for row in self.rows if not row.is_default]


def settings_table(runs: Sequence[RunRecord]) -> SettingsTable:
    """Returns the settings of all runs, with the panels, help and defaults of the options of their kinds."""
    used = [kinds()[run.kind].train for run in runs if run.kind in kinds()]
    known = {name: leaf for cls in used for name, leaf in config.leaves(cls).items()}
    defaults = {name: value for cls in used for name, value in config.defaults(cls).items()}
    names = list(dict.fromkeys([*known, *(name for run in runs for name in run.settings)]))
    table = SettingsTable()
    for name in names:
        present = [run.settings.get(name) for run in runs]
        if not any(name in run.settings for run in runs):
            continue
        leaf = known.get(name)
        differs = any(value != present[0] for value in present) and name not in NO_CHANGE
        is_default = all(value is None or value == defaults.get(name, value) for value in present)
        values = [format_setting(value) for value in present]
        row = TableRow(name, values, leaf.help if leaf else "", differs, is_default)
        table.panels.setdefault(leaf.panel if leaf else "Other", []).append(row)
    return table


def format_setting(value: object) -> str:
    """Returns a value as a reader writes it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ", ".join(map(format_setting, value)) or "none"
    if isinstance(value, float):
        return f"{value:.6g}"
    if value is None:
        return MISSING
    return str(value) or "none"


@dataclass(frozen=True)
class PlanRow:
    """A setting of plans: its value and reason in each run."""

    name: str
    values: list[tuple[str, str]]
    differs: bool


def plan_table(runs: Sequence[RunRecord]) -> list[PlanRow]:
    plans = [plan if isinstance(plan := run.plan.get("settings"), dict) else {} for run in runs]
    rows = []
    for name in dict.fromkeys(name for plan in plans for name in plan):
        found = [plan.get(name) for plan in plans]
        values = [
            (format_setting(setting.get("value")), _reason(setting)) if isinstance(setting, dict) else (MISSING, "")
            for setting in found
        ]
        rows.append(PlanRow(str(name), values, len({value for value, _ in values}) > 1))
    return rows


def _reason(setting: Mapping[str, Any]) -> str:
    cost = setting.get("cost")
    return f"{setting.get('reason', '')}" + (f" (costs {cost})" if cost else "")


def plan_events(run: RunRecord) -> list[tuple[str, str, bool]]:
    """Returns the step and the words of each event in plan.json, such as a warning, and False for a cool-down."""
    events = run.plan.get("events")
    found = []
    for event in events if isinstance(events, list) else ():
        if not isinstance(event, dict):
            continue
        rest = {name: value for name, value in event.items() if name != "step"}
        message = rest.pop("message", None) or rest.pop("warning", None)
        words = message or ", ".join(f"{name} {format_setting(value)}" for name, value in rest.items())
        found.append((str(event.get("step", "?")), str(words), event.get("check") != "cooldown"))
    return found[:100]


@dataclass(frozen=True)
class RunPart:
    """A part of a run, from a start to its end. `changes` are sentences about what was different than before."""

    began: str
    first_step: int
    last_step: int | None
    outcome: str
    message: str
    device: str
    changes: list[str]
    lost_steps: int


def run_parts(run: RunRecord) -> list[RunPart]:
    """Returns the parts of a run, in order."""
    parts: list[RunPart] = []
    before: Mapping[str, Any] = {}
    for start, end in _paired(run.history):
        found = start.get("machine")
        machine: Mapping[str, Any] = found if isinstance(found, dict) else {}
        step = _count(start.get("step"))
        lost = max(0, _count(start.get("logged_step")) - step) if step or parts else 0
        parts.append(
            RunPart(
                short_time(start.get("time")), step, _count(end.get("step")) if end else None,
                str(end.get("outcome", "unknown")) if end else "no end was reported",
                str(end.get("message", "")) if end else "", str(machine.get("device", MISSING)),
                _changes(start, machine, before), lost,
            )
        )  # fmt: skip
        before = machine
    return parts


def _changes(start: Mapping[str, Any], machine: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    changed = start.get("changes")
    words = [
        f"{name}: {format_setting(values[0])} → {format_setting(values[1])}"
        for name, values in (changed.items() if isinstance(changed, dict) else ())
        if isinstance(values, list) and len(values) == 2
    ]
    for name in ("device", "torch", "gputrain", "python", "cuda") if before else ():
        if before.get(name) != machine.get(name):
            words.append(f"{name}: {before.get(name, MISSING)} → {machine.get(name, MISSING)}")
    return words


def _paired(history: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
    pairs: list[tuple[dict[str, Any], dict[str, Any] | None]] = []
    for row in history:
        if row.get("event") == "start":
            pairs.append((row, None))
        elif pairs and pairs[-1][1] is None:
            pairs[-1] = (pairs[-1][0], row)
    return pairs


def _count(value: object) -> int:
    return value if is_count(value) else 0
