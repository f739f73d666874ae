"""What the suite promises about itself: no test depends on those before it, or on how its process was started."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import HANG_SECONDS

ROOT = Path(__file__).parents[1]

TESTS = """
import logging
import os
import signal
import subprocess
import sys

import gputrain.cli.ui as ui

log = logging.getLogger("gputrain")


def test_a_command_line_that_fails():
    def program():
        os.environ["GPUTRAIN_LEFT"] = "behind"
        del os.environ["GPUTRAIN_GIVEN"]
        raise ValueError("of ours")

    ui.run(program)


def test_what_is_found_afterwards(caplog):
    logging.getLogger("gputrain.engine").warning("a warning")
    assert caplog.messages == ["a warning"]
    assert (log.propagate, log.level) == (True, logging.NOTSET)
    assert not any(isinstance(handler, ui.LineHandler) for handler in log.handlers)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert "GPUTRAIN_LEFT" not in os.environ
    assert os.environ["GPUTRAIN_GIVEN"] == "1"


def test_a_process_is_started_that_heeds_signals():
    program = "import os, signal; os.kill(os.getpid(), signal.SIGHUP)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGHUP
    program = "import os, signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).stdout == b"True\\n"
"""


def ignore_signals() -> None:
    """What nohup and a script that starts a process in the background do."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals that are inherited")
def test_a_test_that_fails_within_a_command_line_changes_nothing_for_others(tmp_path):
    (tmp_path / "test_two.py").write_text(TESTS)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.conftest", "-rA", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env={**environment, "GPUTRAIN_GIVEN": "1"}, capture_output=True, text=True,
        timeout=HANG_SECONDS, preexec_fn=ignore_signals,
    )  # fmt: skip
    outcomes = re.findall(r"^(PASSED|FAILED|ERROR) \S+::(\w+)", done.stdout, re.MULTILINE)
    assert sorted(outcomes) == [
        ("FAILED", "test_a_command_line_that_fails"),
        ("PASSED", "test_a_process_is_started_that_heeds_signals"),
        ("PASSED", "test_what_is_found_afterwards"),
    ], done.stdout
