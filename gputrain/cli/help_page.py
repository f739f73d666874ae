"""Pages of `--help` and `--help-all`: the options of each panel below its title, without a table that would cut names.

`--help` lists the common options, each in one line of 80 columns; `--help-all` lists every flag and every key of a
configuration file, with whole sentences, defaults and ranges. A config class may declare `rare_panels`, none of whose
options is common in its command.
"""

import inspect
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from gputrain.config import Leaf, ModelName, describe_range, leaves
from gputrain.errors import UserError
from gputrain.formatting import shell_command

UsageError: Any = typer.BadParameter.__base__  # Click's, which newer versions of typer bring along.
WIDEST = 120  # Columns of a help page on a wider terminal.
SHOWS_ALL = "gputrain.help_all"  # Key in click's context.
METAVARS: dict[Any, str] = {int: "N", float: "X", Path: "PATH", ModelName: "MODEL", str: "TEXT"}


class GroupPage(TyperGroup):
    """A group of commands whose help page lists the commands of each panel below its title."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_panels(formatter, [("Options", parameter.get_help_record(ctx)) for parameter in self.get_params(ctx)])
        commands: list[Any] = [self.get_command(ctx, name) for name in self.list_commands(ctx)]
        names = [made.name for made in commands]
        texts = [(made.help or "").split("\n\n")[0].replace("\n", " ") for made in commands]
        panels = [getattr(made, "rich_help_panel", None) or "Commands" for made in commands]
        write_panels(formatter, zip(panels, zip(names, texts, strict=True), strict=True))


class CommandPage(TyperCommand):
    """A command whose help pages list the options of its config class, and whose words each follow an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line. Raises UserError that names the options of words without one, and those missing."""
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            given, stray, _ = self.make_parser(ctx).parse_args(args=words)
            if not stray and type(error).__name__ != "MissingParameter":
                raise
            given = {**(ctx.default_map or {}), **given}
            known = leaves(vars(self.callback)["settings"]).values()
            missing = [leaf for leaf in known if leaf.required and not given.get(leaf.name)]
            first = [leaf for leaf in known if metavar(leaf) == "PATH"][:1]
            wanted = missing or [leaf for leaf in first if leaf.name not in given]
            written = list(map(names, missing))
            if len(stray) == len(wanted) and all(map(os.path.exists, stray)):
                written = [f"{leaf.flag} {shell_command(word)}" for leaf, word in zip(wanted, stray, strict=True)]
            follows = " ".join(written) or f"{ctx.command_path} -h lists them"
            raise UserError(error.format_message(), hint=f"each value follows its option: {follows}") from None

    def format_options(self, ctx: Any, formatter: Any) -> None:
        settings = vars(self.callback)["settings"]
        known, rare = leaves(settings), getattr(settings, "rare_panels", ())
        whole = SHOWS_ALL in ctx.meta
        shared: list[Any] = [parameter for parameter in self.get_params(ctx) if parameter.name not in known]
        rows = [
            ("Options", (", ".join(parameter.opts), parameter.help)) for parameter in shared if not parameter.hidden
        ]
        for leaf in known.values():
            if whole or (leaf.level == "common" and leaf.panel not in rare):
                rows.append((leaf.panel, (names(leaf), described(leaf) if whole else clause(leaf))))
        write_panels(formatter, rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write where all options stand."""
        shows_some = SHOWS_ALL not in ctx.meta and any(option.name == "help_all" for option in self.params)
        formatter.write(
            f"\nAll options {'here: --help-all; ' if shows_some else ''}of every command: docs/options.md\n"
        )


def write_panels(formatter: Any, rows: Iterable[tuple[str, tuple[str, str] | None]]) -> None:
    """Write the rows of each panel, in the order of the panels' first rows."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for panel, row in rows:
        if row:
            panels.setdefault(panel, []).append(row)
    for panel, listed in panels.items():
        with formatter.section(panel):
            formatter.write_dl(listed, col_max=max(len(left) for left, _ in listed) + 2)


def parameter(name: str, kind: Any, option: Any, default: Any = None) -> inspect.Parameter:
    """Return the parameter of a command's function from which typer makes an option."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def help_all_option() -> inspect.Parameter:
    """Return the option that shows every option and key of a command."""

    # Typer looks for the type of a parameter's annotation only.
    def show(context: typer.Context, wanted: bool) -> None:
        if wanted and not context.resilient_parsing:
            context.meta[SHOWS_ALL] = True
            typer.echo(context.get_help())
            raise typer.Exit

    option = typer.Option("--help-all", is_eager=True, callback=show, help="Show all options and keys of --config.")
    return parameter("help_all", bool, option, default=False)


def names(leaf: Leaf) -> str:
    """Return what a user writes: `--image-size N`, `fmin: X` in a file, `--[no-]report`."""
    if leaf.is_positional:
        return leaf.name.removesuffix("s").upper()
    if leaf.level == "file":
        return f"{leaf.name}: {metavar(leaf)}"
    if leaf.plain_type is bool:
        return leaf.flag if leaf.default is False else f"--[no-]{leaf.flag[2:]}"
    return f"{leaf.flag} {metavar(leaf)}"


def metavar(leaf: Leaf) -> str:
    """Return a word for the value of an option."""
    kind = leaf.plain_type
    if leaf.is_list:
        item = get_args(kind)[0]
        name = "NAME" if get_origin(item) is Literal else METAVARS[item]
        return f"{name},..." if leaf.separator else name
    if get_origin(kind) is Literal:
        return "NAME"
    return "true" if kind is bool else METAVARS[kind]


def clause(leaf: Leaf) -> str:
    """Return the line of `--help`: the first sentence of the help, and the default."""
    shown = "required" if leaf.required else default_text(leaf)
    return leaf.clause + (f" [{shown}]" if shown and leaf.default is not False else "")


def described(leaf: Leaf, *, with_default: bool = True) -> str:
    """Return the text of `--help-all`: whole sentences, further names, and in brackets values, default and range."""
    also = f" Also {', '.join(leaf.flags[1:])}." if leaf.spellings else ""
    shown = "required" if leaf.required else default_text(leaf) and f"default: {default_text(leaf)}"
    facts = [choices(leaf), shown if with_default else "", describe_range(leaf.min, leaf.max)]
    return f"{leaf.help}{also}" + (f" [{'; '.join(filter(None, facts))}]" if any(facts) else "")


def choices(leaf: Leaf) -> str:
    """Return the values of an option that has a few; otherwise nothing."""
    kind = get_args(leaf.plain_type)[0] if leaf.is_list else leaf.plain_type
    return "|".join(map(str, get_args(kind))) if get_origin(kind) is Literal else ""


def default_text(leaf: Leaf) -> str:
    """Return a default as a user would write it; nothing if the program chooses the value."""
    if leaf.required or leaf.default is None:
        return ""
    if isinstance(leaf.default, bool):
        return "on" if leaf.default else "off"
    if isinstance(leaf.default, tuple):
        return ",".join(map(str, leaf.default))
    return f"{leaf.default:g}" if isinstance(leaf.default, float) else str(leaf.default)
