"""The queue of trainings: what starts when, what is resumed, and how it goes on after an end of its process. Most
trainings are scripts that write a history as a training does; the slow test has real ones."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from gputrain.engine.requests import ASKED_TO_STOP
from gputrain.errors import UserError
from gputrain.hw.child_process import remedy_for_exit
from gputrain.watch import queue as module
from gputrain.watch.queue import Queue
from tests.waiting import wait_until

# Stands for `gputrain train-KIND --config FILE --resume-from auto`: the file FILE.todo has a line of an end for every
# attempt. "wait" waits for a signal, "lock" waits with the folder's lock held, and any other end is written as such.
TRAINING = """
import json, os, signal, sys, time
file = sys.argv[sys.argv.index("--config") + 1]
run = json.load(open(file))["output_dir"]
todo = open(file + ".todo").read().splitlines()
os.makedirs(run, exist_ok=True)
history = os.path.join(run, "history.jsonl")
rows = [json.loads(line) for line in open(history)] if os.path.exists(history) else []
step = max([row["step"] for row in rows], default=0)
open(file + ".words", "a").write(" ".join(sys.argv[1:]) + "\\n")
attempt = len(open(file + ".words").read().splitlines())
todo = json.loads(todo[min(attempt, len(todo)) - 1])
if todo["end"] == "lock":
    import fcntl
    lock = open(os.path.join(run, ".lock"), "w")
    fcntl.flock(lock, fcntl.LOCK_EX)

def write(**row):
    with open(history, "a") as out:
        out.write(json.dumps(row) + "\\n")

def stop(*_):
    write(event="end", step=step + 1, outcome="stopped", message="asked to terminate after step 1")
    print("stopped: asked to terminate after step 1", file=sys.stderr)
    os._exit(75)

signal.signal(signal.SIGTERM, stop)
if todo["end"] != "early":
    write(event="start", step=step)
step += todo.get("steps", 0)
if todo["end"] in ("wait", "lock"):
    open(file + ".waits", "w").close()
    while True:
        time.sleep(0.02)  # A signal just before a long sleep would be handled after it.
if todo["end"] == "killed":
    open(os.path.join(run, "metrics.jsonl"), "w").write(json.dumps({"step": step}) + "\\n")
    os.kill(os.getpid(), signal.SIGKILL)
message = todo.get("message", "")
if todo["end"] != "early":
    write(event="end", step=step, outcome=todo["end"], message=message)
code = {"finished": 0, "stopped": 75}.get(todo["end"], 2)
print({0: "", 75: "stopped: "}.get(code, "error: ") + message, file=sys.stderr)
sys.exit(code)
"""
FINISHED = {"end": "finished", "steps": 9}


class Desk:
    """A folder of configurations, and queues on it that look when they are asked to."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.queues = folder / "queue", []
        self.folder.mkdir()

    def put(self, name, *todo, **settings):
        values = {"data_path": "pictures", "output_dir": str(self.folder.parent / Path(name).stem), **settings}
        path = self.folder / name
        path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
        Path(f"{path}.todo").write_text("\n".join(map(json.dumps, todo or [FINISHED])))
        return path

    def queue(self):
        self.queues.append(Queue(self.folder))
        return self.queues[-1]

    def starts(self, name):
        words = self.folder / f"{name}.words"
        return len(words.read_text().splitlines()) if words.exists() else 0

    def waits(self, name):
        """Wait until the training of a file is there."""
        mark = self.folder / f"{name}.waits"
        wait_until(mark.exists, f"the training of {name}")
        mark.unlink()


@pytest.fixture
def desk(tmp_path, monkeypatch):
    (tmp_path / "training.py").write_text(TRAINING)
    monkeypatch.setattr(module, "PROGRAM", (sys.executable, "-IS", str(tmp_path / "training.py")))
    monkeypatch.setattr(module, "PAUSES", (0.0, 0.0))
    monkeypatch.setattr(module, "SETTLED_SECONDS", 0.0)
    monkeypatch.setattr(module, "ASKING_SECONDS", 0.0)
    made = Desk(tmp_path)
    yield made
    for queue in made.queues:
        queue.close()


def states(queue):
    return {entry.name: entry.state for entry in queue.entries}


def entry(queue, name):
    return next(entry for entry in queue.entries if entry.name == name)


