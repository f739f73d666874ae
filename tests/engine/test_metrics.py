"""What a report's numbers, pictures and sounds become: lines of metrics.jsonl, files in samples/, and TensorBoard."""

import io
import json
import math
import resource
import signal
import threading
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gputrain.engine import metrics as engine_metrics
from gputrain.engine import run_folder, stop
from gputrain.engine.callbacks.reports import log_evaluation
from gputrain.engine.metrics import Bar, Metrics, TimeLeft
from gputrain.samples import Report, SoundSample
from tests.process import killed_at
from tests.tables import each_row
from tests.toy import cpu_runtime
from tests.waiting import Clock

RATE_HZ = 16000
TONE_T = 0.5 * torch.sin(2 * torch.pi * 440 * torch.arange(RATE_HZ) / RATE_HZ)
RAMP = torch.arange(48, dtype=torch.uint8).reshape(4, 4, 3)


def metrics(folder: Path, first_step: int = 0) -> Metrics:
    return Metrics(
        folder, Console(quiet=True), cpu_runtime(), unit="crops", first_step=first_step, last_step=10
    )  # fmt: skip


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_sounds_and_pictures_reach_samples_and_tensorboard(tmp_path):
    report = Report({"score": -1.5}, {"ramp": RAMP}, {"tone": SoundSample(TONE_T, RATE_HZ)})
    with metrics(tmp_path) as written:
        written.report(3, 1, "samples", report)
    wave_T, rate_hz = soundfile.read(tmp_path / "samples" / "tone_step_00000003.wav", dtype="float32")
    assert rate_hz == RATE_HZ
    assert np.abs(wave_T - TONE_T.numpy()).max() < 1 / 32767
    with Image.open(tmp_path / "samples" / "ramp_step_00000003.png") as picture:
        assert np.array_equal(np.asarray(picture), RAMP.numpy())
    board = EventAccumulator(str(tmp_path / "logs")).Reload()
    (played,) = board.Audio("samples/tone")
    assert (played.step, played.sample_rate, played.length_frames) == (3, RATE_HZ, RATE_HZ)
    heard_T, heard_hz = soundfile.read(io.BytesIO(played.encoded_audio_string), dtype="float32")
    assert heard_hz == RATE_HZ
    assert np.abs(heard_T - TONE_T.numpy()).max() < 2 / 32767
    (shown,) = board.Images("samples/ramp")
    assert (shown.width, shown.height) == (4, 4)
    assert [event.value for event in board.Scalars("samples/score")] == [-1.5]
    assert [(row["step"], row["epoch"], row["samples/score"]) for row in rows(tmp_path)] == [(3, 1, -1.5)]


def test_a_report_without_numbers_adds_no_line(tmp_path):
    with metrics(tmp_path) as written:
        written.report(0, 0, "samples", Report(sounds={"tone": SoundSample(TONE_T, RATE_HZ)}))
    assert not (tmp_path / "metrics.jsonl").exists()


def test_means_over_the_steps_since_the_last_line(tmp_path):
    """A step that is not finite leaves the mean to the others; where none is, the line holds null."""
    with metrics(tmp_path) as written:
        for loss, other in ((1.0, math.nan), (math.inf, math.nan), (3.0, math.nan)):
            written.add({"loss/l1": torch.tensor(loss), "loss/kl": torch.tensor(other)}, items=4, flops=0)
        told = written.write(3, 0, {"learning_rate": 0.1})
        written.add({"loss/l1": torch.tensor(7.0)}, items=4, flops=0)
        written.write(4, 0, {})
    assert [row["loss/l1"] for row in told] == [1.0, math.inf, 3.0]
    first, second = rows(tmp_path)
    assert (first["loss/l1"], first["loss/kl"], first["learning_rate"]) == (2.0, None, 0.1)
    assert (second["step"], second["loss/l1"]) == (4, 7.0)
    assert first["speed/crops_per_second"] > 0


