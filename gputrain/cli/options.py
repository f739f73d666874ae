"""Turns a config class into a command: every field becomes an option, `--config FILE` gives defaults.

A value is checked in the same way whether a flag or a file gives it. A flag beats the file, the file beats the default.
"""

import inspect
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import typer
from typer import _completion_shared
from typer.core import TyperCommand, TyperGroup

from gputrain import config
from gputrain.bench.options import BenchSettings, MeasuredFile
from gputrain.config import Leaf, ModelName
from gputrain.errors import Stopped, UserError
from gputrain.fetch.hub import OFFLINE
from gputrain.kinds import Translate, read_defaults

T = TypeVar("T")
LIST_ITEMS = {int: "N", float: "N", Path: "PATH", ModelName: "PATH"}  # What help pages call an item of a list.
FILES = "gputrain.files"  # Key of the files of a benchmark in click's context.


OFFLINE_HELP = "Fetch nothing: published models are read from the cache, as with HF_HUB_OFFLINE=1."
WIDEST = 120  # Columns of a help page on a wider terminal.


class CommandPage(TyperCommand):
    """A command whose help page lists the options of each panel below its title, without a table: an option's name is
    never cut, however narrow the terminal is, and brackets stay."""

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


def command(
    app: typer.Typer, panel: str, *, shipped: Path | None = None, translate: Translate | None = None
) -> Callable[[Callable[[T], None]], Callable[[T], None]]:
    """Register a function of one config object as a command that has the function's name."""

    def register(function: Callable[[T], None]) -> Callable[[T], None]:
        (parameter,) = inspect.signature(function, eval_str=True).parameters.values()
        name, page = function.__name__.replace("_", "-"), inspect.getdoc(function) or ""
        add_command(
            app, name, parameter.annotation, function, panel=panel, help=page, shipped=shipped, translate=translate
        )
        return function

    return register


def add_command(
    app: typer.Typer,
    name: str,
    settings: type,
    function: Callable[[Any], None],
    *,
    panel: str,
    help: str,
    profiles: Path | None = None,
    shipped: Path | None = None,
    translate: Translate | None = None,
) -> None:
    """Add a command that calls a function with an object of the config class `settings`.

    `profiles` is a folder of YAML files that `--profile-name` chooses from, `shipped` a folder of files that `--config`
    finds by their names alone. `translate` is applied to `--config` files before their keys are checked.
    """

    def run(context: typer.Context, **values: Any) -> None:
        if values.pop("offline", False):
            os.environ[OFFLINE] = "1"  # Processes that are started from here heed it, too.
        try:
            made: Any = settings_of(settings, context, values)
            function(with_files(made, context, values) if issubclass(settings, BenchSettings) else made)
        except KeyboardInterrupt as error:
            raise Stopped(str(error) or "interrupted", hint="run the same command again") from None
        except EOFError as error:  # Click would print "Aborted." and nothing else.
            raise RuntimeError("a file or a connection to another process ended too early") from error

    options = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    options += [_option(leaf) for leaf in config.leaves(settings).values()]
    if issubclass(settings, BenchSettings):
        options.append(_measured_config_option(settings, shipped, translate))
    else:
        options.append(_config_option(settings, shipped, translate))
    if profiles:
        options.append(_profile_option(settings, profiles))
    if names_models(settings):
        options.append(_offline_option())
    options += [_hidden_switch(name) for name in config.switches(settings).leave]
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.settings = settings  # type: ignore[attr-defined]
    app.command(name, help=help, cls=CommandPage, rich_help_panel=panel, context_settings=_context(settings))(run)


def names_models(settings: type) -> bool:
    """Return True if a command has an option that takes a published model by its name."""
    return any(_is_model_name(leaf) for leaf in config.leaves(settings).values())


def _is_model_name(leaf: Leaf) -> bool:
    return ModelName in (leaf.plain_type, *get_args(leaf.plain_type))


