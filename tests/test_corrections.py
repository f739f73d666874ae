"""The figures of docs/evidence/corrections.md follow from each other, from gpus.yaml and from the networks."""

import re
from pathlib import Path

import pytest
import torch

from gputrain.hw.gpus import find_gpu
from gputrain.planner.memory.fake_runtime import on_fake_tensors
from gputrain.planner.memory.timeline import MemoryTimeline
from gputrain.vae.architecture import PRESETS
from gputrain.vae.model import AutoencoderKL

TEXT = (Path(__file__).parent.parent / "docs" / "evidence" / "corrections.md").read_text(encoding="utf-8")
# The columns are size, batch, forward TFLOP, step TFLOP, floor and guide of the RTX 5090, and those of the RTX 4090.
SPEED = [re.split(r" \| ", line.strip("| \n")) for line in re.findall(r"^\| \d+ \|.* s?.*\|$", TEXT, re.MULTILINE)]
ROWS = [row for row in SPEED if len(row) == 8]
A_R2, B_R4 = (float(number) for number in re.search(r"forward = ([\d.]+) r² \+ ([\d.]+) r⁴", TEXT).groups())


def forward_tflop(size: int, preset: str = "flux", recompute_norms: bool = True) -> float:
    """Count the forward pass of the network itself on fake tensors, in 16 bits as on a GPU."""
    timeline = MemoryTimeline()
    with on_fake_tensors(), timeline.watching(), torch.autocast("cpu", torch.bfloat16):
        model = AutoencoderKL(PRESETS[preset], recompute_norms=recompute_norms)
        model.decode(model.encode(torch.empty(1, 3, size, size)).mean_BLhw)
    return sum(operator.flops for operator in timeline.log.operators) / 1e12


def test_the_formula_is_the_networks():
    for size in (512, 768, 1024):
        r = size / 1024
        assert forward_tflop(size, recompute_norms=False) == pytest.approx(A_R2 * r**2 + B_R4 * r**4, rel=1e-3)


def test_the_table_of_speeds():
    assert [(int(row[0]), int(row[1])) for row in ROWS] == [(512, 16), (768, 24), (1024, 16), (1536, 8), (2048, 4)]
    for size, batch, forward, step, floor_5090, _, floor_4090, _ in ROWS:
        r = int(size) / 1024
        exact = A_R2 * r**2 + B_R4 * r**4
        assert float(forward) == pytest.approx(exact, abs=0.005)
        assert float(step) == pytest.approx(3 * exact * int(batch), abs=0.5)
        assert float(floor_5090) == pytest.approx(3 * exact * int(batch) / find_gpu("rtx5090").bf16_tflops, abs=0.005)
        assert float(floor_4090) == pytest.approx(3 * exact * int(batch) / find_gpu("rtx4090").bf16_tflops, abs=0.005)


@pytest.mark.parametrize(("preset", "tflop"), [("flux", 13.81), ("lite", 4.38), ("fast", 1.10)])
def test_the_presets_as_they_are_trained(preset, tflop):
    assert forward_tflop(1024, preset) == pytest.approx(tflop, abs=0.005)
    floor = 3 * tflop * 16 / find_gpu("rtx5090").bf16_tflops
    assert f"{floor:.2f} s" in TEXT
