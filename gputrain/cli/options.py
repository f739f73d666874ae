"""Turns a config class into a command: every field becomes an option, `--config FILE` gives defaults.

A value is checked in the same way whether a flag or a file gives it. A flag beats the file, the file beats the default.
"""

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar, get_args

import typer

from gputrain import config
from gputrain.cli.help_page import WIDEST, CommandPage, help_all_option, metavar, parameter
from gputrain.config import Leaf, ModelName
from gputrain.errors import Stopped, UserError
from gputrain.former_options import explain_former, left_out, renamed
from gputrain.kinds import Translate, read_defaults

T = TypeVar("T")


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
    shipped: Path | None = None,
    translate: Translate | None = None,
) -> None:
    """Add a command that calls a function with an object of the config class `settings`.

    `shipped` is a folder of files that `--config` finds by their names alone. `translate` is applied to `--config`
    files before their keys are checked.
    """

    def run(context: typer.Context, **values: Any) -> None:
        try:
            function(settings_of(settings, context, values))
        except KeyboardInterrupt as error:
            raise Stopped(str(error) or "interrupted", hint="run the same command again") from None
        except EOFError as error:  # Click would print "Aborted." and nothing else.
            raise RuntimeError("a file or a connection to another process ended too early") from error

    leaves = config.leaves(settings).values()
    options = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    options += [_file_key(leaf) if leaf.level == "file" else _option(leaf) for leaf in leaves]
    options.append(_config_option(settings, shipped, translate))
    if any(leaf.level != "common" for leaf in leaves):
        options.append(help_all_option())
    options += [_hidden_switch(name) for name in config.switches(settings).leave]
    options += _former_flags(settings)
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.settings = settings  # type: ignore[attr-defined]
    app.command(name, help=help, cls=CommandPage, rich_help_panel=panel, context_settings=_context(settings))(run)


def settings_of(cls: type[T], context: typer.Context, values: dict[str, Any]) -> T:
    """Build the config object of a parsed command line and the files that it names, whose values are checked already.
    Raises UserError as `config.assemble` does."""
    leaves, switches, typed = config.leaves(cls), config.switches(cls), _typed(context, values)
    given: dict[str, object] = {name: _joined(leaf, values[name]) for name, leaf in leaves.items() if name in typed}
    given |= {name: values[name] for name in switches.leave if name in typed}
    return config.assemble(cls, {**(context.default_map or {}), **config.without_switches(cls, given)})


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
    is_name = ModelName in (leaf.plain_type, *get_args(leaf.plain_type))
    if is_name and not all(item.strip() for item in (value if leaf.is_list else [value])):
        what = leaf.name.removesuffix("s").upper() if leaf.is_positional else leaf.flag
        raise UserError(f"{what} is empty", hint="name a model; is a variable of the shell not set?")
    return leaf.separator.join(value) or () if leaf.is_list and leaf.separator else value


def _option(leaf: Leaf) -> inspect.Parameter:
    kind: Any = leaf.plain_type
    limits: dict[str, Any] = {"min": leaf.min, "max": leaf.max} if kind in (int, float) else {}
    if leaf.is_list:  # A list is one option, 128,256,512, or the option several times, and a sequence in YAML.
        kind = list[Path] if get_args(kind)[0] is Path and not leaf.separator else list[str]
    elif kind is ModelName:
        kind = str
    names = [f"{leaf.flag}/--no-{leaf.flag[2:]}"] if kind is bool else [leaf.flag]
    option: Any = typer.Option(*names, help=leaf.help, rich_help_panel=leaf.panel, **limits)
    if leaf.is_positional:
        option = typer.Argument(help=leaf.help, metavar=metavar(leaf))
    default = inspect.Parameter.empty if leaf.required else leaf.default
    return parameter(leaf.name, kind, option, default)


def _file_key(leaf: Leaf) -> inspect.Parameter:
    """Return a hidden flag that says where the key belongs."""
    message = f"{leaf.name} is a key of a configuration file and no flag"
    hint = f"write `{leaf.name}: VALUE` into a file, such as more.yaml, and add --config more.yaml"
    return _refused_flag(leaf.name, leaf.plain_type is bool, message, hint)


def _former_flags(settings: type) -> list[inspect.Parameter]:
    """Return hidden flags of former options, which say what to do now."""
    known = {name: leaf for leaf in config.leaves(settings).values() for name in leaf.names}
    kind = "" if "kind" in known else getattr(settings, "kind", "")
    gone = {name: former.is_switch or isinstance(former.default, bool) for name, former in left_out(kind).items()}
    gone |= {name: now in known and known[now].plain_type is bool for name, now in renamed(kind).items()}
    told = {name: explain_former(name, kind) or ("", "") for name in gone.keys() - known}
    return [_refused_flag(name, gone[name], message, hint) for name, (message, hint) in told.items()]


def _refused_flag(name: str, is_switch: bool, message: str, hint: str) -> inspect.Parameter:
    """Return a hidden flag whose use is an error. `VALUE` in the hint stands for what was given."""

    def refuse(context: typer.Context, value: str | None) -> None:
        if _typed(context, [name]):
            raise UserError(message, hint=hint.replace("VALUE", str(value)))

    flag = "--" + name.replace("_", "-")
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if is_switch else flag, hidden=True, callback=refuse, expose_value=False
    )
    return parameter(name, bool if is_switch else str, option)


def _hidden_switch(name: str) -> inspect.Parameter:
    """Returns a switch that is accepted and not listed: the help of its option names it."""
    flag = name.replace("_", "-")
    return parameter(name, bool, typer.Option(f"--{flag}/--no-{flag}", hidden=True))


def _config_option(settings: type, shipped: Path | None, translate: Translate | None) -> inspect.Parameter:
    """Return the option that names configuration files: a later one beats an earlier one."""

    # On Python 3.10 typer takes a bare `list[Path]` in a callback for a class, which it isn't, and raises TypeError.
    def load(context: typer.Context, paths: list[Path] | None) -> list[Path] | None:
        found = [_find(path, shipped) if shipped else path for path in paths or ()]
        for path in found:
            context.default_map = {**(context.default_map or {}), **read_defaults(path, settings, translate)}
        return paths

    help_text = f"A file, or {', '.join(_names(shipped))}" if shipped else "YAML or JSON file of options"
    option = typer.Option("--config", "-c", help=help_text, is_eager=True, callback=load)
    return parameter("config", list[Path], option, default=[])


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
