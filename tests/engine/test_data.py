"""Order, loader, processes, split and manifests."""

import errno
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import traceback
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from multiprocessing import synchronize
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from gputrain.data_in.preparation import in_processes
from gputrain.data_in.split import few_held_out, fingerprint, is_held_out, split
from gputrain.engine import data
from gputrain.engine.data import DataWarning, Reader, Stream, batches, item_rng, loader, permutation, samples
from gputrain.engine.schedule import RunProgress, Schedule, StepSchedule
from gputrain.errors import UserError
from gputrain.files import check_report, read_rows, write_rows, writing
from gputrain.hw.plan import Hardware, decide
from gputrain.hw.probe import Machine
from tests.tables import each_row
from tests.waiting import HANG_SECONDS, wait_until

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")

# ------------------------------------------------------------------------------------------------------ order


def test_order_and_random_numbers_never_change():
    """Golden numbers: another version of ours or of numpy that draws others would break every resumed run."""
    assert permutation(7, 0, 10).tolist() == [3, 1, 4, 5, 0, 2, 8, 6, 7, 9]
    assert permutation(7, 1, 10).tolist() == [3, 2, 1, 5, 7, 4, 8, 0, 9, 6]
    assert item_rng(7, 1, 3).random(2).tolist() == [0.749715518835575, 0.01110419921171324]


def test_every_sample_has_random_numbers_of_its_own():
    keys = [(seed, epoch, item) for seed in range(4) for epoch in range(4) for item in range(4)]
    assert len({item_rng(*key).random() for key in keys}) == len(keys)
    assert len({tuple(permutation(seed, epoch, 20)) for seed in range(4) for epoch in range(4)}) == 16


