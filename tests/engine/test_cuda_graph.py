"""Steps as CUDA graphs, recorded and replayed on the CPU: they are the eager steps, bit for bit."""

import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gputrain.engine import cuda_graph, step
from gputrain.engine.cuda_graph import MOST_RELEASES, all_close, replay_gradients, replay_gradients_if_planned
from gputrain.engine.recipe import Term
from gputrain.engine.schedule import Schedule
from gputrain.engine.state import TrainState
from gputrain.hw.plan import Hardware, Setting, decide
from gputrain.hw.runtime import DTYPES, Runtime
from tests.hw.test_plan import machine
from tests.recorded_graphs import RecordedGraphs
from tests.tables import each_row
from tests.toy import BATCH, ITEMS, ToyBatch, ToyRecipe, new_state, weights

STEPS, LATE = 20, 8
OUT_OF_MEMORY = "CUDA out of memory"


pytestmark = pytest.mark.usefixtures("no_garbage_collection")


def trained(tmp_path, recorder=None, *, micro_batch=BATCH, prepare=None, sizes=None, change=lambda recipe: None):
    """Returns the state after 20 steps. `sizes`: items by step, where there are fewer; `change(recipe)` comes first."""
    recipe = ToyRecipe(
        Schedule(batch_size=BATCH, micro_batch_size=micro_batch, gradient_clip=1.0), adversarial_from=LATE
    )
    change(recipe)
    state = new_state(recipe, tmp_path)
    if recorder:
        replay_gradients(state, recorder)
    scalars = []
    for number in range(STEPS):
        x_BD = ITEMS[torch.arange(number * BATCH, number * BATCH + (sizes or {}).get(number, BATCH)) % len(ITEMS)]
        if prepare:
            prepare(state, number)
        scalars.append(step.update(state, recipe.prepare(x_BD, number), number, learning_rate=1e-2))
        recipe.average(number)
    return state, [{name: float(value) for name, value in row.items()} for row in scalars]


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("eager"))


def assert_equal(ours, theirs):
    (one, rows), (other, others) = ours, theirs
    assert rows == others
    mine, expected = weights(one.recipe), weights(other.recipe)
    assert all(torch.equal(mine[name], expected[name]) for name in expected)


class Failing(RecordedGraphs):
    """Fails at the captures of these numbers, before or after its function has run, or at these replays."""

    def __init__(self, captures=(), replays=(), message=OUT_OF_MEMORY):
        super().__init__()
        self.failing, self.failing_replays, self.message, self.tried = captures, replays, message, 0

    def capture(self, function: Callable):
        self.tried += 1
        if self.tried in self.failing:
            function()
            raise RuntimeError(self.message)
        made, replay = super().capture(function)

        def replay_or_fail() -> None:
            if self.replays + 1 in self.failing_replays:
                self.replays += 1
                raise RuntimeError(self.message)
            replay()

        return made, replay_or_fail


@pytest.mark.parametrize("micro_batch", [BATCH, 3])
def test_replayed_steps_are_eager_steps(tmp_path, micro_batch):
    """The batch is static from step 1 on; two eager passes precede each capture. Before LATE, there is one loss."""
    recorder = RecordedGraphs()
    ours = trained(tmp_path, recorder, micro_batch=micro_batch)
    assert_equal(ours, trained(tmp_path, micro_batch=micro_batch))
    assert recorder.captures == 3
    assert recorder.replays == (LATE - 3) + 2 * (STEPS - LATE - 2)


def test_kept_sums_are_those_of_their_step_and_gradients_stay_in_place(tmp_path, monkeypatch):
    """Metrics keep the scalars of many steps; torch's optimizers get the same tensors in each."""
    places: list[tuple[int, ...]] = []

    def note(state: TrainState, step: int) -> None:
        optimizer = state.recipe.step_groups[1].phases[0].optimizer
        step_as_before = type(optimizer).step

        def stepped(self, *arguments):
            if self is optimizer:
                places.append(tuple(p.grad.data_ptr() for p in state.recipe.generator.parameters()))
            return step_as_before(self, *arguments)

        if not step:
            monkeypatch.setattr(type(optimizer), "step", stepped)

    _, rows = trained(tmp_path, RecordedGraphs(), prepare=note)
    assert len(set(places[-STEPS + LATE + 2 :])) == 1
    assert len({row["loss/generator/l2"] for row in rows}) == STEPS


