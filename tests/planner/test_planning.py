"""The plan in training: what is written of it, what is learnt on the way, and what is asked for again."""

import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gputrain.engine.out_of_memory import MemoryRelief
from gputrain.engine.recipe import phases_of
from gputrain.engine.run_folder import PlanFile, Run
from gputrain.engine.schedule import Schedule
from gputrain.engine.state import TrainState
from gputrain.engine.train import dry_run
from gputrain.hw.plan import Hardware, Plan, Setting, decide
from gputrain.hw.probe import Machine
from gputrain.planner import model_planner
from gputrain.planner.memory.fit import Fit, MemoryBudget, MemoryModel, fit
from gputrain.planner.memory.predict import prediction_key
from gputrain.planner.model_planner import ModelPlanner, does_not_fit, memory_budget, plan_step, training_steps
from gputrain.planner.time.roofline import EAGER_LAUNCH_SECONDS, LAUNCH_SECONDS, DeviceRates, KernelCost, StepCost
from tests.tables import each_row
from tests.toy import BATCH, ITEMS, ToyRecipe, cpu_runtime, quiet, train_toy, weights

RATES = DeviceRates(sixteen_bit_flops=6e14, fp32_flops=3e14, bytes_per_second=3e12)
H100 = Machine(
    system="Linux", cpu_cores=16, gpu="NVIDIA H100", gpu_memory_gb=80.0, gpu_free_gb=79.0, compute_capability=(9, 0),
    compiled_capabilities=("sm_90",), triton=True, compiler="g++", ram_gb=128.0, ram_free_gb=100.0,
)  # fmt: skip


def plan_of(machine: Machine = H100, **requested) -> Plan:
    return decide(machine, Hardware(**requested))


def schedule(**changes) -> Schedule:
    return Schedule(**{"batch_size": BATCH, "num_epochs": 3, "warmup_steps": 0, **changes})


def state(tmp_path, recipe: ToyRecipe) -> tuple[TrainState, Run]:
    run = Run(tmp_path, quiet(tmp_path), {}, "")
    return TrainState.begin(recipe, recipe.schedule, cpu_runtime(), run), run


def test_what_ran_out_stands_in_the_plan_file(tmp_path):
    recipe = ToyRecipe(schedule())
    recipe.fail = {("discriminators", 2): 2, ("generator", 5): 4}
    train_toy(recipe, quiet(tmp_path))
    record = PlanFile.read(tmp_path / "plan.json")
    assert record.micro_batch == {"discriminators": 2, "generator": 4}
    assert record.events == [
        {"step": 2, "phase": "discriminators", "cause": "out of memory", "from": 8, "to": 4},
        {"step": 2, "phase": "discriminators", "cause": "out of memory", "from": 4, "to": 2},
        {"step": 5, "phase": "generator", "cause": "out of memory", "from": 8, "to": 4},
    ]
    assert record.measured["peak_gb"] > 0


def test_a_resumed_run_remembers_what_fits(tmp_path, caplog):
    first = ToyRecipe(schedule(max_steps=4))
    first.fail = {("discriminators", 2): 2}
    train_toy(first, quiet(tmp_path))
    second = ToyRecipe(schedule(max_steps=8))
    second.fail = {("discriminators", step): 2 for step in range(4, 8)}
    caplog.clear()
    train_toy(second, quiet(tmp_path, resume_from="auto"))
    assert "out of memory" not in caplog.text
    assert PlanFile.read(tmp_path / "plan.json").micro_batch == {"discriminators": 2, "generator": 8}


def test_a_plan_file_comes_back_as_it_was(tmp_path):
    plan, found = plan_step(
        plan_of(), MemoryBudget(20.0, 1e14), schedule(), lambda _: MemoryModel({"a": 1.0}, {"a": 2.0}, 1e12), None
    )
    record = PlanFile(plan, {"autoencoder": 4}, found.to_json(), {"peak_gb": 1.5}, [{"step": 3}])
    record.save(tmp_path / "plan.json")
    assert PlanFile.read(tmp_path / "plan.json") == record
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["settings"]["micro_batch_size"]["value"] == 8
    assert content["prediction"]["predicted_peak_gb"] == 17.0
    assert all(setting["reason"] for setting in content["settings"].values())


