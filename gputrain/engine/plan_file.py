"""plan.json: the plan of a run, its changes during the run, and reading it with --plan-file."""

import contextlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gputrain.errors import UserError
from gputrain.hw.plan import Plan
from gputrain.stored import from_json

NAME = "plan.json"


def write_text(path: Path, text: str) -> None:
    """Write a file atomically, also in case of a power failure. Raises OSError."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


@dataclass
class PlanFile:
    """`micro_batch`: present micro-batch sizes by step group; `events`: changes of the plan during the run."""

    plan: Plan
    micro_batch: dict[str, int]
    prediction: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write the file atomically. Raises OSError."""
        content = {
            "settings": self.plan.to_json(),
            "micro_batch": self.micro_batch,
            "prediction": self.prediction,
            "measured": self.measured,
            "events": self.events,
        }
        write_text(path, json.dumps(content, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> "PlanFile":
        """Read a plan file. Raises UserError if it is missing or invalid."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            content["plan"] = content.pop("settings")
            found = from_json(cls, content)
            _check(found)
            return found
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}", hint="--plan-file takes the plan.json of a run") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UserError(
                f"{path} is not a plan of gputrain", hint="--plan-file takes the plan.json of a run"
            ) from None


def _check(found: PlanFile) -> None:
    """Raises ValueError if a value is one that no plan has."""
    settings = found.plan.settings
    known: dict[str, tuple[object, ...]] = {"device": ("cuda", "cpu"), "precision": ("bf16", "fp16", "fp32")}
    least = {"num_workers": 0, "prefetch_factor": 0, "micro_batch_size": 1, "accumulation_steps": 1}
    fits = [settings[name].value in values for name, values in known.items()]
    fits += [is_count(settings[name].value, low) for name, low in least.items() if name in settings]
    fits += [is_count(size, 1) for size in found.micro_batch.values()]
    if not all(fits):
        raise ValueError


def is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31
