"""A part of fixed shapes as a CUDA graph, amid terms whose shapes change: the steps are the eager ones."""

import logging

import pytest
import torch
from torch import Tensor, nn

from gputrain.engine import graphs, train
from gputrain.engine.graphs import EAGER_PASSES, MOST_RELEASES, MOST_SIZES, StepGraphs
from gputrain.engine.recipe import ChainGradients, FixedShapes, Phase, StepGroup, Term
from gputrain.engine.run_dir import Run
from gputrain.engine.schedule import Schedule
from gputrain.engine.state import TrainState
from gputrain.engine.train import update
from tests.engine.test_graphs import Failing, assert_equal, warnings_in
from tests.recorded_graphs import RecordedGraphs
from tests.toy import BATCH, ITEMS, WIDTH, ToyBatch, ToyRecipe, cpu_runtime, quiet

STEPS = 12


class PartlyFixed(ToyRecipe):
    """An encoder sees one to three copies of the items; a generator and discriminators see one. Both take part in one
    step group, and the encoder gets gradients from both."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self.encoder = nn.Linear(WIDTH, WIDTH).to(self.dtype)
        self.modules["e"] = self.encoder
        made = nn.ModuleList([self.encoder, self.generator])
        generator = Phase("generator", (made,), self._adamw(made))
        discriminators = Phase("discriminators", (self.discriminators,), self._adamw(self.discriminators))
        self.step_groups = [StepGroup((generator, discriminators), self.loss)]
        self.of_part = (self.generator, self.discriminators)

    def average(self, step: int) -> None:
        pass

    def loss(self, batch: ToyBatch, step: int):
        code_BD = self.encoder(batch.x_BD.repeat(1 + step % 3, 1))
        leaf_BD = code_BD.detach().requires_grad_()
        yield Term("size", leaf_BD.square().sum() / batch.whole)
        chosen_BD = leaf_BD[: len(batch.x_BD)] + 0.1 * batch.noise_BD
        yield FixedShapes("part", self.part_loss, (chosen_BD, batch.x_BD), self.of_part, (batch.whole,))
        assert leaf_BD.grad is not None
        self._maybe_run_out("generator", step, batch)
        yield ChainGradients((code_BD,), (leaf_BD.grad,))

    def part_loss(self, code_BD: Tensor, x_BD: Tensor, whole: int):
        made_BD = self.generator(code_BD)
        leaf_BD = made_BD.detach().requires_grad_()
        yield Term("l2", (leaf_BD - x_BD).square().sum() / whole, weight=2.0)
        for discriminator in self.discriminators:
            fake = discriminator(leaf_BD.detach())
            error = (discriminator(x_BD) - 1).square() + fake.square()
            yield Term("adversarial", error.sum() / whole, phase="discriminators")
            yield Term("fool", (discriminator(leaf_BD) - 1).square().sum() / whole, inputs=(leaf_BD,))
        assert leaf_BD.grad is not None
        yield ChainGradients((made_BD,), (leaf_BD.grad,))


class Alternating(PartlyFixed):
    """The discriminators step first, in a group with a part of its own, which has the same modules."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        (both,) = self.step_groups
        generator, discriminators = both.phases
        self.step_groups = [
            StepGroup((discriminators,), self.discriminator_loss), StepGroup((generator,), self.loss)
        ]  # fmt: skip

    def discriminator_loss(self, batch: ToyBatch, step: int):
        with torch.no_grad():
            code_BD = self.encoder(batch.x_BD) + 0.1 * batch.noise_BD
        yield FixedShapes("first", self.first_loss, (code_BD, batch.x_BD), self.of_part, (batch.whole,))

    def first_loss(self, code_BD: Tensor, x_BD: Tensor, whole: int):
        with torch.no_grad():
            made_BD = self.generator(code_BD)
        for discriminator in self.discriminators:
            error = (discriminator(x_BD) - 1).square() + discriminator(made_BD).square()
            yield Term("adversarial", error.sum() / whole)

    def part_loss(self, code_BD: Tensor, x_BD: Tensor, whole: int):
        terms = super().part_loss(code_BD, x_BD, whole)
        yield from (term for term in terms if not (isinstance(term, Term) and term.phase))


@pytest.fixture(autouse=True)
def no_garbage_collection(monkeypatch):
    monkeypatch.setattr(graphs, "release_memory", lambda: None)
    monkeypatch.setattr(train, "release_memory", lambda: None)


