"""Training on several ranks makes the steps of one process: weights, averages, statistics and logged scalars."""

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import pytest
import torch

from gputrain.engine.checkpoint import LAST, read
from gputrain.engine.distributed import BatchDraws, RankGroup, buckets, in_memory_order
from gputrain.errors import UserError
from gputrain.hw.plan import Hardware, decide
from gputrain.hw.probe import Machine
from gputrain.hw.ranks import SINGLE, Ranks, share_of, weakest_of
from gputrain.planner.model_planner import memory_budget
from tests.engine.rank_steps import CASES
from tests.engine.test_finish_by import rates

QUICK = ("toy",)


def train_on_ranks(
    folder: Path, cases: Collection[str], dtype: str, steps: int, counts: tuple[int, ...]
) -> dict[tuple[str, int, int], dict]:
    """Returns what the steps of each case made, by case, number of ranks, and rank."""
    words = [",".join(cases), dtype, str(steps), *map(str, counts)]
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.engine.rank_steps", folder, str(rank), *words],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(max(counts))
    ]
    while any(child.poll() is None for child in children) and not any(child.poll() for child in children):
        time.sleep(0.05)
    for child in children:  # Those that wait for one that has failed.
        child.kill()
    assert [child.wait() for child in children] == [0] * len(children)
    return {
        (case, count, rank): torch.load(folder / f"{case}_{count}_{rank}.pt")
        for case in cases
        for count in counts
        for rank in range(count)
    }


def compare(results: dict[tuple[str, int, int], dict], counts: tuple[int, ...], bound: float, loss_bound: float):
    for case in {case for case, _, _ in results}:
        alone = results[case, 1, 0]
        for count in counts:
            for rank in range(count):
                one = results[case, count, rank]
                # All ranks have the same bits.
                same = results[case, count, 0]
                assert all(torch.equal(value, same["weights"][name]) for name, value in one["weights"].items())
                for name, value in alone["weights"].items():
                    assert float((value.double() - one["weights"][name].double()).abs().max()) <= bound, (case, name)
                assert alone["scalars"].keys() == one["scalars"].keys()
                for name, value in alone["scalars"].items():
                    assert float(one["scalars"][name]) == pytest.approx(float(value), rel=loss_bound, abs=loss_bound)


def test_two_ranks_train_as_one_process(tmp_path):
    results = train_on_ranks(tmp_path, QUICK, "float64", 3, (1, 2))
    compare(results, (2,), 1e-12, 1e-9)
    compare_runs(tmp_path, 14)
    for rank in range(2):  # They have also averaged a model of create_optimal_config's, and compared their plans.
        found = torch.load(tmp_path / f"exchanged_{rank}.pt")
        assert found["first"].tolist() == [[2.0] * 3] * 2
        assert found["second"].tolist() == [[1.5] * 2] * 2
        assert (found["unused"], int(found["count"])) == (None, 7)
        assert found["refused"] == "the processes that train together have planned differently"


def compare_runs(folder: Path, step: int) -> None:
    """A run on several ranks that fewer have continued, from its checkpoints, is the run of one process, with the
    cool-down that the leader was asked for."""
    alone, together = (read(folder / name / LAST, "toy") for name in ("alone", "together"))
    assert (alone["progress"]["step"], together["progress"]["step"]) == (20, step)
    assert [(one["progress"]["cooldown_step"], one["progress"]["cooldown_end"]) for one in (alone, together)] == [
        (4, 24), (4, 24),
    ]  # fmt: skip
    assert rates(folder / "together") == rates(folder / "alone")[:step]
    if step == 20:
        for module, state in alone["modules"].items():
            for name, value in state.items():
                assert float((together["modules"][module][name] - value).abs().max()) <= 1e-12, name


@pytest.mark.slow
def test_ranks_train_as_one_process(tmp_path):
    """Memory runs out on rank 1 only, in the toy recipe and in the VAE, which continue in smaller micro-batches."""
    results = train_on_ranks(tmp_path, CASES, "float64", 20, (1, 2, 4))
    compare(results, (2, 4), 1e-12, 1e-9)
    compare_runs(tmp_path, 20)
    assert results["toy", 2, 0]["micro_batch"] == {"discriminators": 8, "generator": 8}
    assert results["toy", 2, 1]["micro_batch"] == {"discriminators": 1, "generator": 1}
    assert results["vae", 2, 0]["micro_batch"]["autoencoder"] == 7
    assert results["vae", 2, 1]["micro_batch"]["autoencoder"] == 2


@pytest.mark.slow
def test_ranks_train_as_one_process_in_fp32(tmp_path):
    """Losses agree to rounding, which 20 steps enlarge. Weights do where a gradient is more than rounding; AdamW moves
    any other by up to the learning rate in each step."""
    cases = [case for case in CASES if case != "toy"]  # Its data are in float64.
    results = train_on_ranks(tmp_path, cases, "float32", 20, (1, 2))
    for case in cases:
        for name, value in results[case, 1, 0]["scalars"].items():
            if name.startswith("loss/"):
                assert float(results[case, 2, 1]["scalars"][name]) == pytest.approx(float(value), rel=1e-4, abs=1e-6)


