"""A run that ends early, for whatever reason, keeps every step that it has made."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from gputrain.engine import checkpoint
from gputrain.engine.distributed import RankGroup
from gputrain.engine.recipe import phases_of
from gputrain.errors import Stopped, UserError
from tests.engine.test_run import assert_equal, rows_of, schedule, trained, wait_for_steps
from tests.toy import ToyRecipe, batches, quiet, train_toy, weights
from tests.waiting import HANG_SECONDS, has_ended, wait_until

ROOT = Path(__file__).parents[2]
STEPS = 12


def out_of_memory(*arguments):
    torch.empty(10**15)  # No machine has a petabyte, so this raises the allocator's own error.


def cannot_convolve(*arguments):
    raise RuntimeError("FIND was unable to find an engine to execute this computation after trying 42 plans.")


def defect(*arguments):
    raise ValueError("of ours")


def saved_step(folder) -> int:
    return checkpoint.read(folder / "checkpoint_last.pt", "toy")["progress"]["step"]


def train_with(folder, fault=None, source=batches, **saving) -> ToyRecipe:
    """Train with a recipe that `fault` changes."""
    recipe = ToyRecipe(schedule(STEPS), adversarial_from=3)
    if fault:
        fault(recipe)
    train_toy(recipe, quiet(folder, **{"log_every_steps": 1, **saving}), source)
    return recipe


def failing(name: str, at: int, failure, times: int = 10**6):
    """A fault that lets a method of the recipe fail, from its call number `at` on, so many times."""

    def fault(recipe: ToyRecipe) -> None:
        method, calls = getattr(recipe, name), iter(range(10**6))

        def either(*arguments):
            if at <= next(calls) < at + times:
                failure()
            return method(*arguments)

        setattr(recipe, name, either)

    return fault


def failing_loss(phase: int, step: int, failure):
    """A fault in the loss of a phase in one step, after it has drawn from torch's random numbers."""

    def fault(recipe: ToyRecipe) -> None:
        loss = recipe.step_groups[phase].loss

        def either(batch, at):
            if at == step:
                torch.rand(3)
                failure()
            return loss(batch, at)

        object.__setattr__(recipe.step_groups[phase], "loss", either)

    return fault


def test_the_last_step_is_saved_before_it_is_sampled_and_evaluated(tmp_path):
    """So that not even a crash of the process there loses it."""
    saved = []

    def note() -> None:
        saved.append(saved_step(tmp_path) if (tmp_path / "checkpoint_last.pt").exists() else 0)

    def fault(recipe: ToyRecipe) -> None:
        sample, evaluate = recipe.sample, recipe.evaluate
        recipe.sample = lambda: (note(), sample())[1]
        recipe.evaluate = lambda: (note(), evaluate())[1]

    train_with(tmp_path, fault, evaluate_every_epochs=100, eval_first=False)
    assert saved == [0, STEPS, STEPS]  # The first samples come before the first step.


def broken_source(first, last):
    for step, x_BD in zip(range(first, last), batches(first, last), strict=True):
        if step == 7:
            raise UserError("no picture is left")
        yield x_BD


@pytest.mark.parametrize(
    ("made", "error", "options"),
    [
        (8, ValueError, {"fault": failing("evaluate", 2, defect), "evaluate_every_steps": 4}),
        (7, ValueError, {"fault": failing("prepare", 7, defect)}),
        (7, UserError, {"source": broken_source}),
        (6, ValueError, {"fault": failing_loss(0, 6, defect)}),
        (5, ValueError, {"fault": failing("average", 5, defect), "checkpoint_every_steps": 5}),
        (4, ValueError, {"fault": failing_loss(1, 6, defect), "checkpoint_every_steps": 4}),
    ],
    ids=["evaluation", "prepare", "data", "first phase", "moving average", "second phase"],
)
def test_an_error_between_steps_loses_no_step(tmp_path, caplog, made, error, options):
    """Within a step, when some weights have moved and others have not, nothing can be saved: the checkpoint before
    it stays. The resumed run is the undisturbed one, bit for bit."""
    with pytest.raises(error):
        train_with(tmp_path / "cut", **options)
    assert saved_step(tmp_path / "cut") == made
    trained(tmp_path / "before", made)
    assert (f"step {made} is saved before the run ends" in caplog.text) == ("checkpoint_every_steps" not in options)
    within = f"failed after some of its weights had changed, and is not saved; a resumed run goes on from step {made}"
    assert (within in caplog.text) == ("checkpoint_every_steps" in options)
    random_before, random_cut = (
        checkpoint.read(tmp_path / name / "checkpoint_last.pt", "toy")["random"]["cpu"] for name in ("before", "cut")
    )
    assert torch.equal(random_before, random_cut)
    assert_equal(trained(tmp_path / "straight", STEPS), trained(tmp_path / "cut", STEPS, resume_from="auto"))


