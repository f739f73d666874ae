"""Defines the commands. Each passes its settings to the package that does the work, which is imported only then."""

import functools
import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from gputrain import __version__
from gputrain.bench.options import bench_settings
from gputrain.cli import fetching, kind_commands, tables, ui
from gputrain.cli.fetching import FetchSettings
from gputrain.cli.help_page import WIDEST, GroupPage
from gputrain.cli.options import add_command, command
from gputrain.cli.settings import (
    DemoSettings,
    EvaluateSettings,
    ExportSettings,
    PrepareSettings,
    ReportSettings,
    ValidateSettings,
    refuse_others,
)
from gputrain.config import leaves, read_config
from gputrain.errors import UserError, require
from gputrain.fetch.names import kind_of, local_path
from gputrain.formatting import shell_command
from gputrain.hw.doctor import CheckCompatibility, check_machine
from gputrain.kinds import ModelKind, OwnCommand, kinds
from gputrain.speech.config import Normalize
from gputrain.watch.options import WatchSettings

app = typer.Typer(
    help="Train image VAEs, vocoders, voices and speech recognisers at the limit of the GPU at hand, and export them "
    "in the formats that other tools load.",
    cls=GroupPage,
    rich_markup_mode=None,  # Otherwise brackets in a help text, such as gputrain[f0], are taken for markup.
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDEST},
)
bench = typer.Typer(cls=GroupPage, rich_markup_mode=None, no_args_is_help=True)
app.add_typer(
    bench, name="bench", rich_help_panel="Machine", help="Measure the effect of each optimisation on this machine.",
    context_settings=app.info.context_settings,
)  # fmt: skip
plan = typer.Typer(cls=GroupPage, rich_markup_mode=None, no_args_is_help=True)
app.add_typer(
    plan, name="plan", rich_help_panel="Machine", help="Plan a training for any GPU, without the GPU.",
    context_settings=app.info.context_settings,
)  # fmt: skip


def main() -> None:
    ui.run(lambda: command_line()())


@functools.cache
def command_line() -> Any:
    """Return the parser of all commands. Called by itself, `app` would make it anew for each command line."""
    return typer.main.get_command(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        ui.out.print(f"gputrain {__version__}")
        raise typer.Exit


@app.callback()
def gputrain(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version.")
    ] = False,
) -> None:
    pass


# ------------------------------------------------------------------------------------------------------------ data


def translate_data(content: dict[str, object], source: Path) -> dict[str, object]:
    """Return our keys and values for a configuration of prepare-data, whichever other program it is for."""
    for kind in kinds().values():
        content = kind.translate_data(content, source) if kind.translate_data else content
    return content


SHIPPED_DATA = next((kind.shipped for kind in kinds().values() if kind.translate_data and kind.shipped), None)


@command(app, "Data", shipped=SHIPPED_DATA, translate=translate_data)
def prepare_data(settings: PrepareSettings) -> None:
    """Prepare a folder of pictures, recordings or speech for training. A second run does only what is missing."""
    kind_commands.prepare(settings)


@command(app, "Data")
def validate(settings: ValidateSettings) -> None:
    """Decode every picture or recording of a folder, and report what the folder holds and which files are faulty."""
    kind_commands.validate(settings)


@command(app, "Data")
def fetch(settings: FetchSettings) -> None:
    """Load published models ahead of time, by short names or names on the Hugging Face Hub."""
    fetching.fetch(settings)


@command(app, "Data")
def normalize(settings: Normalize) -> None:
    """Print the normalised form of a text, of a file, or of standard input, as a voice is trained on it."""
    from gputrain.speech.text.lines import normalize_lines

    for line in normalize_lines(settings):
        ui.out.print(line, markup=False, highlight=False, soft_wrap=True)
        if ui.out.quiet:  # Nobody reads the lines any more, and standard input may have no end.
            break


# --------------------------------------------------------------------------------------------------------- machine


@command(app, "Machine")
def check_compatibility(settings: CheckCompatibility) -> None:
    """Check whether this machine can train, what to repair if not, and which settings suit it."""
    with ui.err.status("examining the machine") as status:
        report = check_machine(settings.data_path, status.update)
    if settings.json:
        ui.out.print_json(json.dumps(report.to_json()))
    else:
        tables.print_checks(report.checks)
        ui.out.print("\nSettings that suit this machine:")
        ui.out.print(f"  {report.command}", markup=False, soft_wrap=True)
    if any(check.status == "failed" for check in report.checks):
        raise typer.Exit(1)


def print_bench(kind: ModelKind, settings: Any) -> None:
    """Run the benchmark of a kind of model. Raises UserError if no row could be measured."""
    require(*kind.packages)
    from gputrain.bench.step_bench import run_bench

    report, written = run_bench(kind.work(), settings)
    tables.print_bench(report)
    ui.out.print(ui.escape(f"The table is in {written}"), soft_wrap=True)
    if not any(result.figures for result in report.results):
        raise UserError("no row could be measured", hint="the table gives the reason for each row")


def print_plans(kind: ModelKind, settings: Any) -> None:
    require(*kind.packages)
    from gputrain.planner.model_planner import plan_cards

    with ui.err.status("running a step on fake tensors") as status:
        plans = plan_cards(kind.work(), settings, status.update)
    if settings.cards.json:
        ui.out.print_json(json.dumps([plan.to_json() for plan in plans]))
    else:
        tables.print_plans(plans)
    if settings.cards.strict and not all(plan.fit.fits for plan in plans):
        raise typer.Exit(ui.NOT_PASSED)