def test_rows_of_all_ranks_are_the_batch():
    for count in (1, 2, 3, 7):
        for items in range(12):
            parts = [list(range(items))[Ranks(index, count).rows(items)] for index in range(count)]
            assert [item for part in parts for item in part] == list(range(items))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
            assert max(map(len, parts)) == Ranks(0, count).largest_part(items)


def test_torchrun_describes_the_ranks():
    environment = {
        "TORCHELASTIC_RUN_ID": "none", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
        "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "3",
    }  # fmt: skip
    ranks = Ranks.launched(environment)
    assert ranks == Ranks(5, 8, 1, 4, under_torchrun=True, restarts=1, restarts_left=2)
    assert not ranks.leads
    assert Ranks.launched({"RANK": "3"}) == SINGLE  # Another program's variable.


def test_gradients_travel_in_buckets_of_the_size_asked_for():
    """Every number is in exactly one bucket, in channels_last too, and dtypes are not mixed."""
    tensors = [
        torch.arange(100.0),
        torch.arange(60.0).reshape(1, 5, 4, 3).to(memory_format=torch.channels_last),
        torch.tensor(7.0),
        torch.arange(9.0, dtype=torch.float64),
    ]
    made = list(buckets(tensors, 128))
    assert all(sum(piece.numel() * piece.element_size() for piece in bucket) <= 128 for bucket in made)
    assert all(len({piece.dtype for piece in bucket}) == 1 for bucket in made)
    flat = torch.cat([piece.double() for bucket in made for piece in bucket])
    assert torch.equal(flat, torch.cat([in_memory_order(tensor).double() for tensor in tensors]))
    for bucket in made:  # They are views: a sum that is written into them arrives in the gradients.
        torch._foreach_zero_(bucket)
    assert all(not tensor.any() for tensor in tensors)


def test_draws_of_an_item_do_not_depend_on_the_ranks():
    def draws(ranks: Ranks, items: int) -> tuple[torch.Tensor, torch.Tensor]:
        one = BatchDraws.of_step(3, 11, torch.device("cpu"), items, global_items=7, ranks=ranks)
        return one.normal(2, dtype=torch.float64), one.uniform()

    whole = draws(SINGLE, 7)
    parts = [draws(Ranks(index, 3), size) for index, size in enumerate((3, 2, 2))]
    for alone, together in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(alone, torch.cat(together))
    other = BatchDraws.of_step(3, 12, torch.device("cpu"), 7, global_items=7, ranks=SINGLE)
    assert not torch.equal(whole[0], other.normal(2, dtype=torch.float64))


def test_a_single_process_exchanges_nothing():
    group = RankGroup()
    gradient = torch.ones(3)
    group.all_reduce([gradient], [{"loss": torch.ones(())}])
    assert (group.gather("a"), group.any_rank(True, False), group.total(2.0)) == (["a"], [True, False], [2.0])
    assert group.from_leader(lambda: {"a": 1}) == {"a": 1}
    assert gradient.tolist() == [1, 1, 1]


GPU_40 = Machine(
    system="Linux", cpu_cores=32, gpu="A100", gpu_memory_gb=40, gpu_free_gb=39, compute_capability=(8, 0),
    compiled_capabilities=("sm_80",), triton=True, compiler="g++", ram_gb=256, ram_free_gb=200, shared_memory_gb=100,
)  # fmt: skip


def test_ranks_plan_for_the_weakest_of_their_gpus():
    """All make one plan: bf16 needs every GPU to have it, and the budget is the smallest one, less what NCCL takes."""
    t4 = dataclasses.replace(
        GPU_40,
        gpu="T4",
        gpu_memory_gb=16,
        gpu_free_gb=15.5,
        compute_capability=(7, 5),
        compiled_capabilities=("sm_75",),
    )
    machines = [share_of(machine, Ranks(index, 2, index, 2)) for index, machine in enumerate((GPU_40, t4))]
    common = [weakest_of(machines, machine) for machine in machines]
    plans = [decide(machine, Hardware()) for machine in common]
    assert plans[0] == plans[1]
    assert plans[0].precision.value == "fp16"
    assert (common[0].cpu_cores, common[0].ram_gb, common[0].shared_memory_gb, common[0].gpus) == (16, 128, 50, 2)
    alone = memory_budget(t4, plans[0], Hardware(), None).budget_gb
    together = memory_budget(common[0], plans[0], Hardware(), None)
    assert together.budget_gb == pytest.approx(alone - 1.0)
    assert together.gpus == 2
    with pytest.raises(UserError, match="some ranks have a GPU and others have none"):
        weakest_of([GPU_40, Machine(system="Linux", cpu_cores=4)], GPU_40)
