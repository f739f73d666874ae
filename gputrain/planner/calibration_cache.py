"""Calibration probes of a training on this machine, in a file of the user's cache folder."""

import functools
import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gputrain import __version__
from gputrain.engine.plan_file import write_text
from gputrain.hw.plan import Plan
from gputrain.hw.probe import Machine
from gputrain.hw.runtime import cache_folder
from gputrain.stored import from_json

log = logging.getLogger(__name__)

SWITCHES = ("device", "precision", "compile", "tf32", "channels_last", "cudnn_benchmark", "expandable_segments")


@dataclass(frozen=True)
class CalibrationProbe:
    """The measured peak of a micro-batch over all step groups."""

    items: int
    checkpointing: bool
    allocated_gb: float
    reserved_gb: float  # Memory that the allocator held.
    budget_gb: float  # Memory that the process was limited to.
    fits: bool  # True if it fitted without the allocator having to release cached memory and to try again.

    def applies_to(self, budget_gb: float) -> bool:
        """Returns True if the result is the same under another budget."""
        return self.reserved_gb <= budget_gb if self.fits else budget_gb <= self.budget_gb


@dataclass(frozen=True)
class CalibrationCache:
    key: dict[str, Any]  # Everything that the memory of a step depends on.
    folder: Path

    @classmethod
    def of(cls, machine: Machine, plan: Plan, memory_key: dict[str, Any]) -> "CalibrationCache":
        """Returns the cache for the settings of a model in `memory_key`, in values that JSON has.

        The budget is not part of the key, because a probe knows to which budgets it applies.
        """
        key = {
            "gpu": machine.gpu or "cpu", "memory_gb": round(machine.gpu_memory_gb, 1),
            "driver": machine.driver.version, "torch": machine.torch, "gputrain": __version__,
            "plan": {name: getattr(plan, name).value for name in SWITCHES}, **memory_key,
        }  # fmt: skip
        return cls(json.loads(json.dumps(key)), cache_folder() / "calibration")

    @functools.cached_property
    def path(self) -> Path:
        text = json.dumps(self.key, sort_keys=True)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"

    def load(self) -> list[CalibrationProbe]:
        """Returns the stored probes; none if there is no file or a damaged one."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            return from_json(list[CalibrationProbe], content["probes"]) if content["key"] == self.key else []
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def save(self, probes: Sequence[CalibrationProbe]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            content = {"key": self.key, "probes": [vars(probe) for probe in probes]}
            write_text(self.path, json.dumps(content, indent=2))
        except OSError as error:
            log.warning("%s cannot be written (%s): the next run will measure again", self.path, error.strerror)
