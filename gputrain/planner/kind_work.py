"""`KindWork` and `TrainingData`: what is planned, measured and trained of a kind of model.

A kind of model implements `KindWork` beside its `ModelKind`, in its kind.py, and `TrainingData` in its data.py. The
help page imports every kind.py, and so this module: neither imports torch until a function of theirs is called. GB is
1e9 bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar, get_type_hints

from gputrain.config import changed
from gputrain.engine.schedule import Saving, Schedule
from gputrain.hw.plan import NOT_PLANNED, Cards, Hardware, Plan, decide

if TYPE_CHECKING:
    from gputrain.engine.data import SampleSource
    from gputrain.engine.recipe import Recipe
    from gputrain.engine.run_folder import Run
    from gputrain.hw.probe import Machine
    from gputrain.hw.runtime import Runtime
    from gputrain.planner.memory.fit import Fit, MemoryBudget


@dataclass(frozen=True)
class PlanTarget:
    """The training that a plan is for.

    `build(runtime, checkpointing)` makes its recipe; `load()` returns the largest batch as the data loader does, and
    `load(items)` one of another size. `model_name`: the class of a user's model, whose errors are explained. Up to
    `proportional_up_to` items, all that a step allocates and computes is proportional to the items or does not depend
    on them; 0: unknown.
    """

    build: Callable[[Runtime, bool], Recipe]
    load: Callable[..., Any]
    model_name: str = ""
    proportional_up_to: float = 0


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


S = TypeVar("S", bound=TrainSettings)


@dataclass(frozen=True)
class TrainingStart(Generic[S]):
    """Decisions on a training that need its open data, and are made before anything is planned."""

    settings: S  # Completed: what was left to the program has its value, which config.yaml holds.
    digests: dict[str, Any]  # Counts and digests of the data, by which a resumed run notices that they have changed.
    facts: dict[str, Any] = field(default_factory=dict)  # Properties of the data that inference needs.


@dataclass(frozen=True)
class StageData:
    """The data of a training, as the planner and the schedule see them."""

    item_seconds: Callable[[], float]  # Measures the CPU time that a data worker needs for an item.
    step_items: int = 0  # Items of a step; 0: as many as the schedule says.


@dataclass(frozen=True)
class StageTraining:
    """The parts that are trained: the model with its first weights, and the items of its batches."""

    recipe: Recipe
    source: SampleSource
    starts_pretrained: bool = False  # True if the weights of a new run come from a file.
    facts: dict[str, Any] = field(default_factory=dict)  # What inference needs of the weights to begin with.


class TrainingData(ABC, Generic[S]):
    """The opened data of a training. The session calls `begin` and `stage`, plans the training, and calls
    `training`. None of them changes the run: what they decide is in their results."""

    sizes: Any  # As in KindWork.
    divides_items = False  # True if the data set itself gives each rank its part of every item.

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of items of an epoch."""

    @abstractmethod
    def begin(self, settings: S, run: Run, runtime: Runtime) -> TrainingStart[S]:
        """Logs the data and the model, and reads the weights that a new run begins with.

        Raises UserError if the run was begun with data or settings that contradict these.
        """

    def stage(self, settings: S) -> StageData:
        """Returns what the plan needs to know of the data."""
        return StageData(lambda: 0.0)

    @abstractmethod
    def training(self, settings: S, run: Run, runtime: Runtime) -> StageTraining:
        """Returns what is trained with the planned settings. A new run has random weights, or those that its settings
        name; a resumed one gets its weights afterwards."""


NO_DATA = (Path("."),)  # The data of a plan for which none are named.


def plan_settings(train: type, **groups: type) -> Any:
    """Returns the options of a kind's plan: those of its training, without required data, further groups of options
    such as the speech to plan for, and the GPUs."""
    data = get_type_hints(train)["data"]
    path = changed(data, "data_path", default=NO_DATA, help=COUNTED_HELP)
    planned_data = _subclass("PlannedData", data, [("data_path", tuple[Path, ...], path)])
    groups = {"data": planned_data, **groups, "cards": Cards}
    made = _subclass(
        train.__name__.replace("Train", "Plan"), train, [(n, group, group()) for n, group in groups.items()]
    )
    made.rare_panels = NOT_PLANNED
    return made