# -------------------------------------------------------------------------------------------------------- training


def train(kind: ModelKind, settings: Any) -> None:
    """Train a model, write a report into the run folder at the end, and print what can be done with the model."""
    if not settings.saving.resume_from and (name := getattr(settings.model, "init_from", None)) and kind.published:
        local_path(name, kind.published)  # What cannot be had is said before torch is loaded and anything is planned.
    require(*kind.packages)
    from gputrain.report.notify import Messages
    from gputrain.report.page import report_at_end
    from gputrain.session import train_model
    from gputrain.watch.server import watched_beside

    messages = Messages(kind, settings.saving)
    with watched_beside(settings.saving), report_at_end(settings.saving), messages:
        train_model(kind.work(), settings, ui.err)
    print_next_steps(kind, settings.saving.output_dir)


def print_next_steps(kind: ModelKind, run: Path) -> None:
    """Print where a run is, and the commands that use its model; nothing of a run that made no step."""
    from gputrain.engine.run_folder import CONFIG
    from gputrain.report.page import model_commands

    if not (run / CONFIG).exists():
        return
    commands = [command.line for command in model_commands(run, kind, read_config(run / CONFIG))]
    commands.append(shell_command("tensorboard", "--logdir", run / "logs"))
    ui.out.print(ui.escape(f"The run is in {run}. Next:"), soft_wrap=True)
    for line in commands:
        ui.out.print(f"  {ui.escape(line)}", soft_wrap=True)


def add_commands_of(kind: ModelKind) -> None:
    """Add the commands of a kind of model."""

    plan_help = f"Predict the memory of {kind.command} and choose its settings for any GPU, from the options alone."
    add = partial(add_command, name=kind.command, shipped=kind.shipped, translate=kind.translate)
    bench_options, run_bench = bench_settings(kind.plan), partial(print_bench, kind)
    add(bench, settings=bench_options, function=run_bench, panel="Machine", help=kind.bench_help)
    add(plan, settings=kind.plan, function=partial(print_plans, kind), panel="Machine", help=plan_help)
    add(app, settings=kind.train, function=partial(train, kind), panel=kind.panel, help=train_help(kind))


def train_help(kind: ModelKind) -> str:
    """Return the head of a train command's help page: what it does, an example, and when a run ends."""
    known = leaves(kind.train)
    length = next(known[name] for name in ("num_steps", "num_epochs") if known[name].default)
    example = f"gputrain {kind.command} --data-path data/{kind.name} {length.flag} {length.default}"
    return f"{kind.help}\n\nExample: {example}\n\nA run ends after {length.flag}; --help-all shows other ends."


def run_own(kind: ModelKind, own: OwnCommand, settings: Any) -> None:
    require(*kind.packages)
    own.run(settings, ui.TerminalOutput())


for each in kinds().values():
    add_commands_of(each)
for each in kinds().values():
    for own in each.commands:
        add_command(app, own.name, own.settings, partial(run_own, each, own), panel=each.panel, help=own.help)


# -------------------------------------------------------------------------------------------------- trained models


@command(app, "Trained models")
def evaluate(settings: EvaluateSettings) -> None:
    """Evaluate a model on held-out data: pictures of a VAE, sound and pitch of a vocoder, speech of a voice."""
    kind = kind_of(settings.path)
    refuse_others(settings, kind, "evaluation", f"{settings.model}, {kind.title}")
    require(*kind.packages)
    with ui.TerminalBar("evaluating") as bar:
        title, figures, report = kind_commands.evaluate(settings, kind, bar.update)
    ui.print_figures(title, figures)
    kind_commands.write_report(settings.json, report)


@command(app, "Trained models")
def export(settings: ExportSettings) -> None:
    """Write a model in the format of another program, and verify that the file read back computes the same."""
    kind = kind_of(settings.path)
    exporter = kind.exporters[kind_commands.format_of(settings, kind)]
    require(*kind.packages, *exporter.packages)
    with ui.TerminalBar("exporting") as bar:
        exported = exporter.write(settings, bar.update)
    ui.print_figures(f"Exported {settings.output_dir}", exported.figures)
    for note in exported.notes:
        ui.out.print(note, markup=False, soft_wrap=True)


@command(app, "Trained models")
def report(settings: ReportSettings) -> None:
    """Write one HTML file about one or more runs: curves, samples, settings, memory, history."""
    from gputrain.report.page import write_report

    size = write_report(settings.runs, settings.output_file)
    ui.out.print(ui.escape(f"{settings.output_file}: {size / 1e6:.1f} MB"), soft_wrap=True)


@command(app, "Trained models")
def watch(settings: WatchSettings) -> None:
    """Show runs live in a browser: progress, curves, samples, memory, health."""
    from gputrain.watch.server import serve

    serve(settings, lambda address: ui.out.print(address, markup=False, soft_wrap=True))


@command(app, "Trained models")
def demo(settings: DemoSettings) -> None:
    """Prepare, train, evaluate and export a small model in a few minutes, on any machine and on data at hand."""
    run_command: Any = partial(command_line(), standalone_mode=False)
    kind_commands.run_demo(settings.output_dir, settings.kind, run_command)
