"""Trains small recipes of all models on several ranks of this machine, as the tests of distributed training need it.

    python -m tests.engine.rank_steps FOLDER RANK CASES DTYPE STEPS COUNT ...

As many such processes as the largest COUNT, started together, train each of CASES on each of these numbers of ranks,
and each saves what its steps made of the weights: FOLDER/CASE_COUNT_RANK.pt.
"""

import dataclasses
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from gputrain.engine import train as training
from gputrain.engine.distributed import RankGroup
from gputrain.engine.run_folder import Run, open_run
from gputrain.engine.schedule import Schedule, StepSchedule, begin
from gputrain.engine.state import TrainState
from gputrain.engine.step import update
from gputrain.hw.ranks import Ranks
from gputrain.hw.runtime import Runtime
from tests.autoconfig.averaging import exchanged
from tests.engine.asking import Asking, note_requests
from tests.toy import BATCH, ITEMS, ToyBatch, ToyRecipe, ToySettings, cpu_runtime, quiet

# With this rate, a parameter whose gradient is zero but for rounding, which AdamW enlarges to steps of full size, stays
# within 1e-12.
LEARNING_RATE = 1e-5
# The mel spectrogram of a wave that an untrained generator makes, from which it makes another (pc_aug), enlarges a
# difference of weights tenfold in each step, however the batch is divided.
MOST_STEPS = {"vocoder": 3}
CASES = ("toy", "vae", "vocoder", "vocoder_muon", "voice", "recogniser", "recogniser_of_whole_waves")


def toy(runtime: Runtime) -> tuple[ToyRecipe, Callable[[int], Any]]:
    """The toy recipe, whose third step runs out of memory on rank 1 with more than one item."""
    recipe = ToyRecipe(Schedule(num_steps=100, num_epochs=0, batch_size=BATCH, warmup_steps=0), adversarial_from=3)
    if runtime.ranks.index == 1:
        recipe.fail = {("discriminators", 5): 1, ("generator", 9): 1}
    inner, rows = recipe.prepare, runtime.ranks.rows(BATCH)

    def prepare(loaded, step):
        batch = inner(loaded, step)
        return ToyBatch(batch.x_BD[rows], batch.noise_BD[rows], batch.whole)

    recipe.prepare = prepare
    return recipe, lambda step: ITEMS[torch.arange(step * BATCH, (step + 1) * BATCH) % len(ITEMS)]


def made(case: str, runtime: Runtime) -> tuple[Any, Callable[[int], Any]]:
    """Returns the recipe of a case, and a function that loads the batch of a step. Models are imported if needed."""
    if case == "toy":
        return toy(runtime)
    build = getattr(importlib.import_module("tests.engine.rank_models"), case)
    recipe, load = build(runtime)
    return recipe, load


def train(case: str, group: RankGroup, folder: Path, dtype: torch.dtype, steps: int) -> dict[str, Any]:
    """Returns weights and averages after the steps, and the scalars of the last step."""
    runtime = dataclasses.replace(cpu_runtime(), ranks=group.ranks)
    recipe, load = made(case, runtime)
    for module in recipe.modules.values():
        module.to(dtype)
    schedule = recipe.schedule if case == "toy" else recipe.settings.schedule
    run = Run(folder, quiet(folder), {}, "", group=group)
    state = TrainState.begin(recipe, schedule, runtime, run)
    for step in range(min(steps, MOST_STEPS.get(case, steps))):
        scalars = update(state, recipe.prepare(load(step), step), step, LEARNING_RATE)
        recipe.average(step)
    weights = {f"{n}.{k}": v for n, module in recipe.modules.items() for k, v in module.state_dict().items()}
    return {"weights": weights, "scalars": scalars, "micro_batch": state.micro_batch}


def train_runs(folder: Path, rank: int, stages: tuple[tuple[int, int], ...]) -> None:
    """Train one run of the toy in stages, each on a number of ranks and up to a step. Before the fourth step, rank 0
    is asked for a cool-down over 20 steps."""
    note_requests(pytest.MonkeyPatch())
    for count, last in stages:
        if rank >= count:
            continue
        init_method = f"file://{folder}.{count}"
        group = RankGroup.join(Ranks(rank, count, rank, count), on_gpu=False, init_method=init_method)
        runtime = dataclasses.replace(cpu_runtime(), ranks=group.ranks)
        vars(runtime)["product_rate"] = 1e11  # It would be measured for each run.
        recipe, _ = toy(runtime)
        saving = quiet(folder, resume_from="auto", log_every_steps=1)
        settings = ToySettings(schedule=dataclasses.replace(recipe.schedule, max_steps=last), saving=saving)
        run = open_run(settings, saving, kind="toy", command="gputrain train-toy", group=group)
        steps = StepSchedule(settings.schedule, begin(run.progress, len(ITEMS), new_stage=False))
        source = Asking(folder, {3: ("cooldown", 20)} if rank == 0 else {})
        training.train(recipe, source, steps, run, runtime, Console(quiet=True))
        group.close()


def main(folder: Path, rank: int, cases: list[str], dtype: torch.dtype, steps: int, counts: list[int]) -> None:
    torch.set_num_threads(1)
    for number, count in enumerate(counts):
        if rank >= count:
            continue
        group = RankGroup.join(
            Ranks(rank, count, rank, count), on_gpu=False, init_method=f"file://{folder}/meeting_{number}"
        )
        if count == 2:
            torch.save(exchanged(rank), folder / f"exchanged_{rank}.pt")
        for case in cases:
            torch.save(train(case, group, folder, dtype, steps), folder / f"{case}_{count}_{rank}.pt")
        group.close()
    train_runs(folder / "alone", rank, ((1, 20),))
    train_runs(folder / "together", rank, tuple(zip(sorted(counts, reverse=True), (7, 14, 20), strict=False)))


if __name__ == "__main__":
    folder, rank, cases, dtype, steps, *counts = sys.argv[1:]
    given = (getattr(torch, dtype), int(steps), [int(count) for count in counts])
    main(Path(folder), int(rank), cases.split(","), *given)