def test_a_step_that_is_saved_before_an_error_has_a_line_of_metrics(tmp_path, monkeypatch):
    """After seven steps, the exchange with other ranks fails, as when one of them has ended."""
    agree, calls = RankGroup.any_rank, iter(range(1000))

    def any_rank(self, *flags: bool) -> list[bool]:
        if next(calls) >= 7:  # The first one is a wait for the samples before the first step.
            raise UserError("the connection to another rank is lost")
        return agree(self, *flags)

    with monkeypatch.context() as patched:
        patched.setattr(RankGroup, "any_rank", any_rank)
        patched.setattr(RankGroup, "total", lambda self, *values: defect())
        with pytest.raises(UserError, match="is lost"):
            train_with(tmp_path, log_every_steps=10)
    assert saved_step(tmp_path) == 7
    trained(tmp_path, STEPS, resume_from="auto", log_every_steps=1)
    assert [row["step"] for row in rows_of(tmp_path)] == [7, *range(8, STEPS + 1)]
    assert rows_of(tmp_path)[0]["loss/generator/l2"] > 0


def test_samples_and_evaluations_that_do_not_fit_are_left_out(tmp_path, caplog):
    def fault(recipe: ToyRecipe) -> None:
        failing("sample", 2, out_of_memory, times=1)(recipe)
        failing("evaluate", 2, out_of_memory, times=1)(recipe)

    recipe = train_with(tmp_path / "a", fault, evaluate_every_steps=4, sample_every_steps=4)
    assert_equal(trained(tmp_path / "straight", STEPS), weights(recipe))
    assert "out of memory: the samples of step 8 are skipped" in caplog.text
    assert "out of memory: the held-out figures of step 8 are skipped" in caplog.text
    assert [row["step"] for row in rows_of(tmp_path / "a") if "eval/score" in row] == [0, 4, 12]
    assert [path.stem[-2:] for path in sorted((tmp_path / "a" / "samples").iterdir())] == ["00", "04", "12"]


def test_samples_and_evaluations_search_no_convolutions_and_the_steps_go_on_doing_so(tmp_path, monkeypatch):
    """Held-out clips have any length, and cuDNN would search again for each."""
    searching = {"sample": [], "evaluate": [], "prepare": []}

    def note(recipe: ToyRecipe) -> None:
        failing("evaluate", 2, out_of_memory, times=1)(recipe)
        for name, values in searching.items():
            method = getattr(recipe, name)
            setattr(recipe, name, lambda *arguments, method=method, values=values: (
                values.append(torch.backends.cudnn.benchmark), method(*arguments))[1])  # fmt: skip

    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    train_with(tmp_path, note, evaluate_every_steps=4, sample_every_steps=4)
    assert {name: set(values) for name, values in searching.items()} == {
        "sample": {False}, "evaluate": {False}, "prepare": {True},
    }  # fmt: skip
    assert len(searching["evaluate"]) >= 4


def test_sampling_and_evaluating_leave_the_random_numbers_of_the_steps_alone(tmp_path):
    def random_figures(recipe: ToyRecipe) -> None:
        evaluate = recipe.evaluate
        recipe.evaluate = lambda: (torch.rand(5), evaluate())[1]

    states = []
    for name, fault in (("a", None), ("b", random_figures)):
        train_with(tmp_path / name, fault, evaluate_every_steps=4)
        states.append(checkpoint.read(tmp_path / name / "checkpoint_last.pt", "toy")["random"]["cpu"])
    assert torch.equal(*states)


