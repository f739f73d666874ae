"""The form of a checkpoint's content."""

from typing import Any, TypeGuard

from torch import Tensor

FORMAT = 1
# The types of its parts. Those of a test or of an older version may be fewer.
PARTS = {"kind": str, "modules": dict, "optimizers": dict, "loss_scales": dict, "random": dict, "progress": dict,
         "config": dict, "facts": dict, "data": dict, "names": list}  # fmt: skip


def is_content(content: object) -> TypeGuard[dict[str, Any]]:
    """Returns True if an object has the parts of a checkpoint, each of the right type."""
    if not isinstance(content, dict) or content.get("format") != FORMAT or not {"kind", "modules"} <= content.keys():
        return False
    if not all(isinstance(content.get(name, kind()), kind) for name, kind in PARTS.items()):
        return False
    return all(
        isinstance(state, dict) and all(isinstance(value, Tensor) for value in state.values())
        for state in content["modules"].values()
    )
