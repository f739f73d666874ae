"""CUDA graphs: the kernels of a step, captured once and then launched as one.

A step of thousands of short kernels takes as long as the processor needs to launch them. A graph is the list of the
kernels with their arguments; replaying it is one launch. So everything that a graph reads and writes has fixed
addresses: the batch is copied into static tensors, and the gradients and sums of losses are those of the capture, whose
memory stays reserved. A graph holds the gradients of a whole batch with all its micro-batches, or the part of Muon's
step that treats matrices; nothing between them is captured: neither the exchange with other ranks nor clipping.

A group is captured only if it says by `StepGroup.fixed` that its loss takes nothing else from the step. Of a group
whose shapes change, only what it yields as `FixedShapes` is captured, by micro-batch, so that its replays add to
gradients. What is captured is computed kernel by kernel first, and its losses and gradients must be those of the
graph's first replay.
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import is_
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from gputrain.engine.captured import (
    ExpectedGradients,
    GradientGraph,
    HostCopies,
    StaticBatch,
    Sums,
    TensorLayout,
    copied,
    drop_gradients,
    put_gradients,
)
from gputrain.engine.muon import Muon, StepInputs, product_dtype
from gputrain.engine.recipe import Batch, FixedShapes, Recipe, StepGroup, phases_of
from gputrain.errors import first_line
from gputrain.hw.plan import MOST_GRAPHED_PARTS, Setting
from gputrain.hw.runtime import Runtime, is_out_of_memory, release_memory

T = TypeVar("T")
log = logging.getLogger(__name__)

EAGER_PASSES = 2  # Passes before a capture, in which code is compiled and cuDNN searches its algorithms.
MOST_SIZES = 4  # Graphs of each part of fixed shapes, one for each number of items; other numbers have none.
MOST_RELEASES = 3  # After memory has run out so often while graphs held some, there are none any more.


class GraphBackend(Protocol):
    """Captures and replays. All graphs of a backend share the memory of their intermediate results."""

    def warm_up(self, function: Callable[[], T]) -> T:
        """Call the function where it will be captured."""

    def capture(self, function: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Call the function without executing its kernels. Returns its result, and what executes them."""


