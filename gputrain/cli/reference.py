"""Writes docs/options.md from the configuration: `python -m gputrain.cli.reference`."""

from pathlib import Path

import typer

from gputrain.cli.app import app
from gputrain.cli.options import OFFLINE_HELP, names_models
from gputrain.config import Leaf, describe, leaves

PAGE = Path(__file__).parents[2] / "docs" / "options.md"
HEAD = """# Options

Every option is also a key of the YAML or JSON file that `--config` takes, with underscores for hyphens:
`--image-size 512` is `image_size: 512`. A flag beats the file, the file beats the default. Flags may be spelt with
underscores too. `--profile-name` of `train-vae` takes the values of a file of the package (ultra, high, standard, fast,
draft), which `--config` and flags beat. `train-vocoder` and `plan train-vocoder` read openvpi's files too, and find
base_hifi_gpu.yaml and base_hifi_rtx5090_optimized.yaml by name ([vocoder_keys.md](vocoder_keys.md)).

`--mixed-precision`, `--use-bf16` and `--enable-tf32`, each with a `--no-` form, set `--precision`
([precision.md](precision.md)).

The configuration in a run folder names its kind of model in the key `kind`.

<!-- Written by `make docs` from the configuration; a test fails if it is stale. -->
"""


def page() -> str:
    return HEAD + "".join(section(name, settings) for name, settings in commands(app).items())


def commands(of: typer.Typer, prefix: str = "") -> dict[str, type]:
    """Return the config class of every command by its name; a group's name comes first: `bench train-vae`."""
    found = {f"{prefix}{command.name}": vars(command.callback)["settings"] for command in of.registered_commands}
    for group in of.registered_groups:
        if group.typer_instance:
            found |= commands(group.typer_instance, f"{prefix}{group.name} ")
    return found


def section(name: str, settings: type) -> str:
    rows = "".join(row(leaf) for leaf in leaves(settings).values())
    if names_models(settings):
        rows += f"| `--offline` | `false` | true or false | {OFFLINE_HELP} |\n"
    return f"\n## gputrain {name}\n\n| option | default | takes | what it does |\n|---|---|---|---|\n{rows}"


def row(leaf: Leaf) -> str:
    kind = leaf.plain_type
    if leaf.is_positional:
        return f"| `{leaf.name.upper()}` | {default(leaf)} | {describe(kind)} | {leaf.help} |\n"
    flag = f"{leaf.flag}` / `--no-{leaf.flag[2:]}" if kind is bool else "`, `".join(leaf.flags)
    return f"| `{flag}` | {default(leaf)} | {describe(kind)}{limits(leaf)} | {leaf.help} |\n"


def default(leaf: Leaf) -> str:
    if leaf.required:
        return "required"
    if leaf.default is None:
        return "auto" if leaf.plain_type is bool else "none"
    if leaf.default in ("", ()):
        return "none"
    return f"`{str(leaf.default).lower() if isinstance(leaf.default, bool) else leaf.default}`"


def limits(leaf: Leaf) -> str:
    if leaf.min is not None and leaf.max is not None:
        return f", {leaf.min:g} to {leaf.max:g}"
    return f", at least {leaf.min:g}" if leaf.min is not None else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
