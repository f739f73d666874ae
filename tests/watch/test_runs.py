"""Which runs are found below folders, and how they appear, change and vanish."""

import os
import shutil

import pytest

from gputrain.watch import runs as module
from gputrain.watch.runs import DEPTH, MOST_ENTRIES, Runs, find_runs, id_of
from tests.report.runs import metric_rows, write_rows


def run_at(folder, steps=3, changed=None):
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "metrics.jsonl", metric_rows("vae", steps))
    if changed:
        os.utime(folder / "metrics.jsonl", (changed, changed))
    return folder


def names(runs):
    return [runs.record(id).name for id in runs.ids()]


def test_runs_are_found_to_a_depth_and_through_links_but_not_among_data(tmp_path):
    root = tmp_path / "all"
    for name in (".", "a", "a/b/c", "a/b/c/d", ".hidden", "samples", "a/logs/x", "pictures"):
        run_at(root / name)
    run_at(tmp_path / "elsewhere")
    (root / "link").symlink_to(tmp_path / "elsewhere")
    (root / "a" / "loop").symlink_to(root)
    (root / "dangling").symlink_to(root / "nothing")
    (root / "pictures" / "metrics.jsonl").rename(root / "pictures" / "checkpoint_last.pt")
    looked_at = list(find_runs(root, DEPTH, {}))
    found = {str(path.relative_to(root)) for path in filter(None, looked_at)}
    assert found == {".", "a", "a/b/c", "link", "pictures"}
    assert len(looked_at) == 6  # These and a/b, each once.
    for name in ("not there", "a\0b", "\ud800"):
        assert not list(filter(None, find_runs(tmp_path / name, DEPTH, {})))
        assert len(id_of(tmp_path / name)) == 10


def test_a_folder_of_a_million_files_costs_little(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_ENTRIES", 5)
    assert MOST_ENTRIES <= 10_000
    for number in range(50):
        (tmp_path / f"{number}").mkdir()
    assert len(list(find_runs(tmp_path, DEPTH, {}))) == 6


def test_runs_appear_and_vanish_in_the_order_of_their_changes(tmp_path):
    runs = Runs([tmp_path / "later", tmp_path / "one" / "vae"], lambda: [tmp_path / "queue" / "first"])
    runs.look()
    assert runs.ids() == []
    one = run_at(tmp_path / "one" / "vae", changed=1000)
    run_at(tmp_path / "later" / "vae", changed=3000)
    run_at(tmp_path / "queue" / "first", changed=2000)
    runs.look()
    assert names(runs) == ["later/vae", "queue/first", "one/vae"]
    runs.touch()
    assert runs.record(id_of(one)).last_step == 3
    run_at(one, steps=9, changed=4000)
    runs.read()
    assert runs.record(id_of(one)).last_step == 9
    assert runs.ids()[0] == id_of(one)
    shutil.rmtree(tmp_path / "later")
    runs.look()
    assert names(runs) == ["vae", "first"]  # The name is as short as it can be.
    with pytest.raises(KeyError):
        runs.record("../vae")


def test_a_look_at_a_slow_disk_goes_on_where_it_was_interrupted(tmp_path):
    for name in "abc":
        run_at(tmp_path / name)
    runs = Runs([tmp_path])
    counts = []
    for _ in range(6):
        runs.look(limit=0)  # It looks at one folder.
        counts.append(len(runs.ids()))
    assert counts == [0, 1, 2, 3, 3, 3]
    shutil.rmtree(tmp_path / "a")
    for _ in range(5):
        runs.look(limit=0)
        assert len(runs.ids()) in (2, 3)
    assert len(runs.ids()) == 2


def test_the_thread_reads_what_is_asked_for(tmp_path):
    folder = run_at(tmp_path / "run")
    runs = Runs([tmp_path])
    runs.start()
    runs.touch([id_of(folder)])
    assert runs.record(id_of(folder)).last_step == 3


def test_long_metrics_are_listed_by_their_end_and_read_whole_later(tmp_path):
    run = run_at(tmp_path / "long", steps=2000)
    runs = Runs([run])
    runs.look()
    record = runs.record(id_of(run))
    assert (record.is_read, record.last_step) == (False, 2000)
    runs.read(limit=0.0)
    assert not record.is_read
    runs.read()
    assert record.is_read
    assert record.series("eval/psnr_db")[1] == (10, 3.2)