def settings_of(cls: type[T], context: typer.Context, values: dict[str, Any]) -> T:
    """Build the config object of a parsed command line and the files that it names, whose values are checked already.
    Raises UserError as `config.assemble` does."""
    leaves, switches, typed = config.leaves(cls), config.switches(cls), _typed(context, values)
    given: dict[str, object] = {name: _joined(leaf, values[name]) for name, leaf in leaves.items() if name in typed}
    given |= {name: values[name] for name in switches.leave if name in typed}
    return config.assemble(cls, {**(context.default_map or {}), **config.without_switches(cls, given)})


def with_files(made: T, context: typer.Context, values: dict[str, Any]) -> T:
    """Return the options of a benchmark with the configuration files that --config named."""
    option, leave = config.switches(type(made))
    flags = frozenset(option if name in leave else name for name in _typed(context, values))
    bench = replace(made.bench, files=context.meta.get(FILES, ()), flags=flags)  # type: ignore[attr-defined]
    return replace(made, bench=bench)  # type: ignore[type-var]


def _typed(context: typer.Context, values: Iterable[str]) -> frozenset[str]:
    """Return the names of the options that were given on the command line."""
    sources = {name: context.get_parameter_source(name) for name in values}
    return frozenset(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")


def _context(settings: type) -> dict[str, Any]:
    """Accept flags by all their names: with underscores, as in --image_size, and as other programs call them."""
    own = {other: leaf.flag for leaf in config.leaves(settings).values() for other in leaf.flags}

    def normal(name: str) -> str:
        flag = name.replace("_", "-")
        return own.get(f"--{flag}", f"--{flag}")[2:]

    return {
        "token_normalize_func": normal, "help_option_names": ["-h", "--help"], "max_content_width": WIDEST,
    }  # fmt: skip


def _joined(leaf: Leaf, value: Any) -> Any:
    """Return the value of a flag. Those that hold a list or a part of one are joined, to be split at separators.

    Raises UserError for an empty name of a model, which a shell makes of a variable that is not set: a training would
    begin from random weights.
    """
    if _is_model_name(leaf) and not all(item.strip() for item in (value if leaf.is_list else [value])):
        what = leaf.name.removesuffix("s").upper() if leaf.is_positional else leaf.flag
        raise UserError(f"{what} is empty", hint="name a model; is a variable of the shell not set?")
    return leaf.separator.join(value) or () if leaf.is_list and leaf.separator else value


def _option(leaf: Leaf) -> inspect.Parameter:
    kind: Any = leaf.plain_type
    further: dict[str, Any] = {}
    names = [f"{leaf.flag}/--no-{leaf.flag[2:]}"] if kind is bool else [leaf.flag]
    help_text = f"{leaf.help} Also {', '.join(leaf.flags[1:])}." if leaf.spellings else leaf.help
    if leaf.is_list:
        # A list is one option, 128,256,512, or the option several times, and a sequence in YAML.
        item = LIST_ITEMS.get(kind.__args__[0], "NAME" if leaf.separator else "TEXT")
        kind = list[Path] if kind.__args__[0] is Path and not leaf.separator else list[str]
        further = {"metavar": f"{item},{item},..." if leaf.separator else item}
    elif kind is ModelName:
        kind, further = str, {"metavar": "PATH|NAME"}
    elif kind in (int, float):
        further = {"min": leaf.min, "max": leaf.max}
    default = inspect.Parameter.empty if leaf.required else leaf.default
    option: Any = typer.Option(
        *names, help=help_text, rich_help_panel=leaf.panel, show_default=leaf.default not in ("", ()), **further
    )
    if leaf.is_positional:
        option = typer.Argument(help=leaf.help, metavar=leaf.name.removesuffix("s").upper(), show_default=False)
    return inspect.Parameter(
        leaf.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _offline_option() -> inspect.Parameter:
    option = typer.Option("--offline", help=OFFLINE_HELP)
    return inspect.Parameter(
        "offline", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, option]
    )


def _hidden_switch(name: str) -> inspect.Parameter:
    """Returns a switch that is accepted and not listed: the help of its option names it."""
    flag = name.replace("_", "-")
    option = typer.Option(f"--{flag}/--no-{flag}", hidden=True)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[bool, option])


