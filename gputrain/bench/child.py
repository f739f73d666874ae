"""The child process that measures a row of `gputrain bench`: `python -m gputrain.bench.child KIND --row REQUEST`.

KIND is the name of the model's package. The package is imported by name, because models import the benchmarks.
"""

import importlib
import sys
from typing import Any

from gputrain.bench import runner
from gputrain.bench.runner import Settings
from gputrain.bench.step_bench import measure_bench_row


def measure_request(request: Settings) -> dict[str, Any]:
    """Returns the figures of a row."""
    return measure_bench_row(importlib.import_module(f"gputrain.{sys.argv[1]}.bench").BENCH, request)


if __name__ == "__main__":
    runner.answer(measure_request)
