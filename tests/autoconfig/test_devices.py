"""Several GPUs that train together: the weakest, shares of each batch, and the result of one process."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gputrain.autoconfig import optimal
from gputrain.autoconfig.clips import LengthSampler
from gputrain.autoconfig.optimal import machine_to_plan
from gputrain.hw.gpus import find_gpu
from gputrain.hw.probe import Machine
from gputrain.hw.ranks import Ranks
from tests.autoconfig.test_clips import lengths
from tests.tables import each_row

ROOT = Path(__file__).resolve().parents[2]


@each_row(
    (None, 0.0, 2, "Tesla T4", 16), (None, 0.0, 1, "NVIDIA A100 SXM", 40), (None, 12.0, 2, "Tesla T4", 12),
    ("l4", 0.0, 2, "NVIDIA L4", 24), ("l4", 12.0, 2, "NVIDIA L4", 12),
)  # fmt: skip
def test_the_weakest_gpu_of_this_machine_or_the_named_one_is_planned_for(
    monkeypatch, gpu, vram_gb, gpus, name, memory_gb
):
    here = Machine(system="Linux", cpu_cores=8, ram_gb=64, ram_free_gb=60, gpu_count=2)
    cards = [find_gpu(one).installed_in(here) for one in ("a100-40", "t4")]
    monkeypatch.setattr(optimal, "probe", lambda index=0: cards[index])
    found = machine_to_plan(gpu, vram_gb, gpus)
    assert (found.gpu, found.gpu_memory_gb, found.gpu_free_gb, found.gpus) == (
        name, memory_gb, memory_gb, gpus
    )  # fmt: skip


@each_row(2, 3)
def test_ranks_share_each_batch(count):
    """Together they have the clips of the undivided batch; the last one repeats its longest clips to be divisible."""
    whole = list(LengthSampler(lengths(), 6 * count, seed=1))
    parts = [list(LengthSampler(lengths(), 6 * count, 1, Ranks(index, count))) for index in range(count)]
    assert all(len(part) == len(whole) for part in parts)
    for batch, *shares in zip(whole, *parts, strict=True):
        assert len({len(share) for share in shares}) == 1
        together = sorted(number for share in shares for number in share)
        repeated = -len(batch) % count
        assert together == sorted([*batch, *batch[:repeated]])
        for share in shares:
            assert list(lengths()[share]) == sorted(lengths()[share], reverse=True)


def trained(folder: Path, processes: int, *options: str) -> list[dict]:
    output = folder / "made"
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    command = [sys.executable, *start, "-m", "tests.autoconfig.two_gpus", str(output), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(output.with_suffix(f".{rank}.pt"), weights_only=True) for rank in range(processes)]


@pytest.mark.slow
def test_two_processes_give_the_weights_of_one(tmp_path):
    """Over two epochs, whose last batch has 6 of 8 clips; then with memory that ends on one of the two."""
    (alone,) = trained(tmp_path, 1)
    first, second = trained(tmp_path, 2)
    assert torch.equal(first["weights"], second["weights"])
    assert (first["weights"] - alone["weights"]).abs().max() < 1e-12 * alone["weights"].abs().max()
    sizes = [[items for items, _ in one["passes"]] for one in (alone, first, second)]
    assert sum(sizes[0]) == sum(sizes[1]) + sum(sizes[2])
    assert max(sizes[1]) == max(sizes[2]) == 2
    again, failing = trained(tmp_path, 2, "--memory-ends")
    assert (failing["limit"], again["limit"]) == (1, 0)
    assert torch.equal(again["weights"], failing["weights"])
    assert (again["weights"] - alone["weights"]).abs().max() < 1e-12 * alone["weights"].abs().max()