@pytest.mark.parametrize("captures", [[1], [2], [3], [1, 2, 3]])
def test_a_graph_that_does_not_fit_leaves_its_size_eager(tmp_path, captures, caplog, eager):
    recorder = Failing(captures)
    ours = trained(tmp_path, recorder)
    assert_equal(ours, eager)
    assert ours[0].micro_batch == {"discriminators": BATCH, "generator": BATCH}
    assert recorder.replays > 0 if len(captures) < 3 else not recorder.replays
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_memory_that_runs_out_at_a_replay_is_that_of_the_graphs(tmp_path, caplog, eager):
    """The step is made eagerly and in the same parts, and the graphs are captured again."""
    recorder = Failing(replays=[8])
    ours = trained(tmp_path, recorder)
    assert_equal(ours, eager)
    assert ours[0].micro_batch == {"discriminators": BATCH, "generator": BATCH}
    assert recorder.captures == 5
    assert not ours[0].events


def test_memory_that_runs_out_beside_graphs_ends_them_at_last(tmp_path, caplog):
    """Every second batch is smaller, and doesn't fit beside the graphs."""
    short = dict.fromkeys(range(4, STEPS, 5), 6)
    run_out: list[int] = []

    def fails_beside_graphs(state: TrainState, step: int) -> None:
        if step in short and state.gradients.graphs:
            run_out.append(step)
            state.recipe.fail = {("generator", step): 0}
            drop = state.gradients.drop

            def dropped() -> None:
                state.recipe.fail = {}
                drop()

            state.gradients.drop = dropped

    ours = trained(tmp_path, RecordedGraphs(), prepare=fails_beside_graphs, sizes=short)
    assert_equal(ours, trained(tmp_path, sizes=short))
    assert len(run_out) == MOST_RELEASES
    assert ours[0].gradients.is_off
    assert "memory ran out beside them" in ours[0].runtime.plan.cuda_graphs.reason
    assert not ours[0].events


def test_after_a_smaller_micro_batch_it_is_captured_again(tmp_path):
    def run_out(recipe: ToyRecipe) -> None:
        recipe.fail = {("generator", 2): 4}

    recorder = RecordedGraphs()
    ours = trained(tmp_path, recorder, change=run_out)
    assert_equal(ours, trained(tmp_path, change=run_out))
    assert ours[0].micro_batch == {"discriminators": BATCH, "generator": 4}
    assert {key[:2] for key in ours[0].gradients.graphs} == {("discriminators", 1), ("generator", 2)}


def test_a_batch_of_another_size_is_eager_and_leaves_the_graphs(tmp_path):
    short, recorder = {6: 5, 13: 5, 14: 3, 17: 5}, RecordedGraphs()
    ours = trained(tmp_path, recorder, sizes=short)
    assert_equal(ours, trained(tmp_path, sizes=short))
    assert recorder.captures == 3


def test_two_batches_of_another_size_have_graphs_of_their_own(tmp_path):
    short, recorder = dict.fromkeys(range(12, STEPS), 5), RecordedGraphs()
    ours = trained(tmp_path, recorder, sizes=short)
    assert_equal(ours, trained(tmp_path, sizes=short))
    assert recorder.captures == 5


def test_two_shapes_have_graphs_at_once(tmp_path):
    """Each group has a graph of each shape from the fourth batch of the shape on, and again after LATE; they write the
    same gradients."""
    short, recorder = dict.fromkeys(range(1, STEPS, 2), 5), RecordedGraphs()
    ours = trained(tmp_path, recorder, sizes=short)
    assert_equal(ours, trained(tmp_path, sizes=short))
    assert (recorder.captures, recorder.replays) == (2 + 4, 2 + 2 * (4 + 4))
    places: dict[str, set[tuple[int, ...]]] = {}
    for key, graph in ours[0].gradients.graphs.items():
        written = (gradient.data_ptr() for _, gradient in graph.gradients if gradient is not None)
        places.setdefault(key.group, set()).add(tuple(written))
    assert [len(of_group) for of_group in places.values()] == [1, 1]