def test_a_dry_run_finds_what_does_not_fit_and_leaves_no_trace(tmp_path):
    recipe = ToyRecipe(schedule())
    recipe.fail = {("generator", 100): 2}
    made, _ = state(tmp_path, recipe)
    before, random = weights(recipe), torch.get_rng_state()
    dry_run(made, ITEMS[:BATCH], 100)
    assert made.micro_batch == {"discriminators": 8, "generator": 2}
    assert [event["step"] for event in made.events] == [100, 100]
    after = weights(recipe)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None for phase in phases_of(recipe) for p in phase.parameters())
    assert torch.equal(torch.get_rng_state(), random)


def test_training_begins_with_a_dry_run_of_the_step_that_takes_most(tmp_path):
    recipe = ToyRecipe(schedule(max_steps=1))
    recipe.peak_memory_step = lambda step: 50
    recipe.fail = {("discriminators", 50): 4}
    train_toy(recipe, quiet(tmp_path))
    assert PlanFile.read(tmp_path / "plan.json").micro_batch == {"discriminators": 4, "generator": 8}


def test_a_device_that_fills_up_is_relieved(tmp_path, caplog):
    """Warned of once at 90 %; at 95 % first the cache is given back, and if that was not it, less is taken at once."""
    made, _ = state(tmp_path, ToyRecipe(schedule()))
    relief = MemoryRelief(made.micro_batch, made.shrink)
    with caplog.at_level(logging.WARNING):
        for step, pressure in enumerate(["", "warn", "warn", "act", "warn", "act", "act", "act"]):
            relief.relieve(pressure, step)
    assert caplog.text.count("90 % full") == 1
    assert [(event["step"], event["from"], event["to"]) for event in made.events] == [(6, 8, 4), (7, 8, 4)]
    assert made.events[0]["cause"] == "memory 95 % full"
    assert made.micro_batch == {"discriminators": 4, "generator": 4}


def test_the_budget_of_a_gpu_of_a_cpu_and_of_an_unknown_machine():
    assert memory_budget(H100, plan_of(), Hardware(), RATES) == MemoryBudget(pytest.approx(74.4), RATES)
    assert memory_budget(H100, plan_of(), Hardware(memory_budget=15), RATES).budget_gb == 15
    on_cpu = memory_budget(H100, plan_of(device="cpu"), Hardware(device="cpu"), RATES)
    assert (on_cpu.budget_gb, on_cpu.rates) == (99.5, RATES)  # Of the free memory, the process itself takes a part.
    bare = Machine(system="Linux", cpu_cores=2)
    assert memory_budget(bare, decide(bare, Hardware()), Hardware(), None).budget_gb == float("inf")


def test_cards_that_compute_alike_share_a_prediction():
    another = replace(plan_of(), device=Setting("cuda", "another card"))
    assert prediction_key(plan_of()) == prediction_key(another)
    assert prediction_key(plan_of()) != prediction_key(plan_of(precision="fp16"))  # In fp16 the loss is scaled.
    assert prediction_key(plan_of()) != prediction_key(plan_of(use_torch_compile=False))
    assert prediction_key(plan_of()) != prediction_key(plan_of(precision="tf32"))


def test_what_does_not_fit_says_by_how_much():
    found = fit(4, lambda _: MemoryModel({"a": 10.0}, {"a": 8.0}, 1e12), MemoryBudget(15.0))
    error = does_not_fit("picture", found, ["--preset fast would take 9.0 GB"])
    assert "a single picture is predicted to take 18.0 GB, 3.0 GB more than the 15.0 GB" in error.message
    assert "--preset fast would take 9.0 GB" in error.hint
    assert "--no-plan" in error.hint
    assert does_not_fit("picture", found, [], "gputrain train-vae").hint.endswith(":\n  gputrain train-vae")


@pytest.mark.parametrize("text", ["", '{"device": {"value": "cpu", "reason": "x"}}'])
def test_a_plan_that_cannot_be_read_ends_no_run(tmp_path, text):
    """The run is planned again."""
    train_toy(ToyRecipe(schedule(max_steps=2)), quiet(tmp_path))
    (tmp_path / "plan.json").write_text(text)
    train_toy(ToyRecipe(schedule(max_steps=4)), quiet(tmp_path, resume_from="auto"))
    assert PlanFile.read(tmp_path / "plan.json").micro_batch == {"discriminators": 8, "generator": 8}


