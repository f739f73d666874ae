"""Which runs are found below folders, and how they appear, change and vanish."""

import json
import os
import shutil
import threading

import pytest

from gputrain.report.records import RunReader
from gputrain.watch import runs as module
from gputrain.watch.runs import DEPTH, MOST_ENTRIES, Runs, find_runs, id_of
from tests.report.runs import metric_rows, write_rows
from tests.waiting import wait_until
from tests.watch.serving import serving


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
    looked_at = {}
    found = [str(path.relative_to(root)) for path in find_runs(root, DEPTH, looked_at)]
    assert sorted(found) == [".", "a", "a/b/c", "link", "pictures"]
    assert len(looked_at) == 6  # These and a/b.
    for name in ("not there", "a\0b", "\ud800"):
        assert not list(find_runs(tmp_path / name, DEPTH, {}))
        assert len(id_of(tmp_path / name)) == 10


def test_a_folder_of_a_million_files_costs_little(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_ENTRIES", 5)
    assert MOST_ENTRIES <= 10_000
    for number in range(50):
        run_at(tmp_path / f"{number}")
    assert len(list(find_runs(tmp_path, DEPTH, {}))) == 5


def test_runs_appear_and_vanish_in_the_order_of_their_changes(tmp_path):
    runs = Runs([tmp_path / "later", tmp_path / "one" / "vae", tmp_path / "further"])
    runs.look()
    assert runs.ids() == []
    one = run_at(tmp_path / "one" / "vae", changed=1000)
    run_at(tmp_path / "later" / "vae", changed=3000)
    run_at(tmp_path / "further" / "first", changed=2000)
    runs.look()
    assert names(runs) == ["later/vae", "further/first", "one/vae"]
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


def test_a_look_at_a_slow_disk_shows_what_it_has_found(tmp_path, monkeypatch):
    for name in "abc":
        run_at(tmp_path / name)
    runs = Runs([tmp_path])
    monkeypatch.setattr(module, "READ_SECONDS", -1.0)  # Each folder takes longer.
    counts = []
    monkeypatch.setattr(module, "id_of", lambda folder: counts.append(len(runs.ids())) or id_of(folder))
    runs.look()
    shutil.rmtree(tmp_path / "a")
    runs.look()
    assert counts == [0, 1, 2, 3, 3]  # A run is there until a whole look has missed it.
    assert len(runs.ids()) == 2


def test_a_disk_that_does_not_answer_stops_the_pages_of_its_own_runs_alone(tmp_path, monkeypatch):
    hanging, other = run_at(tmp_path / "hanging"), run_at(tmp_path / "other")
    runs = Runs([tmp_path])
    runs.look()
    answers, refresh = threading.Event(), RunReader.refresh

    def slow(reader, **options):
        if reader.record.folder == hanging:
            answers.wait()
        refresh(reader, **options)

    monkeypatch.setattr(RunReader, "refresh", slow)
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.01)
    reading = threading.Thread(target=runs.read, daemon=True)
    reading.start()
    try:
        wait_until(lambda: runs._runs[id_of(hanging)].turn.locked(), "the reading thread")
        for steps, ids in ((9, []), (12, [id_of(other)])):  # The overview, and the page of the run.
            run_at(other, steps)
            monkeypatch.setattr(runs, "_read", -100.0)  # The last reading was long ago.
            runs.touch(ids)
            assert runs.record(id_of(other)).last_step == steps
        assert runs.record(id_of(hanging)).last_step == 3
        with pytest.raises(TimeoutError):
            runs.touch([id_of(hanging), id_of(other)])
        with serving(runs) as site:
            assert site.ask("/").status == 200
            assert site.ask(f"/update?run={id_of(other)}").status == 200
            assert site.ask(f"/update?run={id_of(hanging)}").status == 503
    finally:
        answers.set()
        reading.join()
    runs.touch([id_of(hanging)])


def test_what_a_page_shows_does_not_change_while_the_run_is_read(tmp_path):
    folder = run_at(tmp_path / "run")
    runs = Runs([tmp_path])
    runs.look()
    before = runs.record(id_of(folder))
    points, versions = before.metrics.series("loss/model/vae"), dict(before.versions)
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in metric_rows("vae", 9)[4:])
    runs.read()
    assert (before.metrics.series("loss/model/vae"), before.versions, before.last_step) == (points, versions, 3)
    assert before.metrics.latest["seconds"] == 3
    after = runs.record(id_of(folder))
    assert (after.last_step, len(after.metrics.series("loss/model/vae"))) == (9, 9)
    runs.read()
    assert runs.record(id_of(folder)).metrics is after.metrics


def test_the_thread_reads_what_is_asked_for(tmp_path):
    folder = run_at(tmp_path / "run")
    runs = Runs([tmp_path])
    runs.start()
    runs.touch([id_of(folder)])
    assert runs.record(id_of(folder)).last_step == 3
