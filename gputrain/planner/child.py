"""The child process that measures a model: `python -m gputrain.planner.child KIND --row REQUEST`.

It serves calibration and the rows of `gputrain bench`. KIND is the name of the model's package. The package is imported
by name, because models import the planner.
"""

import importlib
import sys
from functools import partial
from typing import Any

from gputrain.bench import runner
from gputrain.bench.runner import Settings
from gputrain.bench.step_bench import measure_bench_row
from gputrain.planner.calibrate import measure_sizes


def measure_request(kind: str, request: Settings) -> dict[str, Any]:
    """Returns the figures of a request: probes of micro-batches if it has sizes, otherwise those of a benchmark row."""
    if "sizes" in request:
        target = importlib.import_module(f"gputrain.{kind}.plan").child_target(request)
        return measure_sizes(target, request)
    return measure_bench_row(importlib.import_module(f"gputrain.{kind}.bench").BENCH, request)


if __name__ == "__main__":
    runner.answer(partial(measure_request, sys.argv[1]))
