"""The child process that measures a row of `gputrain bench`: `python -m gputrain.bench.child KIND --row REQUEST`."""

import sys
from typing import Any

from gputrain.bench import runner
from gputrain.bench.runner import Settings
from gputrain.bench.step_bench import measure_bench_row
from gputrain.kinds import kinds


def measure_request(request: Settings) -> dict[str, Any]:
    """Returns the figures of a row of the kind of model that is the first argument."""
    return measure_bench_row(kinds()[sys.argv[1]], request)


if __name__ == "__main__":
    runner.answer(measure_request)
