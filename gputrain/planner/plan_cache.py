"""Keeps memory models in the folder of caches: what a plan needs for any card, found by a step on shapes.

A file is read strictly, and what cannot be read is predicted again. The key has all that a prediction depends on:
settings, sizes of the data, the switches of the plan, the machine's processor, versions, and the program's own sources.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gputrain
from gputrain import caches
from gputrain.planner.memory.fit import MemoryModel
from gputrain.planner.time.roofline import KernelCost, StepCost
from gputrain.serialization import from_json, read_json

FILES = 200  # The newest are kept; each has 0.1 to 0.5 MB.
COLUMNS = [(one.name, bool if one.type is bool else float) for one in fields(KernelCost) if one.type is not str]
PARTS = ("one", "many", "update")


@dataclass(frozen=True)
class _Numbers:
    """Holds what is stored of a model besides its kernels; `items` and the rest are those of its StepCost."""

    key: str  # The name of its file, which may be a copy.
    fixed: dict[str, float]
    item: dict[str, float]
    item_flops: float
    items: int = 0  # 0: the kernels are not known.
    first: int = 1


def kept_model(key: object, predict: Callable[[], MemoryModel]) -> MemoryModel:
    """Returns the memory model that is kept for a key, or the predicted one, which is kept from now on."""
    text = repr((key, _surroundings(), sources_digest()))
    path = caches.plan_folder() / f"{hashlib.sha256(text.encode()).hexdigest()}.npz"
    with contextlib.suppress(Exception):  # What damaged files raise is not documented.
        return _read(path)
    model = predict()
    try:
        _write(path, model)
    except OSError as error:
        caches.say_once(f"{path.parent}: what was planned cannot be kept for the next start ({error.strerror})")
    return model


def _surroundings() -> tuple[str, ...]:
    """Returns the versions, and what the kernels that torch chooses for a CPU depend on."""
    installed = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions(name="transformers")}
    cpu = (platform.system(), platform.machine(), torch._C._get_cpu_capability())
    return (platform.python_version(), torch.__version__, np.__version__, repr(installed), *cpu)


@functools.cache
def sources_digest(folder: Path = Path(gputrain.__file__).parent) -> str:
    """Returns a digest of the program's own sources."""
    digest = hashlib.sha256()
    for path in sorted(path for kind in ("*.py", "*.yaml") for path in folder.rglob(kind)):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _read(path: Path) -> MemoryModel:
    with np.load(path, allow_pickle=False) as file:
        numbers = from_json(_Numbers, read_json(str(file["numbers"])))
        if numbers.key != path.stem:
            raise ValueError
        if not numbers.items:
            return MemoryModel(numbers.fixed, numbers.item, numbers.item_flops)
        one, many, update = (_kernels(file[part], file[f"{part}_names"]) for part in PARTS)
    cost = StepCost(one, many, numbers.items, update, numbers.first)
    return MemoryModel(numbers.fixed, numbers.item, numbers.item_flops, cost)


def _kernels(rows: np.ndarray, names: np.ndarray) -> tuple[KernelCost, ...]:
    if rows.dtype != np.dtype(COLUMNS) or names.dtype.kind != "U":
        raise ValueError
    return tuple(KernelCost(name, *row) for name, row in zip(names.tolist(), rows.tolist(), strict=True))


def _write(path: Path, model: MemoryModel) -> None:
    arrays: dict[str, Any] = {}
    numbers = _Numbers(path.stem, model.fixed, model.item, model.item_flops)
    if cost := model.cost:
        numbers = replace(numbers, items=cost.items, first=cost.first)
        for part in PARTS:
            kernels: tuple[KernelCost, ...] = getattr(cost, part)
            rows = [tuple(getattr(one, name) for name, _ in COLUMNS) for one in kernels]
            arrays |= {part: np.array(rows, COLUMNS), f"{part}_names": np.array([one.name for one in kernels], str)}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        with partial.open("xb") as file:
            np.savez_compressed(file, numbers=np.array(json.dumps(asdict(numbers))), **arrays)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    newest_first = sorted(path.parent.iterdir(), key=lambda one: one.stat().st_mtime, reverse=True)
    for old in newest_first[FILES:]:
        old.unlink(missing_ok=True)
