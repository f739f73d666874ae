"""Writes docs/options.md from the configuration: `python -m tests.cli.options_page`."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import typer

from gputrain.bench.options import BenchOptions
from gputrain.cli.app import app
from gputrain.cli.help_page import default_text, described, names
from gputrain.config import Leaf, leaves
from gputrain.kinds import kinds

PAGE = Path(__file__).parents[2] / "docs" / "options.md"
HEAD = """# Options

Look up an option here: each stands once, with the commands that have it. `--name` is a flag, and the key `name` of the
YAML or JSON file that `--config` takes: `--image-size 512` is `image_size: 512`. What is written `name:` is a key of a
file only. A flag beats the file, of several files the last one, and the file the default. Flags may be spelt with
underscores too, and a flag `--[no-]name` is switched off by `--no-name`. `--help` shows the common options of a
command, `--help-all` all.

`--config` finds files of the package by their names: `standard`, `ultra`, `high`, `fast` and `draft` of `train-vae`,
`vits_rtx4090` of `train-tts`, and `tiny` and openvpi's `base_hifi_gpu` and `base_hifi_rtx5090_optimized` of
`train-vocoder`, which also reads openvpi's own keys ([vocoder_keys.md](vocoder_keys.md)), as `train-tts` reads those of
Coqui ([coqui_keys.md](coqui_keys.md)). The configuration in a run folder names its kind of model in the key `kind`.

`--mixed-precision`, `--use-bf16` and `--enable-tf32`, each with a `--no-` form, set `--precision`
([precision.md](precision.md)). `bench train-NAME` has the options of `train-NAME` and its own.

<!-- Written by `make docs` from the configuration; a test fails if it is stale. -->
"""
TABLE = "\n| option | default | of | what it is |\n|---|---|---|---|\n"


def page() -> str:
    found = commands(app)
    training = {kind.name: leaves(kind.train) for kind in kinds().values()}
    parts = [HEAD, "\n## Training\n", "\n`plan train-NAME` has these options, too.\n", *by_panel(training)]
    plans = {kind.name: _others(leaves(kind.plan), leaves(kind.train)) for kind in kinds().values()}
    parts += ["\n## plan train-NAME\n", *by_panel(plans)]
    parts += ["\n## bench train-NAME\n", *by_panel({"all": leaves(BenchOptions)})]
    further = {name: leaves(settings) for name, settings in found.items() if "train-" not in name}
    return "".join([*parts, "\n## Other commands\n", *by_panel(further)])


def commands(of: typer.Typer, prefix: str = "") -> dict[str, type]:
    """Return the config class of every command by its name; a group's name comes first: `bench train-vae`."""
    found = {f"{prefix}{command.name}": vars(command.callback)["settings"] for command in of.registered_commands}
    for group in of.registered_groups:
        if group.typer_instance:
            found |= commands(group.typer_instance, f"{prefix}{group.name} ")
    return found


def _others(own: Mapping[str, Leaf], known: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """Return the options that are not among the known ones, or are declared otherwise."""
    return {name: leaf for name, leaf in own.items() if leaf != known.get(name)}


def by_panel(options: Mapping[str, Mapping[str, Leaf]]) -> Iterable[str]:
    """Yield a table for each panel, with one row for an option that several commands have alike. `options` are those of
    each command."""
    panels: dict[str, dict[tuple[str, ...], dict[str, Leaf]]] = {}
    for command, known in options.items():
        for leaf in known.values():
            alike = (leaf.name, described(leaf, with_default=False))
            panels.setdefault(leaf.panel, {}).setdefault(alike, {})[command] = leaf
    for panel, rows in panels.items():
        listed = sorted(rows.values(), key=lambda leaf_of: next(iter(leaf_of.values())).name)
        yield f"\n### {panel}\n{TABLE}" + "".join(row(leaf_of, all_of=options) for leaf_of in listed)


def row(leaf_of: Mapping[str, Leaf], all_of: Iterable[str]) -> str:
    """Return the row of an option that some of the commands have, each perhaps with another default."""
    leaf = next(iter(leaf_of.values()))
    commands_of: dict[str, list[str]] = {}
    for command, own in leaf_of.items():
        commands_of.setdefault(f"`{default_text(own)}`" if default_text(own) else "", []).append(command)
    several = len(commands_of) > 1
    defaults = "; ".join(
        f"{shown or 'none'} ({', '.join(of)})" if several else shown for shown, of in commands_of.items()
    )
    of = "all" if set(leaf_of) == set(all_of) else ", ".join(leaf_of)
    text = described(leaf, with_default=False).replace("|", r"\|")
    return f"| `{names(leaf)}` | {'required' if leaf.required else defaults} | {of} | {text} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
