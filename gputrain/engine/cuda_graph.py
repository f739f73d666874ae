"""A CUDA graph in place of the gradients of a batch: its kernels are captured once, and then launched as one.

A step of thousands of short kernels takes as long as the processor needs to launch them. Everything that a graph reads
and writes has a fixed address: the batch is copied into static tensors, and the gradients and sums of losses are those
of the capture, whose memory stays reserved. A graph holds the gradients of a whole batch with all its micro-batches.
Each shape of batches has its own graphs, as many as MOST_GRAPHED_SHAPES; all of them share one memory pool and one set
of gradients, because a step has replayed one graph of a group, and its optimizer has used them, before the next.

`ReplayedGradients` takes the place of `gradients()` in step.py. It captures a group only if its `graph_key` says
that its loss takes nothing else from the step. What is captured is computed kernel by kernel first, and the losses and
gradients of the graph's first replay must be those.
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

import contextlib
import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from gputrain.engine.recipe import Batch, PhaseSums, StepGroup, Sums
from gputrain.engine.state import TrainState
from gputrain.engine.step import drop_gradients, gradients
from gputrain.errors import first_line
from gputrain.hw.plan import MOST_GRAPHED_PARTS, MOST_GRAPHED_SHAPES, Setting
from gputrain.hw.runtime import is_out_of_memory, random_state, release_memory, set_random_state

log = logging.getLogger(__name__)

EAGER_PASSES = 2  # Passes before a capture, in which code is compiled and cuDNN searches its algorithms.
MOST_SEEN = 1000  # Shapes that are remembered before one of them comes again.
# A graph holds one bucket of clips, and no dropout that is repeated.
NOT_CAPTURED = "no graph holds several batches (accumulation_steps) or recomputed layers with dropout (checkpointing)"
MOST_RELEASES = 3  # After memory has run out so often while there were graphs, there are none any more.
Gradients = tuple[dict[str, float], list[Tensor | None]]  # Losses and statistics by name, and gradients, on the host.


def replay_gradients_if_planned(state: TrainState) -> None:
    """Have the gradients of a training replayed as CUDA graphs, if its plan says so and a group has a graph key."""
    runtime = state.runtime
    if runtime.device.type == "cuda" and runtime.plan.cuda_graphs.value:
        if any(group.graph_key is not None for group in state.recipe.step_groups):
            replay_gradients(state, partial(CudaBackend, runtime.device))
        else:
            runtime.plan = replace(runtime.plan, cuda_graphs=Setting(False, f"asked for, but {NOT_CAPTURED}"))
            log.warning("there are no CUDA graphs in this run: %s", NOT_CAPTURED)


def replay_gradients(state: TrainState, make: Callable[[], "CudaBackend"]) -> None:
    """Have the gradients of a training replayed, by graphs that `make()` captures."""
    state.gradients = replayed = ReplayedGradients(state, make)
    state.free_memory = replayed.free_memory


class CudaBackend:
    """Captures with torch.cuda.graph, on a stream and into a memory pool of its own, which all its graphs share."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], Sums]) -> Sums:
        """Call the function on the stream of the capture, as autograd and cuBLAS keep workspaces by stream."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            made = function()
        current.wait_stream(self.stream)
        return made

    def capture(self, function: Callable[[], Sums]) -> tuple[Sums, Callable[[], None]]:
        """Call the function without executing its kernels. Returns its result, and what executes them."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        try:
            # Other threads pin memory and ask for events meanwhile, which does not disturb a capture of this thread.
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                made = function()
        except Exception:
            torch.cuda.set_stream(current)  # torch does not return to it if the end of the capture fails.
            self._end_failed_capture()
            raise
        return made, graph.replay

    def _end_failed_capture(self) -> None:
        """Tell the allocator that the capture is over, which torch does not if CUDA has invalidated it, and give the
        default generator a copy of its state, with its seed and offset, that belongs to no capture.

        torch 2.9 to 2.11 leave it in the capture, and the next dropout would raise. Former graphs keep the old state
        and can be replayed no more. https://github.com/pytorch/pytorch/issues/171263
        """
        with contextlib.suppress(RuntimeError, AttributeError):  # It is an error if torch has done it.
            torch._C._cuda_endAllocateToPool(self.device.index, self.pool)
            torch._C._cuda_releasePool(self.device.index, self.pool)
        generator = torch.cuda.default_generators[self.device.index]
        generator.graphsafe_set_state(generator.clone_state())


