"""Comparison of what trainings leave: nested values bit for bit, and weights by their largest difference."""

import torch
from torch import Tensor


def differing(one: object, other: object, place: str = "") -> list[str]:
    """Return the places at which two nested values differ: in keys, values, or a tensor's bits, dtype or strides."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same = torch.equal(one, other) and (one.dtype, one.stride()) == (other.dtype, other.stride())
    elif isinstance(one, dict) and isinstance(other, dict) and list(one) == list(other):
        return [found for key in one for found in differing(one[key], other[key], f"{place}.{key}")]
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        pairs = zip(one, other, strict=True)
        return [found for number, pair in enumerate(pairs) for found in differing(*pair, f"{place}[{number}]")]
    else:
        same = not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other
    return [] if same else [place or "the whole"]


def assert_same(one: object, other: object) -> None:
    assert not differing(one, other)


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference between tensors of the same names, in float64."""
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)
