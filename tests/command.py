"""The command line as a user types it: in a process of its own, or within the tests' process, which is quicker.

Whatever it is run for, its hints are checked: their options and commands exist (tests/hints.py)."""

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from itertools import pairwise
from typing import Any
from unittest import mock

from gputrain.cli.app import main
from tests.hints import check_printed
from tests.process import process_kept

Done = subprocess.CompletedProcess[str]


class ProgressSeen(list[tuple[float, int]]):
    """The progress that a command reports: pass it as `progress`."""

    def __call__(self, done: float, total: int) -> None:
        self.append((done, total))

    def leads_to(self, total: int) -> bool:
        """It begins with nothing done, advances with each report, and ends with everything done."""
        done = [one for one, _ in self]
        advances = all(one < other for one, other in pairwise(done))
        return {of for _, of in self} == {total} and (done[0], done[-1]) == (0, total) and advances


def gputrain(*words: object, **options: Any) -> Done:
    command = [sys.executable, "-m", "gputrain", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    check_printed(command[3:], done.stdout, done.stderr)
    return done


def gputrain_here(*words: object) -> Done:
    """The same without a process: modules that the tests have imported and patched are as they are."""
    command = ["gputrain", *map(str, words)]
    out, err = io.StringIO(), io.StringIO()
    code: object = None
    try:
        with process_kept(), redirect_stdout(out), redirect_stderr(err), mock.patch.object(sys, "argv", command):
            main()
    except SystemExit as ended:
        code = ended.code
    assert isinstance(code, int), code
    assert "Traceback" not in err.getvalue()
    check_printed(command[1:], out.getvalue(), err.getvalue())
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())
