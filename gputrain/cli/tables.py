"""Prints figures, checks, benchmarks, plans and reports on data as tables on stdout."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gputrain.cli.ui import err, escape, one_line, out
from gputrain.formatting import format_number

if TYPE_CHECKING:
    from gputrain.bench.runner import BenchReport
    from gputrain.data_in.preparation import RefusedItem
    from gputrain.hw.doctor import Check
    from gputrain.planner.model_planner import CardPlan


def print_checks(checks: Sequence["Check"]) -> None:
    """Print a line for each check, with its remedy below."""
    style = {"ok": "green", "note": "yellow", "failed": "bold red"}
    width = max(len(check.name) for check in checks)
    for check in checks:
        mark = f"[{style[check.status]}]{check.status:<6}[/]"
        out.print(f"{mark}  {check.name:<{width}}  {escape(check.found)}", soft_wrap=True)
        if check.remedy:
            out.print(f"{'':<{width + 8}}  {escape(f'remedy: {check.remedy}')}", soft_wrap=True)


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


OF_PROCESSORS = ("num_workers", "prefetch_factor", "persistent_workers")  # They follow from this machine's cores.
MOST_COLUMNS = 4  # Up to this many cards have a column each; more have a row each.


def print_plans(plans: Sequence["CardPlan"]) -> None:
    """Print a column for every card, or a row if there are many; then the reasons, or what would make it fit, each once
    below the names of all cards that it is said of."""
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
    gpus_of: dict[tuple[bool, str], list[str]] = {}
    for plan in plans:
        for line in _notes(plan, brief=many, every=len(plans) == 1):
            gpus_of.setdefault((plan.fit.fits, line), []).append(plan.gpu)
    sections: dict[tuple[bool, tuple[str, ...]], list[str]] = {}
    for (fits, line), gpus in gpus_of.items():
        sections.setdefault((fits, tuple(gpus)), []).append(line)
    named = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in plans[0].columns.items())
    for (fits, names_of_gpus), lines in sorted(sections.items(), key=lambda section: -len(section[0][1])):
        title = escape(f"{', '.join(names_of_gpus)}: {named}")
        out.print(f"\n[bold]{title}[/]" if fits else f"\n[bold red]{title} does not fit[/]", soft_wrap=True)
        for line in lines:
            out.print(f"  {escape(line)}", soft_wrap=True)


def _notes(plan: "CardPlan", *, brief: bool, every: bool) -> Iterator[str]:
    """Yield what would make a plan fit, or unless `brief` the reasons of its settings, with `every` those of all."""
    if plan.torch_build:
        yield f"torch: the default build has no code for this GPU; for one that has: {plan.torch_build}"
    if not plan.fit.fits:
        yield from plan.remedies or ["no known GPU has enough memory"]
    settings = plan.plan.settings if plan.fit.fits and not brief else {}
    for name, setting in settings.items():
        hidden = plan.elsewhere and name in OF_PROCESSORS
        if not hidden and (every or name in ("precision", "compile", "cuda_graphs", *plan.fit.settings)):
            cost = f" (costs {setting.cost})" if setting.cost else ""
            yield f"{name}: {_shown(setting.value)}: {setting.reason}{cost}"


def _plan_column(plan: "CardPlan", *, parts: bool) -> dict[str, str]:
    fit, time = plan.fit, plan.time
    return {
        **{name.replace("_", " "): str(value) for name, value in plan.columns.items()},
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
        "CUDA graphs": _shown(plan.plan.cuda_graphs.value),
        "predicted step": _predicted(time.seconds_per_step, "s"),
        "items a second": _predicted(time.items_per_second),
        **({"predicted hours": _predicted(time.hours)} if time.hours else {}),
        **({"predicted cost": _predicted(time.cost)} if time.cost else {}),
    }


def _predicted(value: float | None, unit: str = "") -> str:
    return "unknown" if value is None else f"{format_number(value)} {unit}".rstrip()


def _shown(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def print_refusals(refused: Sequence["RefusedItem"], shown: int = 5) -> None:
    """Print the items left out by reason: the first few of each, and the number of the others."""
    by_reason: dict[str, list[RefusedItem]] = {}
    for refusal in refused:
        by_reason.setdefault(refusal.reason, []).append(refusal)
    for reason, items in by_reason.items():
        first = items if len(items) == shown + 1 else items[:shown]
        for item in first:
            err.print(f"[yellow]{reason}:[/] {one_line(item.path)}: {one_line(item.detail)}", soft_wrap=True)
        if len(items) > len(first):
            err.print(f"[yellow]{reason}:[/] and {len(items) - len(first)} more, {len(items)} in all", soft_wrap=True)
