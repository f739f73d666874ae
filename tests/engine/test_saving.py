"""Saving while the training goes on: what is written is the state of its step, errors of the thread have the effects
of any other save, and no end of a run overtakes a checkpoint that is being written."""

import errno
import io
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import wait
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gputrain.engine import checkpoint, saving
from gputrain.engine.checkpoint import BEST, LAST, PREVIOUS, map_tensors, tensor_bytes
from gputrain.engine.run_folder import Run
from gputrain.engine.saving import HostSnapshot, SaveJob, Saver, buffers_like
from gputrain.engine.state import TrainState
from gputrain.errors import Stopped
from tests.comparison import assert_same
from tests.engine.test_run import assert_equal, schedule, steps_logged, trained
from tests.toy import ToyRecipe, batches, cpu_runtime, quiet, train_toy, weights, whole_checkpoint

CPU = torch.device("cpu")
WRITE, SUBMIT, FINISH = checkpoint._write, Saver._submit, Saver._finish
UNTIL_WAITED_FOR = 1000  # More steps than a run has: a write lasts until the training waits for it.
HANG_SECONDS = 120.0


class SlowDisk:
    """Writes checkpoints slowly without a clock. What is written in a thread waits until the training has made `steps`
    further steps or waits for it itself, and is complete before the training goes on.

    The main thread alone counts and releases, so that no order in which the threads run can change anything.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.asked = 0  # Number of batches that the training has asked for.
        self.during: list[int] = []  # Steps of the training during each write.
        self.fails: Callable[[int], None] = lambda number: None
        self._writes: tuple[Saver, int] | None = None  # The one whose thread writes, and its first batch.
        self._released = threading.Event()

    def submit(self, saver: Saver, job: SaveJob) -> None:
        assert self._writes is None
        self._released.clear()
        self._writes = saver, self.asked
        SUBMIT(saver, job)

    def finish(self, saver: Saver) -> None:
        self._complete()
        FINISH(saver)

    def _complete(self) -> None:
        if self._writes is None:
            return
        (saver, first), self._writes = self._writes, None
        self._released.set()
        wait([saver.pending])
        self.during.append(self.asked - first)

    def write(self, content, file) -> int:
        number = len(self.during)
        if threading.current_thread() is threading.main_thread():
            self.during.append(0)
            self.fails(number)
            return WRITE(content, file)
        self.fails(number)
        released = self._released

        class Slow:
            def write(self, data: bytes) -> int:
                assert released.wait(HANG_SECONDS)
                return file.write(data)

            def __getattr__(self, name: str) -> object:
                return getattr(file, name)

        return WRITE(content, Slow())

    def batches(self, first: int, last: int):
        for x_BD in batches(first, last):
            if self._writes is not None and self.asked - self._writes[1] >= self.steps:
                self._complete()
            self.asked += 1
            yield x_BD


@pytest.fixture
def disk(monkeypatch) -> SlowDisk:
    slow = SlowDisk()
    monkeypatch.setattr(checkpoint, "_write", slow.write)
    monkeypatch.setattr(Saver, "_submit", lambda saver, job: slow.submit(saver, job))
    monkeypatch.setattr(Saver, "_finish", lambda saver: slow.finish(saver))
    return slow


def run(folder, disk: SlowDisk, steps: int = 20, **others) -> ToyRecipe:
    recipe = ToyRecipe(schedule(steps), adversarial_from=3)
    train_toy(recipe, quiet(folder, **{"log_every_steps": 1, "keep_checkpoints": 0, **others}), disk.batches)
    return recipe


def in_one_thread(monkeypatch) -> None:
    """Let every save take the state as it is, without a copy and while the training waits."""
    monkeypatch.setattr(saving, "ram", lambda: (1.0, 1e-9))


def test_what_is_written_while_training_goes_on_is_the_state_of_its_step(tmp_path, disk, monkeypatch, caplog):
    """The reference is a run that waits for each of its saves. Weights, averages, random numbers and progress are equal
    bit by bit, although three steps change them while a checkpoint is written."""
    disk.steps = 3
    recipe = run(tmp_path / "meanwhile", disk, checkpoint_every_steps=5)
    assert disk.during == [3, 3, 3, 0]  # The last one must be saved.
    in_one_thread(monkeypatch)
    waiting = run(tmp_path / "waiting", disk, checkpoint_every_steps=5)
    assert disk.during[4:] == [0] * 4
    assert caplog.text.count("training waits for every save") == 1
    assert_equal(weights(recipe), weights(waiting))
    for name in [f"checkpoint_step_{step}.pt" for step in (5, 10, 15, 20)] + [LAST, PREVIOUS]:
        found, expected = (checkpoint.read(tmp_path / kind / name, "toy") for kind in ("meanwhile", "waiting"))
        expected["config"]["output_dir"] = found["config"]["output_dir"]
        assert_same(found, expected)


def test_a_copy_is_written_as_the_original_and_shares_its_memory_with_the_next_copy():
    shared = torch.arange(6.0).reshape(2, 3)
    content = {
        "module": torch.nn.BatchNorm2d(3).state_dict(),  # It has attributes: versions of its parts.
        "nested": [{"a": (shared, 1), "b": shared}, torch.empty(0), torch.tensor(3)],
        "nhwc": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "bf16": torch.randn(7).bfloat16(),
        "bytes": torch.arange(251, dtype=torch.uint8),
    }
    host = HostSnapshot()
    copied = host.copy(content, CPU)
    assert_same(copied, content)
    assert copied["module"]._metadata == content["module"]._metadata
    files = [io.BytesIO(), io.BytesIO()]
    for file, value in zip(files, (content, copied), strict=True):
        torch.save(value, file)
    # Shared tensors are written once, and no byte beside the tensors is.
    assert len(files[0].getvalue()) == len(files[1].getvalue())
    assert_same(*(torch.load(io.BytesIO(file.getvalue())) for file in files))

    places = [tensor.data_ptr() for tensor in checkpoint.distinct_tensors(copied).values()]
    before = shared.clone()
    shared += 1
    assert torch.equal(copied["nested"][0]["b"], before)
    again = host.copy(content, CPU)
    assert [tensor.data_ptr() for tensor in checkpoint.distinct_tensors(again).values()] == places
    assert_same(again, content)
    content["more"] = torch.ones(5)
    assert_same(host.copy(content, CPU), content)


def test_sizes_count_shared_tensors_once_and_buffers_fill_chunks(monkeypatch):
    one = torch.zeros(10, dtype=torch.float64)
    assert tensor_bytes({"a": one, "b": [one, torch.zeros(3)]}) == 80 + 12
    monkeypatch.setattr(saving, "CHUNK_BYTES", 256)
    tensors = [torch.zeros(size) for size in (16, 16, 100, 16, 1)]
    buffers = buffers_like(tensors, pinned=False)
    assert [len(buffer) for buffer in buffers] == [16, 16, 100, 16, 1]
    assert [buffer.untyped_storage().nbytes() for buffer in buffers] == [64, 64, 400, 64, 4]
    starts = sorted((buffer.data_ptr(), 4 * len(buffer)) for buffer in buffers)
    assert all(start + size <= later for (start, size), (later, _) in pairwise(starts))
    assert map_tensors((1, "a", None), lambda tensor: tensor) == (1, "a", None)


def test_a_second_save_waits_for_the_first_if_it_has_a_name_and_otherwise_comes_later(tmp_path, disk):
    """Every step is due to be saved, and a write lasts for four steps if the training doesn't wait for it."""
    disk.steps = 4
    run(tmp_path, disk, 21, checkpoint_every_minutes=1e-9)
    assert disk.during == [4, 4, 4, 4, 0]  # Those of steps 1, 6, 11 and 16, and the last one, which must be saved.
    disk.during.clear()
    run(tmp_path / "named", disk, 6, checkpoint_every_steps=1)
    assert disk.during == [1, 1, 1, 1, 1, 0]
    assert {path.name for path in (tmp_path / "named").glob("*_step_*.pt")} == {
        f"checkpoint_step_{step}.pt" for step in range(1, 7)
    }


