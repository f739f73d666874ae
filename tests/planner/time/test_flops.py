"""The FLOPs of operators that torch's own formulas count wrongly."""

import pytest
import torch
import torch.nn.functional as F

from gputrain.planner.time.flops import FlopCount

CONVOLUTIONS = {
    "of one dimension": (F.conv1d, (2, 8, 50), (6, 8, 5), {"stride": 2}),
    "in groups": (F.conv1d, (2, 8, 50), (16, 2, 5), {"groups": 4}),
    "of each channel": (F.conv2d, (2, 8, 9, 7), (8, 1, 3, 3), {"groups": 8, "padding": 1}),
    "transposed": (F.conv_transpose1d, (2, 8, 50), (8, 6, 4), {"stride": 2}),
    "transposed in groups": (F.conv_transpose2d, (2, 8, 9, 7), (8, 3, 4, 4), {"groups": 2, "stride": 2}),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_each_gradient_of_a_convolution_takes_as_much_as_the_convolution(name):
    """Every number of the input, or of the result, meets every tap of its group's kernels once: two FLOPs."""
    function, shape, kernel, options = CONVOLUTIONS[name]
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(kernel, requires_grad=True)
    with FlopCount() as forward:
        made = function(x, weight, **options)
    positions = (x if "transposed" in name else made)[0, 0].numel()
    assert forward.flops == 2 * shape[0] * positions * weight.numel()
    for leaves in ([x], [weight], [x, weight]):
        with FlopCount() as backward:
            torch.autograd.grad(made.sum(), leaves, retain_graph=True)
        assert backward.flops == len(leaves) * forward.flops
