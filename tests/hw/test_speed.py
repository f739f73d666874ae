"""Rates and speeds have the right size, and leave no files behind."""

import itertools
import os
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from gputrain.errors import UserError
from gputrain.hw import speed
from gputrain.hw.speed import disk_speed, product_flops_per_second

CPU = torch.device("cpu")


def test_the_rate_of_a_product(monkeypatch):
    """A simulated device computes 1 TFLOPS if undisturbed. It has its own clock, as this machine is shared."""
    disturbances = itertools.cycle([1.5, 1.0, 3.0])

    def time_taken(matrices, count):
        a, b, product = matrices
        assert a.shape == b.shape == product.shape
        assert a.std() == pytest.approx(1, abs=0.1)
        return 2 * len(a) ** 3 * count / 1e12 * next(disturbances)

    monkeypatch.setattr(speed, "_time", time_taken)
    assert product_flops_per_second(CPU, torch.float32) == pytest.approx(1e12)


def test_what_is_timed():
    a, b, product = matrices = speed._matrices(64, CPU, torch.float32)
    product.zero_()
    assert 0 < speed._time(matrices, 3) < 10
    torch.testing.assert_close(product, a @ b)
    assert 1e8 < product_flops_per_second(CPU, torch.float32, seconds=0.05) < 1e14


def test_a_product_that_the_device_refuses():
    with pytest.raises(RuntimeError):
        product_flops_per_second(CPU, torch.bool, seconds=0.01)


def test_the_speed_of_a_disk(tmp_path, monkeypatch):
    """Two blocks are written in 2 seconds and read in half a second, by the test's own clock."""
    monkeypatch.setattr(speed, "LARGEST_FILE", 2 * speed.BLOCK)
    monkeypatch.setattr(speed, "DISK_SECONDS", 10.0)
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=iter([100.0, 101.0, 102.0, 110.0, 110.5]).__next__))
    found = disk_speed(tmp_path)
    assert found.write_mb_per_second == pytest.approx(2 * 16.777216 / 2)
    assert found.read_mb_per_second == pytest.approx(2 * 16.777216 / 0.5)
    assert found.cache_dropped is (sys.platform == "linux")


def test_nothing_is_left_of_the_trial(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "LARGEST_FILE", 2 * speed.BLOCK)
    seen: set[str] = set()
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            seen.update(os.listdir(tmp_path))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        disk_speed(tmp_path)
    finally:
        ended.set()
        watcher.join()
    assert not os.listdir(tmp_path)
    if sys.platform == "linux":  # The file has no name, so a trial killed at any moment leaves nothing.
        assert not seen


def test_a_slow_disk_gets_a_short_file(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "LARGEST_FILE", 100 * speed.BLOCK)
    monkeypatch.setattr(speed, "DISK_SECONDS", 0.0001)
    blocks: list[int] = []
    monkeypatch.setattr(os, "fsync", blocks.append)
    disk_speed(tmp_path)
    assert len(blocks) == 1


def test_folders_that_cannot_be_measured(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="no such folder"):
        disk_speed(tmp_path / "missing")
    if os.name == "posix" and os.geteuid() != 0:
        tmp_path.chmod(0o555)
        with pytest.raises(UserError, match="Permission denied"):
            disk_speed(tmp_path)
        tmp_path.chmod(0o755)
    monkeypatch.setattr(speed, "FREE_BYTES", 10**18)
    with pytest.raises(UserError, match="GB free, too little"):
        disk_speed(tmp_path)
