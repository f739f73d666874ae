"""Checkpoints that cannot be lost: written aside, synced and renamed; verified when read; the one before kept.

A run folder holds

    checkpoint_last.pt      the newest
    checkpoint_previous.pt  the one before it
    checkpoint_best.pt      the one with the best score on held-out data
    checkpoint_epoch_25.pt  kept every checkpoint_freq epochs
    checkpoint_step_800.pt  kept every checkpoint_steps steps

All but the first two are names (hard links, where the file system has them) of what was saved as checkpoint_last.pt.
"""

import contextlib
import logging
import os
import pickle
import re
import shutil
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gputrain.errors import UserError

log = logging.getLogger(__name__)

FORMAT = 1
LAST, PREVIOUS, BEST = "checkpoint_last.pt", "checkpoint_previous.pt", "checkpoint_best.pt"
KEPT_NAME = re.compile(r"checkpoint_(epoch|step)_(\d+)\.pt")
Content = dict[str, Any]
# What torch.load raises when it takes damaged bytes for instructions, names and sizes.
UNREADABLE = (OSError, EOFError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError)


class Damaged(UserError):
    """A checkpoint that was whole once; another one may serve."""


class SaveFailed(Exception):
    """The disk did not take a checkpoint. Those saved before are whole."""


def save(folder: Path, content: Content) -> Path:
    """Write `content` as checkpoint_last.pt, so that at every moment a whole checkpoint is on the disk.

    Raises SaveFailed if it cannot be written; the folder is then as it was.
    """
    last, partial = folder / LAST, folder / (LAST + ".partial")
    try:
        # torch reports a full disk as a RuntimeError of its writer.
        with partial.open("wb") as file:
            torch.save({"format": FORMAT, **content}, file)
            file.flush()
            os.fsync(file.fileno())
        if last.exists():
            os.replace(last, folder / PREVIOUS)
        os.replace(partial, last)
        _sync_folder(folder)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise SaveFailed(f"{last}: cannot be written: {_reason(error, folder)}") from None
    return last


def keep(folder: Path, name: str) -> None:
    """Give the checkpoint that was just saved a further name, which later saves leave alone."""
    source, target = folder / LAST, folder / name
    partial = target.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    try:
        os.link(source, partial)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, partial)
    os.replace(partial, target)


def prune(folder: Path, newest: int, is_permanent: Callable[[int], bool] = lambda step: False) -> None:
    """Delete all but the `newest` checkpoint_epoch_*.pt, and all but the `newest` checkpoint_step_*.pt and those of
    steps that are permanent. 0 keeps all."""
    kept: dict[str, list[tuple[int, Path]]] = {"epoch": [], "step": []}
    for path in folder.iterdir():
        if (named := KEPT_NAME.fullmatch(path.name)) and not (named[1] == "step" and is_permanent(int(named[2]))):
            kept[named[1]].append((int(named[2]), path))
    for numbered in kept.values():
        for _, path in sorted(numbered)[:-newest] if newest else []:
            path.unlink(missing_ok=True)


def find(resume_from: str, folder: Path, kind: str) -> tuple[Path, Content] | None:
    """The checkpoint that `--resume-from` names: a file, a run folder, or `auto`, which may find nothing in `folder`.

    A damaged one is replaced by checkpoint_previous.pt beside it, with a warning.
    """
    named = folder if resume_from == "auto" else Path(resume_from)
    choices = [named / LAST, named / PREVIOUS] if named.is_dir() else [named, named.parent / PREVIOUS]
    present = [path for path in choices if path.exists()]
    if not present and resume_from == "auto":
        return None
    if not choices[0].exists() and not named.is_dir():
        raise UserError(f"{named}: no such checkpoint", hint=_nearby(named))
    if not present:
        raise UserError(f"{named}: holds no checkpoint", hint="name a run folder, or a checkpoint in it")
    for path, fallback in pairwise(present):
        try:
            return path, read(path, kind)
        except Damaged as error:
            log.warning("%s; going on from %s instead", error.message, fallback.name)
    return present[-1], read(present[-1], kind)