def _subclass(name: str, base: type, fields: Sequence[tuple[str, Any, Any]]) -> Any:
    return make_dataclass(name, fields, bases=(base,), frozen=True, kw_only=True)


class PlannedTraining(NamedTuple):
    """A training to plan for other GPUs than this machine's."""

    work: KindWork[Any]
    settings: Any
    columns: dict[str, Any]  # What names the training in a table, such as size and batch.
    items: int | None  # Items of an epoch; None: unknown.


COUNTED_HELP = "Data whose items are counted. Hours are predicted by them; not needed."
# The default is what reaches its first step within a minute, and has been run on a GPU.
SLOW_TO_COMPILE = "its many layers take minutes to compile, and no compiled step was timed yet; ask for it to try"


@dataclass(frozen=True)
class StepTraits:
    """Properties of a kind's step on which the default hardware settings depend, as in hw.plan.decide.

    A reason that is not empty must be overruled by the user: the default on newer GPUs is to compile, and 16 bit.
    """

    fixed_shapes: bool = True  # True if all batches have the same shape.
    generator_is_1d: bool = False  # True if only the discriminators have 2-D convolutions.
    is_1d: bool = False  # True if the model has no 2-D convolutions at all.
    eager_because: str = ""
    fp32_because: str = ""
    graphless_because: str = ""  # The reason why no step can be a CUDA graph; this one cannot be overruled.


# A row of a benchmark: its label, what it adds to the settings of the row before, and the plan's setting that must be
# on afterwards.
Switch = tuple[str, dict[str, Any], str]
SWITCHES: tuple[Switch, ...] = (
    ("fp32", {}, ""),
    ("+ TF32", {"precision": "tf32"}, "tf32"),
    ("+ bf16", {"precision": "mixed"}, "precision"),
    ("+ channels_last", {"channels_last": True}, "channels_last"),
    ("+ compile", {"use_torch_compile": True}, "compile"),
)
# For models whose batches have one shape. The capture may fall into a timed step, which the median leaves out.
CUDA_GRAPHS: Switch = ("+ CUDA graphs", {"use_cuda_graphs": True}, "cuda_graphs")


@dataclass(frozen=True)
class SyntheticWork:
    """The work of a benchmark: steps on synthetic data.

    `recipe(runtime)` makes a recipe without held-out data. `batch()` makes a batch as the data loader does, and
    `seconds` is the sound of each of its items; 0: there is no sound."""

    title: str  # The model and the batch: "1024 channels, 16 crops of 0.93 s".
    recipe: Callable[[Runtime], Recipe]
    batch: Callable[[], Any]
    seconds: float = 0.0


@dataclass(frozen=True)
class KindWork(ABC, Generic[S]):
    """The work of planning, measuring and training a kind of model.

    `sizes` are the properties of the data that the shapes of a step depend on besides the settings, such as the length
    of a clip; None if there are none, or before they are known.
    """

    sizes: Any = None

    kind: ClassVar[str]  # "vae": also the name of the train command, and in checkpoints.
    item: ClassVar[str]  # Name of an item of a batch, in the singular: "picture".
    traits: ClassVar[StepTraits] = StepTraits()
    switches: ClassVar[Sequence[Switch]] = SWITCHES  # The rows of a benchmark.

    def decide(self, machine: Machine, requested: Hardware) -> Plan:
        """Returns the plan of this model's hardware settings, without those of the batch."""
        return decide(machine, requested, **vars(self.traits))

    # ------------------------------------------------------------------------------------------------------ training

    def completed(self, settings: S) -> S:
        """Returns the settings with those that are left to the program. Raises UserError if they contradict."""
        return settings

    @abstractmethod
    def open_data(self, settings: S) -> TrainingData[S]:
        """Opens the data of a training. Raises UserError if they cannot be used."""

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
    def synthetic(self, settings: S, **options: Any) -> SyntheticWork:
        """Returns what a benchmark measures, by the settings and by the options that only the benchmark has."""
