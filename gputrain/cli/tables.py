"""Prints figures, checks, benchmarks, plans and reports on data as tables on stdout."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from gputrain.cli.ui import err, escape, out

if TYPE_CHECKING:
    from gputrain.bench.runner import BenchReport
    from gputrain.engine.dataset_report import RefusedItem
    from gputrain.hw.doctor.host_rules import Check
    from gputrain.hw.plan import Plan
    from gputrain.planner.model_planner import CardPlan


def print_figures(title: str, figures: Mapping[str, object]) -> None:
    out.print(f"[bold]{escape(title)}[/]")
    width = max(map(len, figures), default=0)
    for name, value in figures.items():
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        out.print(f"  {name:<{width}}  {escape(shown)}", soft_wrap=True)


def print_checks(checks: Sequence["Check"]) -> None:
    """Print the checks, each with its remedy below: as a table on a terminal, elsewhere one line each."""
    style = {"ok": "green", "note": "yellow", "failed": "bold red"}
    rows = []
    for check in checks:
        rows.append((f"[{style[check.status]}]{check.status:<6}[/]", check.name, escape(check.found)))
        if check.remedy:
            rows.append((" " * 6, "", escape(f"remedy: {check.remedy}")))
    if out.is_terminal:
        table = Table.grid(padding=(0, 2))
        for row in rows:
            table.add_row(*row)
        out.print(table)
    else:
        width = max(len(check.name) for check in checks)
        for mark, name, text in rows:
            out.print(f"{mark}  {name:<{width}}  {text}", soft_wrap=True)


def print_bench(report: "BenchReport") -> None:
    """Print a table of the rows: their figures, or why there are none. Notes on a row go to stderr."""
    heads, rows = report.table()
    first = max(len(row[0]) for row in rows)
    widths = [max(len(row[column]) for row in [heads, *rows] if column < len(row)) for column in range(1, len(heads))]

    def line(label: str, cells: Sequence[str]) -> str:
        shown = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        return escape("  ".join([f"  {label:<{first}}", *shown]))

    out.print(f"[bold]{escape(report.title)}[/]", soft_wrap=True)
    out.print(escape(f"{report.device}, torch {report.machine.get('torch', 'unknown')}"), soft_wrap=True)
    out.print(line("", heads[1:]), soft_wrap=True)
    for result, (label, *cells) in zip(report.results, rows, strict=True):
        missing = escape(f"  {label:<{first}}  not measured: {result.reason}")
        out.print(line(label, cells) if cells else missing, soft_wrap=True)
        for note in result.notes:
            err.print(f"[yellow]{escape(label)}:[/] {escape(note)}", soft_wrap=True)


MOST_COLUMNS = 4  # Up to this many cards have a column each; more have a row each.


def print_each_gpu(plans: Sequence[tuple[str, "Plan | None"]]) -> None:
    """Print the settings of each of several GPUs. Ranks that train together all use those of the weakest."""
    if plans:
        out.print("\nSettings of each GPU; GPUs that train together all use those of the weakest:")
    for number, (name, plan) in enumerate(plans):
        words = ["this torch has no code for it"]
        if plan:
            switches = {"compile": plan.compile, "TF32": plan.tf32, "channels_last": plan.channels_last}
            words = [
                str(plan.precision.value),
                *(f"{title} {'on' if one.value else 'off'}" for title, one in switches.items()),
            ]
        out.print(f"  GPU {number}: {escape(name)}: {', '.join(words)}", soft_wrap=True)


def print_plans(plans: Sequence["CardPlan"]) -> None:
    """Print a column for every card, or a row if there are many; then the reasons, or what would make it fit."""
    many = len(plans) > MOST_COLUMNS
    columns = [{"": plan.gpu, **_plan_column(plan, parts=not many)} for plan in plans]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[name, *(column.get(name, "") for column in columns)] for name in names]
    if many:
        rows = [list(row) for row in zip(*rows, strict=True)]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        out.print(escape(f"  {line}".rstrip()), soft_wrap=True)
    for plan in plans:
        stage = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in plan.stage.items())
        title = escape(f"{plan.gpu}: {stage}")
        if not plan.fit.fits:
            out.print(f"\n[bold red]{title} does not fit[/]")
            for remedy in plan.remedies:
                out.print(f"  {escape(remedy)}", soft_wrap=True)
        elif not many:
            out.print(f"\n[bold]{title}[/]")
            for name, setting in plan.plan.settings.items():
                if len(plans) == 1 or name in ("precision", "compile", *plan.fit.settings):
                    cost = f" (costs {setting.cost})" if setting.cost else ""
                    out.print(f"  {name}: {_shown(setting.value)}: {escape(setting.reason + cost)}", soft_wrap=True)


def _plan_column(plan: "CardPlan", *, parts: bool) -> dict[str, str]:
    fit = plan.fit
    seconds = fit.least_seconds_per_step
    return {
        **{name.replace("_", " "): str(value) for name, value in plan.stage.items()},
        "memory": f"{plan.memory_gb:.1f} GB",
        "may be used": f"{fit.budget_gb:.1f} GB",
        "fits": _shown(fit.fits),
        "predicted peak": f"{fit.predicted_peak_gb:.2f} GB",
        **({f"  {kind}": f"{gb:.2f} GB" for kind, gb in fit.parts.items()} if parts else {}),
        "precision": str(plan.plan.precision.value),
        "micro-batch": str(fit.micro_batch_size),
        "accumulation": str(fit.accumulation_steps),
        "checkpointing": _shown(fit.checkpointing),
        "compile": _shown(plan.plan.compile.value),
        "least time a step": "unknown" if seconds is None else f"{seconds:.3g} s",
    }


def _shown(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def print_refusals(refused: Sequence["RefusedItem"], shown: int = 20) -> None:
    for refusal in refused[:shown]:
        err.print(f"[yellow]{refusal.reason}:[/] {escape(refusal.path)}: {escape(refusal.detail)}", soft_wrap=True)
    if len(refused) > shown:
        err.print(f"... and {len(refused) - shown} more", soft_wrap=True)