def map_batch(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a batch, which consists of dataclasses and containers, with all its tensors changed."""

    def changed(leaf: Any) -> Any:
        if is_dataclass(leaf) and not isinstance(leaf, type):
            return replace(leaf, **{part.name: map_batch(getattr(leaf, part.name), change) for part in fields(leaf)})
        return change(leaf) if isinstance(leaf, Tensor) else leaf

    return tree_map(changed, value)


class GraphKey(NamedTuple):
    """Names what a graph has been captured for."""

    group: str
    parts: int
    graph_key: Hashable  # What the group's loss takes from the step.
    shapes: str  # Of the batch.


@dataclass
class GradientGraph:
    """The gradients of a group as a graph, with the tensors that it writes."""

    replay: Callable[[], None]
    sums: Sums
    gradients: list[tuple[Tensor, Tensor | None]]  # Every parameter of the group, and its gradient.

    def run(self) -> Sums:
        """Replay the graph. Returns copies of the sums, as those of several steps are kept."""
        self.replay()
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        return copied(self.sums)


class ReplayedGradients:
    """The gradients of a training's steps, as graphs where shapes are fixed."""

    def __init__(self, state: TrainState, make: Callable[[], CudaBackend]) -> None:
        self.runtime, self.make = state.runtime, make
        self.is_off = False
        self.backend: CudaBackend | None = None
        self.static: dict[str, Batch] = {}  # The batches whose tensors the graphs read, by their shapes.
        self.seen: set[str] = set()  # Shapes of batches that are not static.
        self.batch: Callable[[], Batch | None] = lambda: None  # The batch of the present step,
        self.in_place: Batch | None = None  # and the one in its place for all groups, as losses may write into it.
        self.shapes = ""  # Of the present batch.
        self.passes: Counter[GraphKey] = Counter()  # Eager passes by what would be captured.
        self.graphs: dict[GraphKey, GradientGraph] = {}
        self.gradients: dict[Tensor, Tensor] = {}  # By parameter, those that all graphs write.
        self.eager: set[GraphKey] = set()  # What is not captured, as memory ran out.
        self.releases = 0

    def __call__(self, state: TrainState, group: StepGroup, batch: Batch, parts: int, step: int) -> Sums:
        """Add the gradients of a batch to the group's parameters, which have none. Returns the sums of each phase."""
        if self.batch() is not batch:
            self.batch, self.in_place = weakref.ref(batch), self._static_of(batch)
        batch = batch if self.in_place is None else self.in_place
        compute = partial(gradients, state, group, batch, parts, step)
        graph_key = group.graph_key(step) if group.graph_key else None
        if batch is not self.static.get(self.shapes) or graph_key is None or parts > MOST_GRAPHED_PARTS:
            return compute()
        key = GraphKey(group.name, parts, graph_key, self.shapes)
        if graph := self.graphs.get(key):
            return graph.run()
        if any(
            old.group == key.group and (old.graph_key != graph_key or old.shapes == key.shapes) for old in self.graphs
        ):
            self._forget_graphs()  # Another loss or number of parts has begun, and the former does not come back.
        self.passes[key] += 1
        if self.passes[key] <= EAGER_PASSES or key in self.eager:
            return compute()
        return self._first_replay(key, group, compute)

    def _static_of(self, batch: Batch) -> Batch | None:
        """Return a batch with these values in the tensors that the graphs read; None if nothing is captured for its
        shapes: it is their first batch, as the last one of a training may be, or there are enough other shapes."""
        if self.is_off:
            return None
        self.shapes = repr(map_batch(batch, lambda part: (tuple(part.shape), part.stride(), part.dtype, part.device)))
        if self.shapes in self.static:
            given: list[Tensor] = []
            map_batch(batch, given.append)
            values = iter(given)
            map_batch(self.static[self.shapes], lambda target: target.copy_(next(values), non_blocking=True))
        elif self.shapes in self.seen and len(self.static) < MOST_GRAPHED_SHAPES:
            self.static[self.shapes] = map_batch(batch, torch.clone)
        elif len(self.seen) < MOST_SEEN:
            self.seen.add(self.shapes)
        return self.static.get(self.shapes)

    def _first_replay(self, key: GraphKey, group: StepGroup, compute: Callable[[], Sums]) -> Sums:
        """Compute the gradients eagerly and by a new graph. The graph is kept if both agree, otherwise the eager
        gradients are the step's."""
        self.backend = self.backend or self.make()
        device = self.runtime.device
        before = random_state(device)
        sums = copied(self.backend.warm_up(compute))
        after = random_state(device)
        numbers, expected = on_host(sums, group.parameters())
        values = [torch.tensor(list(numbers.values())), *(value for value in expected if value is not None)]
        if not numbers or not all(bool(value.isfinite().all()) for value in values):
            return sums
        drop_gradients(group)
        release_memory()  # The graph needs the memory that the eager pass has needed.
        set_random_state(before, device)  # The first replay has the dropout of the eager pass.
        problem = self._capture(key, group, compute, (numbers, expected))
        set_random_state(after, device)
        if not problem:
            count = sum(other.group == key.group for other in self.graphs)
            log.info("the gradients of the %s are a CUDA graph from now on (%d)", group.name, count)
            return sums
        drop_gradients(group)
        if key in self.eager:
            self._forget_graphs()
            log.info("there is not enough memory for a CUDA graph of a step; training goes on without it")
        else:
            self.disable(problem)
        for parameter, value in zip(group.parameters(), expected, strict=True):
            parameter.grad = None if value is None else value.to(parameter.device)
        return sums

    def _capture(self, key: GraphKey, group: StepGroup, compute: Callable[[], Sums], expected: Gradients) -> str:
        """Capture and replay the gradients. Returns what is wrong with them, or ""."""
        assert self.backend is not None
        try:
            torch.clear_autocast_cache()  # 16-bit copies are made on each side of the graph's border.
            made, replay = self.backend.capture(partial(self._into_shared, group, compute))
            torch.clear_autocast_cache()
            graph = GradientGraph(replay, made, [(weight, weight.grad) for weight in group.parameters()])
            problem = difference(expected, on_host(graph.run(), group.parameters()), self.runtime.product_eps())
        except Exception as error:
            if is_out_of_memory(error):
                self.eager.add(key)
            return f"{type(error).__name__}: {first_line(error)}"
        if not problem:
            self.graphs[key] = graph
        return problem

    def _into_shared(self, group: StepGroup, compute: Callable[[], Sums]) -> Sums:
        """Compute the gradients of a group, and put them where the graphs of other shapes have put theirs."""
        sums = compute()
        made = [(weight, weight.grad) for weight in group.parameters() if weight.grad is not None]
        moved = [(self.gradients[weight], grad) for weight, grad in made if weight in self.gradients]
        if moved:
            torch._foreach_copy_([shared for shared, _ in moved], [gradient for _, gradient in moved])
        for parameter, gradient in made:
            parameter.grad = self.gradients.setdefault(parameter, gradient)
        return sums

    def disable(self, problem: str) -> None:
        """Compute everything kernel by kernel from now on, after a graph has failed."""
        self.drop()
        self.is_off = True
        self.runtime.plan = replace(self.runtime.plan, cuda_graphs=Setting(False, f"they were given up: {problem}"))
        log.warning("CUDA graphs are off for the rest of this run (%s); training goes on without them", problem)

    def free_memory(self) -> bool:
        """Free the graphs' memory, after memory has run out. Returns whether there was any."""
        if not self.graphs:
            return False
        self.releases += 1
        if self.releases < MOST_RELEASES:
            self.drop()
        else:
            self.disable("memory ran out beside them again and again")
        return True

    def drop(self) -> None:
        """Forget all graphs and what has been counted for them, and free their memory. They are captured again."""
        self.static.clear()
        self.passes.clear()
        self.eager.clear()
        self._forget_graphs()

    def _forget_graphs(self) -> None:
        if self.backend is not None:
            self.graphs.clear()
            self.gradients.clear()
            self.backend = None  # The next graphs get another pool.
            release_memory()


def on_host(sums: Sums, parameters: Sequence[Tensor]) -> Gradients:
    """Return copies of the sums and of the parameters' gradients, which take none of the device's memory."""
    kinds = [(f"{phase} {kind}", named) for phase, found in sums.items() for kind, named in vars(found).items()]
    numbers = {f"{kind} {name}": float(value) for kind, named in kinds for name, value in named.items()}
    return numbers, [
        None if weight.grad is None else weight.grad.detach().to("cpu", copy=True) for weight in parameters
    ]


def difference(expected: Gradients, found: Gradients, eps: float) -> str:
    """Return what is wrong with the losses or gradients of a replay; "" if nothing is. `eps` is the relative rounding
    step of the arithmetic."""
    if found[0].keys() != expected[0].keys():
        return "a replayed step has other losses"
    for name, value in expected[0].items():
        if not abs(found[0][name] - value) <= math.sqrt(eps) * abs(value):
            return f"{name} of a replayed step is {found[0][name]:.6g} instead of {value:.6g}"
    pairs = list(zip(expected[1], found[1], strict=True))
    if any((value is None) != (made is None) for value, made in pairs):
        return "a replayed step has gradients of other parameters"
    if not all_close([(value, made) for value, made in pairs if value is not None and made is not None], eps):
        return "the gradients of a replayed step differ from those of a step"
    return ""


def all_close(pairs: Sequence[tuple[Tensor, Tensor]], eps: float) -> bool:
    """Return whether the tensors of each pair are equal in half of the digits of an arithmetic that rounds by `eps`.
    The order of the additions in atomic sums differs from pass to pass, and changes fewer digits than these.

    A difference is relative to the norm of the first tensor, or to the norm that it would have with the mean square of
    all first tensors, because some are zero but for rounding.
    """
    squares = [float(value.double().square().sum()) for value, _ in pairs]
    mean = sum(squares) / max(1, sum(value.numel() for value, _ in pairs))
    norms = [max(square, mean * value.numel()) ** 0.5 for square, (value, _) in zip(squares, pairs, strict=True)]
    distances = [float((other.double() - value.double()).norm()) for value, other in pairs]
    return all(found <= math.sqrt(eps) * norm for found, norm in zip(distances, norms, strict=True))


def copied(sums: Sums) -> Sums:
    """Return copies of all sums, made by one kernel if they have one data type."""
    values = [value for found in sums.values() for named in vars(found).values() for value in named.values()]
    alike = len({(value.dtype, value.shape) for value in values}) == 1
    copies = iter(torch.stack(values).unbind() if alike else [value.clone() for value in values])
    return {
        phase: PhaseSums(*({name: next(copies) for name in named} for named in vars(found).values()))
        for phase, found in sums.items()
    }
