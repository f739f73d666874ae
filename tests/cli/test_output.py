"""Output that cannot be written: full disks, pipes that nobody reads, names that change a terminal."""

import contextlib
import io
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from rich.console import Console

from gputrain.cli import ui
from gputrain.cli.ui import PipeConsole
from gputrain.hw.ranks import SINGLE
from gputrain.planner.model_planner import PredictedTime
from tests.chaos.tiny import make_data, words
from tests.command import gputrain, gputrain_here
from tests.tables import each_row, slow
from tests.waiting import HANG_SECONDS, wait_until

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


@needs_full
@pytest.mark.parametrize("line", [["--version"], ["--help"], ["normalize", "--language", "en", "--text", "one"]])
def test_a_full_disk_under_the_output_is_an_error_of_the_user(line):
    with FULL.open("w") as full:
        command = [sys.executable, "-m", "gputrain", *line]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "error: the output cannot be written: No space left on device"
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.slow
def test_messages_that_nobody_reads_do_not_end_a_training(tmp_path):
    """As `2>&1 | head -1` has it: the pipe is closed after the first line. The run goes on to its end."""
    data = make_data("vae", tmp_path / "data")
    line = [sys.executable, "-m", "gputrain", *words("vae", data, tmp_path / "run", 3)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(HANG_SECONDS) == 0
    content = torch.load(tmp_path / "run" / "checkpoint_last.pt", weights_only=True)
    assert content["progress"]["step"] == 3


@pytest.mark.parametrize("line", ["--help", "normalize --language en --text one", "plan --help"])
def test_a_reader_that_ends_is_no_error(line):
    """As `| head -0` has it: nobody reads the output."""
    process = subprocess.Popen([sys.executable, "-m", "gputrain", *line.split()], stdout=subprocess.PIPE, stderr=-1)
    assert process.stdout is not None
    process.stdout.close()
    _, said = process.communicate(timeout=HANG_SECONDS)
    assert (process.returncode, said) == (0, b"")


def test_input_without_an_end_ends_with_its_reader():
    """As `yes | gputrain normalize | head -1` has it."""
    line = [sys.executable, "-m", "gputrain", "normalize", "--language", "en"]
    process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(b"one\n" * 20_000)
        process.stdin.flush()
        assert process.stdout.readline() == b"one\n"
        process.stdout.close()
        while True:  # The reader's end becomes one of the program, and that a broken pipe.
            process.stdin.write(b"one\n" * 20_000)
    assert process.wait(HANG_SECONDS) == 0


@pytest.mark.parametrize("closed", ["closed >&-", "closed >&- 2>&-"])
def test_closed_streams_are_no_error(closed):
    line = f'exec "{sys.executable}" -m gputrain --version {closed.removeprefix("closed ")}'
    assert subprocess.run(["sh", "-c", line], timeout=HANG_SECONDS, check=False).returncode == 0


@each_row(
    ("cp1252", True, b"na\xefve \\u02bb \\ud83d\\ude00", True),
    ("cp866:replace", True, b"na?ve ? ?", False),  # What the user has chosen is obeyed.
    ("ascii", False, b"na\\u00efve \\u02bb \\ud83d\\ude00", True),
    ("utf-8", True, "naïve ʻ \U0001f600".encode(), False),
    ("", False, "naïve ʻ \U0001f600".encode(), False),  # What goes to a file is UTF-8, whatever the locale.
    ("", True, b"na\xefve \\u02bb \\ud83d\\ude00", True),
)
def test_printing_never_fails(monkeypatch, chosen, terminal, expected, warns):
    """The escapes are JSON's, so that a line of JSON has its meaning in every encoding."""
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding=chosen.partition(":")[0] or "cp1252")
    monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stdout", stream)
    escaped = ui.prepare_streams({"PYTHONIOENCODING": chosen})
    stream.write("naïve ʻ \U0001f600")
    stream.flush()
    assert (written.getvalue(), escaped.replaced) == (expected, warns)


def test_what_an_encoding_lacks_is_escaped_and_said():
    environment = {**os.environ, "PYTHONIOENCODING": "cp1252"}
    done = gputrain("normalize", "--text", "Oʻn", env=environment)
    assert (done.returncode, done.stdout) == (0, "o\\u02bbn\n")
    assert "standard output is cp1252" in done.stderr