def _config_option(settings: type, shipped: Path | None, translate: Translate | None) -> inspect.Parameter:
    def load(context: typer.Context, path: Path | None) -> Path | None:
        if path is not None:
            found = _find(path, shipped) if shipped else path
            context.default_map = {**(context.default_map or {}), **read_defaults(found, settings, translate)}
        return path

    help_text = "YAML or JSON file of options; flags beat it."
    if shipped:
        help_text += f" gputrain contains {', '.join(_names(shipped))}."
    option = typer.Option("--config", "-c", help=help_text, is_eager=True, callback=load)
    return inspect.Parameter(
        "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, option]
    )


def _measured_config_option(
    settings: type[BenchSettings], shipped: Path | None, translate: Translate | None
) -> inspect.Parameter:
    # On Python 3.10 typer takes a bare `list[Path]` in a callback for a class, which it isn't, and raises TypeError.
    def load(context: typer.Context, paths: list[Path] | None) -> list[Path] | None:
        found = [_find(path, shipped) if shipped else path for path in paths or ()]
        context.meta[FILES] = tuple(
            MeasuredFile(path.stem, read_defaults(path, settings.measured, translate)) for path in found
        )
        return paths

    help_text = (
        "YAML or JSON file of the train command's options to measure; flags beat it. Several files are measured side "
        "by side, each with its own settings."
    )
    if shipped:
        help_text += f" gputrain contains {', '.join(_names(shipped))}."
    option = typer.Option("--config", "-c", help=help_text, is_eager=True, callback=load)
    return inspect.Parameter(
        "config", inspect.Parameter.KEYWORD_ONLY, default=[], annotation=Annotated[list[Path], option]
    )


def _names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def _find(path: Path, shipped: Path) -> Path:
    """Return the user's file, or for a name without a folder, with or without its ending, one of the shipped files."""
    if path.is_file() or path.parent != Path():
        return path
    for name in (path.name, f"{path.name}.yaml"):
        if (shipped / name).is_file():
            return shipped / name
    raise UserError(f"{path}: no such file", hint=f"gputrain contains {', '.join(_names(shipped))}")


def _profile_option(settings: type, profiles: Path) -> inspect.Parameter:
    known = _names(profiles)

    def load(context: typer.Context, name: str | None) -> str | None:
        if name is not None:
            if name not in known:
                raise UserError(f"there is no profile {name!r}", hint=f"choose one of {', '.join(known)}")
            # A value of --config beats the profile's, in whichever order the two options are given.
            context.default_map = {**read_defaults(profiles / f"{name}.yaml", settings), **(context.default_map or {})}
        return name

    option = typer.Option(
        "--profile-name", is_eager=True, callback=load, metavar="NAME",
        help=f"Set of option values ({', '.join(known)}); --config and flags beat them.",
    )  # fmt: skip
    return inspect.Parameter(
        "profile_name", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option]
    )


# zsh runs the installed script when Tab is pressed first. Typer's only registers the function for the next Tab.
CALL_IT = '[[ $zsh_eval_context[-1] == loadautofunc ]] && %(complete_func)s "$@"\n'


def complete_at_the_first_tab() -> None:
    """Let the script of --install-completion and --show-completion for zsh also complete when it is loaded."""
    scripts: dict[str, str] = getattr(_completion_shared, "_completion_scripts", {})  # Another typer may have none.
    if "zsh" in scripts and CALL_IT not in scripts["zsh"]:
        scripts["zsh"] = f"{scripts['zsh'].rstrip()}\n{CALL_IT}"
