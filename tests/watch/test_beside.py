"""--watch: a page beside a training, whose process ends with the training, and harms it in no way."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from gputrain.cli.ui import LineHandler
from gputrain.engine.run_folder import HISTORY
from gputrain.engine.schedule import Saving
from gputrain.hw.ranks import SINGLE
from gputrain.watch import server as beside
from gputrain.watch.server import watched_beside
from tests.cli.test_torchrun import options
from tests.waiting import HANG_SECONDS, has_ended, wait_until

PAGE = """
import json, os, sys
facts = [sys.argv[1:], os.getpid(), os.getsid(0), os.environ["GPUTRAIN_WATCH_PARENT"], os.environ["PYTHONSAFEPATH"]]
print("http://127.0.0.1:8765/", flush=True)
print("further words", flush=True)
open("facts.partial", "w").write(json.dumps(facts))
os.rename("facts.partial", "facts")
sys.stdin.read()
os.rename("facts", "ended")
"""


@pytest.fixture
def run(tmp_path, monkeypatch, caplog) -> Path:
    """A run folder that does not exist yet, whose page is a small program of its own."""
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(beside, "PROGRAM", (sys.executable, "-IS", "-c", PAGE))
    return tmp_path / "run"


def begin(run: Path) -> None:
    run.mkdir()
    (run / HISTORY).write_text("{}\n")


def facts() -> list:
    wait_until(Path("facts").exists, "the page")
    return json.loads(Path("facts").read_text())


def test_the_page_is_a_session_of_its_own_and_ends_with_the_training(run, caplog):
    with watched_beside(Saving(output_dir=Path("run"), watch=True, allow_control=True)):
        begin(run)
        words, process, session, *environment = facts()
        assert words == [str(run), "--wait", "--allow-control"]
        assert (session, environment) == (process, ["1", "1"])
        wait_until(lambda: "http" in caplog.text, "the address")
    wait_until(Path("ended").exists, "the end of the page")
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [
        ("INFO", "the page of the run, elsewhere after ssh -L 8765:localhost:8765 HOST: http://127.0.0.1:8765/")
    ]


def test_the_address_is_printed_with_its_token(run, monkeypatch, capsys):
    monkeypatch.setattr(beside, "PROGRAM", (sys.executable, "-IS", "-c", PAGE.replace("8765/", "8765/?token=abc")))
    monkeypatch.setattr(logging.getLogger("gputrain"), "handlers", [LineHandler(SINGLE)])
    shown = []
    with watched_beside(Saving(output_dir=run, watch=True, allow_control=True)):
        facts()
        wait_until(lambda: "the page of the run" in (shown.append(capsys.readouterr().err) or "".join(shown)), "it")
    assert "http://127.0.0.1:8765/?token=abc" in "".join(shown)


def test_no_page_is_left_of_a_training_that_fails_before_its_first_step(run, caplog):
    processes = []

    def fail() -> None:
        with watched_beside(Saving(output_dir=run, watch=True)):
            processes.append(facts()[1])
            raise ValueError("no data")

    with pytest.raises(ValueError, match="no data"):
        fail()
    wait_until(lambda: has_ended(processes[0]), "the end of the page")
    assert not Path("ended").exists()
    assert "WARNING" not in caplog.text


def test_a_killed_training_takes_its_page_along(run):
    child = os.fork()
    if not child:
        with watched_beside(Saving(output_dir=run, watch=True)):
            begin(run)
            facts()
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    wait_until(Path("ended").exists, "the end of the page")


def test_a_page_that_fails_is_one_warning(run, monkeypatch, caplog):
    for program, reason in (
        ((sys.executable, "-IS", "-c", "import sys; sys.exit('error: no port is free\\nhint: end something')"),
         "is not served (error: no port is free); the training goes on"),
        ((sys.executable, "-IS", "-c", "import os; os.kill(os.getpid(), 9)"), "is not served (SIGKILL); the training"),
        ((str(run / "python"),), "cannot be served ([Errno 2] No such file or directory"),
    ):  # fmt: skip
        caplog.clear()
        monkeypatch.setattr(beside, "PROGRAM", program)
        with watched_beside(Saving(output_dir=run, watch=True)):
            wait_until(lambda: caplog.records, "the warning")
        assert [one.levelname for one in caplog.records] == ["WARNING"]
        assert reason in caplog.text


@pytest.mark.parametrize("rank", ["", "1"])
def test_there_is_no_page_unless_asked_for_nor_beside_another_rank(run, monkeypatch, rank):
    if rank:
        ranks = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
        for name, value in {"TORCHELASTIC_RUN_ID": "none", **ranks}.items():
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(beside.subprocess, "Popen", None)
    with watched_beside(Saving(output_dir=run, watch=bool(rank))):
        pass


@pytest.mark.slow
def test_the_page_of_a_killed_training_holds_no_pipe_and_ends(photographs, tmp_path):
    """Standard output and standard error of the training go to a pipe, as with `| tee`."""
    words = options(photographs, tmp_path / "shown", **{"num-steps": 100_000})
    command = [sys.executable, "-m", "gputrain", *words, "--watch"]
    training = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said = next(line for line in training.stdout if "the page of the run" in line)
        address = said.split()[-1]
        wait_until(lambda: "shown" in title(address), "the run on the page")
        children = Path(f"/proc/{training.pid}/task/{training.pid}/children").read_text().split()
        (page,) = (int(one) for one in children if b"watch" in Path(f"/proc/{one}/cmdline").read_bytes().split(b"\0"))
    finally:
        training.kill()
    training.communicate(timeout=HANG_SECONDS)  # It reads the pipe to its end.
    assert "shown" in title(address)
    wait_until(lambda: has_ended(page), "the end of the page")


def title(address: str) -> str:
    with urllib.request.urlopen(address, timeout=HANG_SECONDS) as answer:
        return re.findall("<title>(.*?)</title>", answer.read().decode())[0]
