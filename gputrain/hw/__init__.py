"""Hardware: facts of the machine, and the only code that sets the switches of torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gputrain.hw.memory import MemoryEstimate, predict_training_memory

__all__ = ["MemoryEstimate", "predict_training_memory"]


def __getattr__(name: str) -> Any:
    """What others import from here needs torch, which `gputrain --help` must not wait for."""
    if name in __all__:
        from gputrain.hw import memory

        return getattr(memory, name)
    raise AttributeError(name)
