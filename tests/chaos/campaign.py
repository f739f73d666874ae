"""Disturbs tiny trainings at random moments, resumes them until they have finished, and compares them with undisturbed
ones."""

import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.disturb import RESUMABLE, Disturbance, damage
from tests.chaos.tiny import TinyRun, differences, finish, make_data, words

STEPS = 30
SAVED = re.compile(r"after step (\d+); everything is saved|stopped at once")


@dataclass
class Campaign:
    """Disturbs runs of one kind below `folder`; `seed` decides about every moment, as far as the machine obeys."""

    kind: str
    folder: Path
    seed: int
    steps: int = STEPS
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    compared: int = 0
    seconds: float = 0.0  # An undisturbed run takes so long after its first line.
    _damaged: str = ""  # What has been done to the newest checkpoint since the last attempt.

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.kind} {self.seed}")
        self.data = make_data(self.kind, self.folder / "data")
        self.straight, self.cut, self.log = (self.folder / name for name in ("straight", "cut", "log"))
        run = TinyRun(self._words(self.straight), self.log)
        code, said = run.wait()
        self.seconds = time.monotonic() - run.began
        if code:
            raise AssertionError(f"the undisturbed run of {self.kind} ended with {code}:\n{said}")

    def _words(self, folder: Path, workers: int = 0) -> list[str]:
        return words(self.kind, self.data, folder, self.steps, num_workers=workers)

    def run(self, disturbances: Sequence[Disturbance], *, damaged_share: float = 0.2) -> None:
        """Goes through the disturbances, one an attempt, and damages some of the checkpoints between the attempts."""
        for disturbance in disturbances:
            self._disturb(disturbance)
            if self.rng.random() < damaged_share and self.cut.exists():
                self._damaged = damage(self.cut, self.rng)
                self.outcomes["checkpoint damaged"] += bool(self._damaged)
        self._complete()

    def _disturb(self, disturbance: Disturbance) -> None:
        moment = self.rng.uniform(0, self.seconds)
        run = TinyRun(self._words(self.cut, disturbance.workers), self.log)
        disturbance.act(run, moment, self.cut, self.rng)
        code, said = run.wait()
        self._check(f"{disturbance.name} after {moment:.3f} s", code, said, disturbance.codes)
        self.outcomes[disturbance.name if code or not disturbance.codes - {0} else "finished before"] += 1
        if code == 0:
            self._compare()

    def _check(self, what: str, code: int, said: str, codes: frozenset[int]) -> None:
        if code not in codes:
            self._blame(f"{what}: exit code {code}", said)
        # Before its first step and after its last one, a run has nothing to save.
        early = "step " not in said or f"step {self.steps}/" in said
        if code == RESUMABLE and not SAVED.search(said) and not early:
            self._blame(f"{what}: 75 without saying what is saved", said)
        if "Traceback" in said:
            self._blame(f"{what}: a traceback", said)
        if self._damaged and "truncated or damaged" not in said and "step " in said:
            self._blame(f"{self._damaged}: it was not noticed", said)
        if "step " in said or code == 0:
            self._damaged = ""

    def _blame(self, fault: str, said: str) -> None:
        self.faults.append(f"{self.kind}, seed {self.seed}: {fault}\n{said[-2000:]}")

    def _complete(self) -> None:
        """Resumes until the run has finished, and compares it."""
        if self.cut.exists():
            code, said = finish(self._words(self.cut), self.log)
            self._check("the last attempt", code, said, frozenset({0}))
            self._compare()

    def _compare(self) -> None:
        self.compared += 1
        found = differences(self.cut, self.straight)
        if found:
            self._blame(f"differences: {found}", "")
        shutil.rmtree(self.cut)

    def report(self) -> str:
        counts = ", ".join(f"{count} x {name}" for name, count in sorted(self.outcomes.items()))
        return f"{self.kind}: {counts}; {self.compared} runs compared; {len(self.faults)} faults"