@pytest.mark.slow
def test_a_stop_with_a_closed_pipe_still_saves(tmp_path):
    data = make_data("vocoder", tmp_path / "data")
    line = [sys.executable, "-m", "tests.chaos.tiny", *words("vocoder", data, tmp_path / "run", 10_000)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    wait_until((tmp_path / "run" / "checkpoint_last.pt").exists, "a checkpoint", lambda: process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANG_SECONDS) == ui.RESUMABLE


@each_row("x" * 300, "a/" * 3000 + "b", "file/run")
def test_a_folder_that_cannot_be_made_is_an_error_of_the_user(tmp_path, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "data").mkdir(exist_ok=True)
    done = gputrain_here("train-vae", "--data-path", tmp_path / "data", "--output-dir", tmp_path / name)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert str(tmp_path) in done.stderr


def test_names_are_printed_on_one_line():
    name = os.fsdecode(b"a\nerror: b\x1b[2J[/red]\xff.png")
    done = gputrain_here("validate", "--input-dir", f"/none/{name}")
    assert done.returncode == 2
    assert "a\\nerror: b\\x1b[2J[/red]\\udcff.png" in done.stderr
    assert ui.escape("two lines\n  of a message") == "two lines\n  of a message"


def test_an_internal_error_keeps_its_traceback():
    assert ui.describe(OSError(24, "Too many open files", "a")) is None
    assert ui.describe(OSError(36, "File name too long", "a")) == (
        "a: File name too long", "name another file or folder, or see to its disk"
    )  # fmt: skip


def test_a_check_that_is_not_passed_is_3_with_strict(tmp_path):
    """Without it, the report is all that tells."""
    Image.linear_gradient("L").save(tmp_path / "whole.png")
    line = ["validate", "--input-dir", tmp_path, "--num-workers", 1]
    assert gputrain_here(*line, "--strict").returncode == ui.DONE
    (tmp_path / "broken.png").write_bytes(b"no picture")
    assert gputrain_here(*line).returncode == ui.DONE
    done = gputrain_here(*line, "--strict")
    assert done.returncode == ui.NOT_PASSED
    assert "broken.png" in done.stdout + done.stderr


@each_row((True, True, 0), (False, True, 3), (False, False, 0))
def test_a_plan_that_does_not_fit_is_3_with_strict(monkeypatch, fits, strict, code):
    time = PredictedTime(None, 8, None, 0.0)
    plans = [
        SimpleNamespace(fit=SimpleNamespace(fits=one), to_json=dict, elsewhere=False, time=time) for one in (True, fits)
    ]
    monkeypatch.setattr("gputrain.planner.model_planner.plan_cards", lambda work, settings, doing: plans)
    words = ["--strict"] if strict else []
    assert gputrain_here("plan", "train-vae", "--gpu", "t4", "--json", *words).returncode == code


def test_a_bar_shows_the_time_that_passes_and_what_is_left(monkeypatch):
    """Work without updates moves, too, and loading before the first update is no part of the estimate."""
    now, written = [0.0], io.StringIO()
    monkeypatch.setattr(ui, "err", Console(file=written, force_terminal=True, width=80))
    bar = ui.TerminalBar("evaluating", lambda: now[0])
    for second, done in ((10, 2), (20, 4.5)):  # Two of the items had been done before; then 2.5 items in 10 s.
        now[0] = second
        bar.update(done, 10)
    now[0] = 61
    ui.err.print(bar.progress.make_tasks_table(bar.progress.tasks))
    assert "4/10" in written.getvalue()
    assert "0:01:01" in written.getvalue()
    assert bar.progress.tasks[0].time_remaining == 22  # 5.5 items


def test_without_a_terminal_a_line_tells_the_progress_every_half_minute(monkeypatch):
    now, written = [0.0], io.StringIO()
    monkeypatch.setattr(ui, "err", Console(file=written, force_terminal=False, width=80))
    with ui.TerminalBar("preparing", lambda: now[0]) as bar:
        for second in range(0, 100, 5):
            now[0] = second
            bar.update(second / 10, 20)
    assert written.getvalue().splitlines() == [
        "preparing: 3/20, 30 s, 2 min 50 s left", "preparing: 6/20, 1 min, 2 min 20 s left",
        "preparing: 9/20, 1 min 30 s, 1 min 50 s left",
    ]  # fmt: skip


def test_a_plan_says_which_card_it_plans_and_each_reason_once(monkeypatch):
    small = ["plan", "train-vae", "--preset", "fast", "--channels", "32,32", "--image-size", 32, "--batch-size", 2]
    gpus = ["--gpu", "rtx4090,2x rtx3060,p100,v100"]
    monkeypatch.setattr(ui, "LINE_SECONDS", 0.0)
    few = gputrain_here(*small, *gpus)
    assert few.stderr.splitlines() == [
        "planning 1 of 4: rtx4090", "planning 2 of 4: 2 x rtx3060", "planning 3 of 4: p100", "planning 4 of 4: v100-16"
    ]  # fmt: skip
    lines = few.stdout.splitlines()
    assert "rtx4090, 2 x rtx3060, p100, v100-16: image size 32, batch size 2" in lines
    reasons = [line for line in lines if re.match(r"  [a-z_]+: ", line)]
    assert len(reasons) == len(set(reasons)) > 5
    assert sum(line.startswith("  precision: bf16") for line in reasons) == 1
    (build,) = (line for line in reasons if line.startswith("  torch: the default build has no code"))
    assert "./setup.sh --torch cu126" in build
    assert lines[lines.index(build) - 1].startswith("p100, v100-16: ")
    monkeypatch.setattr(ui, "LINE_SECONDS", math.inf)
    done = gputrain_here(*small, *gpus, "--gpu", "l4")
    assert done.stderr == ""
    many = done.stdout.splitlines()
    assert [line for line in many if line.startswith("  torch: ")] == [build]
    assert not any(line.startswith("  precision: ") for line in many)


def test_a_bar_is_drawn_on_terminals_only(monkeypatch):
    for terminal in (True, False):
        written = io.StringIO()
        monkeypatch.setattr(ui, "err", Console(file=written, force_terminal=terminal, width=80))
        with ui.TerminalBar("exporting") as bar:
            bar.update(1, 3)
        assert ("exporting" in written.getvalue()) == terminal


def test_a_package_that_a_data_worker_lacks_is_named(capsys):
    """torch raises the worker's error again, with its traceback as the only argument."""

    def program() -> None:
        raise ModuleNotFoundError(
            "Caught ModuleNotFoundError in DataLoader worker process 0.\n"
            "Original Traceback (most recent call last):\nModuleNotFoundError: No module named 'soxr'\n"
        )

    assert ui._outcome(program, SINGLE) == ui.USER_ERROR
    assert "the package soxr is not installed" in " ".join(capsys.readouterr().err.split())


# ---------------------------------------------------------------------------------------------- the start of a training


@pytest.mark.parametrize("kind", ["vae", *[slow(kind) for kind in ("vocoder", "tts")]])
def test_the_start_of_a_training_is_short_and_its_plan_is_logged_if_asked_for(tmp_path, monkeypatch, caplog, kind):
    data = make_data(kind, tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    smaller = {"adversarial_weight": 0, "discriminator_start": 5000, "discriminator_channels": 64}
    changes = {**(smaller if kind == "vae" else {}), "sample_every_steps": 0, "evaluate_every_steps": 0}
    caplog.set_level("DEBUG", "gputrain")
    monkeypatch.setattr(ui, "LineHandler", lambda ranks: caplog.handler)
    done = gputrain_here(
        *words(kind, data, Path("run"), 1, **changes), "--plan", "--no-report", "--verbose", "--no-eval-first"
    )
    assert done.returncode == 0, done.stderr
    short = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    detailed = [record.getMessage() for record in caplog.records if record.levelname == "DEBUG"]
    assert len(short) <= 8, short
    runs_on = "runs on: CPU (asked for); fp32"
    for part in ("model: ", "for training: ", runs_on, "memory: ", "time: ", "run folder: run;"):
        assert sum(part in line for line in short) == 1, (part, short)
    settings = json.loads(Path("run", "plan.json").read_text())["settings"]
    for name, setting in settings.items():
        assert not [line for line in short if line.startswith(f"{name}: ")]
        assert sum(line.startswith(f"{name}: ") and setting["reason"] in line for line in detailed) == 1, name
    assert {name for name, one in settings.items() if one["reason"] == "asked for"} <= {"device", "num_workers"}
    assert "verbose" not in Path("run", "config.yaml").read_text()
    times = [re.fullmatch(r"start, (.*): \d+\.\d s, \d+\.\d CPU-s", line) for line in detailed]
    assert [found[1] for found in times if found] == [
        "from the command to the end of imports", "hardware and run folder", "data", "planning",
        "model and first weights", "first samples", "first batch", "from the command to the first step",
    ]  # fmt: skip


def test_colours_that_are_asked_for_make_no_terminal_of_a_pipe(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # As a notebook's kernel sets for its commands.
    piped = PipeConsole(file=io.StringIO(), width=80)
    with piped.status("planning"):
        piped.print("[red]a[/] line")
    monkeypatch.setattr(ui, "err", piped)
    with ui.TerminalBar("preparing") as bar:
        bar.update(1, 2)
        bar.update(2, 2)
    assert piped.file.getvalue() == "\x1b[31ma\x1b[0m line\n"
    monkeypatch.delenv("FORCE_COLOR")
    plain = PipeConsole(file=io.StringIO(), width=80)
    plain.print("[red]a[/] line")
    assert plain.file.getvalue() == "a line\n"


def test_no_error_and_no_line_of_a_log_shows_secrets():
    url = "https://ann:secret@a.b/c?token=secret"
    record = logging.LogRecord("gputrain", logging.WARNING, "", 1, "see %s, hf_%s", (url, "secret" * 5), None)
    with ui.err.capture() as said:
        ui._print_end("error", f"{url}: no such file", f"load {url}", 2)
        ui.LineHandler(SINGLE).emit(record)
    assert "https://a.b/c: no such file" in said.get()
    assert "secret" not in said.get()