def test_a_batch_that_does_not_fit_is_prepared_again(tmp_path):
    recipe = train_with(tmp_path / "a", failing("prepare", 5, out_of_memory, times=1))
    assert_equal(trained(tmp_path / "straight", STEPS), weights(recipe))


def test_a_batch_that_never_fits_ends_the_run_with_what_it_has_learnt(tmp_path):
    with pytest.raises(UserError, match=r"out of memory after step 5 \(cpu\): .*DefaultCPUAllocator") as caught:
        train_with(tmp_path, failing("prepare", 5, out_of_memory))
    assert "--resume-from auto" in caught.value.hint
    assert saved_step(tmp_path) == 5


def test_a_convolution_that_cannot_be_computed_ends_the_run_with_the_librarys_message(tmp_path, caplog):
    """No batch is made smaller for it, and what the run has learnt is saved."""

    def fault(recipe: ToyRecipe) -> None:
        failing("generated", 5, cannot_convolve)(recipe)

    with pytest.raises(UserError, match="42 plans") as caught:
        train_with(tmp_path, fault)
    assert "check-compatibility" in caught.value.hint
    assert "micro-batches" not in caplog.text
    assert saved_step(tmp_path) >= 1


def test_an_optimizer_that_does_not_fit_ends_the_run_with_a_clear_error(tmp_path, caplog):
    """Half of the weights may have moved: the checkpoint of the step before is what counts."""

    def fault(recipe: ToyRecipe) -> None:
        phases_of(recipe)[1].optimizer.register_step_pre_hook(failing_from(10))  # The first call allocates its state.

    with pytest.raises(UserError, match="out of memory after step 9") as caught:
        train_with(tmp_path / "cut", fault, checkpoint_every_steps=3)
    assert "--resume-from auto" in caught.value.hint
    assert saved_step(tmp_path / "cut") == 9
    assert "step 10 failed after some of its weights had changed" in caplog.text
    assert "goes on from step 9, as if" in caplog.text
    assert_equal(trained(tmp_path / "straight", STEPS), trained(tmp_path / "cut", STEPS, resume_from="auto"))


def test_an_optimizer_that_never_fits_leaves_a_run_without_a_checkpoint(tmp_path, caplog):
    def fault(recipe: ToyRecipe) -> None:
        phases_of(recipe)[1].optimizer.register_step_pre_hook(failing_from(3))

    with pytest.raises(UserError, match="out of memory after step 2"):
        train_with(tmp_path, lambda recipe: (setattr(recipe, "adversarial_from", 0), fault(recipe)))
    assert "step 3 failed" in caplog.text
    assert "there is no checkpoint yet, so that a resumed run starts from scratch" in caplog.text
    assert not checkpoint.newest_first(tmp_path)


def test_state_of_an_optimizer_that_does_not_fit_at_first_is_allocated_again(tmp_path, monkeypatch):
    """Memory runs out between the state of two parameters, once: the step is the same."""
    failed = []

    def fault(recipe: ToyRecipe) -> None:
        optimizer, zeros_like = phases_of(recipe)[1].optimizer, torch.zeros_like

        def failing_once(*arguments, **named):
            if not failed and len(optimizer.state) == 2:
                failed.append([len(state) for state in optimizer.state.values()])
                out_of_memory()
            return zeros_like(*arguments, **named)

        monkeypatch.setattr(torch, "zeros_like", failing_once)

    recipe = train_with(tmp_path / "a", fault)
    assert failed == [[3, 0]]  # Numbers of entries in the state of each parameter.
    assert_equal(trained(tmp_path / "straight", STEPS), weights(recipe))


def test_state_of_an_optimizer_that_never_fits_loses_no_step(tmp_path, caplog):
    """The discriminators' phase begins in the fourth step; nothing of that step has moved when its state is made."""

    def fault(recipe: ToyRecipe) -> None:
        phases_of(recipe)[0].optimizer.register_step_pre_hook(failing_from(0))

    with pytest.raises(UserError, match="out of memory after step 3"):
        train_with(tmp_path / "cut", fault)
    assert "step 3 is saved before the run ends" in caplog.text
    assert saved_step(tmp_path / "cut") == 3
    assert_equal(trained(tmp_path / "straight", STEPS), trained(tmp_path / "cut", STEPS, resume_from="auto"))


