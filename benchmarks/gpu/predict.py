"""Predictions for `gpu.sh measure`, which `gpu.sh prepare` makes on another machine: they would slow measurements."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from gpu.runner import Figures
from gpu.trainings import CELLS, MODES, TRAININGS, modes_of
from gputrain.errors import UserError
from gputrain.hw.gpus import find_gpu
from gputrain.hw.probe import probe
from gputrain.planner.memory.fit import budget_gb
from gputrain.planner.model_planner import ModelPlanner, memory_budget
from gputrain.planner.target import published_rates

FILE = "predictions.json"  # In the folder of the prepared data: figures by card, mode and training.
MEMORY = "memory"  # The mode of a cell, whose training is planned for less memory.


def predict(cards: list[str], path: Path) -> None:
    """Writes what is planned and predicted for each card. Cards with the same arithmetic share most of the work."""
    found: dict[str, dict[str, Figures]] = {find_gpu(card).key: {} for card in cards}
    steps = [(mode, name, 0.0, training) for name, training in TRAININGS.items() for mode in modes_of(name)]
    for mode, name, limit_gb, training in [*steps, *((MEMORY, name, *cell) for name, cell in CELLS.items())]:
        settings = training.settings("cuda", **MODES["eager" if mode == MEMORY else mode])
        planner, began = ModelPlanner(training.model(settings)), time.perf_counter()
        for card, by_name in found.items():
            by_name[f"{mode}, {name}"] = predicted(settings, card, planner, limit_gb)
        print(f"{mode}, {name}: predicted in {time.perf_counter() - began:.1f} s", flush=True)
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def predicted(settings: Any, card: str, planner: ModelPlanner[Any], limit_gb: float) -> Figures:
    """Returns what is predicted of a step on a card, and the settings that the plan has chosen."""
    gpu = find_gpu(card)
    machine = gpu.installed_in(probe())
    plan = planner.work.decide(machine, settings.hardware)
    budget = memory_budget(machine, plan, settings.hardware, published_rates(gpu, plan))
    if limit_gb:
        budget = dataclasses.replace(budget, budget_gb=budget_gb(limit_gb))
    plan, fit = planner.plan(settings, plan, budget)
    how = fit.micro_batch_size, fit.accumulation_steps
    chosen = {"micro_batch_size": fit.micro_batch_size, "gradient_checkpointing": fit.checkpointing}
    figures: Figures = {
        "settings": chosen | ({"lean": plan.lean.value} if plan.lean else {}), "budget_gb": budget.budget_gb,
        "predicted_seconds": fit.predicted_seconds_per_step, "predicted_gb": fit.predicted_peak_gb, "fits": fit.fits,
    }  # fmt: skip
    if fit.cost:
        graphs = bool(plan.cuda_graphs.value)
        figures["predicted_launches"] = fit.cost.host_launches(*how) if graphs else fit.cost.totals(*how).kernels
    return figures


def prediction(folder: Path, mode: str, name: str) -> Figures:
    """Returns what was predicted for the card of this machine, or why there is nothing."""
    if not (folder / FILE).is_file():
        return {"no_prediction": f"{folder / FILE} is missing (gpu.sh prepare --card)"}
    by_card = json.loads((folder / FILE).read_text(encoding="utf-8"))
    try:
        card = find_gpu(probe().gpu or "").key
    except UserError:
        card = "this machine"
    figures: Figures | None = by_card.get(card, {}).get(f"{mode}, {name}")
    return figures or {"no_prediction": f"for {card}, only for {', '.join(by_card)}"}
