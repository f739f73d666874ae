"""From a config class to a command: every knob becomes an option, `--config FILE` a set of defaults.

A value has the same way whether it comes from a flag or a file: a flag beats the file, the file beats the default.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from gputrain import config
from gputrain.config import Leaf
from gputrain.errors import Stopped, UserError

T = TypeVar("T")

# The older spelling of the user's scripts, --image_size, is the same flag.
CONTEXT = {"token_normalize_func": lambda flag: flag.replace("_", "-"), "help_option_names": ["-h", "--help"]}


def command(
    app: typer.Typer, panel: str, name: str = "", profiles: Path | None = None
) -> Callable[[Callable[[T], None]], Callable[[T], None]]:
    """Register a function of one config object as a command, named like the function if not otherwise.

    `profiles` is a folder of YAML files that `--profile-name` chooses from.
    """

    def register(function: Callable[[T], None]) -> Callable[[T], None]:
        (parameter,) = inspect.signature(function, eval_str=True).parameters.values()
        settings = parameter.annotation

        def run(**values: Any) -> None:
            values.pop("config")
            values.pop("profile_name", None)
            given = {name: _joined(value) for name, value in values.items() if value is not None}
            try:
                function(config.assemble(settings, given))
            except KeyboardInterrupt:
                raise Stopped("interrupted", hint="run the same command again to go on") from None

        options = [_option(leaf) for leaf in config.leaves(settings).values()]
        options.append(_config_option(settings))
        if profiles:
            options.append(_profile_option(settings, profiles))
        run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        run.settings = settings  # type: ignore[attr-defined]
        run.__doc__ = function.__doc__
        called = name or function.__name__.replace("_", "-")
        app.command(called, rich_help_panel=panel, context_settings=CONTEXT)(run)
        return function

    return register


def _joined(value: Any) -> Any:
    """The parts of a list, each with commas or without, as one text; () where there are none."""
    return (",".join(value) or ()) if isinstance(value, (list, tuple)) else value


def _option(leaf: Leaf) -> inspect.Parameter:
    kind: Any = leaf.plain_type
    further: dict[str, Any] = {}
    names = [f"{leaf.flag}/--no-{leaf.flag[2:]}"] if kind is bool else [leaf.flag]
    if getattr(kind, "__origin__", None) is tuple:
        # A list is one option, 128,256,512, or the option several times, and a sequence in YAML.
        item = "N" if kind.__args__[0] in (int, float) else kind.__args__[0].__name__.upper()
        kind, further = list[str], {"metavar": f"{item},{item},..."}
    elif kind in (int, float):
        further = {"min": leaf.min, "max": leaf.max}
    default = inspect.Parameter.empty if leaf.required else leaf.default
    option = typer.Option(
        *names, help=leaf.help, rich_help_panel=leaf.panel, show_default=leaf.default not in ("", ()), **further
    )
    return inspect.Parameter(
        leaf.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _config_option(settings: type) -> inspect.Parameter:
    def load(context: typer.Context, path: Path | None) -> Path | None:
        if path is not None:
            context.default_map = {**(context.default_map or {}), **read_defaults(path, settings)}
        return path

    option = typer.Option(
        "--config", "-c", help="YAML or JSON file of options; flags beat it.", is_eager=True, callback=load
    )
    return inspect.Parameter(
        "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, option]
    )


def _profile_option(settings: type, profiles: Path) -> inspect.Parameter:
    known = sorted(path.stem for path in profiles.glob("*.yaml"))

    def load(context: typer.Context, name: str | None) -> str | None:
        if name is not None:
            if name not in known:
                raise UserError(f"there is no profile {name!r}", hint=f"choose one of {', '.join(known)}")
            # Whichever option stands first: a value of --config beats the profile's.
            context.default_map = {**read_defaults(profiles / f"{name}.yaml", settings), **(context.default_map or {})}
        return name

    option = typer.Option(
        "--profile-name", is_eager=True, callback=load, metavar="NAME",
        help=f"Ready-made options ({', '.join(known)}); --config and flags beat them.",
    )  # fmt: skip
    return inspect.Parameter(
        "profile_name", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option]
    )


def read_defaults(path: Path, settings: type) -> dict[str, Any]:
    """The values of a file, checked one by one, as defaults for the options of `settings`."""
    known = config.leaves(settings)
    values: dict[str, Any] = {}
    for key, value in config.read_file(path).items():
        if key not in known:
            raise config.unknown_key(key, known, f"{path}: ")
        values[key] = config.convert(known[key], value, f"{path}: ")
    return values
