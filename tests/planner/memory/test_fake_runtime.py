"""Results of operators on fake tensors that are found once for equal arguments."""

import torch

from gputrain.planner.memory.fake_runtime import QuickFakeMode, on_fake_tensors


def test_what_is_known_of_an_operator_depends_on_all_that_its_results_do():
    found: list[object] = []
    try:
        for dtype in (torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            with on_fake_tensors():
                assert torch.ones(3).dtype == dtype
    finally:
        torch.set_default_dtype(torch.float32)
    for _ in range(2):
        with on_fake_tensors():
            x, y = torch.empty(4), torch.empty(4)
            x.set_(y)
            found.append(x.untyped_storage()._cdata == y.untyped_storage()._cdata)
    assert found == [True, True]
    mode = QuickFakeMode()  # Asked directly, because autograd returns the first argument whatever it is given.
    with mode:
        x, y = torch.empty(5), torch.empty(5)
    for other in (x, y):
        assert mode.dispatch(torch.ops.aten.mul_.Tensor, (), (x, other), {}) is x