def test_a_write_error_in_the_thread_costs_a_warning_and_the_next_save_tries_again(tmp_path, disk, caplog):
    def full(number: int) -> None:
        if number == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk.fails = full
    run(tmp_path, disk, 12, checkpoint_every_steps=3)
    assert caplog.text.count("No space left on device; free some space") == 1
    assert "Training continues, and the next save tries again" in caplog.text
    steps = sorted(int(path.stem.split("_")[-1]) for path in tmp_path.glob("*_step_*.pt"))
    assert steps == [3, 9, 12]
    assert steps_logged(tmp_path) == list(range(1, 13))


@pytest.mark.parametrize(("failing", "says_intact"), [(0, False), (1, True)])
def test_a_last_save_that_fails_says_what_is_left(tmp_path, disk, failing, says_intact):
    """Earlier checkpoints are mentioned only if there are some."""

    def full(number: int) -> None:
        if number >= failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk.fails = full
    with pytest.raises(Stopped) as stopped:
        run(tmp_path, disk, 6, checkpoint_every_steps=3)
    assert ("earlier checkpoints are intact" in stopped.value.hint) == says_intact
    assert bool(list(tmp_path.glob("checkpoint_*.pt"))) == says_intact


def test_a_defect_in_the_thread_ends_the_run_and_the_step_is_saved(tmp_path, disk, caplog):
    def defect(number: int) -> None:
        if number == 0:
            raise ValueError("of ours")

    disk.fails = defect
    with pytest.raises(ValueError, match="of ours"):
        run(tmp_path, disk, 12, checkpoint_every_steps=3)
    assert checkpoint.read(tmp_path / LAST, "toy")["progress"]["step"] == 4
    assert "step 4 is saved before the run ends with an error" in caplog.text