def trained(tmp_path, recorder=None, *, micro_batch=BATCH, sizes=None, prepare=None, steps=STEPS, kind=PartlyFixed):
    recipe = kind(Schedule(batch_size=BATCH, micro_batch_size=micro_batch, gradient_clip=1.0))
    state = TrainState.begin(recipe, recipe.schedule, cpu_runtime(), Run(tmp_path, quiet(tmp_path), {}, ""))
    if recorder:
        state.graphs = StepGraphs.with_backend(recipe, state.runtime, recorder)
    rows = []
    for step in range(steps):
        x_BD = ITEMS[torch.arange(step * BATCH, step * BATCH + (sizes or {}).get(step, BATCH)) % len(ITEMS)]
        if prepare:
            prepare(state, step)
        scalars = update(state, recipe.prepare(x_BD, step), step, learning_rate=1e-2)
        rows.append({name: float(value) for name, value in scalars.items()})
    return state, rows


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("eager"))


def test_replayed_parts_are_eager_parts(tmp_path, eager):
    """The encoder's shapes change in every step; the part's graph is replayed in each but the first two."""
    recorder = RecordedGraphs()
    ours = trained(tmp_path, recorder)
    assert_equal(ours, eager)
    assert (recorder.captures, recorder.replays) == (1, STEPS - EAGER_PASSES)
    parameters = [parameter for module in ours[0].recipe.of_part for parameter in module.parameters()]
    assert list(ours[0].graphs.added) == parameters


def test_two_groups_have_a_part_each(tmp_path):
    """A graph of the second group leaves the gradients of the first group's parameters alone. Of each part, so many
    sizes have a graph."""
    recorder = RecordedGraphs()
    ours = trained(tmp_path, recorder, micro_batch=4, kind=Alternating)
    assert_equal(ours, trained(tmp_path, micro_batch=4, kind=Alternating))
    assert (recorder.captures, recorder.replays) == (2, 2 * 2 * (STEPS - 1))
    recorder, sizes = RecordedGraphs(), {step: 2 + step % (MOST_SIZES + 1) for step in range(4 * (MOST_SIZES + 1))}
    state, _ = trained(tmp_path, recorder, sizes=sizes, steps=len(sizes), kind=Alternating)
    names = [graph.group for graph in state.graphs.of_gradients.values()]
    assert (names.count("first"), names.count("part")) == (MOST_SIZES, MOST_SIZES)


def test_micro_batches_add_to_one_gradient(tmp_path):
    """Parts of 3, 3 and 2 items: the first size has a graph from step 1 on, the second is never the first of a step,
    and adds to the graph's gradients kernel by kernel."""
    recorder = RecordedGraphs()
    ours = trained(tmp_path, recorder, micro_batch=3)
    assert_equal(ours, trained(tmp_path, micro_batch=3))
    assert (recorder.captures, recorder.replays) == (1, 2 * (STEPS - 1))


def test_graphs_of_several_sizes_share_gradients(tmp_path):
    """Two parts of 4 items, or of 3: both sizes have a graph, and a step with both (4 and 3) adds up in either."""
    sizes = {step: (8, 6, 7)[step % 3] for step in range(STEPS)}
    recorder = RecordedGraphs()
    ours = trained(tmp_path, recorder, micro_batch=4, sizes=sizes)
    assert_equal(ours, trained(tmp_path, micro_batch=4, sizes=sizes))
    assert recorder.captures >= 2
    graphs_of_parts = list(ours[0].graphs.of_gradients.values())
    first, second = ([made for _, made in graph.added] for graph in graphs_of_parts[:2])
    assert all(one is other for one, other in zip(first, second, strict=True))


def test_a_graph_adds_to_a_gradient_that_it_has_not_made(tmp_path):
    """Seven items are parts of 3, 2 and 2; from step 3 on of 4 and 3, of which the first has no graph yet."""

    def shrink(state: TrainState, step: int) -> None:
        state.micro_batch["generator"] = 3 if step < 3 else 4

    sizes = dict.fromkeys(range(5), 7)
    recorder = RecordedGraphs()
    ours = trained(tmp_path, recorder, sizes=sizes, steps=5, prepare=shrink)
    assert_equal(ours, trained(tmp_path, sizes=sizes, steps=5, prepare=shrink))
    assert (recorder.captures, recorder.replays) == (1, 1 + 2)


