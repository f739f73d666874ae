"""`KindWork` and `TrainingData`: what is planned, measured and trained of a kind of model.

A kind of model (gputrain/kinds.py) implements both in its `work.py`. GB is 1e9 bytes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from gputrain.engine.data import SampleSource
from gputrain.engine.recipe import Recipe
from gputrain.engine.run_folder import Run
from gputrain.engine.schedule import Saving, Schedule
from gputrain.hw.plan import Hardware, Plan, decide
from gputrain.hw.probe import Machine
from gputrain.hw.runtime import Runtime
from gputrain.planner.memory.fit import Fit, MemoryBudget


@dataclass(frozen=True)
class PlanTarget:
    """The training that a plan is for.

    `build(runtime, checkpointing)` makes its recipe; `load()` returns the largest batch as the data loader does, and
    `load(items)` one of another size. `model_name`: the class of a user's model, whose errors are explained.
    `is_proportional(items)`: whether all that a step on up to so many items allocates and computes is proportional to
    the items or does not depend on them; `global_batch_size` is then the size of the largest batch.
    """

    build: Callable[[Runtime, bool], Recipe]
    load: Callable[..., Any]
    model_name: str = ""
    is_proportional: Callable[[int], bool] = lambda items: False
    global_batch_size: int = 0


class TrainSettings(Protocol):
    """The options of a train command that planning reads."""

    @property
    def model(self) -> Any: ...  # It has the option gradient_checkpointing.
    @property
    def schedule(self) -> Schedule: ...
    @property
    def saving(self) -> Saving: ...
    @property
    def hardware(self) -> Hardware: ...


# The default is what reaches its first step within a minute, and has been run on a GPU.
SLOW_TO_COMPILE = "its many layers take minutes to compile, and no compiled step was timed yet; ask for it to try"

S = TypeVar("S", bound=TrainSettings)


class BatchSource(SampleSource, Protocol):
    """A data set that batches are made of."""

    @property
    def item_bytes(self) -> int: ...  # Size of an item in a batch.

    def __len__(self) -> int: ...


class TrainingData(ABC, Generic[S]):
    """The opened data of a training, and the recipe that trains on them."""

    sizes: Any  # As in KindWork.
    divides_items = False  # True if the data set itself gives each rank its part of every item.

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of items of an epoch."""

    @abstractmethod
    def digests(self) -> dict[str, Any]:
        """Returns counts and digests of the data, by which a resumed run notices that they have changed."""

    def begin(self, settings: S, run: Run, runtime: Runtime) -> S:
        """Tells the run what inference needs of the data, and logs them. Returns the settings, completed.

        Raises UserError if the run was begun with data that contradict these.
        """
        return settings

    def begin_stage(self, settings: S, position: str) -> None:
        """Logs what is trained in a stage, at a position such as "stage 1 of 2"; "" if there is one stage."""

    def item_seconds(self, settings: S) -> float:
        """Returns the CPU time that a data worker needs for an item."""
        return 0.0

    def complete_plan(self, settings: S, machine: Machine, plan: Plan) -> Plan:
        """Returns a new plan with the settings that only this kind of data has, and logs them."""
        return plan

    @abstractmethod
    def source(self, settings: S, runtime: Runtime) -> BatchSource:
        """Returns the data set of a stage."""

    def step_items(self, settings: S) -> int:
        """Returns the items of a step; 0: as many as the schedule says."""
        return 0

    @abstractmethod
    def recipe(self, settings: S, runtime: Runtime) -> Recipe:
        """Returns the recipe, with random weights and the held-out data."""

    def start(self, recipe: Any, run: Run) -> bool:
        """Gives the recipe of a new run the weights that the settings name. Returns whether it has some of a file."""
        return False


class PlannedTraining(NamedTuple):
    """A training to plan for other GPUs than this machine's."""

    work: "KindWork[Any]"
    stages: list[tuple[Any, dict[str, Any]]]  # The settings of each stage, with the columns that name it in a table.
    items: int | None  # Items of an epoch; None: unknown.


# A row of a benchmark: its label, what it adds to the settings of the row before, and the plan's setting that must be
# on afterwards.
Switch = tuple[str, dict[str, Any], str]