@pytest.mark.parametrize(("failing", "expected"), [(1, (9, 3.0)), (None, (6, 5.0))])
def test_the_best_score_is_that_of_a_checkpoint_that_has_been_written(tmp_path, disk, failing, expected):
    """If the write of the second evaluation's checkpoint fails, the third one, a lower score, is the best. Whether it
    has failed is known only when the third evaluation waits for it."""
    scores = iter([0.0, 1.0, 5.0, 3.0, 2.0])

    def full(number: int) -> None:
        if number == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk.fails, disk.steps = full, UNTIL_WAITED_FOR
    recipe = ToyRecipe(schedule(12), adversarial_from=3)
    evaluate = recipe.evaluate
    recipe.evaluate = lambda: (setattr(found := evaluate(), "scalars", {"score": next(scores)}), found)[1]
    train_toy(recipe, quiet(tmp_path, log_every_steps=1, evaluate_every_steps=3), disk.batches)
    best = checkpoint.read(tmp_path / BEST, "toy")["progress"]
    assert (best["step"], best["best_score"]) == expected
    assert checkpoint.read(tmp_path / LAST, "toy")["progress"]["best_score"] == expected[1]


def test_going_back_waits_for_the_checkpoint_that_is_being_written(tmp_path, disk, caplog):
    """Steps 16 to 18 are bad. The only checkpoint is one that is not complete when they are noticed."""
    disk.steps = UNTIL_WAITED_FOR

    def poisoned(first: int, last: int):
        for step, x_BD in enumerate(disk.batches(first, last), first):
            yield x_BD * float("nan") if step in (15, 16, 17) else x_BD

    folder = quiet(tmp_path, log_every_steps=1, checkpoint_every_steps=15)
    train_toy(ToyRecipe(schedule(19), adversarial_from=3), folder, poisoned)
    assert "weights and optimizers are back at step 15" in caplog.text