def run_all(queue):
    """Look until nothing runs and nothing is to start."""

    def is_idle():
        queue.look()
        return not {"running", "waiting"} & set(states(queue).values()) or queue.is_paused

    wait_until(is_idle, "the end of the queue", lambda: queue.message.startswith("the queue waits"))


def test_trainings_run_in_the_order_of_their_names_and_every_file_has_a_state(desk):
    desk.put("10.json")
    desk.put("2.yaml")
    desk.put("3.yaml", num_stepz=1)
    desk.put("4.yaml", output_dir=str(desk.folder.parent / "2"))
    desk.put("5.yaml", output_dir=None)
    desk.put("6.yaml", kind="colouriser")
    desk.put("7.yaml", resume_from=str(desk.folder.parent / "7" / "checkpoint_last.pt"))
    desk.put("8.json", {"end": "early", "message": "no such folder"})
    (desk.folder / "9.yml").write_text("[1, 2")
    desk.put("11.yaml", output_dir=str(desk.folder.parent / ("a" * 300)))
    desk.put("12.yaml", output_dir="a\0b")
    desk.put("13.yaml", resume_from="a\0b")
    (desk.folder / "14.yaml").symlink_to("14.yaml")
    (desk.folder / ".hidden.yaml").write_text("image_size: 32")
    (desk.folder / "notes.txt").write_text("")
    queue = desk.queue()
    run_all(queue)
    wanted = {
        "2.yaml": ("finished", ""), "3.yaml": ("refused", "did you mean 'num_steps'"),
        "4.yaml": ("refused", "is the output_dir of 2.yaml, too"), "5.yaml": ("refused", "output_dir is missing"),
        "6.yaml": ("refused", "kind is 'colouriser'"), "7.yaml": ("refused", "leave it out"),
        "8.json": ("failed", "error: no such folder\n(exit code 2)"), "9.yml": ("refused", "not valid YAML"),
        "10.json": ("finished", ""), "11.yaml": ("refused", "name too long"), "12.yaml": ("refused", "output_dir"),
        "13.yaml": ("refused", "null byte"),
    }  # fmt: skip
    assert list(states(queue)) == list(wanted)
    for name, (state, message) in wanted.items():
        assert (entry(queue, name).state, message in entry(queue, name).message) == (state, True), entry(queue, name)
    first = (desk.folder / "2.yaml.words").read_text().split()
    assert first == ["train-vae", "--config", str(desk.folder / "2.yaml"), "--resume-from", "auto"]
    begun = {name: (desk.folder / f"{name}.words").stat().st_mtime_ns for name in ("2.yaml", "8.json", "10.json")}
    assert begun["2.yaml"] < begun["8.json"] < begun["10.json"]


def test_an_attempt_that_has_made_steps_is_resumed_and_a_stop_pauses_the_queue(desk):
    memory, in_time = "out of memory", "stopped in time for --max-time 1m"
    by_clock = "stopped in time for --finish-by 18:30"  # Resumed at once, it would train until the next day.
    failed, moved = {"end": "failed", "message": memory}, {"end": "failed", "steps": 5, "message": memory}
    limit = {"end": "stopped", "steps": 5, "message": in_time}
    rows = {  # What a training does at each attempt; its state then, how often it has started, and the message.
        "1.yaml": ([moved, FINISHED], "finished", 2, ""),
        "2.yaml": ([moved], "failed", 3, "error: out of memory\n(exit code 2)"),
        "3.yaml": ([failed], "failed", 1, "error: out of memory\n(exit code 2)"),
        "4.yaml": ([{"end": "killed", "steps": 5}, FINISHED], "finished", 2, ""),
        "5.yaml": ([{"end": "killed"}], "failed", 1, f"(SIGKILL: {remedy_for_exit(-9)})"),
        "6.yaml": ([limit, moved, failed, limit, moved, moved, limit, FINISHED], "finished", 8, ""),
        "7.yaml": ([{**limit, "steps": 0}], "failed", 1, f"{in_time}: its max_time is too short for a step"),
        "8.yaml": ([{"end": "stopped", "steps": 1, "message": by_clock}, FINISHED], "stopped", 1, by_clock),
        "9.yaml": ([FINISHED], "waiting", 0, ""),
    }  # fmt: skip
    for name, (todo, *_) in rows.items():
        desk.put(name, *todo)
    queue = desk.queue()
    run_all(queue)
    found = {one.name: (one.state, desk.starts(one.name), one.message) for one in queue.entries}
    assert found == {name: tuple(row[1:]) for name, row in rows.items()}
    assert queue.is_paused
    assert queue.message
    queue._thread = object()  # It has begun to work: start() goes on.
    queue.start()
    run_all(queue)
    assert (states(queue)["8.yaml"], states(queue)["9.yaml"], queue.message) == ("finished", "finished", "")
    # A new process knows the ends from the histories; a run without an end is resumed.
    again = desk.queue()
    queue.close()
    again.pause()
    wanted = {name: row[1] for name, row in rows.items()} | {
        "5.yaml": "waiting", "8.yaml": "finished", "9.yaml": "finished"
    }  # fmt: skip
    assert states(again) == wanted
    again.retry(entry(again, "3.yaml").id)
    assert states(again) == wanted | {"3.yaml": "waiting"}