def read(path: Path, kind: str) -> Content:
    """The content of a checkpoint of a `kind` of model, on the CPU, verified.

    Raises Damaged if it is truncated or has changed, UserError if it is missing or something else.
    """
    try:
        # torch.load reads past changed bytes, the archive's own checksums don't.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip() is not None
    except FileNotFoundError:
        raise UserError(f"{path}: no such checkpoint", hint=_nearby(path)) from None
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError, struct.error):
        damaged = True
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if damaged:
        raise Damaged(f"{path}: truncated or damaged", hint=_nearby(path))
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError):
        content = None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path}: not a checkpoint that this version of gputrain has written", hint=_nearby(path))
    if content["kind"] != kind:
        raise UserError(f"{path}: holds a model of kind {content['kind']!r}, expected {kind!r}")
    return content


def read_foreign(path: Path, *, instead: str, plain: Mapping[str, type] | None = None) -> dict[Any, Any]:
    """What another program has saved with torch, a mapping, on the CPU.

    Raises UserError if it is damaged, is no mapping, or would have to run code to be read; `instead` says what to take.
    `plain` are further things it may hold: by the full name there, what is made in its place.
    """
    try:
        with torch.serialization.safe_globals([(made, name) for name, made in (plain or {}).items()]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(
            f"{path}: holds more than tensors, or is no file of torch's; reading it could run code from it",
            hint=instead,
        ) from None
    except UNREADABLE as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: truncated or damaged: {reason}", hint="copy or download it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no tensors by name", hint=instead)
    return content


def load_modules(modules: dict[str, nn.Module], states: dict[str, Content]) -> None:
    """Load a checkpoint's weights. Raises UserError, naming what differs, if they belong to other modules."""
    for name, module in modules.items():
        mine, theirs = module.state_dict(), states.get(name)
        if theirs is None:
            raise UserError(
                f"the checkpoint holds no {name}", hint="resume with the losses and averaging that it was trained with"
            )
        odd = list(mine.keys() ^ theirs.keys())
        odd += [key for key in mine.keys() & theirs.keys() if mine[key].shape != theirs[key].shape]
        if odd:
            raise UserError(
                f"the checkpoint's {name} has another architecture: {len(odd)} tensors differ, such as {min(odd)}",
                hint="resume with the preset and sizes that it was trained with; they stand in its run's config.yaml",
            )
        module.load_state_dict(theirs)


def load_optimizer(name: str, optimizer: torch.optim.Optimizer, states: dict[str, Content]) -> None:
    """Load an optimizer's state; the rates and decays are those of the present configuration, not the saved ones.

    Another algorithm has no use for what the saved one has gathered: it begins without, which a warning says.
    Raises UserError if there is no state, or that of other parameters.
    """
    if name not in states:
        raise UserError(
            f"the checkpoint holds no optimizer of the {name}", hint="resume with the losses it was trained with"
        )
    saved, groups = states[name], optimizer.state_dict()["param_groups"]
    before, now = _algorithm(saved["param_groups"]), _algorithm(groups)
    if before != now:
        log.warning(
            "the %s was trained with %s and goes on with %s: its weights are kept, and the averages of its gradients "
            "that %s had gathered are lost; the first hundred steps may be rough", name, before, now, before,
        )  # fmt: skip
        return
    if [len(group["params"]) for group in saved["param_groups"]] != [len(group["params"]) for group in groups]:
        raise UserError(f"the checkpoint's optimizer of the {name} moves other parameters")
    optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})
    # Fused and foreach optimizers pair the numbers of a parameter and its state by their places in memory, and the
    # saved state has the layout (channels_last or not) of the run that saved it.
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if value.shape == parameter.shape and value.stride() != parameter.stride():
                state[key] = torch.empty_like(parameter, requires_grad=False).copy_(value)


def _algorithm(groups: Sequence[Content]) -> str:
    return "Muon" if any("orthogonal" in group for group in groups) else "AdamW"


def _nearby(path: Path) -> str:
    folder = path.parent
    names = sorted(other.name for other in folder.glob("*.pt") if other != path) if folder.is_dir() else []
    return f"{folder} holds {', '.join(names)}" if names else f"{folder} holds no checkpoint"


def _reason(error: Exception, folder: Path) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    free_gb = shutil.disk_usage(folder).free / 1e9
    return f"the disk did not take it ({free_gb:.1f} GB are free)"


def _sync_folder(folder: Path) -> None:
    """Make the renames themselves durable, where a folder can be opened (not on Windows)."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
