"""Rows in processes of their own: what each answers, how it fails, and that none outlives its parent."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gputrain.bench import runner
from gputrain.bench.runner import BenchReport, BenchResult, BenchRow
from gputrain.errors import UserError
from tests.tables import slow
from tests.waiting import HANG_SECONDS, has_ended, wait_until

# A child whose rows do what their name says.
PROGRAM = """
import logging, os, sys, time
from gputrain.bench import runner

def measure(settings):
    print("talk on stdout is no answer")
    print("about to", settings["do"], file=sys.stderr, flush=True)
    if settings["do"] == "answer":
        logging.getLogger("gputrain.x").warning("a warning")
        logging.getLogger("gputrain.x").warning("a warning")
        return {"pid": os.getpid(), "twice": 2 * settings["number"], "label": "renamed"}
    if settings["do"] == "refuse":
        raise runner.NotMeasured("needs another machine")
    if settings["do"] == "run out":
        import torch
        torch.empty(10**15)
    if settings["do"] == "crash":
        raise ValueError("something foolish")
    if settings["do"] == "die":
        os.kill(os.getpid(), 9)
    if settings["do"] == "hang":
        time.sleep(600)
    if settings["do"] == "say nothing":
        sys.exit(0)

if not runner.answer(measure):
    import pathlib
    rows = [runner.BenchRow("hang", {"do": "hang", "device": "cpu"})]
    list(runner.measure_rows(rows, [sys.executable, __file__], minutes=10))
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("child") / "program.py"
    path.write_text(PROGRAM)
    return path


def measured(program: Path, *doings: str, minutes: float = 1.0) -> list[BenchResult]:
    rows = [BenchRow(do, {"do": do, "number": 21, "device": "cpu"}) for do in doings]
    return list(runner.measure_rows(rows, [sys.executable, str(program)], minutes=minutes))


def test_a_row_is_a_process_that_answers_for_itself(program):
    (result,) = measured(program, "answer")
    assert result.figures["twice"] == 42
    assert result.figures["pid"] != os.getpid()
    assert result.label == "renamed"
    assert result.notes == ["a warning"]
    assert result.machine["torch"] == torch.__version__
    assert result.machine["device"]


@pytest.mark.slow
def test_a_row_that_fails_says_why_and_the_others_still_run(program):
    results = measured(program, "run out", "crash", "die", "say nothing", "refuse")
    reasons = [result.reason for result in results]
    assert reasons[0].startswith("out of memory: ")
    assert reasons[1] == "the process ended with exit code 1; its last line: ValueError: something foolish"
    killed = "the process was killed, as the system does when memory runs out; its last line: about to die"
    assert reasons[2] == killed
    assert reasons[3] == "the process ended with exit code 0; its last line: about to say nothing"
    assert reasons[4] == "needs another machine"
    assert not any(result.figures for result in results)


def test_a_row_that_hangs_is_given_up_with_its_last_line(program):
    """Where the process takes longer to start, it is given more time; this one would hang for ten minutes."""
    for minutes in (0.06, 0.12, 0.25, 0.5, 2.0):
        (result,) = measured(program, "hang", minutes=minutes)
        if "it printed nothing" not in result.reason:
            break
    assert result.reason == f"stopped after {minutes:g} minutes; its last line: about to hang"


@pytest.mark.skipif(os.name == "nt", reason="sends a signal to one process")
@pytest.mark.parametrize("name", map(slow, ("SIGKILL", "SIGINT", "SIGTERM")))
def test_a_child_ends_with_its_parent(program, name):
    """Whatever signal ends the parent, although only the parent receives it."""
    parent = subprocess.Popen([sys.executable, str(program)], stderr=subprocess.DEVNULL, start_new_session=True)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    if not children.exists():
        parent.kill()
        pytest.skip("needs /proc")
    wait_until(lambda: children.read_text(), "the child")
    (child,) = map(int, children.read_text().split())
    wait_until(lambda: "do" in Path(f"/proc/{child}/cmdline").read_text(), "the child's program")
    time.sleep(0.2)  # It may measure by then, or still start.
    parent.send_signal(getattr(signal, name))
    assert parent.wait(HANG_SECONDS) != 0
    wait_until(lambda: has_ended(child), "the end of the child")


def figures(seconds: float, **others: object) -> dict[str, object]:
    return {
        "items_per_second": 8 / seconds,
        "seconds_per_step": seconds,
        "tflops": 1.0,
        "share_of_product": 0.5,
        **others,
    }


def report() -> BenchReport:
    machine = {"device": "Card (R) 80 GB", "torch": "2.9"}
    plain = BenchResult("fp32", {"batch": 8}, figures(4.0, peak_gb=70.0), machine=machine)
    refused = BenchResult("+ TF32", {"batch": 8}, reason="needs Ampere")
    fast = BenchResult(
        "+ recompute norms", {"batch": 8}, figures(0.5, peak_gb=7.0, peak_reserved_gb=8.25), machine=machine
    )
    return BenchReport("a title", "images", "the command", [plain, refused, fast])


def test_table():
    heads, rows = report().table()
    assert heads == ["", "speed", "s/step", "TFLOPS", "of product", "peak GB", "reserved GB", "speed-up"]
    assert rows == [
        ["fp32", "2 images/s", "4", "1", "50%", "70.00", "-", "1.00"],
        ["+ TF32"],
        ["+ recompute norms", "16 images/s", "0.5", "1", "50%", "7.00", "8.25", "8.00"],
    ]


def test_files(tmp_path, monkeypatch):
    measured = report()
    monkeypatch.setattr(runner, "measure_rows", lambda *_, **__: iter(measured.results))
    empty = dataclasses.replace(measured, results=[])
    table = runner.run_rows(empty, [], [], minutes=1, folder=tmp_path, name="bench_vae")
    assert table == tmp_path / "bench_vae_card_r_80_gb.json"
    assert list(tmp_path.iterdir()) == [table]
    page = json.loads(table.read_text())
    assert page["device"] == "Card (R) 80 GB"
    assert page["command"] == "the command"
    assert page["rows"][1] == {"label": "+ TF32", "settings": {"batch": 8}, "reason": "needs Ampere"}
    assert page["rows"][2]["figures"]["peak_gb"] == 7.0


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file.*: (Not a directory|File exists)"):
        runner.open_folder(tmp_path / "file")