def test_a_file_may_be_changed_added_and_removed_at_any_time(desk, monkeypatch):
    desk.put("1.yaml", {"end": "early", "message": "no such folder"}, FINISHED)
    queue = desk.queue()
    run_all(queue)
    assert states(queue) == {"1.yaml": "failed"}
    os.utime(desk.folder / "1.yaml", (1, 1))  # Nothing has changed.
    desk.put("2.yaml", {"end": "wait"})
    queue.look()
    assert states(queue) == {"1.yaml": "failed", "2.yaml": "running"}
    desk.waits("2.yaml")
    desk.put("1.yaml", {"end": "early"}, FINISHED, num_epochs=3)
    (desk.folder / "2.yaml").unlink()
    queue.look()
    assert states(queue) == {"1.yaml": "waiting", "2.yaml": "running"}
    queue.skip(entry(queue, "2.yaml").id)
    run_all(queue)
    assert states(queue) == {"1.yaml": "finished"}
    assert not queue.is_paused
    desk.put("0.yaml", output_dir=str(desk.folder.parent / "1"))  # The folder stays that of the run in it.
    queue.look()
    assert states(queue) == {"0.yaml": "refused", "1.yaml": "finished"}
    (desk.folder / "0.yaml").unlink()
    desk.put("1.yaml", FINISHED, num_epochs=5)  # More epochs for what has finished.
    run_all(queue)
    assert desk.starts("1.yaml") == 3
    # What is being written waits, and so does what comes after it.
    monkeypatch.setattr(module, "SETTLED_SECONDS", 1000.0)
    for name in ("3.yaml", "4.yaml", "5.yaml"):
        desk.put(name)
    for name in ("3.yaml", "5.yaml"):
        os.utime(desk.folder / name, (1, 1))
    wait_until(lambda: queue.look() or states(queue)["3.yaml"] == "finished", "the training before it")
    queue.look()
    assert [one.state for one in queue.entries[1:]] == ["finished", "waiting", "waiting"]
    os.utime(desk.folder / "4.yaml", (9e9, 9e9))  # The clock of another machine is ahead.
    run_all(queue)
    assert set(states(queue).values()) == {"finished"}


def test_the_buttons(desk):
    for name in ("1.yaml", "2.yaml", "3.yaml"):
        desk.put(name, {"end": "wait"}, FINISHED)
    queue = desk.queue()
    queue.look()
    first, second, _ = (one.id for one in queue.entries)
    queue.skip(second)
    desk.waits("1.yaml")
    queue.pause()
    queue.skip(first)  # It saves first, and nothing follows it.
    wait_until(lambda: queue.look() or "running" not in states(queue).values(), "the end of the first one")
    assert states(queue) == {"1.yaml": "skipped", "2.yaml": "skipped", "3.yaml": "waiting"}
    history = [json.loads(line) for line in (desk.folder.parent / "1" / "history.jsonl").read_text().splitlines()]
    assert [row.get("outcome") for row in history] == [None, "stopped"]
    queue.retry(second)
    assert states(queue)["2.yaml"] == "waiting"
    for refused in (queue.retry, queue.skip):
        with pytest.raises(KeyError):
            refused("no such")
    queue._thread = object()  # It has begun to work: start() goes on.
    queue.start()
    desk.waits("2.yaml")
    with pytest.raises(UserError, match="yaml is running"):
        queue.retry(second)
    queue.close()  # It saves, and a new process goes on with it.
    queue = desk.queue()
    wait_until(lambda: queue.look() or states(queue)["3.yaml"] == "running", "the third one")
    assert desk.starts("2.yaml") == 2
    assert states(queue) == {"1.yaml": "finished", "2.yaml": "finished", "3.yaml": "running"}


