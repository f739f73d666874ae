"""Help pages without tables: an option's name is never cut, however narrow the terminal is, and brackets stay."""

from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup

WIDEST = 120  # Columns of a help page on a wider terminal.


class CommandPage(TyperCommand):
    """A command whose help page lists the options of each panel below its title."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_panels(ctx, formatter, self.get_params(ctx))


class GroupPage(TyperGroup):
    """A group of commands whose help page lists the commands of each panel below its title."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_panels(ctx, formatter, self.get_params(ctx))
        commands: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            text = (command.help or "").split("\n\n")[0].replace("\n", " ")
            commands.setdefault(getattr(command, "rich_help_panel", None) or "Commands", []).append((name, text))
        for panel, rows in commands.items():
            with formatter.section(panel):
                formatter.write_dl(rows)


def write_panels(ctx: Any, formatter: Any, parameters: Iterable[Any]) -> None:
    """Write the options of each panel, in the order of the panels' first options; those of no panel come first."""
    panels: dict[str, list[tuple[str, str]]] = {"Options": []}
    for parameter in parameters:
        record = parameter.get_help_record(ctx)
        if record:
            panels.setdefault(getattr(parameter, "rich_help_panel", None) or "Options", []).append(record)
    for panel, rows in panels.items():
        if rows:
            with formatter.section(panel):
                formatter.write_dl(rows, col_max=28)