@each_row(
    (None, 20, True, False),
    (None, 20, False, True),  # Uncompiled, it does not fit.
    (None, 2_900, True, False),
    (None, 3_100, True, True),
    (None, 100_000, True, True),  # Without a closer look.
    (None, None, True, True),  # The number of steps is unknown.
    (True, 20, True, True),
    (False, 10_000, True, False),
)
def test_a_training_compiles_if_its_steps_win_back_what_that_takes(monkeypatch, asked, steps, fits_eager, compiles):
    """Compiled, a step moves 30 GB, and 90 GB otherwise: 20 ms more at 3 TB/s."""
    kernel = KernelCost("copy", 1, 30e9, 0.0, 0.0, 1.0, sixteen_bit=False)
    fits, planned = {}, []
    for is_compiled, kernels in ((True, (kernel,)), (False, (kernel,) * 3)):
        cost, has_room = StepCost(kernels, kernels, 4), is_compiled or fits_eager
        fits[is_compiled] = Fit(4, 1, False, 1.0, {}, 0.0, cost.seconds(RATES, 4, 1), 2.0, has_room, {}, cost)

    def fit_of(self, settings, plan, budget):
        planned.append((plan.compile.value, budget.rates.launch_seconds))
        return plan, fits[plan.compile.value]

    monkeypatch.setattr(ModelPlanner, "plan", fit_of)
    settings = SimpleNamespace(hardware=Hardware(use_torch_compile=asked))
    given = plan_of(use_torch_compile=asked)
    plan, _, budget = ModelPlanner(None).plan_steps(settings, given, MemoryBudget(2.0, RATES), lambda *_: steps)
    assert plan.compile.value is compiles
    if asked is None and steps and steps < 100_000:  # It is also planned as it would run uncompiled.
        assert planned == [(True, LAUNCH_SECONDS), (False, EAGER_LAUNCH_SECONDS)]
    else:
        assert len(planned) == 1
    if asked is None and not compiles:
        won = {20: 0, 2_900: 58}[steps]
        assert plan.compile.reason == f"{steps} steps win back {won} s of the 60 that compiling takes"
        assert budget.rates.launch_seconds == EAGER_LAUNCH_SECONDS
    else:
        assert plan == given


@each_row(
    ({"num_steps": 70}, 70, 70),
    ({"num_steps": 70, "max_steps": 20}, 20, 20),
    ({"num_steps": 70, "num_epochs": 3}, None, 70),  # Fewer, if three epochs of the data end before.
    ({"num_epochs": 3, "max_steps": 20}, None, 20),
    ({"num_epochs": 3}, None, None),
    ({"finish_by": "101s"}, 30, 30),  # Of two seconds, after a start of 40.
    ({"finish_by": "30s"}, 0, 0),
)
def test_steps_of_a_training_on_unknown_data(schedule, steps, at_most):
    schedule = Schedule(**{"num_epochs": 0, **schedule})
    assert training_steps(schedule, None, 2.0, 40.0) == steps
    assert training_steps(schedule, None, 2.0, 40.0, at_most=True) == at_most


def test_gpus_with_the_same_arithmetic_share_what_their_remedies_need(monkeypatch):
    """Predictions are made once for the settings and the arithmetic, not again for each GPU."""
    made = []

    def counted(target, plan, checkpointing):
        made.append((target, plan.precision.value, checkpointing))
        return 4.0

    monkeypatch.setattr(model_planner, "least_gb", counted)
    model = SimpleNamespace(gradient_checkpointing=None)
    asked = SimpleNamespace(size=256, model=model, schedule=SimpleNamespace())
    smaller = SimpleNamespace(size=64, model=model, schedule=SimpleNamespace())
    work = SimpleNamespace(fallbacks=lambda *_: {"--size 64": smaller}, target=lambda settings: settings.size)
    planner = ModelPlanner(work)
    found = Fit(1, 1, True, 9.0, {}, 0.0, None, 5.0, False, {})
    for budget_gb, helps in ((5.0, True), (4.1, False), (6.0, True)):
        sentences = planner.remedies(asked, plan_of(), MemoryBudget(budget_gb), found)
        assert ("--size 64 would take 4.0 GB at least" in sentences) == helps
    assert made == [(64, "bf16", True)]
    planner.remedies(asked, plan_of(precision="tf32"), MemoryBudget(5.0), found)
    assert len(made) == 2
