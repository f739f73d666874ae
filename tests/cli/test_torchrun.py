"""train-vae under torchrun, on two CPU ranks: one run folder, continued by any number of ranks, and what ends a run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gputrain.engine.checkpoint import LAST, read
from tests.command import gputrain_here
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
STEPS = 12


def options(photographs: Path, folder: Path, **changes: object) -> list[str]:
    given = {
        "data-path": photographs, "output-dir": folder, "image-size": 16, "channels": "32,32", "z-channels": 4,
        "batch-size": 5, "num-epochs": 0, "num-steps": STEPS, "warmup-steps": 0, "evaluate-every-steps": 6,
        "log-every-steps": 1,
        "sample-every-steps": 0, "checkpoint-every-epochs": 0, "num-workers": 0, "device": "cpu", **changes,
    }  # fmt: skip
    return ["train-vae", *(word for name, value in given.items() for word in (f"--{name}", str(value)))]


def torchrun(*words: str, ranks: int = 2, restarts: int = 0) -> subprocess.Popen[str]:
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    return subprocess.Popen(
        [sys.executable, "-m", *launcher, "-m", "gputrain", *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def losses(folder: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss/autoencoder/l1"] for row in rows if "loss/autoencoder/l1" in row}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return read(folder / LAST, "vae")["modules"]["autoencoder"]


def wait_for_step(folder: Path, step: int) -> None:
    wait_until(lambda: (folder / "metrics.jsonl").exists() and step in losses(folder), f"step {step}")


def ranks_of(launcher: subprocess.Popen[str]) -> list[int]:
    """Returns the processes of the ranks, in their order."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            environment = (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == launcher.pid:
            found.update({int(line[5:]): int(path.name) for line in environment if line.startswith(b"RANK=")})
    return [found[rank] for rank in sorted(found)]


@pytest.mark.slow
def test_ranks_train_as_one_process_and_one_process_continues(photographs, tmp_path):
    """The run of two ranks is written once; a single process continues it, and both together are the run of one."""
    together, alone = tmp_path / "together", tmp_path / "alone"
    launcher = torchrun(*options(photographs, together, **{"max-steps": 6}))
    said = launcher.communicate(timeout=280)[0]
    assert launcher.returncode == 0, said
    assert said.count("The run is in") == 1
    assert said.count("step 6/6") == 1
    done = gputrain_here(*options(photographs, together), "--resume-from", "auto")
    assert done.returncode == 0, done.stderr
    assert gputrain_here(*options(photographs, alone)).returncode == 0
    assert losses(together).keys() == losses(alone).keys() == set(range(1, STEPS + 1))
    for step, loss in losses(alone).items():
        assert losses(together)[step] == pytest.approx(loss, rel=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds the ranks in /proc")
def test_a_killed_rank_is_restarted_and_nothing_is_lost(photographs, tmp_path):
    """The ranks continue from the last checkpoint by themselves, to the bits of the run that was not disturbed."""
    calm, disturbed = tmp_path / "calm", tmp_path / "disturbed"
    steps = {"num-steps": 150, "checkpoint-every-steps": 5, "evaluate-every-steps": 0, "evaluate-every-epochs": 0}
    launcher = torchrun(*options(photographs, calm, **steps))
    assert launcher.wait(280) == 0, launcher.communicate()[0]
    launcher = torchrun(*options(photographs, disturbed, **steps), restarts=3)
    for rank, step in ((1, 12), (0, 33)):
        wait_for_step(disturbed, step)
        os.kill(ranks_of(launcher)[rank], signal.SIGKILL)
    said = launcher.communicate(timeout=280)[0]
    assert launcher.returncode == 0, said
    assert losses(disturbed) == losses(calm)
    for name, value in weights(calm).items():
        assert torch.equal(value, weights(disturbed)[name]), name


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds the ranks in /proc")
@pytest.mark.parametrize("receiver", ["torchrun", "one rank", "group"])
def test_a_signal_ends_all_ranks_after_the_same_step(photographs, tmp_path, receiver):
    folder = tmp_path / "run"
    steps = {"num-steps": 3000, "evaluate-every-steps": 0, "evaluate-every-epochs": 0}
    launcher = torchrun(*options(photographs, folder, **steps))
    wait_for_step(folder, 5)
    ranks = ranks_of(launcher)
    receivers = {"torchrun": [launcher.pid], "one rank": [ranks[1]], "group": [launcher.pid, *ranks]}
    for process in receivers[receiver]:
        os.kill(process, signal.SIGTERM)
    said = launcher.communicate(timeout=120)[0]
    assert launcher.returncode != 0
    assert "everything is saved" in said, said
    saved = read(folder / LAST, "vae")["progress"]["step"]
    assert saved == max(losses(folder))


@pytest.mark.slow
def test_more_ranks_than_items_are_refused(photographs, tmp_path):
    launcher = torchrun(*options(photographs, tmp_path / "run", **{"batch-size": 1}))
    said = launcher.communicate(timeout=120)[0]
    assert launcher.returncode != 0
    assert "batches of 1 cannot be divided among 2 ranks" in said
    assert f'Traceback (most recent call last):\n  File "{ROOT}' not in said
