"""Hardware: facts about the machine, the plan made from them, and the only code that sets torch's global settings."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gputrain.autoconfig.optimal import Planner, create_optimal_config
    from gputrain.autoconfig.settings import OptimalConfig, load_config
    from gputrain.planner.memory.predict import MemoryEstimate
    from gputrain.planner.memory.torch_model import predict_training_memory

__all__ = [
    "MemoryEstimate",
    "OptimalConfig",
    "Planner",
    "create_optimal_config",
    "load_config",
    "predict_training_memory",
]

HOMES = {
    "MemoryEstimate": "planner.memory.predict",
    "OptimalConfig": "autoconfig.settings",
    "Planner": "autoconfig.optimal",
    "create_optimal_config": "autoconfig.optimal",
    "load_config": "autoconfig.settings",
    "predict_training_memory": "planner.memory.torch_model",
}


def __getattr__(name: str) -> Any:
    """Import the public functions on first use: they need torch, which `gputrain --help` must not import."""
    if name in HOMES:
        return getattr(import_module(f"gputrain.{HOMES[name]}"), name)
    raise AttributeError(name)