def test_only_so_many_shapes_are_captured(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_graph, "MOST_GRAPHED_SHAPES", 1)
    short, recorder = dict.fromkeys(range(1, STEPS, 2), 5), RecordedGraphs()
    assert_equal(trained(tmp_path, recorder, sizes=short), trained(tmp_path, sizes=short))
    assert recorder.captures == 1 + 2


def test_a_replay_has_the_dropout_of_its_step(tmp_path):
    """So has the first one, although the eager pass before it has drawn the same."""

    def dropping(recipe: ToyRecipe) -> None:
        loss = recipe.generator_loss

        def with_dropout(batch: ToyBatch, step: int):
            yield Term("dropped", torch.dropout(recipe.generator[0].weight, 0.5, train=True).square().sum())
            yield from loss(batch, step)

        recipe.step_groups[1] = replace(recipe.step_groups[1], loss=with_dropout)

    torch.manual_seed(0)
    ours, after = trained(tmp_path, recorder := RecordedGraphs(), change=dropping), torch.get_rng_state()
    torch.manual_seed(0)
    assert_equal(ours, trained(tmp_path, change=dropping))
    assert torch.equal(torch.get_rng_state(), after)
    assert recorder.captures == 3


class Wrong(RecordedGraphs):
    """Its second graph has one gradient too large by a thousandth."""

    def __init__(self, recipe: list[ToyRecipe]):
        super().__init__()
        self.recipe = recipe

    def capture(self, function: Callable):
        made, replay = super().capture(function)
        gradients = [p.grad for p in self.recipe[0].discriminators.parameters() if p.grad is not None]

        def replay_wrongly() -> None:
            replay()
            for gradient in gradients[-1:]:
                gradient.mul_(1.001)

        return made, replay_wrongly