def test_a_run_of_other_settings_is_gone_on_with_only_if_it_is_tried_again(desk):
    run = desk.folder.parent / "1"
    run.mkdir()
    (run / "config.yaml").write_text("kind: vae\ndata_path: [others]\nnum_epochs: 7\noutput_dir: x\nlog_freq: 3\n")
    desk.put("1.yaml", num_epochs=7, log_freq=50, data_path="pictures")
    desk.put("2.yaml", kind="vocoder", output_dir=str(run / "inner"))
    (run / "inner").mkdir()
    (run / "inner" / "config.yaml").write_text("data_path: others\n")
    queue = desk.queue()
    run_all(queue)
    assert states(queue) == {"1.yaml": "refused", "2.yaml": "refused"}
    message = entry(queue, "1.yaml").message
    assert "data_path is" in message
    assert "num_epochs" not in message
    assert "a run of train-vae" in entry(queue, "2.yaml").message
    queue.pause()
    queue.retry(entry(queue, "1.yaml").id)
    desk.put("1.yaml", num_epochs=9, data_path="pictures")  # Once it is to go on, further changes are for it, too.
    queue.look()
    assert states(queue) == {"1.yaml": "waiting", "2.yaml": "refused"}
    queue.is_paused = False
    run_all(queue)
    assert states(queue) == {"1.yaml": "finished", "2.yaml": "refused"}


def test_a_run_begins_at_the_checkpoint_of_its_file_and_goes_on_from_its_own(desk):
    desk.put("1.yaml", {"end": "killed", "steps": 1}, FINISHED, resume_from="elsewhere/checkpoint_step_8.pt")
    queue = desk.queue()
    queue.look()
    run = Path(entry(queue, "1.yaml").run)
    wait_until((run / "history.jsonl").exists, "the first attempt")
    (run / "checkpoint_last.pt").touch()
    run_all(queue)
    words = (desk.folder / "1.yaml.words").read_text().splitlines()
    assert [line.endswith("--resume-from auto") for line in words] == [False, True]


def test_a_training_that_runs_already_is_waited_for_and_a_second_queue_only_shows(desk):
    desk.put("1.yaml", {"end": "lock"}, FINISHED)
    desk.put("2.yaml")
    queue, second = desk.queue(), desk.queue()
    queue.look()
    desk.waits("1.yaml")
    second.look()
    assert states(second) == {"1.yaml": "running", "2.yaml": "waiting"}
    assert "another" in second.message
    with pytest.raises(UserError, match="another gputrain watch"):
        second.pause()
    stopped = desk.folder.parent / "3"
    stopped.mkdir()
    row = {"event": "end", "step": 1, "outcome": "stopped", "message": ASKED_TO_STOP}
    (stopped / "history.jsonl").write_text(json.dumps(row) + "\n")
    desk.put("3.yaml")
    second.look()  # The other one may have gone on with it.
    assert (states(second)["3.yaml"], second.is_paused) == ("stopped", False)
    (desk.folder / "3.yaml").unlink()
    # The first process ends abruptly, and its training goes on.
    (first, _), child = queue.entries, queue.entries[0].process
    first.process = None
    queue.close()
    second.look()
    assert (states(second), second.message) == ({"1.yaml": "running", "2.yaml": "waiting"}, "")
    assert "another process trains" in entry(second, "1.yaml").message
    (desk.folder / "1.yaml").rename(desk.folder / "1.yaml.done")  # It has the machine until its end, whatever comes.
    second.look()
    assert states(second) == {"1.yaml": "running", "2.yaml": "waiting"}
    (desk.folder / "1.yaml.done").rename(desk.folder / "1.yaml")
    os.kill(child.pid, signal.SIGTERM)
    child.wait()
    run_all(second)  # Somebody has stopped it, and wants the machine.
    assert states(second) == {"1.yaml": "stopped", "2.yaml": "waiting"}
    assert second.is_paused