def test_a_report_between_leaves_the_open_window_and_its_speed_alone(tmp_path, clock):
    with metrics(tmp_path) as written:
        clock.now += 1.5
        written.add({"loss/l1": torch.tensor(1.0)}, items=4, flops=8.0)
        with written.paused():
            clock.now += 100
            written.report(1, 0, "eval", Report({"score": 1.0}))
        clock.now += 0.5
        written.add({"loss/l1": torch.tensor(3.0)}, items=4, flops=8.0)
        told = written.write(2, 0, {})
    assert [row["loss/l1"] for row in told] == [1.0, 3.0]
    line = rows(tmp_path)[-1]
    assert line["loss/l1"] == 2.0
    assert (line["speed/seconds_per_step"], line["speed/crops_per_second"]) == (1.0, 4.0)


def test_the_shown_line_names_the_phase_where_two_have_a_loss_of_one_name(tmp_path):
    shown = Console(file=io.StringIO(), width=500)
    losses = {"generator/waves": 11.25, "generator/mel": 0.5, "discriminator/waves": 0.75}
    with Metrics(tmp_path, shown, cpu_runtime(), unit="clips", first_step=0, last_step=10) as written:
        written.add({f"loss/{name}": torch.tensor(loss) for name, loss in losses.items()}, items=4, flops=0)
        written.write(1, 0, {})
    assert "discriminator/waves 0.75 mel 0.5 generator/waves 11.25 |" in shown.file.getvalue()


def test_a_narrow_terminal_cuts_neither_the_step_nor_the_losses():
    terminal = Console(file=io.StringIO(), width=40, force_terminal=True, color_system=None)
    bar = Bar(terminal)
    bar.add_task("step 7/10", total=10, left="3 h 12 min left")
    bar.last_line = "epoch 1 | " + " ".join(f"loss{number} 0.5" for number in range(20))
    with terminal.capture() as shown:
        terminal.print(*bar.get_renderables(), sep="\n")
    first, *others = shown.get().splitlines()
    assert first.startswith("step 7/10 ")
    assert first.rstrip().endswith("3 h 12 min left")
    assert " ".join(line.strip() for line in others if line.strip()) == bar.last_line


def test_the_time_passes_before_the_first_line():
    """The first evaluation or step may take minutes."""
    bar = Bar(Console(file=io.StringIO(), width=60, force_terminal=True, color_system=None))
    bar.get_time = chain([5.0], repeat(48.0)).__next__
    bar.add_task("starting", total=10, left="")
    (task,) = bar.tasks
    assert str(TimeLeft().render(task)) == "43 s"
    bar.update(task.id, left="3 min left")
    assert str(TimeLeft().render(task)) == "3 min left"


