"""Keeps memory models in the folder of caches: what a plan needs for any card, found by a step on shapes.

What cannot be read is predicted again. The key has all that a prediction depends on:
settings, sizes of the data, the switches of the plan, the machine's processor, versions, and the program's own sources.
"""

import contextlib
import functools
import gzip
import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch

import gputrain
from gputrain import caches
from gputrain.planner.memory.fit import MemoryModel
from gputrain.planner.time.roofline import KernelCost, StepCost

FILES = 200  # The newest are kept; each has 0.1 to 0.5 MB.


def kept_model(key: object, predict: Callable[[], MemoryModel]) -> MemoryModel:
    """Returns the memory model that is kept for a key, or the predicted one, which is kept from now on."""
    text = repr((key, _surroundings(), sources_digest()))
    path = caches.plan_folder() / f"{hashlib.sha256(text.encode()).hexdigest()}.json.gz"
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
    with gzip.open(path, "rt", encoding="utf-8") as file:  # It has a checksum.
        name, fixed, item, item_flops, kept = json.load(file)
    if name != path.name:  # The file may be a copy of another.
        raise ValueError
    cost = None
    if kept:
        one, many, update = (tuple(KernelCost(*row) for row in rows) for rows in kept["kernels"])
        cost = StepCost(one, many, kept["items"], update, kept["first"])
    return MemoryModel(fixed, item, item_flops, cost)


def _write(path: Path, model: MemoryModel) -> None:
    kept, cost = None, model.cost
    if cost:
        columns = [field.name for field in fields(KernelCost)]
        rows = [
            [[getattr(kernel, name) for name in columns] for kernel in kernels]
            for kernels in (cost.one, cost.many, cost.update)
        ]
        kept = {"kernels": rows, "items": cost.items, "first": cost.first}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        with gzip.open(partial, "xt", compresslevel=1, encoding="utf-8") as file:
            json.dump([path.name, model.fixed, model.item, model.item_flops, kept], file)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    newest_first = sorted(path.parent.iterdir(), key=lambda one: one.stat().st_mtime, reverse=True)
    for old in newest_first[FILES:]:
        old.unlink(missing_ok=True)