@pytest.mark.parametrize("signals", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_signal_during_a_write_leaves_a_complete_checkpoint(tmp_path, disk, signals):
    """The write lasts until after the signals. One of them saves the last step too, two of them stop at once, but not
    before the checkpoint is complete."""
    disk.steps = UNTIL_WAITED_FOR
    recipe = ToyRecipe(schedule(20), adversarial_from=3)
    average = recipe.average

    def signalled(step: int) -> None:
        for _ in range(signals if step == 6 else 0):
            signal.raise_signal(signal.SIGTERM)
        average(step)

    recipe.average = signalled
    with pytest.raises(Stopped, match="everything is saved" if signals == 1 else "stopped at once"):
        train_toy(recipe, quiet(tmp_path / "cut", log_every_steps=1, checkpoint_every_steps=5), disk.batches)
    step = checkpoint.read(tmp_path / "cut" / LAST, "toy")["progress"]["step"]
    assert step == (7 if signals == 1 else 5)
    assert not list((tmp_path / "cut").glob("*.partial"))
    assert_equal(trained(tmp_path / "straight", 20), trained(tmp_path / "cut", 20, resume_from="auto"))


def test_nothing_is_written_where_there_is_no_room_and_both_numbers_are_named(tmp_path):
    """A tensor on the meta device has a size and takes no memory."""
    checkpoint.save(tmp_path, whole_checkpoint())
    before = (tmp_path / LAST).read_bytes()
    vast = torch.empty(10**15, dtype=torch.int8, device="meta")
    with pytest.raises(checkpoint.SaveFailed, match=r"it takes 1050000\.00 GB, and \d+\.\d\d GB are free") as caught:
        checkpoint.save(tmp_path, whole_checkpoint(modules={"g": vast}))
    assert "--keep-checkpoints" in caught.value.hint
    assert (tmp_path / LAST).read_bytes() == before
    assert not (tmp_path / PREVIOUS).exists()


def test_a_checkpoint_that_the_disk_changes_replaces_none(tmp_path, monkeypatch):
    """The disk flips a bit of what it was given. The checkpoint and the one before it stay."""
    for step in (1, 2):
        checkpoint.save(tmp_path, whole_checkpoint(step=step))
    sync = os.fsync

    def flipping(handle: int) -> None:
        sync(handle)
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.is_file():
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 4
            path.write_bytes(content)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", flipping)
        with pytest.raises(checkpoint.SaveFailed, match="what the disk holds differs from what was written") as caught:
            checkpoint.save(tmp_path, whole_checkpoint(step=3))
    assert caught.value.hint == "see to the disk"
    steps = [checkpoint.read(tmp_path / name, "toy")["progress"]["step"] for name in (LAST, PREVIOUS)]
    assert steps == [2, 1]


def test_a_save_that_is_started_returns_before_it_is_written(tmp_path, disk, monkeypatch):
    """The clock is read when the save is started, and when the thread begins and ends."""
    disk.steps = UNTIL_WAITED_FOR
    run = Run(tmp_path, quiet(tmp_path), {}, "")
    recipe = ToyRecipe(schedule(100))
    state = TrainState.begin(recipe, recipe.schedule, cpu_runtime(), run)
    saver = Saver(state, run)
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=iter([100.0, 100.5, 107.0]).__next__))
    saver.save(["checkpoint_step_0.pt"])
    assert (saver.is_busy, saver.is_due(), run.status.saved_step) == (True, False, -1)
    assert not (tmp_path / LAST).exists()
    saver.finish()
    assert (saver.is_busy, run.status.saved_step) == (False, 0)
    assert (saver.saved_at, run.status.save_seconds) == (100.0, 6.5)
    assert os.path.samefile(tmp_path / LAST, tmp_path / "checkpoint_step_0.pt")