class CudaBackend:
    """Captures with torch.cuda.graph, on a stream and into a memory pool of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], T]) -> T:
        """Autograd and cuBLAS keep streams and workspaces by stream, so that it is the stream of the capture."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            made = function()
        current.wait_stream(self.stream)
        return made

    def capture(self, function: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        try:
            # Other threads pin memory and ask for events meanwhile, which does not disturb a capture of this thread.
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                made = function()
        except Exception:
            torch.cuda.set_stream(current)  # torch does not return to it if the end of the capture fails.
            self._end_allocating()
            self._end_capturing_random_numbers()
            raise
        return made, graph.replay

    def _end_allocating(self) -> None:
        """Tell the allocator that the capture is over. torch does not, if CUDA has invalidated the capture."""
        with contextlib.suppress(RuntimeError, AttributeError):  # It is an error if torch has done it.
            torch._C._cuda_endAllocateToPool(self.device.index, self.pool)
            torch._C._cuda_releasePool(self.device.index, self.pool)

    def _end_capturing_random_numbers(self) -> None:
        """Give the default generator a copy of its state, with its seed and offset, that belongs to no capture.

        torch 2.9 to 2.11 leave the state in its capture if CUDA has invalidated that, and the next dropout would raise.
        Former graphs keep the old state and can be replayed no more: whoever catches the error drops them.
        https://github.com/pytorch/pytorch/issues/171263
        """
        generator = torch.cuda.default_generators[self.device.index]
        generator.graphsafe_set_state(generator.clone_state())


@dataclass
class MatrixGraph:
    """Muon's step of its matrices as a graph."""

    replay: Callable[[], None]
    inputs: StepInputs
    tensors: list[Tensor]  # What it reads and writes.

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        return len(tensors) == len(self.tensors) and all(map(is_, tensors, self.tensors))


@dataclass
class StepGraphs:
    """The graphs of a training. Without a `make`, everything runs kernel by kernel."""

    runtime: Runtime | None = None
    make: Callable[[], GraphBackend] | None = None
    holds_groups: bool = False  # True if the gradients of a whole batch can be captured, so that its place is fixed.
    backend: GraphBackend | None = None
    static: StaticBatch | None = None
    latest: tuple[Any, int] = (None, 0)  # Shapes of the last batch that was not static, and how often in a row.
    passes: Counter[Hashable] = field(default_factory=Counter)  # Eager passes by what would be captured.
    of_gradients: dict[Hashable, GradientGraph] = field(default_factory=dict)
    of_matrices: dict[int, MatrixGraph] = field(default_factory=dict)  # By the optimizer's identity.
    added: dict[Tensor, Tensor] = field(
        default_factory=dict
    )  # Gradients that the graphs of parts add to, by parameter.
    eager: set[Hashable] = field(default_factory=set)  # What is not captured: it has no losses, or memory ran out.
    releases: int = 0

    @classmethod
    def of(cls, recipe: Recipe, runtime: Runtime) -> "StepGraphs":
        """Return the graphs of a recipe's training, none if its plan has none."""
        if runtime.device.type != "cuda" or not runtime.plan.cuda_graphs.value:
            return cls()
        return cls.with_backend(recipe, runtime, partial(CudaBackend, runtime.device))

    @classmethod
    def with_backend(cls, recipe: Recipe, runtime: Runtime, make: Callable[[], GraphBackend]) -> "StepGraphs":
        graphs = cls(runtime, make, any(group.fixed is not None for group in recipe.step_groups))
        for phase in phases_of(recipe):
            if isinstance(phase.optimizer, Muon):
                phase.optimizer.step_matrices = partial(graphs._step_matrices, phase.optimizer)
        return graphs

    def placed(self, batch: Batch) -> Batch:
        """Return the batch in the tensors that the graphs read, or as it is if nothing is captured for its shapes."""
        if self.make is None or not self.holds_groups:
            return batch
        if self.static is not None and self.static.takes(batch):
            self.latest = None, 0
            return self.static.batch
        shapes = StaticBatch.shapes_of(batch)
        times = self.latest[1] + 1 if shapes == self.latest[0] else 1
        self.latest = shapes, times
        if times < EAGER_PASSES:  # The last batch of an epoch may be smaller than the others.
            return batch
        self.drop()
        self.static = StaticBatch.like(batch)
        return self.static.batch

    def gradients(self, group: StepGroup, batch: Batch, parts: int, step: int, compute: Callable[[], Sums]) -> Sums:
        """Add the gradients of a batch to the group's parameters, which have none. Returns the sums of each phase.

        `compute()` does it kernel by kernel, in so many `parts`.
        """
        if self.static is None or batch is not self.static.batch or group.fixed is None or parts > MOST_GRAPHED_PARTS:
            return compute()
        key = (group.name, parts, group.fixed(step))
        if graph := self.of_gradients.get(key):
            return graph.run()
        if any(graph.group == group.name for graph in self.of_gradients.values()):
            self._forget_graphs()  # Another loss or size has begun, and the former does not come back.
        self.passes[key] += 1
        if self.passes[key] <= EAGER_PASSES or key in self.eager:
            return compute()
        parameters = [parameter for phase in group.phases for parameter in phase.parameters()]
        return self._first_replay(key, group.name, parameters, compute)

    def gradients_of_part(
        self, group: StepGroup, part: FixedShapes, compute: Callable[[Sequence[Tensor]], Sums]
    ) -> tuple[Sums, list[Tensor | None]]:
        """Add the gradients of a part of a group's loss to the part's parameters. Returns the sums of each phase, and
        the gradients of the part's inputs. `compute(copies of the inputs)` does it kernel by kernel."""
        key = (part.name, *map(TensorLayout.of, part.inputs), *part.constants)
        if graph := self.of_gradients.get(key):
            return graph.run(part.inputs), [static.grad for static in graph.inputs]
        copies = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in part.inputs]
        if not self._captures_part(group, key, part):
            return compute(copies), [copy.grad for copy in copies]
        static = [copy.clone().detach().requires_grad_(copy.requires_grad) for copy in copies]
        sums = self._first_replay(key, part.name, part.parameters(), partial(compute, static), static)
        return sums, [one.grad for one in static]

    def _captures_part(self, group: StepGroup, key: Hashable, part: FixedShapes) -> bool:
        """Return whether a part is to be captured now: in the first micro-batch of a step, with a size that recurs."""
        if self.make is None or group.fixed is not None:
            return False
        self.passes[key] += 1
        sizes = sum(graph.group == part.name for graph in self.of_gradients.values())
        enough = self.passes[key] <= EAGER_PASSES or sizes >= MOST_SIZES
        return not (enough or key in self.eager or any(parameter.grad is not None for parameter in part.parameters()))

    def _first_replay(
        self, key: Hashable, name: str, parameters: Sequence[Tensor], compute: Callable[[], Sums],
        inputs: Sequence[Tensor] = (),
    ) -> Sums:  # fmt: skip
        """Compute the gradients of parameters, and of inputs if it is a part of a loss, eagerly and by a new graph. The
        graph is kept if both agree, otherwise the eager ones are the step's."""
        assert self.make is not None
        self.backend = self.backend or self.make()
        sums = copied(self.backend.warm_up(compute))
        expected = ExpectedGradients.of(sums, parameters, inputs)
        if not expected.sums:
            self.eager.add(key)
        if not expected.can_be_compared:
            return sums
        drop_gradients(expected.parameters)
        release_memory()  # The graph needs the memory that the eager pass has needed.
        problem = self._capture_gradients(key, name, inputs, compute, expected)
        if problem:
            drop_gradients(expected.parameters)
            self._fall_back(problem, key)
            expected.restore()
        else:
            log.info("the gradients of the %s are a CUDA graph from now on", name)
        return sums

    def _capture_gradients(
        self, key: Hashable, name: str, inputs: Sequence[Tensor], compute: Callable[[], Sums],
        expected: ExpectedGradients,
    ) -> str:  # fmt: skip
        """Capture and replay the gradients. Returns what is wrong with them, or ""."""
        assert self.backend is not None
        assert self.runtime is not None
        try:
            added = self._gradients_to_add_to(expected) if inputs else []
            put_gradients(added)
            torch.clear_autocast_cache()  # 16-bit copies are made on each side of the graph's border.
            made, replay = self.backend.capture(compute)
            torch.clear_autocast_cache()
            written = [(tensor, tensor.grad) for tensor in expected.parameters]
            graph = GradientGraph(name, replay, made, written, inputs, added)
            problem = expected.difference(graph.run(inputs), self.runtime.product_eps())
        except Exception as error:
            return self._cause(error, key)
        if not problem:
            self.of_gradients[key] = graph
        return problem

    def _gradients_to_add_to(self, expected: ExpectedGradients) -> list[tuple[Tensor, Tensor]]:
        """Return the parameters that should get a gradient, with the tensors that all graphs of a part add theirs to.
        Those of its inputs are made anew."""
        count = len(expected.parameters) - expected.inputs
        pairs = zip(expected.parameters[:count], expected.gradients[:count], strict=True)
        reached = [parameter for parameter, gradient in pairs if gradient is not None]
        for parameter in reached:
            if parameter not in self.added:
                self.added[parameter] = torch.zeros_like(parameter)
        return [(parameter, self.added[parameter]) for parameter in reached]

    def _cause(self, error: Exception, key: Hashable) -> str:
        """Return why a capture has failed, in words, and note if memory ran out."""
        if is_out_of_memory(error):
            self.eager.add(key)
            return "out of memory"
        return f"{type(error).__name__}: {first_line(error)}"

    def _fall_back(self, problem: str, key: Hashable) -> None:
        """Go on kernel by kernel: with this size if memory ran out, otherwise for the rest of the run."""
        if key in self.eager:
            self._forget_graphs()
            log.info("there is not enough memory for a CUDA graph of a step; training goes on without it")
        else:
            self.disable(problem)

    def _step_matrices(self, optimizer: Muon, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Make Muon's step of its matrices, as a graph if their gradients have fixed addresses."""
        fixed = {id(gradient) for graph in self.of_gradients.values() for _, gradient in graph.gradients}
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        tensors = [*parameters, *gradients, *optimizer.momentum_of(parameters)]
        graph = self.of_matrices.get(id(optimizer))
        is_fixed = bool(gradients) and len(tensors) == 3 * len(parameters) and fixed.issuperset(map(id, gradients))
        if not is_fixed or optimizer.grad_scale is None or optimizer.found_inf is None:
            optimizer.step_stacks(parameters, group)
        elif graph is not None and graph.is_of(tensors):
            graph.inputs.take(group["lr"], optimizer.grad_scale, optimizer.found_inf)
            graph.replay()
        elif matrices_key(optimizer) in self.eager or optimizer.found_inf:  # Without a step, nothing is compared.
            optimizer.step_stacks(parameters, group)
        else:
            self._first_step(optimizer, parameters, group, tensors)

    def _first_step(
        self, optimizer: Muon, parameters: list[Tensor], group: dict[str, Any], tensors: list[Tensor]
    ) -> None:
        """Make Muon's step eagerly and by a new graph. The graph is kept if both agree, otherwise the eager result."""
        assert self.backend is not None
        changed = [*parameters, *optimizer.momentum_of(parameters)]
        before = HostCopies.of(changed)
        self.backend.warm_up(lambda: optimizer.step_stacks(parameters, group))
        after = HostCopies.of(changed)
        before.write()
        release_memory()
        problem = self._capture_matrices(optimizer, parameters, group, tensors, (before, after))
        if problem:
            after.write()
            self._fall_back(problem, matrices_key(optimizer))

    def _capture_matrices(
        self, optimizer: Muon, parameters: list[Tensor], group: dict[str, Any], tensors: list[Tensor],
        expected: tuple[HostCopies, HostCopies],
    ) -> str:  # fmt: skip
        """Capture and replay Muon's step. Returns what is wrong with it, or ""."""
        assert self.backend is not None
        assert self.runtime is not None
        assert optimizer.grad_scale is not None
        assert optimizer.found_inf is not None
        before, after = expected
        try:
            inputs = StepInputs.like(optimizer.grad_scale, optimizer.found_inf)
            inputs.take(group["lr"], optimizer.grad_scale, optimizer.found_inf)
            _, replay = self.backend.capture(lambda: optimizer.step_captured(parameters, group, inputs))
            replay()
            in_products = optimizer.product_dtype or product_dtype(parameters[0])
            problem = after.difference(before, self.runtime.product_eps(in_products))
        except Exception as error:
            return self._cause(error, matrices_key(optimizer))
        if not problem:
            self.of_matrices[id(optimizer)] = MatrixGraph(replay, inputs, tensors)
        return problem

    def disable(self, problem: str) -> None:
        """Run everything kernel by kernel from now on, after a graph has failed."""
        assert self.runtime is not None
        self.drop()
        self.make = None
        reason = f"they were given up: {problem}"
        self.runtime.plan = replace(self.runtime.plan, cuda_graphs=Setting(False, reason))
        log.warning("CUDA graphs are off for the rest of this run (%s); training goes on without them", problem)

    def gave_way(self) -> bool:
        """Give the graphs' memory back, after memory has run out elsewhere. Returns whether there was any."""
        if not self.of_gradients:
            return False
        self.releases += 1
        if self.releases < MOST_RELEASES:
            self.drop()
        else:
            self.disable("memory ran out beside them again and again")
        return True

    def drop(self) -> None:
        """Forget all graphs and what has been counted for them, and free their memory. They are captured again."""
        self.static, self.latest = None, (None, 0)
        self.passes.clear()
        self.eager.clear()
        self._forget_graphs()

    def _forget_graphs(self) -> None:
        if self.backend is not None:
            self.of_gradients.clear()
            self.added.clear()
            self.of_matrices.clear()
            self.backend = None  # The next graphs get another pool.
            release_memory()


def matrices_key(optimizer: Muon) -> Hashable:
    return "Muon", id(optimizer)
