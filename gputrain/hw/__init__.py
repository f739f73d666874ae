"""Hardware: facts about the machine, the plan made from them, and the only code that sets torch's global settings."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Return the user's entry, `gputrain.hw.create_optimal_config`, from the package above, which needs torch."""
    if name != "create_optimal_config":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gputrain.autoconfig.optimal import create_optimal_config

    return create_optimal_config
