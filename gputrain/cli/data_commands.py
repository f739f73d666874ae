"""Runs `prepare-data` and `validate`. Imports no torch by itself."""

import json
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from gputrain.cli import tables, ui
from gputrain.cli.settings import DataSettings, PrepareSettings, ValidateSettings
from gputrain.errors import UserError
from gputrain.kinds import DataWork, kinds


def work_of(settings: DataSettings, command: str) -> DataWork:
    """Returns the work of a command for the kind of model that the settings name."""
    made: DataWork = getattr(kinds()[settings.kind], command).work(settings)
    return made


def prepare(settings: PrepareSettings) -> None:
    if settings.mode == "validate":
        return validate(settings.as_validation())
    with ui.TerminalBar("preparing") as bar:
        work = work_of(settings, "prepare")
        folders = (settings.input_dir, settings.output_dir)
        report = work.run(*folders, work.config, num_workers=settings.processes, progress=bar.update)
    _show(f"Prepared {settings.output_dir}", work, report, settings.output_file)


def validate(settings: ValidateSettings) -> None:
    with ui.TerminalBar("validating") as bar:
        work = work_of(settings, "validate")
        report = work.run(settings.input_dir, work.config, num_workers=settings.processes, progress=bar.update)
    _show(report.input_dir, work, report, settings.output_file)
    if settings.strict and report.refused:
        raise typer.Exit(ui.NOT_PASSED)


def _show(title: str, work: DataWork, report: Any, output_file: Path | None) -> None:
    tables.print_refusals(report.refused)
    for reason in getattr(report, "suspicions", ()):
        tables.print_refusals([one for one in report.suspicious if one.reason == reason], shown=5)
    predictions: dict[str, Any] = {}
    if work.predict:
        with ui.err.status("predicting the memory of a step"):
            predictions = work.predict(report)
    ui.print_figures(title, work.figures(report, **predictions))
    for finding in getattr(report, "findings", ()):
        ui.err.print(f"[yellow]note:[/] {escape(finding)}", soft_wrap=True)
    write_report(output_file, report.to_json() | predictions)


def write_report(path: Path | None, report: dict[str, Any]) -> None:
    """Write a report as JSON. Raises UserError if the file cannot be written."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", hint="name a file that can be written") from None
