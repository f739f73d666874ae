"""The work of the commands that serve every kind of model: data, trained models, demos. Imports no torch by itself."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape

from gputrain.cli import tables, ui
from gputrain.cli.settings import DataSettings, EvaluateSettings, ExportSettings, PrepareSettings, ValidateSettings
from gputrain.errors import UserError
from gputrain.formatting import shell_command
from gputrain.kinds import DataWork, ModelKind, ReportProgress, kinds, refuse_other_data

if TYPE_CHECKING:
    from gputrain.data_in.sources import Source

EvaluationReport = tuple[str, dict[str, Any], dict[str, Any]]  # A title, the figures to show, and the report.


def work_of(settings: DataSettings, command: str) -> DataWork:
    """Returns the work of a command for the kind of model that the settings name. Raises UserError if the data are
    prepared for another one."""
    refuse_other_data(settings.input_dir, settings.kind)
    made: DataWork = getattr(kinds()[settings.kind], command).work(settings)
    return made


def source_of(settings: DataSettings, at: Path | None = None) -> "Source":
    """Returns the folder of what the settings name, which is unpacked at a place if it is no folder of files."""
    from gputrain.data_in.sources import Source, open_source

    media: Any = kinds()[settings.kind].media
    if not media:
        return Source(str(settings.input_dir), settings.input_dir)
    with ui.TerminalBar("unpacking") as bar:
        return open_source(
            settings.input_dir, media, at, column=settings.column, progress=bar.update, exclusive=at is not None
        )


def prepare(settings: PrepareSettings) -> None:
    if settings.mode == "validate":
        return validate(settings.as_validation())
    output_dir = settings.output_dir
    assert output_dir is not None  # PrepareSettings.__post_init__ checks this.
    from gputrain.data_in.preparation import check_folders

    work = work_of(settings, "prepare")
    _check_report(settings.output_file)
    check_folders(settings.input_dir, output_dir, settings.kind)
    work.check_output(output_dir)
    # Beside the output folder, so that both are on the disk that the user chose for prepared data.
    source = source_of(settings, Path(f"{os.path.abspath(output_dir)}.unpacked"))
    try:
        with ui.TerminalBar("preparing") as bar:
            report = work.run(
                source.folder, output_dir, work.config, num_workers=settings.processes, progress=bar.update,
                exclude=settings.exclude,
            )  # fmt: skip
    except UserError:
        if source.unpacked:
            ui.err.print(escape(f"the unpacked data stay in {source.unpacked} for the next run"), soft_wrap=True)
        raise
    report = source.complete(report, output_dir)
    source.remove()
    if work.findings and report.made:
        with ui.err.status("looking at what was prepared"):
            report = replace(report, findings=tuple(work.findings(output_dir, settings.processes)))
    _show(f"Prepared {output_dir}", work, report, settings.output_file)
    command = kinds()[settings.kind].command
    for words in (("plan", command), (command,)):
        run = ("--output-dir", Path("outputs", settings.kind)) if words == (command,) else ()
        line = shell_command("gputrain", *words, "--data-path", output_dir, *run, *work.train_options)
        ui.out.print(f"{'Next:' if words[0] == 'plan' else '     '} {escape(line)}", soft_wrap=True)


def validate(settings: ValidateSettings) -> None:
    work = work_of(settings, "validate")
    _check_report(settings.output_file)
    source = source_of(settings)
    with ui.TerminalBar("validating") as bar:
        report = work.run(
            source.folder, work.config, num_workers=settings.processes, progress=bar.update, exclude=settings.exclude
        )
    report = source.complete(report)
    _show(report.input_dir, work, report, settings.output_file)
    if settings.strict and report.refused:
        raise typer.Exit(ui.NOT_PASSED)


def _show(title: str, work: DataWork, report: Any, output_file: Path | None) -> None:
    tables.print_refusals(report.refused)
    tables.print_refusals(getattr(report, "differing", []), shown=5)
    ui.print_figures(title, work.figures(report))
    for finding in getattr(report, "findings", ()):
        ui.err.print(f"[yellow]note:[/] {escape(finding)}", soft_wrap=True)
    write_report(output_file, report.to_json())


def _check_report(path: Path | None) -> None:
    """Raises UserError before the work if its report would replace something else."""
    from gputrain.files import check_report

    check_report(path, ["reasons", "pictures", "clips"])  # Each report, of data or of an evaluation, has one of them.


def write_report(path: Path | None, report: dict[str, Any]) -> None:
    """Write a report as JSON. Raises UserError if the file cannot be written."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", hint="name a file that can be written") from None


def evaluate(settings: EvaluateSettings, kind: ModelKind, progress: ReportProgress) -> EvaluationReport:
    _check_report(settings.json)
    figures = kind.evaluation.run(
        settings, device=settings.device, held_out_share=settings.held_out_share, progress=progress
    )
    items = kind.evaluation.items
    count = getattr(figures, items)
    title = f"{settings.model} on {count} {items if count != 1 else items.removesuffix('s')}"
    return title, dict(getattr(figures, "shown", figures.scalars)), figures.to_json()


def format_of(settings: ExportSettings, kind: ModelKind) -> str:
    """Return the format to write. Raises UserError if this kind of model doesn't have it, or options don't apply."""
    title, known = kind.title, list(kind.exporters)
    if settings.format not in ("auto", *known):
        if not _holds_model(settings):
            raise UserError(f"{settings.model}: holds no model", hint="name a run folder, or a checkpoint in it")
        raise UserError(
            f"{settings.model} is {title}, which has no format {settings.format}", hint=f"use {' or '.join(known)}"
        )
    format = known[0] if settings.format == "auto" else settings.format
    used = kind.exporters[format].options
    given = {name: getattr(settings, name) for name in ("name", "language_code", "default_speaker", "data_path")}
    for option, value in {**given, "device": settings.device == "cuda"}.items():
        if value and option not in used:
            what = f"{title}, format {format}"
            raise UserError(f"{option} does nothing with {what}", hint=f"drop --{option.replace('_', '-')}")
    return format


def _holds_model(settings: ExportSettings) -> bool:
    """Return True for a file, and for a folder with a configuration or a checkpoint."""
    path, names = settings.path, ("config.yaml", "config.json", "*.pt", "*.ckpt")
    return path.is_file() or any(True for name in names for _ in path.glob(name))


def run_demo(folder: Path, kind: str, run_command: Callable[[list[str]], object]) -> None:
    """Write source, data, run, export and synthesised results into `folder`. A second run does only what is missing.

    `run_command` takes the words of a gputrain command.

    Raises UserError if the folder holds something else.
    """
    demo = kinds()[kind].demo
    assert demo is not None  # The option --kind names kinds that have one.
    if folder.exists() and any(folder.iterdir()) and not (folder / demo.source).is_dir():
        raise UserError(
            f"{folder} is not empty, and holds no demo of {kind}", hint=f"--output-dir {folder.name}_{kind}, say"
        )
    began = time.monotonic()
    demo.make_source(folder)
    for line in demo.commands(folder):
        words = [str(word) for word in line]
        ui.err.print(f"\n[bold cyan]$ {escape(shell_command('gputrain', *words))}[/]", soft_wrap=True)
        run_command(words)
    ui.out.print()
    results = {**demo.results(folder), "curves": shell_command("tensorboard", "--logdir", folder)}
    ui.print_figures(f"The demo took {time.monotonic() - began:.0f} s", results)
