"""The benchmark of growth: it names what grows faster than its size, and each of its works runs."""

import mmap
import sys

import pytest

from benchmarks import growth
from benchmarks.growth import WORKS, Growth, Work, measure, row_of


def busy(rounds: int) -> int:
    return sum(number & 1 for number in range(rounds))


def touch_new_pages(size: int) -> None:
    """Takes memory from the system. What malloc gives may be memory that the process has freed before."""
    with mmap.mmap(-1, size) as pages:
        for start in range(0, size, mmap.PAGESIZE):
            pages[start] = 1


@pytest.mark.slow
def test_quadratic_work_is_named_and_linear_work_is_not(monkeypatch, capsys):
    works = {
        "linear": Work("items", lambda folder, size: lambda: busy(1000 * size), 400, 400),
        "quadratic": Work("items", lambda folder, size: lambda: busy(10 * size**2), 400, 400),
    }
    monkeypatch.setattr(sys, "argv", ["growth"])
    assert growth.main(works) == 1
    linear, quadratic = capsys.readouterr().out.splitlines()
    assert linear.startswith("linear ")
    assert "faster" not in linear
    assert quadratic.endswith("grows faster than its size")
    assert quadratic.split()[2:13:5] == ["100", "200", "400"]
    monkeypatch.setattr(sys, "argv", ["growth", "linear"])
    assert growth.main(works) == 0


def test_the_peak_memory_of_work_is_measured():
    work = Work("MB", lambda folder, size: lambda: touch_new_pages(size * 10**6), 40, 40)
    grown = measure(work, 40)
    if sys.platform == "linux":
        assert [round(found / size, 1) for found, size in zip(grown.peak_mb, grown.sizes, strict=True)] == [1.0] * 3


@pytest.mark.slow
def test_every_work_runs_at_a_small_size(tmp_path):
    for number, (name, work) in enumerate(WORKS.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        work.prepare(folder, 40)()
        assert work.largest < work.full, name
    assert row_of("x", "items", Growth([1, 2, 4], [0.1, 0.2, 0.4], [1, 2, 3])).endswith("^1.00")