def failing_from(call: int):
    calls = iter(range(10**6))

    def hook(*arguments):
        if next(calls) >= call:
            out_of_memory()

    return hook


GROUP_RUN = """
import sys, time
from pathlib import Path
from gputrain.cli import ui
from gputrain.engine.data import Stream, loader
from tests import toy
from tests.engine.test_run import schedule

class Items:
    def __getitem__(self, sample):
        time.sleep(0.002)
        if sys.argv[2] == "hang" and sample.epoch == 2:
            time.sleep(1000)
        return toy.ITEMS[sample.item]

def open_batches(first, last):
    stream = Stream(len(toy.ITEMS), 0, toy.BATCH, first * toy.BATCH, last * toy.BATCH)
    return loader(Items(), stream, num_workers=2)

ui.run(lambda: toy.train_toy(
    toy.ToyRecipe(schedule(100_000, num_epochs=100_000)), toy.quiet(Path(sys.argv[1]), log_every_steps=1), open_batches
))
"""


def start(folder: Path, kind: str) -> "subprocess.Popen[str]":
    """A training with two data workers, in a process group of its own."""
    command = [sys.executable, "-c", GROUP_RUN, str(folder), kind]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_the_whole_process_group_ends_in_a_checkpoint(tmp_path, number):
    process = start(tmp_path, "work")
    wait_for_steps(tmp_path, 2)
    time.sleep(random.Random(number).uniform(0, 0.2))
    os.killpg(process.pid, number)
    _, talk = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 75, talk
    assert "everything is saved" in talk
    assert "Traceback" not in talk
    assert saved_step(tmp_path) == [row["step"] for row in rows_of(tmp_path)][-1]


CLOSED_CONNECTION = """
import os, socket
from multiprocessing import resource_sharer
from gputrain.engine.data import start_worker

start_worker(0)
receiver, sender = os.pipe()
shared = resource_sharer.DupFd(receiver)
for _ in range(3):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(shared._id[0])
os.write(sender, b"served")
print(os.read(shared.detach(), 100).decode())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="file descriptors are shared over sockets of Unix")
def test_a_worker_prints_nothing_when_the_main_process_stops_reading_a_batch():
    command = [sys.executable, "-c", CLOSED_CONNECTION]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert (done.stdout, done.stderr) == ("served\n", "")


def hanging_source(first, last):
    """Batches of the first 8 steps; then a request to stop arrives, and no further batch."""
    yield from batches(first, min(last, 8))
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    time.sleep(1000)


def test_a_request_to_stop_ends_the_wait_for_a_batch(tmp_path):
    with pytest.raises(Stopped, match="asked to terminate after step 8; everything is saved"):
        train_with(tmp_path / "cut", source=hanging_source, log_every_steps=5)
    assert [row["step"] for row in rows_of(tmp_path / "cut")] == [5, 8]
    assert_equal(trained(tmp_path / "straight", STEPS), trained(tmp_path / "cut", STEPS, resume_from="auto"))


@pytest.mark.slow
def test_a_request_to_stop_does_not_wait_for_workers_that_hang(tmp_path):
    """All 4 batches of the third epoch hang: 8 steps are made, and the next batch never comes."""
    process = start(tmp_path, "hang")
    wait_for_steps(tmp_path, 8)
    time.sleep(0.3)  # By then the run waits for the batch, as a rule.
    os.killpg(process.pid, signal.SIGTERM)
    _, talk = process.communicate(timeout=HANG_SECONDS)  # The batch would arrive after a thousand seconds.
    assert process.returncode == 75, talk
    assert saved_step(tmp_path) == 8
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 8


ORPHANS = """
import multiprocessing, os, signal, time
from gputrain.engine.data import start_worker

def work(pipe):
    start_worker(0)
    pipe.send(os.getpid())
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context("METHOD")
    here, there = context.Pipe()
    context.Process(target=work, args=(there,), daemon=True).start()
    print(here.recv(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_workers_end_with_a_killed_run(tmp_path, method):
    """SIGKILL leaves the run no time to end them, and with a fork server the run is not their parent."""
    (tmp_path / "run.py").write_text(ORPHANS.replace("METHOD", method))
    done = subprocess.run([sys.executable, tmp_path / "run.py"], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: has_ended(int(done.stdout)), "the end of a worker whose run has ended")
