"""Writes a report of runs, on request and at the end of a run."""

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from gputrain.engine.history import history_size
from gputrain.engine.run_folder import write_text
from gputrain.engine.schedule import Saving
from gputrain.engine.stop import COMMAND_CLOCK, EXIT_SECONDS, parse_duration
from gputrain.errors import UserError, first_line
from gputrain.hw.ranks import Ranks
from gputrain.report.media import MediaBudget
from gputrain.report.page import make_page, unique_names
from gputrain.report.records import read_run

log = logging.getLogger(__name__)

REPORT = "report.html"
MEDIA_SECONDS = 30.0  # Time to read pictures and sounds for a report that a user asks for.
END_SECONDS = 4.0  # The same at the end of a run.
LEAST_SECONDS = 1.5  # With less time before the limit of --max-time, no report is written.


def write_report(runs: Sequence[Path], path: Path, seconds: float = MEDIA_SECONDS) -> int:
    """Write the report of runs as one HTML file. `seconds` limit the time for pictures and sounds. Returns the
    size of the file in bytes.

    Raises UserError if a folder holds no run, or if the file cannot be written.
    """
    records = [read_run(run, name) for run, name in zip(runs, unique_names(runs), strict=True)]
    page = make_page(records, MediaBudget.of(seconds))
    # Names of files may contain bytes that are no UTF-8.
    page = page.encode("utf-8", "replace").decode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, page)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}", hint="--output-file takes a file to write") from None
    return len(page.encode())


@contextlib.contextmanager
def report_at_end(saving: Saving) -> Iterator[None]:
    """Write report.html into the run folder when the block has trained, however it ends.

    An error of the report causes a warning, and nothing else: the outcome of the run stays as it is.
    """
    before = history_size(saving.output_dir)
    try:
        yield
    finally:
        if saving.report and Ranks.launched(os.environ).leads and history_size(saving.output_dir) > before:
            _write_at_end(saving)


def _write_at_end(saving: Saving) -> None:
    seconds = END_SECONDS
    if saving.max_time and COMMAND_CLOCK.began is not None:
        left = parse_duration(saving.max_time) - (time.monotonic() - COMMAND_CLOCK.began) - EXIT_SECONDS / 2
        if left < LEAST_SECONDS:
            log.info("there is no time for a report before the limit: gputrain report %s writes it", saving.output_dir)
            return
        seconds = min(seconds, left - LEAST_SECONDS / 2)
    try:
        write_report([saving.output_dir], saving.output_dir / REPORT, seconds)
    except KeyboardInterrupt:
        log.warning("interrupted: %s is not written", REPORT)
    except Exception as error:  # Whatever it is, the training is complete.
        log.warning("%s is not written: %s", REPORT, first_line(error))
