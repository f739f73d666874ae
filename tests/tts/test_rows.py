"""The duration predictor by sums and products of rows, as it is compiled for a GPU, beside its convolutions."""

import copy

import pytest
import torch
from torch import Tensor

from gputrain.tts.duration import DurationPredictor, of_every_row
from gputrain.tts.model import inference_copy
from tests.tables import each_row
from tests.tts.voices import build, small

PRECISION = {torch.float64: 1e-11, torch.float32: 1e-3}


def loss_and_gradients(predictor: DurationPredictor, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(2)
    text_BCS = torch.randn(3, predictor.text_pre.in_channels, 19, dtype=dtype)
    mask_B1S = (torch.arange(19) < torch.tensor([19, 7, 12])[:, None])[:, None]
    durations_BS, noise_B2S = torch.randint(1, 20, (3, 19)), torch.randn(3, 2, 19, dtype=dtype)
    torch.manual_seed(3)  # The masks of dropout follow from it.
    loss_B = predictor(text_BCS * mask_B1S, mask_B1S, durations_BS, noise_B2S)
    return [loss_B.detach(), *torch.autograd.grad(loss_B.sum(), list(predictor.parameters()))]


@pytest.mark.parametrize("dtype", list(PRECISION))
@pytest.mark.parametrize("checkpointing", [False, True])
def test_losses_and_gradients_are_those_of_convolutions(dtype, checkpointing):
    torch.manual_seed(1)
    voice = build(small(duration_dropout=0.5), checkpointing=checkpointing)
    convolutions = voice.duration_predictor.to(dtype).train()
    rows = copy.deepcopy(convolutions)
    rows.compute_by_rows()
    expected, found = (loss_and_gradients(predictor, dtype) for predictor in (convolutions, rows))
    names = ["loss", *dict(rows.named_parameters())]
    for name, value, other in zip(names, expected, found, strict=True):
        assert other.is_contiguous(), name
        assert float((other - value).norm()) <= PRECISION[dtype] * float(value.norm()) + 1e-30, name
        assert float(value.norm()) > 0, name


@each_row(False, True)
def test_layers_that_run_again_are_compiled_one_by_one(checkpointing):
    voice = build(small(), checkpointing=checkpointing)
    kinds = {type(part).__name__ for part in voice.compiled_parts()}
    of_sound = {"GatedLayer"} if checkpointing else {"Coupling", "PosteriorEncoder"}
    assert kinds == {"EncoderLayer", "SeparableStack"} | of_sound


def test_values_of_every_row_have_the_sums_of_gradients():
    torch.manual_seed(4)
    x_BSC, vector_C, matrix_CK = torch.randn(2, 3, 5), torch.randn(5), torch.randn(5, 2)
    leaves = [vector_C.double().requires_grad_(), matrix_CK.double().requires_grad_()]
    assert torch.autograd.gradcheck(lambda *values: of_every_row(x_BSC, *values), leaves)
    vector_BSC, *columns_BSC = of_every_row(x_BSC, vector_C, matrix_CK)
    assert torch.equal(vector_BSC, vector_C.expand_as(x_BSC))
    assert all(torch.equal(column[1, 2], matrix_CK[:, place]) for place, column in enumerate(columns_BSC))


def test_a_copy_that_speaks_has_convolutions_again():
    voice = build(small())
    voice.duration_predictor.compute_by_rows()
    assert voice.duration_predictor.text_pre.by_rows
    assert not any(getattr(module, "by_rows", False) for module in inference_copy(voice).modules())
