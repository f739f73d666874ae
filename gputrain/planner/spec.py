"""The `ModelSpec`, by which the planner knows a kind of model.

GB is 1e9 bytes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from gputrain.engine.recipe import Recipe
from gputrain.engine.schedule import Saving, Schedule
from gputrain.hw.plan import Hardware, Plan, Setting, decide
from gputrain.hw.probe import Machine
from gputrain.hw.runtime import Runtime
from gputrain.planner.microbatch import Fit, MemoryBudget


@dataclass(frozen=True)
class PlanTarget:
    """The training that a plan is for.

    `build(runtime, checkpointing)` makes its recipe; `load()` returns the largest batch as the data loader does, and
    `load(items)` one of another size.
    """

    build: Callable[[Runtime, bool], Recipe]
    load: Callable[..., Any]


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
class Variant(Generic[S]):
    """Settings of a training that the planner may choose, and what the plan says of the choice, by name."""

    settings: S
    reasons: dict[str, Setting] = field(default_factory=dict)


def _one_variant(settings: S, plan: Plan) -> list[Variant[S]]:
    return [Variant(settings)]


@dataclass(frozen=True)
class ModelSpec(Generic[S]):
    """The properties of a kind of model that its planning depends on."""

    kind: str  # "vae": also the name of the package, of the train command, and in checkpoints.
    item: str  # Name of an item of a batch, in the singular: "picture".
    target: Callable[[S], PlanTarget]
    # Returns the settings that the memory of a step depends on besides the plan, batch_size and checkpointing, in
    # values that JSON has.
    memory_key: Callable[[S], dict[str, Any]]
    # Returns changed settings that take less memory, by the flag that makes the change, the smallest loss first.
    fallbacks: Callable[[S, MemoryBudget, Fit], Mapping[str, S]]
    # Returns the variants whose plans are compared, the default first. The fastest that fits is chosen.
    variants: Callable[[S, Plan], list[Variant[S]]] = _one_variant
    fixed_shapes: bool = True  # True if all batches have the same shape.
    generator_is_1d: bool = False  # True if only the discriminators have 2-D convolutions.
    is_1d: bool = False  # True if the model has no 2-D convolutions at all.
    eager_because: str = ""  # The reason why compilation must be asked for; empty: it is the default on newer GPUs.
    packages: tuple[str, ...] = ()  # Modules that are imported in the middle of a training, when it takes samples.
    fp32_because: str = ""  # The reason why 16 bit must be asked for; empty: 16 bit is the default.

    def decide(self, machine: Machine, wishes: Hardware) -> Plan:
        """Returns the plan of this model's hardware settings, without those of the batch."""
        return decide(
            machine,
            wishes,
            fixed_shapes=self.fixed_shapes,
            generator_is_1d=self.generator_is_1d,
            is_1d=self.is_1d,
            eager_because=self.eager_because,
            fp32_because=self.fp32_because,
        )
