"""The page of a run beside its training: --watch of the train commands.

It is served by a process of its own, in a session of its own, so that a Ctrl-C in the terminal only reaches the
training. Its standard input is a pipe that closes when the training ends, however that comes about: then it ends, too.
"""

import contextlib
import logging
import os
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator

from gputrain.engine.history import history_size
from gputrain.engine.schedule import Saving
from gputrain.hw.child_process import describe_exit, package_environment
from gputrain.hw.ranks import Ranks
from gputrain.watch.options import PARENT

log = logging.getLogger(__name__)

PROGRAM = (sys.executable, "-m", "gputrain", "watch")


@contextlib.contextmanager
def watched_beside(saving: Saving) -> Iterator[None]:
    """With --watch, serve the page of a run while the block trains, and for some seconds after it, in which open pages
    get the last state. The training waits for nothing of it, and an error of the page is a warning."""
    left, before = threading.Event(), history_size(saving.output_dir)
    page = _start(saving, left) if saving.watch and Ranks.launched(os.environ).leads else None
    try:
        yield
    finally:
        left.set()
        if page and history_size(saving.output_dir) == before:  # It has not begun: there is nothing to show.
            page.kill()
        if page and page.stdin:
            page.stdin.close()


def _start(saving: Saving, left: threading.Event) -> "subprocess.Popen[str] | None":
    try:
        page = subprocess.Popen(
            [*PROGRAM, os.path.abspath(saving.output_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", env={**package_environment(), PARENT: "1"},
            start_new_session=True, creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        )  # fmt: skip
    except OSError as error:
        log.warning("--watch: the page of the run cannot be served (%s); the training goes on", error)
        return None
    threading.Thread(target=_forward, args=(page, left), name="watch", daemon=True).start()
    return page


def _forward(page: "subprocess.Popen[str]", left: threading.Event) -> None:
    """Log the address that the page's process prints, and a warning if it ends before the training."""
    assert page.stdout is not None
    fault = ""
    for line in page.stdout:
        if line.startswith("http"):
            port = urllib.parse.urlsplit(line).port
            log.info("the page of the run, elsewhere after ssh -L %d:localhost:%d HOST: %s", port, port, line.strip())
        fault = fault or (line.strip() if line.startswith("error") else "")
    code = page.wait()
    if not left.is_set():
        reason = fault or describe_exit(code)
        log.warning("--watch: the page of the run is not served (%s); the training goes on", reason)