def warnings_in(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_wrong_graph_ends_them_all(tmp_path, caplog, eager):
    recipes: list[ToyRecipe] = []
    recorder = Wrong(recipes)
    ours = trained(tmp_path, recorder, change=recipes.append)
    assert_equal(ours, eager)
    assert recorder.captures == 2
    (warning,) = warnings_in(caplog)
    assert warning == (
        "CUDA graphs are off for the rest of this run (the gradients of a replayed step differ from those of a step); "
        "training goes on without them"
    )
    assert ours[0].runtime.plan.cuda_graphs.value is False


def test_a_graph_that_differs_by_the_rounding_of_tf32_is_kept(tmp_path, caplog):
    """It differs by a thousandth, and TF32's half of the digits are 0.031."""
    recipes: list[ToyRecipe] = []

    def compute_in_tf32(state: TrainState, step: int) -> None:
        state.runtime.plan = replace(state.runtime.plan, tf32=Setting(True, "on a GPU"))

    state, _ = trained(tmp_path, Wrong(recipes), change=recipes.append, prepare=compute_in_tf32)
    assert state.gradients.graphs
    assert not warnings_in(caplog)


def test_a_loss_that_cannot_be_captured_ends_them(tmp_path, caplog, eager):
    def reads(recipe: ToyRecipe) -> None:
        loss = recipe.generator_loss

        def reading(batch: ToyBatch, step: int):
            float(batch.x_BD.sum())
            yield from loss(batch, step)

        group = recipe.step_groups[1]
        recipe.step_groups[1] = type(group)(group.phases, reading, graph_key=group.graph_key)

    recorder = RecordedGraphs()
    assert_equal(trained(tmp_path, recorder, change=reads), eager)
    assert recorder.replays == 0
    (warning,) = warnings_in(caplog)
    assert "operation not permitted when stream is capturing" in warning


def test_a_group_that_does_not_say_what_it_takes_stays_eager(tmp_path, eager):
    def unsaid(recipe: ToyRecipe) -> None:
        recipe.step_groups = [type(group)(group.phases, group.loss) for group in recipe.step_groups]

    recorder = RecordedGraphs()
    assert_equal(trained(tmp_path, recorder, change=unsaid), eager)
    assert recorder.captures == 0


def test_gradients_that_are_not_finite_are_not_captured(tmp_path):
    """There is nothing to compare them with; the next step's are."""

    def burst(recipe: ToyRecipe) -> None:
        loss = recipe.generator_loss

        def bursting(batch: ToyBatch, step: int):
            if step == 3:
                yield Term("burst", recipe.generator[0].weight.sum() * float("inf"))
            yield from loss(batch, step)

        group = recipe.step_groups[1]
        recipe.step_groups[1] = type(group)(group.phases, bursting, graph_key=group.graph_key)

    recorder = RecordedGraphs()
    ours, theirs = trained(tmp_path, recorder, change=burst), trained(tmp_path, change=burst)
    assert recorder.captures == 3
    mine, expected = weights(ours[0].recipe), weights(theirs[0].recipe)
    assert all(torch.equal(mine[name], expected[name]) for name in expected)


def test_half_of_the_digits_must_agree():
    """fp32 has a relative precision of 2^-23, of which half of the digits are 3.5e-4. A tensor that is zero but for
    rounding counts with the mean square of all."""
    large, small = torch.full((100,), 2.0), torch.full((50,), 1e-9)
    fp32, bf16 = 2.0**-23, 2.0**-7

    def holds(other_large, other_small, eps):
        return all_close([(large, other_large), (small, other_small)], eps)

    assert holds(large, small, fp32)
    assert holds(large * (1 + 3e-4), small * 1000, fp32)
    assert not holds(large * (1 + 4e-4), small, fp32)
    assert not holds(large, small + 1e-3, fp32)
    assert holds(large * 1.05, small, bf16)
    assert not holds(large * float("nan"), small, fp32)


@each_row(
    ("H100", {"precision": "tf32"}, 2**-10),
    ("H100", {"precision": "fp32"}, 2**-23),
    ("T4", {"precision": "tf32"}, 2**-23),
    ("T4", {}, 2**-10),
    ("H100", {}, 2**-7),
)
def test_the_rounding_step_of_products(machine_name, requested, eps):
    plan = decide(machine(machine_name), Hardware(**requested))
    runtime = Runtime(plan, torch.device("cpu"), DTYPES[plan.precision.value], torch.contiguous_format)
    assert runtime.product_eps() == eps
    assert runtime.product_eps(torch.bfloat16) == 2**-7


def test_a_static_batch_holds_batches_of_its_shapes_alone(tmp_path):
    state, _ = trained(tmp_path, RecordedGraphs())
    replayed = state.gradients
    x_BD = torch.ones(2, 3)
    assert replayed._static_of(ToyBatch(x_BD, torch.zeros(2, 3), 2)) is None  # The first of these shapes.
    static = replayed._static_of(ToyBatch(x_BD, torch.zeros(2, 3), 2))
    place = static.x_BD.data_ptr()
    assert replayed._static_of(ToyBatch(torch.full((2, 3), 5.0), torch.ones(2, 3), 2)) is static
    assert torch.equal(static.x_BD, torch.full((2, 3), 5.0))
    assert static.x_BD.data_ptr() == place != x_BD.data_ptr()
    others = [(torch.ones(2, 3), 3), (torch.ones(1, 3), 2), (torch.ones(2, 3).int(), 2), (torch.ones(3, 2).T, 2)]
    for other_BD, whole in others:
        assert replayed._static_of(ToyBatch(other_BD, torch.ones(2, 3), whole)) is None


def test_a_recipe_without_fixed_groups_says_that_it_has_no_graphs():
    plan = decide(machine("H100"), Hardware(use_cuda_graphs=True))
    runtime = Runtime(plan, torch.device("cuda"), torch.float32, torch.contiguous_format)
    state = SimpleNamespace(runtime=runtime, recipe=SimpleNamespace(step_groups=[SimpleNamespace(graph_key=None)]))
    replay_gradients_if_planned(state)
    assert runtime.plan.cuda_graphs.value is False
    assert runtime.plan.cuda_graphs.reason.startswith("asked for, but no graph holds several batches")
    assert not hasattr(state, "gradients")
