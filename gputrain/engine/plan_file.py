"""plan.json: what a run was planned to be, what became of it, and the way back to the same plan."""

import contextlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gputrain.errors import UserError
from gputrain.hw.plan import Plan

NAME = "plan.json"


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all, also when the power fails. Raises OSError."""
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
    """`micro_batch`: items at once by phase, as they are by now; `events`: what changed on the way, and when."""

    plan: Plan
    micro_batch: dict[str, int]
    prediction: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write it whole or not at all. Raises OSError."""
        told = {
            "settings": self.plan.to_json(),
            "micro_batch": self.micro_batch,
            "prediction": self.prediction,
            "measured": self.measured,
            "events": self.events,
        }
        write_text(path, json.dumps(told, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> "PlanFile":
        """Raises UserError where there is none, or something else."""
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            micro_batch = {str(phase): int(items) for phase, items in told["micro_batch"].items()}
            plan = Plan.from_json(told["settings"])
            return cls(plan, micro_batch, dict(told["prediction"]), dict(told["measured"]), list(told["events"]))
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}", hint="--plan-file takes the plan.json of a run") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{path} is no plan of gputrain", hint="--plan-file takes the plan.json of a run") from None