@pytest.mark.parametrize(("device", "rate"), [("cuda", "2 TFLOPS (50 % of peak)"), ("cpu", "2 TFLOPS")])
def test_a_gpu_has_a_share_of_its_peak(tmp_path, device, rate, clock, monkeypatch):
    """A CPU has none: its matrix products may be slower than its convolutions, and the share would exceed 100 %."""
    monkeypatch.setattr(engine_metrics, "synchronize", lambda device: None)  # There is no GPU to wait for.
    runtime = replace(cpu_runtime(), device=torch.device(device))
    vars(runtime)["product_rate"] = 4e12
    console = Console(file=io.StringIO(), width=200, color_system=None)
    with Metrics(tmp_path, console, runtime, unit="images", first_step=0, last_step=1000) as written:
        clock.now += 1.0
        written.add({"loss/g/l1": torch.tensor(0.5)}, items=40, flops=2e12)
        written.write(1, 0, {"memory/peak_gb": 1.5})
    assert f"images/s, {rate} |" in console.file.getvalue()
    (row,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert row["speed/tflops"] == 2.0
    assert row.get("speed/peak_share") == (0.5 if device == "cuda" else None)


def shown_metrics(folder, clock, lines, terminal=True, steps=10, pauses=()) -> str:
    """Returns what a terminal shows of lines of ten steps that take these seconds, with 40 items each."""
    console = Console(file=io.StringIO(), width=200, force_terminal=terminal, color_system=None)
    with Metrics(folder, console, cpu_runtime(), unit="images", first_step=0, last_step=1000) as written:
        for number, seconds in enumerate(lines, start=1):
            clock.now += seconds
            written.add({"loss/g/l1": torch.tensor(0.5)}, items=40, flops=0)
            written.write(steps * number, 0, {"memory/peak_gb": 1.5})
            if number in pauses:
                with written.paused():
                    clock.now += 1000.0
    return console.file.getvalue()


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """The clock of speed and remaining time."""
    return Clock(monkeypatch, engine_metrics)


def test_the_bar_moves_at_every_step(tmp_path, clock):
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    with Metrics(tmp_path, console, cpu_runtime(), unit="images", first_step=3, last_step=100) as written:
        (task,) = written.bar.tasks
        assert (task.description, task.completed) == ("step 3/100", 3)
        with written.paused("evaluating"):
            assert task.description == "step 3/100, evaluating"
        for step, left in ((4, ""), (5, ""), (6, "3 min 8 s left")):  # 94 steps of 2 s: the first has compiled.
            clock.now += 30.0 if step == 4 else 2.0
            written.add({"loss/g/l1": torch.tensor(0.5)}, items=40, flops=0)
            assert (task.description, task.completed, task.fields["left"]) == (f"step {step}/100", step, left)
            with written.paused("saving"):
                clock.now += 7.0
        written.write(6, 0, {})
        written.add({"loss/g/l1": torch.tensor(0.5)}, items=40, flops=0)
        assert (task.completed, task.fields["left"]) == (7, "18 min left")  # 93 steps of 34 / 3 s.


def test_slow_steps_have_a_remaining_time(tmp_path, clock):
    """A line every 400 s: Rich's own estimate forgets after 30 s."""
    shown = shown_metrics(tmp_path, clock, [400.0] * 4)
    assert "10 h 40 min left" in shown  # 960 steps of 40 s.
    assert "10 s an image" in shown


def test_an_evaluation_counts_for_the_remaining_time_and_not_for_the_speed(tmp_path, clock):
    shown = shown_metrics(tmp_path, clock, [10.0, 10.0, 20.0], terminal=False, pauses=(2,))
    assert [line.split(" | ")[3] for line in shown.splitlines()] == ["4 images/s", "4 images/s", "3 images/s"]
    assert shown.splitlines()[-1].endswith("| 13 h 53 min left")  # 970 steps of (1000 + 30) / 20 s.


@pytest.mark.parametrize(
    ("before", "words"),
    [
        (-math.inf, "score 1.5"),
        (1.25, "score 1.5, the best so far (before: 1.25)"),
        (1.75, "score 1.5 (best so far: 1.75)"),
        (1.5, "score 1.5 (best so far: 1.5)"),
    ],
)
def test_held_out_figures_are_compared_with_the_best(caplog, before, words):
    with caplog.at_level("INFO"):
        log_evaluation(20, {"psnr_db": 36.6512, "ssim": 0.91534, "score": 1.5}, before)
        log_evaluation(25, {"score": -1.364, "blank_share": 0.5, "cer": 2.364, "cer_low": 2.1}, before, ("cer",))
    first, second = caplog.messages
    assert first == f"held-out at step 20: psnr_db 36.65, ssim 0.9153; {words}"
    assert second.startswith("held-out at step 25: blank_share 50 %, cer 236 %; score -1.364")


def test_the_last_line_stays_on_the_terminal(tmp_path, clock):
    shown = shown_metrics(tmp_path, clock, [10.0] * 2)
    last = shown.rstrip().splitlines()[-1]
    assert "step 20/1000 | epoch 0 | l1 0.5 | 4 images/s | 1.5 GB RAM" in last


@each_row(
    (40, "40 s"), (99.4, "1 min 39 s"), (700, "12 min"), (3599, "1 h"), (11_520, "3 h 12 min"), (273_600, "3 d 4 h")
)
def test_durations(seconds, words):
    assert stop.format_duration(seconds) == words


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, caplog):
    (tmp_path / "samples").write_text("in the way")
    with metrics(tmp_path) as written:
        for step in (1, 2):
            written.report(step, 0, "samples", Report({"score": 1.0}, sounds={"tone": SoundSample(TONE_T, RATE_HZ)}))
    assert caplog.text.count("samples cannot be written") == 1
    assert "training continues" in caplog.text
    assert len(rows(tmp_path)) == 2


def test_going_on_forgets_what_came_after_the_checkpoint_and_keeps_the_step_itself(tmp_path):
    for first_step, steps in ((0, (1, 2, 3)), (2, (3,))):
        with metrics(tmp_path, first_step) as written:
            for step in steps:
                written.report(step, 0, "eval", Report({"score": 10.0 * first_step + step}))
        (tmp_path / "metrics.jsonl").open("a").write('{"step": 4, "ep' * (not first_step))
    board = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("eval/score")] == [(1, 1.0), (2, 2.0), (3, 23.0)]
    assert [(row["step"], row["eval/score"]) for row in rows(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 23.0)]


