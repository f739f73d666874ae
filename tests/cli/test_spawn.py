"""Trainings whose processes are spawned, as on Windows, instead of forked: the same weights as without processes."""

import subprocess
import sys

import pytest
import torch

from tests.chaos.tiny import KINDS, make_data, words

PROGRAM = """
import multiprocessing, sys
if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    from tests.chaos.tiny import command
    command(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_spawned_workers_read_the_same_data(kind, tmp_path):
    data = make_data(kind, tmp_path / "data")
    for workers in (0, 2):
        line = words(kind, data, tmp_path / str(workers), 3, num_workers=workers)
        done = subprocess.run([sys.executable, "-c", PROGRAM, *line], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    one, other = (torch.load(tmp_path / str(n) / "checkpoint_last.pt", weights_only=True)["modules"] for n in (0, 2))
    for name in one:
        assert all(torch.equal(value, other[name][key]) for key, value in one[name].items()), name
