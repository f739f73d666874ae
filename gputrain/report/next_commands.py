"""The commands that continue a run and use its model."""

import os
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gputrain.engine.run_folder import CONFIG
from gputrain.kinds import ModelKind, kinds
from gputrain.report.records import RunRecord


class NextCommand(NamedTuple):
    """A command to copy, and what it does."""

    purpose: str
    line: str


def next_commands(run: RunRecord) -> list[NextCommand]:
    """Returns the commands for the kind of the run; for an unknown kind, only that of TensorBoard."""
    folder = str(run.folder)
    board = _command("the curves in TensorBoard", "tensorboard", "--logdir", str(run.folder / "logs"))
    kind = kinds().get(run.kind)
    if kind is None:
        return [board]
    go_on = ["gputrain", kind.command, "--config", str(run.folder / CONFIG), "--resume-from", "auto"]
    if _is_elsewhere(run):
        go_on += ["--output-dir", folder]
    return [
        _command("continue, or train longer with a larger --num-epochs or --num-steps", *go_on),
        *model_commands(run.folder, kind, run.settings),
        _command("watch it live in a browser", "gputrain", "watch", folder),
        _command("write this report again", "gputrain", "report", folder),
        board,
    ]


def model_commands(run: Path, kind: ModelKind, settings: Mapping[str, Any]) -> list[NextCommand]:
    """Returns the commands that use the model of a run with these settings."""
    folder, named = str(run), settings.get("data_path") or "DATA"
    folders = map(str, named) if isinstance(named, list) else [str(named)]
    data = [word for one in folders for word in ("--data-path", one)]
    purpose, name, *words = kind.use
    return [
        _command("evaluate on held-out data", "gputrain", "evaluate", "--model", folder, *data),
        _command(purpose, "gputrain", name, "--model", folder, *words),
        _command("export", "gputrain", "export", "--model", folder, "--output-dir", "EXPORT"),
    ]


def _command(purpose: str, *words: str) -> NextCommand:
    return NextCommand(purpose, subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words))


def _is_elsewhere(run: RunRecord) -> bool:
    """Returns True if the configuration names another folder, as that of a copied run does."""
    written = run.settings.get("output_dir")
    try:
        return isinstance(written, str) and os.path.realpath(written) != os.path.realpath(run.folder)
    except ValueError:  # No folder can have this name.
        return True