def add_score(written: Metrics, step: int) -> None:
    written.report(step, 0, "eval", Report({"score": float(step)}))


@contextmanager
def largest_file(size: int):
    """Let no file grow beyond so many bytes: writing there fails as it does on a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_resumed_run_reads_only_the_end_of_its_metrics(tmp_path, monkeypatch):
    """Of a million lines. What was written behind the checkpoint is cut off, and a report is removed from its step."""
    path = tmp_path / "metrics.jsonl"
    lines = [b'{"step": %d, "loss/x": %f}\n' % (step, 1 / step) for step in range(1, 4001)]
    lines.insert(3990, b'{"step": 3990, "eval/score": 1.0}\n')
    path.write_bytes(b"".join(lines) + b'{"step": 40')
    parsed: list[bytes] = []
    known = run_folder.row_of
    for module in (engine_metrics, run_folder):
        monkeypatch.setattr(module, "row_of", lambda line: parsed.append(line) or known(line))
    with metrics(tmp_path, first_step=3990) as written:
        assert path.read_bytes() == b"".join(lines[:3991])
        written.forget_report(3990, "eval")
        assert path.read_bytes() == b"".join(lines[:3990])
        assert len(parsed) < 40
        written.forget_report(1, "loss")  # Far from the end: all is read.
    assert path.read_bytes() == b"".join(lines[1:3990])


@each_row("fsync", "replace", "truncate")
def test_a_kill_while_metrics_are_shortened_loses_no_line(tmp_path, moment):
    path = tmp_path / "metrics.jsonl"
    content = b"".join(b'{"step": %d, "%s/x": 1}\n' % (step, name) for step in (1, 2, 3) for name in (b"loss", b"eval"))
    path.write_bytes(content)
    with metrics(tmp_path, first_step=3) as written:

        def shorten() -> None:
            written.forget_report(2, "eval")
            Metrics(tmp_path, written.console, cpu_runtime(), unit="images", first_step=1, last_step=9)

        assert killed_at(moment, shorten)
    shorter = content.replace(b'{"step": 2, "eval/x": 1}\n', b"")
    assert path.read_bytes() == (shorter if moment == "truncate" else content)


@pytest.mark.parametrize("damage", [b'\xff{"step": 2}', b'{"step": 2, "eval/score": "\xff"}', b"\0\0\0", b"[2]"])
def test_a_damaged_line_is_dropped_and_the_others_stay(tmp_path, damage):
    with metrics(tmp_path) as written:
        add_score(written, 1)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(damage + b"\n")
    with metrics(tmp_path, first_step=2) as written:
        add_score(written, 3)
    assert [row["step"] for row in rows(tmp_path)] == [1, 3]


def test_a_line_goes_behind_the_end_of_the_one_before(tmp_path):
    with metrics(tmp_path) as written:
        add_score(written, 1)
        whole = (tmp_path / "metrics.jsonl").read_bytes()
        (tmp_path / "metrics.jsonl").write_bytes(whole[:-1])  # whole but for the end of the line
        add_score(written, 2)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]


def test_after_a_full_disk_metrics_and_tensorboard_are_written_again(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda ended: None)  # TensorBoard's thread ends with an error.
    with metrics(tmp_path) as written:
        add_score(written, 1)
        written.board.flush()
        held = (tmp_path / "metrics.jsonl").stat().st_size
        with largest_file(held + 10):
            for step in (2, 3):
                add_score(written, step)
                if written.board is not None:
                    with pytest.raises(OSError, match="File too large"):
                        written.board.flush()
        for step in (4, 5, 6):
            add_score(written, step)
    assert [row["step"] for row in rows(tmp_path)] == [1, 4, 5, 6]
    assert caplog.text.count("metrics.jsonl cannot be written (No space left on device)") == 1
    assert caplog.text.count("logs cannot be written (File too large)") == 1
    board = EventAccumulator(str(tmp_path / "logs")).Reload()
    seen = [event.step for event in board.Scalars("eval/score")]
    assert seen[0] == 1
    assert seen[-2:] == [5, 6]