@given(st.integers(1, 9), st.integers(1, 7), st.integers(0, 30), st.integers(0, 30))
def test_stream_is_the_endless_row_of_whole_epochs(item_count, batch_size, start, length):
    stream = Stream(item_count, 5, batch_size, start, start + length)
    batches = list(stream)
    assert len(batches) == len(stream)
    assert all(len(batch) == batch_size for batch in batches[:-1])
    expected = [(k // item_count, permutation(5, k // item_count, item_count)[k % item_count]) for k in range(61)]
    assert list(chain(*batches)) == expected[start : start + length]


@given(st.integers(1, 9), st.integers(1, 20))
def test_each_epoch_holds_each_item_once(item_count, batch_size):
    seen = sorted(chain(*Stream(item_count, 0, batch_size, 0, 4 * item_count)))
    assert seen == [(epoch, item) for epoch in range(4) for item in range(item_count)]


@given(st.integers(1, 9), st.integers(1, 20), st.integers(0, 40), st.integers(0, 40))
def test_epochs_are_the_same_batches_in_pieces(item_count, batch_size, start, length):
    stream = Stream(item_count, 0, batch_size, start, start + length)
    pieces = list(stream.epochs())
    assert list(chain(*pieces)) == list(stream)
    for piece in pieces:
        assert len({first // item_count for first in range(piece.start_sample, piece.stop_sample, batch_size)}) == 1


# ----------------------------------------------------------------------------------------------------- loader


@dataclass(frozen=True)
class Numbers:
    """Each sample's key, one of its random numbers, and the process that read it."""

    def __getitem__(self, sample):
        epoch, item = sample
        return {
            "values": torch.tensor([epoch, item, item_rng(0, epoch, item).random()], dtype=torch.float64),
            "process": os.getpid(),
        }


def read(start, num_workers, persistent=True, **options):
    stream = Stream(5, 0, 3, start, 14)
    return [
        batch["values"]
        for batch in loader(Numbers(), stream, num_workers=num_workers, persistent=persistent, **options)
    ]


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("first", [0, 5])
def test_every_batch_of_a_training_is_whole(persistent, first):
    """Compiled code is for one shape, so none may be short at the end of an epoch: it goes on into the next."""
    steps = StepSchedule(Schedule(batch_size=3, num_epochs=4), RunProgress(items=7))
    plan = decide(Machine(system="Linux", cpu_cores=1), Hardware(num_workers=0, persistent_workers=persistent))
    read = batches(Numbers(), 7, steps, plan, first, steps.last_step)
    made = [batch["values"][:, 1].int().tolist() for batch in read]
    assert [len(batch) for batch in made] == [3] * (10 - first)
    if first == 0:
        items = [item for batch in made for item in batch][:28]
        assert [sorted(items[at : at + 7]) for at in range(0, 28, 7)] == [list(range(7))] * 4


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resumed_stream_equals_undisturbed_one_at_every_start(num_workers):
    whole = torch.cat(read(0, 0))
    expected = [[epoch, item, item_rng(0, epoch, item).random()] for epoch, item in samples(0, 5, 0, 14)]
    assert whole.tolist() == expected
    for start in range(0, 14, 3 if num_workers else 1):
        assert torch.equal(torch.cat(read(start, num_workers)), whole[start:])


def test_workers_started_afresh_each_epoch_read_the_same():
    assert [batch.tolist() for batch in read(0, 2, persistent=False)] == [batch.tolist() for batch in read(0, 0)]


@pytest.mark.parametrize(("persistent", "processes"), [(True, 1), (False, 3)])
def test_persistent_workers_live_for_the_whole_stream(persistent, processes):
    batches = loader(Numbers(), Stream(4, 0, 2, 0, 12), num_workers=1, persistent=persistent)
    seen = set(chain(*(batch["process"].tolist() for batch in batches)))
    assert len(seen) == processes
    assert os.getpid() not in seen


@pytest.mark.slow
def test_loader_works_where_processes_are_spawned():
    assert torch.equal(torch.cat(read(0, 2, start_method="spawn")), torch.cat(read(0, 0)))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loader_leaves_torchs_random_numbers_alone(num_workers):
    before = torch.random.get_rng_state()
    read(0, num_workers, persistent=False)
    assert torch.equal(torch.random.get_rng_state(), before)


class Circumstances:
    def __getitem__(self, sample):
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        ignored = [signal.getsignal(number) == signal.SIG_IGN for number in numbers]
        return torch.tensor([torch.get_num_threads(), *ignored])


def test_workers_use_one_thread_and_ignore_signals_to_the_group():
    (batch,) = loader(Circumstances(), Stream(1, 0, 1, 0, 1), num_workers=1)
    assert batch.tolist() == [[1, 1, 1, 1]]


class Trouble:
    """Item 0 ends the worker, when a file is there, or raises."""

    def __init__(self, kind, file=None):
        self.kind, self.file = kind, file

    def __getitem__(self, sample):
        if self.kind == "warning":
            warnings.warn("photo.jpg: truncated", DataWarning, stacklevel=2)
            warnings.warn("an odd tag", UserWarning, stacklevel=2)
        elif sample.item == 0 and self.kind == "killed":
            wait_until(self.file.exists, "the batches before")
            os.kill(os.getpid(), signal.SIGKILL)
        elif sample.item == 0 and self.kind == "user error":
            raise UserError("no picture is left", hint="mount the disk again")
        elif sample.item == 0 and self.kind == "defect":
            raise RuntimeError("of ours")
        return torch.tensor(sample.item)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_error_of_the_data_reaches_the_user_with_its_hint(num_workers):
    with pytest.raises(UserError) as caught:
        list(loader(Trouble("user error"), Stream(2, 0, 1, 0, 2), num_workers=num_workers))
    assert (caught.value.message, caught.value.hint) == ("no picture is left", "mount the disk again")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_defect_stays_a_defect(num_workers):
    with pytest.raises(RuntimeError, match="of ours") as caught:
        list(loader(Trouble("defect"), Stream(2, 0, 1, 0, 2), num_workers=num_workers))
    traceback.clear_frames(caught.tb)  # they hold torch's iterator, which takes 5 s to die of garbage collection


@pytest.mark.parametrize("num_workers", [0, 2])
def test_warning_is_logged_once_whichever_worker_met_it(num_workers, caplog):
    list(loader(Trouble("warning"), Stream(4, 0, 1, 0, 12), num_workers=num_workers, persistent=False))
    assert caplog.messages == ["photo.jpg: truncated"]


@dataclass(frozen=True)
class Mortal(Numbers):
    """Kills the worker that reads item 2, so often as there is a file to delete."""

    lives: Path

    def __getitem__(self, sample):
        if sample.item == 2 and (left := next(self.lives.iterdir(), None)):
            left.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(sample)


def test_a_dead_worker_is_replaced_and_no_batch_is_lost(tmp_path, caplog):
    """Two deaths, the second one of a worker that reads on after the first."""
    for number in range(2):
        (tmp_path / str(number)).touch()
    stream = Stream(5, 0, 3, 0, 14)
    survived = [batch["values"] for batch in loader(Mortal(tmp_path), stream, num_workers=2)]
    assert torch.equal(torch.cat(survived), torch.cat(read(0, 0)))
    message = "a data worker process died (SIGKILL); new workers continue at the missing batch"
    assert caplog.messages == [message] * 2


@pytest.mark.slow
def test_workers_that_die_again_and_again_are_a_user_error(tmp_path):
    """Item 0 comes last: the batches before it arrive."""
    stream = Stream(3, 3, 1, 0, 3)
    assert [batch[0].item for batch in stream] == [2, 1, 0]
    batches = loader(Trouble("killed", tmp_path / "arrived"), stream, num_workers=1, prefetch=3)
    assert [next(batches).item(), next(batches).item()] == [2, 1]
    (tmp_path / "arrived").touch()
    with pytest.raises(UserError, match=r"die repeatedly: a data worker process died \(SIGKILL\)") as caught:
        next(batches)
    assert "--num-workers" in caught.value.hint


class Leaving:
    """The first process that reads item 1 ends as if all were well."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __getitem__(self, sample):
        if sample.item == 1 and not self.place.exists():
            self.place.touch()
            os._exit(0)
        return torch.tensor(sample.item)


def test_a_worker_that_ends_without_an_exit_code_of_a_failure_is_replaced(tmp_path, caplog):
    batches = loader(Leaving(tmp_path / "left"), Stream(3, 0, 1, 0, 3), num_workers=1)
    assert sorted(batch.item() for batch in batches) == [0, 1, 2]
    assert "a data worker process died" in caplog.text


def lost_lock() -> synchronize.Lock:
    """Returns a lock of another process, whose semaphore does not exist any more."""
    lock = synchronize.Lock.__new__(synchronize.Lock)
    lock.__setstate__((0, 1, 1, "/no-such-semaphore"))
    return lock


class LostLock:
    def __reduce__(self):
        return lost_lock, ()


@pytest.mark.slow
def test_a_worker_that_starts_while_the_main_process_ends_prints_no_traceback(capfd):
    for first in (Reader(Plain()), "any other object"):
        process = multiprocessing.get_context("spawn").Process(target=print, args=(first, LostLock()))
        process.start()
        process.join(HANG_SECONDS)
        assert process.exitcode == 1
        assert ("Traceback" in capfd.readouterr().err) == isinstance(first, str)


class Plain:
    def __getitem__(self, sample):
        return torch.tensor(sample.item)


@dataclass(frozen=True)
class Hanging:
    """Item 0 comes when the file is there."""

    file: Path

    def __getitem__(self, sample):
        if sample.item == 0:
            wait_until(self.file.exists, "the warning")
        return torch.tensor(sample.item)


def test_a_batch_that_does_not_come_is_told(tmp_path, monkeypatch, caplog):
    """It comes once that has been told."""
    monkeypatch.setattr(data, "HANG_SECONDS", 0.2)
    warn = data.log.warning
    monkeypatch.setattr(data.log, "warning", lambda *of: (warn(*of), (tmp_path / "told").touch()))
    batches = loader(Hanging(tmp_path / "told"), Stream(2, 0, 1, 0, 2), num_workers=1)
    assert sorted(batch.item() for batch in batches) == [0, 1]
    assert re.search(r"no batch for \d+ s: the data workers \(processes \d+\) or the disk", caplog.text)


def test_workers_that_hang_are_killed_when_the_loader_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "LEAVING_SECONDS", 0.1)
    stream = Stream(2, 2, 1, 0, 2)
    assert [batch[0].item for batch in stream] == [1, 0]
    batches = loader(Sleeper(tmp_path), stream, num_workers=2)
    assert next(batches).tolist() == [1]
    wait_until(lambda: list(tmp_path.iterdir()), "a worker that hangs")
    batches.close()
    for pid in [int(path.name) for path in tmp_path.iterdir()]:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@POSIX
def test_a_sigchld_handler_that_another_loader_installed_does_not_raise(tmp_path, monkeypatch):
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    before = signal.getsignal(signal.SIGCHLD)
    list(DataLoader([1, 2], num_workers=1))
    assert signal.getsignal(signal.SIGCHLD) is not before
    try:
        test_workers_that_hang_are_killed_when_the_loader_is_closed(tmp_path, monkeypatch)
    finally:
        signal.signal(signal.SIGCHLD, before)


@dataclass(frozen=True)
class Sleeper:
    """The worker that reads item 0 leaves its process id in a folder, and sleeps for ever."""

    folder: Path

    def __getitem__(self, sample):
        if sample.item == 0:
            (self.folder / str(os.getpid())).touch()
            time.sleep(1000)
        return torch.tensor(sample.item)


# -------------------------------------------------------------------------------------------------- processes


@pytest.mark.parametrize("num_workers", [0, 2])
def test_results_come_in_order(num_workers):
    assert list(in_processes(math.factorial, range(12), num_workers)) == [math.factorial(n) for n in range(12)]


@pytest.mark.parametrize(
    ("function", "code", "named", "advice"),
    [
        (os._exit, 3, "exit code 3", "--num-workers 0"),
        pytest.param(signal.raise_signal, "SIGKILL", "SIGKILL", "memory runs out", marks=POSIX),
        pytest.param(signal.raise_signal, "SIGBUS", "SIGBUS", "/dev/shm", marks=POSIX),
        pytest.param(signal.raise_signal, "SIGSEGV", "SIGSEGV", "--num-workers 0", marks=POSIX),
        pytest.param(signal.raise_signal, "SIGTERM", "SIGTERM", "--num-workers 0", marks=POSIX),
    ],
)
def test_process_that_dies_is_a_user_error_that_names_its_end(function, code, named, advice):
    code = getattr(signal, code) if isinstance(code, str) else code
    with pytest.raises(UserError) as caught:
        list(in_processes(function, [code, code], 2))
    assert caught.value.message == f"a worker process died ({named})"
    assert advice in caught.value.hint
    assert ("memory runs out" in caught.value.hint) is (named == "SIGKILL")


def test_error_in_a_process_keeps_its_hint(tmp_path):
    (tmp_path / "rows").write_text("damaged")
    with pytest.raises(UserError) as caught:
        list(in_processes(partial(read_rows, keys=("path",)), [tmp_path / "rows"] * 2, 2))
    assert "rows, line 1: damaged, or written by another version" in caught.value.message
    assert "prepare-data" in caught.value.hint


ORPHANS = """
    import os, time
    from gputrain.data_in.preparation import in_processes

    def nap(number):
        os.write(1, f"{os.getpid()}\\n".encode())  # print would write it in two pieces.
        time.sleep(0.05)

    if __name__ == "__main__":
        list(in_processes(nap, range(10_000), 2))
"""


def test_killed_parent_leaves_no_processes_behind(tmp_path):
    script = tmp_path / "orphans.py"
    script.write_text(textwrap.dedent(ORPHANS))
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        assert {int(parent.stdout.readline()) for _ in range(4)} != {parent.pid}
        parent.kill()
        parent.communicate(timeout=HANG_SECONDS)  # returns when the last process that inherited the pipe is gone


# ------------------------------------------------------------------------------------------------------ split


def test_fingerprint_sees_size_start_middle_and_end(tmp_path):
    content = bytearray(os.urandom(1_000_000))

    def mark(name="file"):
        (tmp_path / name).write_bytes(content)
        return fingerprint(tmp_path / name)

    marks = [mark(), mark("copy")]
    assert marks[0] == marks[1]
    assert len(marks[0]) == 32
    for position in (0, 65_535, 500_000, 1_000_000 - 65_536, 999_999):
        content[position] ^= 1
        marks.append(mark())
    content.append(0)
    marks.append(mark())
    assert len(set(marks)) == 1 + 5 + 1
    content = bytearray(1_000_000)
    before = mark()
    content.append(0)  # the same three blocks
    assert mark() != before
    content = bytearray(os.urandom(196_608))
    for position in (65_536, 131_071, 131_072):  # the borders of the blocks of the longest file that is read whole
        before = mark()
        content[position] ^= 1
        assert mark() != before


def marks(count):
    return [f"{number:032x}" for number in torch.randint(2**62, (count,), generator=torch.manual_seed(0)).tolist()]


def spread_marks(count):
    """Fingerprints spread over their whole range, as hashes are."""
    return [mark[::-1] for mark in marks(count)]


def test_held_out_share_is_kept_and_grows_from_within():
    many = spread_marks(4000)
    small = {mark for mark in many if is_held_out(mark, 0.05)}
    large = {mark for mark in many if is_held_out(mark, 0.2)}
    assert abs(len(small) / 4000 - 0.05) < 0.015
    assert abs(len(large) / 4000 - 0.2) < 0.03
    assert small < large
    assert not any(is_held_out(mark, 0.0) for mark in many)
    assert all(is_held_out(mark, 1.0) for mark in many)


@settings(max_examples=50)
@given(st.lists(st.sampled_from(spread_marks(6)), min_size=1, max_size=12), st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
def test_split_never_leaks_and_never_leaves_a_side_empty(contents, share):
    items = list(enumerate(contents))
    parts = split(items, share, key=lambda item: item[1])
    if len(set(contents)) == 1:
        assert (parts.train, parts.held_out, parts.shared) == (items, items, True)
        return
    train, held_out = ({mark for _, mark in side} for side in (parts.train, parts.held_out))
    assert train
    assert held_out
    assert not train & held_out
    assert max(held_out) < min(train)
    assert sorted(parts.train + parts.held_out) == items
    assert not parts.shared


def test_split_follows_the_share_where_it_can():
    many = spread_marks(100)
    parts = split(many, 0.2, key=str)
    assert parts.held_out == [mark for mark in many if is_held_out(mark, 0.2)]


# -------------------------------------------------------------------------------------------------- manifests


def test_rows_come_back_whatever_the_file_is_called(tmp_path):
    rows = [{"path": name, "bytes": 1} for name in ("ein Bäcker.png", "日本.png", "not utf-8 \udcff.png", "new\nline")]
    write_rows(tmp_path / "manifest.jsonl", rows)
    assert read_rows(tmp_path / "manifest.jsonl", ("path", "bytes")) == rows
    assert [json.loads(line) for line in (tmp_path / "manifest.jsonl").open()] == rows
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.jsonl"]


def test_unchanged_rows_leave_the_file_untouched(tmp_path):
    path = tmp_path / "manifest.jsonl"
    write_rows(path, [{"a": 1}])
    before = path.stat()
    write_rows(path, [{"a": 1}])
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    write_rows(path, [{"a": 2}])
    assert path.stat().st_ino != before.st_ino


def test_write_that_fails_leaves_the_old_file_whole(tmp_path):
    path = tmp_path / "manifest.jsonl"
    write_rows(path, [{"a": 1}])
    (tmp_path / "manifest.jsonl.partial").mkdir()  # stands in the way of the temporary file
    with pytest.raises(UserError, match=r"manifest\.jsonl: cannot be written"):
        write_rows(path, [{"a": 2}])
    assert read_rows(path, ["a"]) == [{"a": 1}]


@each_row("{", "[]", '{"other": 1}', "", "\xff")
def test_damaged_manifest_names_the_line(tmp_path, line):
    path = tmp_path / "manifest.jsonl"
    path.write_text('{"path": "a"}\n' + line + "\n", encoding="latin-1")
    with pytest.raises(UserError, match=r"manifest\.jsonl(, line 2: damaged|: cannot be read)"):
        read_rows(path, ["path"])


@each_row((1, 63, True), (3, 63, True), (4, 63, False), (1, 8, True), (2, 8, False), (2, 20, True), (2, 19, False))
def test_few_held_out_items_are_a_warning(held_out, items, warns):
    text = few_held_out(held_out, items, "clips", "record more")
    assert bool(text) == warns
    if warns:
        assert text.startswith(f"only {held_out} of {items} clips {'is' if held_out == 1 else 'are'} held out: ")
        assert text.endswith("; record more")


@pytest.mark.parametrize(("code", "hint"), [(errno.EROFS, "choose a folder"), (errno.ENOSPC, "free some space")])
def test_the_remedy_for_a_file_that_cannot_be_written_is_that_of_its_cause(tmp_path, code, hint):
    with pytest.raises(UserError, match="cannot be written") as caught, writing(tmp_path):
        raise OSError(code, os.strerror(code))
    assert caught.value.hint.startswith(hint)


@each_row(
    (b'{"reasons": {}, "clips": 3}', True),
    (b"[]", True),
    (b"", True),
    (b'[{"clips": 1}, {"clips": 2}]', True),
    (b'{"0001": {"caption": "a cat"}}', False),
    (b'{"audio": "a.wav"}\n{"audio": "b.wav"}\n', False),
    (b"\x89PNG\r\n", False),
)
def test_only_a_report_is_written_over(tmp_path, content, may):
    path = tmp_path / "report.json"
    path.unlink(missing_ok=True)
    check_report(path, ["reasons", "clips"])
    path.write_bytes(content)
    with nullcontext() if may else pytest.raises(UserError, match="holds something else than a report"):
        check_report(path, ["reasons", "clips"])
