"""Hardware: facts of the machine, and the only code that sets the switches of torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gputrain.hw.memory import MemoryEstimate, predict_training_memory
    from gputrain.hw.optimal import Planner, create_optimal_config
    from gputrain.hw.settings import OptimalConfig, load_config

__all__ = [
    "MemoryEstimate",
    "OptimalConfig",
    "Planner",
    "create_optimal_config",
    "load_config",
    "predict_training_memory",
]

HOMES = {
    "MemoryEstimate": "memory",
    "OptimalConfig": "settings",
    "Planner": "optimal",
    "create_optimal_config": "optimal",
    "load_config": "settings",
    "predict_training_memory": "memory",
}


def __getattr__(name: str) -> Any:
    """What others import from here needs torch, which `gputrain --help` must not wait for."""
    if name in HOMES:
        return getattr(import_module(f"gputrain.hw.{HOMES[name]}"), name)
    raise AttributeError(name)
