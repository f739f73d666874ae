"""Several GPUs that train together: settings of their own, shares of each batch, and the result of one process."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from gputrain.autoconfig import optimal
from gputrain.autoconfig.clips import BucketSampler
from gputrain.autoconfig.optimal import create_optimal_config, machines_to_plan
from gputrain.errors import UserError
from gputrain.hw.gpus import find_gpu
from gputrain.hw.probe import Machine
from gputrain.hw.ranks import Ranks
from gputrain.planner.model_planner import NCCL_GB
from tests.autoconfig.test_clips import BUCKETS, lengths
from tests.autoconfig.two_gpus import configuration
from tests.tables import each_row

ROOT = Path(__file__).resolve().parents[2]


class Wide(nn.Module):
    """Activations of 0.4 GB a second of a clip, and weights of a few bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return (x * self.weight).sin().sum()


def plan(gpu, **changes):
    made = {"loss": lambda m, b: m(b), "batch": lambda B, s: torch.empty(B, round(s * 5e7)), **changes}
    return create_optimal_config([1.0] * 20 + [2.0] * 20 + [4.0] * 20, Wide(), 32, gpu=gpu, **made)[0]


def test_each_gpu_has_its_own_settings_and_all_share_the_rest():
    together, weak, strong = plan(["a100-40", "t4"]), plan("t4", gpus=2), plan("a100-40", gpus=2)
    assert [one.device for one in together.devices] == [strong.device, weak.device]
    assert weak.devices == strong.devices == ()
    for own, alone in zip(together.devices, (strong, weak), strict=True):
        assert own.micro_batch_size * own.accumulation_steps == 16
        assert own.micro_batch_size == alone.per_device_train_batch_size
        assert own.gradient_checkpointing == alone.gradient_checkpointing
        assert (own.buckets, own.budget_gb) == (alone.buckets, alone.budget_gb)
        assert own.predicted_peak_gb == pytest.approx(alone.predicted_peak_gb, rel=1e-3)
        assert own.predicted_peak_gb <= own.budget_gb
    assert together.devices[0].micro_batch_size > together.devices[1].micro_batch_size
    # The T4 has no bf16, so that the A100 computes in fp16, too; the Trainer's own batch is that of the T4.
    assert (together.fp16, together.bf16, strong.bf16) == (True, False, True)
    assert together.per_device_train_batch_size == weak.per_device_train_batch_size
    assert together.shared_by_processes() == weak.shared_by_processes()
    assert together.on_device(0).buckets == strong.buckets
    assert together.on_device(3).gradient_checkpointing == weak.gradient_checkpointing
    assert plan(["l4", "l4"]).devices == ()
    assert plan("t4").budget_gb - weak.budget_gb == pytest.approx(NCCL_GB)


def test_arguments_are_those_of_the_own_gpu(monkeypatch):
    config = configuration(2)
    checkpointed = type(config.devices[1])(**{**vars(config.devices[1]), "gradient_checkpointing": True})
    config = type(config)(**{**vars(config), "devices": (config.devices[0], checkpointed)})
    torchrun = {"TORCHELASTIC_RUN_ID": "a", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    for local, checkpoints in (("0", False), ("1", True)):
        monkeypatch.setenv("LOCAL_RANK", local)
        own, shared = config.training_arguments(by_length=True), config.training_arguments()
        name = next(key for key in ("activation_checkpointing", "gradient_checkpointing") if key in own)
        assert (own[name], shared[name]) == (checkpoints, False)
        assert (own["per_device_train_batch_size"], shared["per_device_train_batch_size"]) == (4, 1)


def test_the_gpus_of_this_machine_are_planned_each_and_together(monkeypatch):
    here = Machine(system="Linux", cpu_cores=8, ram_gb=64, ram_free_gb=60, gpu_count=2)
    cards = [find_gpu(name).installed_in(here) for name in ("a100-40", "t4")]
    monkeypatch.setattr(optimal, "probe", lambda index=0: cards[index])
    common, each = machines_to_plan(None, 0.0, 2)
    assert [(one.gpu, one.gpus) for one in each] == [(card.gpu, 2) for card in cards]
    assert (common.gpu, common.gpu_memory_gb, common.compute_capability) == ("Tesla T4", 16, (7, 5))
    for gpu, vram_gb, gpus, name, memory_gb in (
        (None, 0.0, 1, cards[0].gpu, 40), (None, 12.0, 2, "Tesla T4", 12), ("l4", 0.0, 2, "NVIDIA L4", 24),
        ("l4", 12.0, 2, "NVIDIA L4", 12),
    ):  # fmt: skip
        common, each = machines_to_plan(gpu, vram_gb, gpus)
        assert each == (common,)
        assert (common.gpu, common.gpu_memory_gb, common.gpu_free_gb, common.gpus) == (name, memory_gb, memory_gb, gpus)


def test_names_of_gpus_that_contradict_are_refused():
    with pytest.raises(UserError, match="2 named GPUs, and gpus is 3"):
        plan(["l4", "t4"], gpus=3)
    with pytest.raises(UserError, match="vram_gb for several"):
        machines_to_plan(["l4", "t4"], 12.0, 2)


@each_row(2, 3)
def test_ranks_share_each_batch(count):
    """Together they have the clips of the undivided batch; the last one repeats its longest clips to be divisible."""
    whole = list(BucketSampler(lengths(), BUCKETS, 6 * count, seed=1))
    parts = [list(BucketSampler(lengths(), BUCKETS, 6 * count, 1, Ranks(index, count))) for index in range(count)]
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
def test_two_different_gpus_give_the_weights_of_one(tmp_path):
    """Over two epochs, whose last batch has 6 of 8 clips; then with memory that ends on one of the two."""
    (alone,) = trained(tmp_path, 1)
    strong, weak = trained(tmp_path, 2)
    assert torch.equal(strong["weights"], weak["weights"])
    assert (strong["weights"] - alone["weights"]).abs().max() < 1e-12 * alone["weights"].abs().max()
    sizes = [[items for items, _ in one["passes"]] for one in (alone, strong, weak)]
    assert sum(sizes[0]) == sum(sizes[1]) + sum(sizes[2])
    assert max(sizes[1]) == max(sizes[2]) == 4
    assert len(strong["passes"]) < len(weak["passes"])  # The weak GPU takes its share in smaller parts.
    again, failing = trained(tmp_path, 2, "--memory-ends")
    assert (failing["splits"], again["splits"]) == (1, 0)
    assert torch.equal(again["weights"], failing["weights"])
    assert (again["weights"] - alone["weights"]).abs().max() < 1e-12 * alone["weights"].abs().max()