def test_a_queue_waits_for_a_disk_that_is_away(desk, monkeypatch):
    desk.put("1.yaml", {"end": "early"})
    desk.put("2.yaml")
    output = desk.folder / "2.yaml.log"
    output.mkdir()
    queue = desk.queue()
    wait_until(lambda: queue.look() or "the queue waits" in queue.message, "the second training")
    assert states(queue) == {"1.yaml": "failed", "2.yaml": "waiting"}
    output.rmdir()
    (first, _), path = queue.entries, desk.folder / "1.yaml"
    path.rename(aside := desk.folder / "aside")
    first.refresh()
    assert "No such file" in first.error
    aside.rename(path)

    def is_in_use(run):
        if run.name == "1":
            raise OSError(errno.EIO, "Input/output error")
        return False

    with monkeypatch.context() as patched:
        patched.setattr(module, "is_in_use", is_in_use)
        run_all(queue)  # The disk of a run that does not run holds nothing else.
        assert states(queue) == {"1.yaml": "refused", "2.yaml": "finished"}
    queue.look()
    assert states(queue) == {"1.yaml": "failed", "2.yaml": "finished"}
    assert desk.starts("1.yaml") == 1


def test_a_lock_that_is_held_for_a_moment_is_no_training(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ASKING_SECONDS", 60.0)
    asking = FileLock(tmp_path / ".lock", thread_local=False)
    asking.acquire()
    threading.Timer(0.05, asking.release).start()
    assert not module.is_in_use(tmp_path)


WATCHER = """
import sys, time
from pathlib import Path
from gputrain.watch.queue import Queue

Queue(Path(sys.argv[1])).start()
time.sleep(1000)
"""


def begun(run, step):
    """Wait until a training has made steps, and hold it there. Returns its process."""
    metrics = run / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and f'"step": {step},' in metrics.read_text(), f"step {step} in {run}")
    starts = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    process = starts[-1]["process"]
    os.kill(process, signal.SIGSTOP)
    return process


@pytest.mark.slow
def test_a_disturbed_queue_gives_the_weights_of_undisturbed_runs(tmp_path, monkeypatch):
    """The watcher and its training are killed, and found again; the next training is stopped and saved by the end of
    the watcher. The run folder of either is that of a queue that nothing has disturbed, bit for bit."""
    from tests.chaos.tiny import EVERY_STEP, OPTIONS, differences, make_data

    monkeypatch.setattr(module, "LOOK_SECONDS", 0.2)
    monkeypatch.setattr(module, "SETTLED_SECONDS", 0.0)
    kinds = {"1.json": "vae", "2.json": "vocoder"}
    data = {name: make_data(kind, tmp_path / kind) for name, kind in kinds.items()}
    for place in ("straight", "disturbed"):
        (tmp_path / place).mkdir()
        for name, kind in kinds.items():
            values = {
                **OPTIONS[kind], "kind": kind, "data_path": str(data[name]), "output_dir": str(tmp_path / place / kind),
                "max_steps": 30, "checkpoint_minutes": EVERY_STEP, "num_workers": 0,
            }  # fmt: skip
            (tmp_path / place / name).write_text(json.dumps(values))
    queue = Queue(tmp_path / "straight")
    run_all(queue)
    queue.close()
    assert states(queue) == {"1.json": "finished", "2.json": "finished"}, queue.entries

    folder = tmp_path / "disturbed"
    watcher = subprocess.Popen([sys.executable, "-c", WATCHER, str(folder)])
    training = begun(folder / "vae", 4)
    watcher.kill()
    watcher.wait()
    queue = Queue(folder)
    queue.look()
    assert "another process trains" in entry(queue, "1.json").message
    os.kill(training, signal.SIGKILL)
    wait_until(lambda: queue.look() or states(queue)["2.json"] == "running", "the second training")
    os.kill(begun(folder / "vocoder", 3), signal.SIGCONT)
    queue.close()
    queue = Queue(folder)
    run_all(queue)
    queue.close()
    assert states(queue) == {"1.json": "finished", "2.json": "finished"}, queue.entries
    for kind in kinds.values():
        assert not differences(tmp_path / "straight" / kind, folder / kind)