def test_there_are_few_sizes(tmp_path):
    sizes = {step: 1 + step % (MOST_SIZES + 2) for step in range(18)}
    recorder = RecordedGraphs()
    ours = trained(tmp_path, recorder, sizes=sizes, steps=18)
    assert_equal(ours, trained(tmp_path, sizes=sizes, steps=18))
    assert recorder.captures == MOST_SIZES


def test_a_part_that_does_not_fit_stays_eager(tmp_path, caplog, eager):
    ours = trained(tmp_path, recorder := Failing([1]))
    assert_equal(ours, eager)
    assert recorder.tried == 1
    assert not recorder.replays
    assert not warnings_in(caplog)
    assert ours[0].graphs.make is not None


@pytest.mark.parametrize("replay", [1, 2, 5])
def test_memory_that_runs_out_at_a_replay_is_that_of_the_graphs(tmp_path, replay, eager):
    """At the first replay it leaves its size eager; later, the step is made again, and the part captured again."""
    ours = trained(tmp_path, recorder := Failing(replays=[replay]))
    assert_equal(ours, eager)
    assert recorder.captures == (1 if replay == 1 else 2)
    assert ours[0].micro_batch == {"generator": BATCH}


def test_memory_that_runs_out_beside_graphs_ends_them_at_last(tmp_path, caplog, eager):
    run_out: list[int] = []

    def fails_beside_graphs(state: TrainState, step: int) -> None:
        state.recipe.fail = {}
        if state.graphs.of_gradients:
            run_out.append(step)
            state.recipe.fail = {("generator", step): 0}
            drop = state.graphs.drop

            def dropped() -> None:
                state.recipe.fail = {}
                drop()

            state.graphs.drop = dropped

    ours = trained(tmp_path, RecordedGraphs(), prepare=fails_beside_graphs)
    assert_equal(ours, eager)
    assert len(run_out) == MOST_RELEASES
    assert "memory ran out beside them" in ours[0].runtime.plan.cuda_graphs.reason
    assert ours[0].micro_batch == {"generator": BATCH}


@pytest.mark.parametrize("which", ["a parameter", "an input"])
def test_a_wrong_graph_ends_them(tmp_path, caplog, eager, which):
    """A gradient that is too large by a thousandth is found, also if it is that of the part's input alone."""
    holder: list[TrainState] = []

    class Wrong(RecordedGraphs):
        def capture(self, function):
            made, replay = super().capture(function)
            (copies,) = function.args
            wrong = copies[0] if which == "an input" else holder[0].recipe.generator[0].weight

            def replay_wrongly() -> None:
                replay()
                assert wrong.grad is not None
                wrong.grad.mul_(1.001)

            return made, replay_wrongly

    ours = trained(tmp_path, Wrong(), prepare=lambda state, step: holder.append(state))
    assert_equal(ours, eager)
    assert "the gradients of a replayed step differ" in ours[0].runtime.plan.cuda_graphs.reason
    assert [record.levelno for record in caplog.records if "CUDA graphs are off" in record.message] == [logging.WARNING]


def test_without_graphs_nothing_is_copied(tmp_path):
    """The part's inputs are its own memory, and the batch is not kept."""
    recipe = PartlyFixed(Schedule(batch_size=BATCH))
    state = TrainState.begin(recipe, recipe.schedule, cpu_runtime(), Run(tmp_path, quiet(tmp_path), {}, ""))
    x_BD, other_BD = torch.ones(3, WIDTH).double().requires_grad_(), torch.zeros(3, WIDTH).double()
    seen = []

    def loss(*copies):
        seen.extend(copies)
        yield Term("sum", copies[0].sum())

    part = FixedShapes("part", loss, (x_BD, other_BD), ())
    sums = train.back_propagate_fixed(state, recipe.step_groups[0], part)
    assert [copy.data_ptr() for copy in seen] == [x_BD.data_ptr(), other_BD.data_ptr()]
    assert [copy.requires_grad for copy in seen] == [True, False]
    assert float(sums["generator"].losses["sum"]) == 3 * WIDTH
    assert torch.equal(x_BD.grad, torch.ones_like(x_BD))
    assert other_BD.grad is None