@dataclass(frozen=True)
class KindWork(ABC, Generic[S]):
    """The work of planning, measuring and training a kind of model.

    `sizes` are the properties of the data that the shapes of a step depend on besides the settings, such as the length
    of a clip; None if there are none, or before they are known.
    """

    sizes: Any = None

    kind: ClassVar[str]  # "vae": also the name of the train command, and in checkpoints.
    item: ClassVar[str]  # Name of an item of a batch, in the singular: "picture".
    unit: ClassVar[str]  # Name of the items of a step in benchmarks, in the plural.

    fixed_shapes: ClassVar[bool] = True  # True if all batches have the same shape.
    generator_is_1d: ClassVar[bool] = False  # True if only the discriminators have 2-D convolutions.
    is_1d: ClassVar[bool] = False  # True if the model has no 2-D convolutions at all.
    # The reason why compilation must be asked for; empty: it is the default on newer GPUs.
    eager_because: ClassVar[str] = ""
    compile_seconds: ClassVar[float] = 60.0  # Seconds of a core to compile a step for the first time.
    fp32_because: ClassVar[str] = ""  # The reason why 16 bit must be asked for; empty: 16 bit is the default.
    graphless_because: ClassVar[str] = ""  # The reason why no step can be a CUDA graph; empty: steps can be.

    bench_options: ClassVar[tuple[str, ...]] = ()  # Options that only the benchmark has.
    switches: ClassVar[Sequence[Switch]] = ()  # The rows of a benchmark; none: those of every kind.
    inference_switches: ClassVar[Sequence[Switch]] = ()  # With the option `inference`, if they are others.

    def decide(self, machine: Machine, requested: Hardware) -> Plan:
        """Returns the plan of this model's hardware settings, without those of the batch."""
        return decide(
            machine,
            requested,
            fixed_shapes=self.fixed_shapes,
            generator_is_1d=self.generator_is_1d,
            is_1d=self.is_1d,
            eager_because=self.eager_because,
            fp32_because=self.fp32_because,
            graphless_because=self.graphless_because,
        )

    # ------------------------------------------------------------------------------------------------------ training

    def completed(self, settings: S) -> S:
        """Returns the settings with those that are left to the program. Raises UserError if they contradict."""
        return settings

    @abstractmethod
    def open_data(self, settings: S) -> TrainingData[S]:
        """Opens the data of a training. Raises UserError if they cannot be used."""

    def stages(self, settings: S) -> tuple[S, ...]:
        """Returns the settings of each stage of a training."""
        return (settings,)

    # ------------------------------------------------------------------------------------------------------ planning

    @abstractmethod
    def target(self, settings: S) -> PlanTarget:
        """Returns the training in the form that the memory planner takes."""

    def fallbacks(self, settings: S, budget: MemoryBudget, found: Fit) -> Mapping[str, S]:
        """Returns changed settings that take less memory, by the flag that makes the change, the smallest loss
        first."""
        any_settings: Any = settings
        model = replace(settings.model, gradient_checkpointing=None)
        return {
            "--micro-batch-size 0": replace(any_settings, schedule=replace(settings.schedule, micro_batch_size=0)),
            "--gradient-checkpointing": replace(any_settings, model=model),
        }

    def begins(self, settings: S) -> Mapping[str, int]:
        """Returns what begins later than the first step, with its option: the number of steps before it."""
        return {}

    @abstractmethod
    def planned(self, settings: Any) -> PlannedTraining:
        """Returns the training that the options of `plan` describe."""

    # ---------------------------------------------------------------------------------------------------- benchmarks

    @abstractmethod
    def title(self, settings: Any, train: S) -> str:
        """Describes the measured training, from the options of the benchmark and of the train command."""

    def of_bench(self, settings: S, **options: Any) -> "KindWork[S]":
        """Returns this work with the sizes of the synthetic data that the options of a benchmark ask for."""
        return self

    @abstractmethod
    def synthetic_recipe(self, settings: S, runtime: Runtime) -> Recipe:
        """Returns a recipe without held-out data."""

    @abstractmethod
    def synthetic_batch(self, settings: S) -> Any:
        """Returns a batch as the data loader does."""

    def item_seconds(self, settings: S, **options: Any) -> float:
        """Returns the audio of an item of the synthetic batch; 0: there is no audio."""
        return 0.0

    def inference(self, settings: S, runtime: Runtime, **options: Any) -> Any:
        """Returns the model in use instead of in training, as an InferenceBench."""
        raise NotImplementedError
