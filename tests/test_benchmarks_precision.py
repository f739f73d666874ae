"""What 16 bit costs beside float64, by the arithmetic of benchmarks/precision.py: the same on every processor.

The models here are new and small; docs/evidence/precision.md has figures of trained ones. Gradients are compared for
the same gradients of the losses at the outputs, so that they measure the arithmetic of the model and not the losses.
"""

import importlib
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.tables import slow

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
precision = importlib.import_module("precision")

image = partial(precision.vae, channels=(32, 64), pixels=32, items=1, steps=0)
sound = partial(precision.vocoder, channels=64, frames=8, items=1, steps=0, discriminator_periods="3,5")
speech = partial(precision.voice, steps=0)
CASES = {
    **{f"vae {preset}": partial(image, preset) for preset in ("flux", "sd", "lite", "fast")},
    **{f"vocoder {one} {kind}": partial(sound, one, kind) for one in precision.VOCODERS for kind in precision.SOURCES},
    **{f"tts {preset}": partial(speech, preset) for preset in ("high", "medium", "fast")},
}  # fmt: skip


QUICK = {"vae fast"}


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in CASES])
def test_16_bit_gradients_are_those_of_float64(name, monkeypatch):
    monkeypatch.setattr(precision, "FIRST_SCALE", 4096.0)
    case = CASES[name]()
    weights = precision.train(case)
    reference = precision.make_step(case, weights, "float64")
    for dtype, least, largest in (("bf16", 0.999, 0.03), ("fp16", 0.9998, 0.004)):
        step = precision.make_step(case, weights, dtype, reference.arriving)
        model, *_ = precision.phases(step, reference).values()
        assert model["cosine"] >= least, dtype
        output = precision.Cost.of(step.outputs[case.output], reference.outputs[case.output])
        assert output.error < largest or "mini" in name, dtype  # the wave of a new model with this source is near zero


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_emulated_products_are_computed_in_fp32_and_rounded_once(dtype):
    draws = torch.Generator().manual_seed(0)
    x, weight, gradient = (torch.randn(size, generator=draws).to(dtype) for size in ((2, 8, 50), (4, 8, 3), (2, 4, 48)))
    x, weight = x.requires_grad_(), weight.requires_grad_()
    with precision.ExactProducts():
        made = torch.nn.functional.conv1d(x, weight)
        found = torch.autograd.grad(made, (x, weight), gradient)
    wide_x, wide_weight = (each.detach().float().requires_grad_() for each in (x, weight))
    expected = torch.nn.functional.conv1d(wide_x, wide_weight)
    assert torch.equal(made, expected.to(dtype))
    for ours, exact in zip(found, torch.autograd.grad(expected, (wide_x, wide_weight), gradient.float()), strict=True):
        assert torch.equal(ours, exact.to(dtype))
