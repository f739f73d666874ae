"""The form of a checkpoint's content."""

from typing import Any

from torch import Tensor

Content = dict[str, Any]
# The types of its parts. Those of a test or of an older version may be fewer.
PARTS = {"kind": str, "modules": dict, "optimizers": dict, "loss_scales": dict, "random": dict, "progress": dict,
         "config": dict, "facts": dict, "data": dict, "names": list}  # fmt: skip


def is_content(content: object, format: int) -> bool:
    """Returns True if an object has the parts of a checkpoint of this format, each of the right type."""
    if not isinstance(content, dict) or content.get("format") != format or not {"kind", "modules"} <= content.keys():
        return False
    if not all(isinstance(content.get(name, kind()), kind) for name, kind in PARTS.items()):
        return False
    return all(
        isinstance(state, dict) and all(isinstance(value, Tensor) for value in state.values())
        for state in content["modules"].values()
    )
