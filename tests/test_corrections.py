"""The figures of docs/corrections.md follow from each other, from gpus.yaml and from the networks themselves."""

import re
from pathlib import Path

import pytest
import torch

from gputrain.config import read_file
from gputrain.hw.gpus import find_gpu
from gputrain.planner.memory.fake_runtime import on_fake_tensors
from gputrain.planner.memory.timeline import MemoryTimeline
from gputrain.vae.architecture import PRESETS
from gputrain.vae.model import AutoencoderKL

VOCODERS = Path(__file__).parents[1] / "gputrain" / "vocoder" / "profiles"
TEXT = (Path(__file__).parent.parent / "docs" / "corrections.md").read_text(encoding="utf-8")
# The columns are size, batch, forward TFLOP, step TFLOP, floor and guide of the RTX 5090, and those of the RTX 4090.
SPEED = [re.split(r" \| ", line.strip("| \n")) for line in re.findall(r"^\| \d+ \|.* s?.*\|$", TEXT, re.MULTILINE)]
ROWS = [row for row in SPEED if len(row) == 8]
A_R2, B_R4 = (float(number) for number in re.search(r"forward = ([\d.]+) r² \+ ([\d.]+) r⁴", TEXT).groups())


def forward_tflop(size: int, preset: str = "flux", lean: bool = True) -> float:
    """Count the forward pass of the network itself on fake tensors, in 16 bits as on a GPU."""
    timeline = MemoryTimeline()
    with on_fake_tensors(), timeline.watching(), torch.autocast("cpu", torch.bfloat16):
        model = AutoencoderKL(PRESETS[preset], lean=lean)
        model.decode(model.encode(torch.empty(1, 3, size, size)).mean_BLhw)
    return timeline.log.flops / 1e12


def test_the_formula_is_the_networks():
    for size in (512, 768, 1024):
        r = size / 1024
        assert forward_tflop(size, lean=False) == pytest.approx(A_R2 * r**2 + B_R4 * r**4, rel=1e-3)


def test_the_table_of_speeds():
    assert [(int(row[0]), int(row[1])) for row in ROWS] == [(512, 16), (768, 24), (1024, 16), (1536, 8), (2048, 4)]
    for size, batch, forward, step, floor_5090, _, floor_4090, _ in ROWS:
        r = int(size) / 1024
        exact = A_R2 * r**2 + B_R4 * r**4
        assert float(forward) == pytest.approx(exact, abs=0.005)
        assert float(step) == pytest.approx(3 * exact * int(batch), abs=0.5)
        assert float(floor_5090) == pytest.approx(3 * exact * int(batch) / find_gpu("rtx5090").bf16_tflops, abs=0.005)
        assert float(floor_4090) == pytest.approx(3 * exact * int(batch) / find_gpu("rtx4090").bf16_tflops, abs=0.005)


def test_eight_of_nine_times_lie_under_the_floor():
    pairs = [(row[5], row[4]) for row in ROWS] + [(row[7], row[6]) for row in ROWS if row[7] != "-"]
    under = [float(guide.split(" to ")[-1]) < float(floor) for guide, floor in pairs]
    assert (len(under), sum(under)) == (9, 8)


@pytest.mark.parametrize(("preset", "tflop"), [("flux", 13.81), ("lite", 4.38), ("fast", 1.10)])
def test_the_presets_as_they_are_trained(preset, tflop):
    assert forward_tflop(1024, preset) == pytest.approx(tflop, abs=0.005)
    floor = 3 * tflop * 16 / find_gpu("rtx5090").bf16_tflops
    assert f"{floor:.2f} s" in TEXT


# --------------------------------------------------------------------------------------------------- vocoder and voice


def row_of(name: str) -> list[float]:
    """Returns the last numbers of a row of the vocoder's table, one for each configuration."""
    (line,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", TEXT, re.MULTILINE)
    return [float(re.findall(r"[\d.]+", cell)[-1]) for cell in re.sub(r"\(.*?\)", "", line).split("|")]


def test_the_table_of_the_vocoder():
    frames, tflop = row_of("frames of sound in a step"), row_of("TFLOP of a step")
    assert [row / 1000 for row in frames] == [0.768, 2.560]
    assert row_of("TFLOP for 1000 frames") == pytest.approx(
        [1000 * a / b for a, b in zip(tflop, frames, strict=True)], abs=0.06
    )
    rates = row_of("rate of the RTX 5090")
    assert rates == pytest.approx([find_gpu("rtx5090").bf16_tflops / 2, find_gpu("rtx5090").bf16_tflops], abs=0.06)
    floors = row_of("floor of a step")
    assert floors == pytest.approx([a / b for a, b in zip(tflop, rates, strict=True)], abs=0.0006)
    assert (frames[1] / floors[1]) / (frames[0] / floors[0]) == pytest.approx(1.8, abs=0.05)
    assert tflop[1] / tflop[0] == pytest.approx(3.8, abs=0.05)
    assert (2 / floors[0], 0.5 / floors[1]) == (pytest.approx(25, abs=0.5), pytest.approx(3, abs=0.3))


def test_what_the_files_of_the_vocoder_say():
    plain, fast = (read_file(VOCODERS / f"base_hifi_{name}.yaml") for name in ("gpu", "rtx5090_optimized"))
    for content in (plain, fast):
        periods = content["model_args"]["discriminator_periods"]
        assert len(periods) == 7
        assert ", ".join(map(str, periods)) in TEXT.replace("\n", " ")
    assert (plain["val_check_interval"], fast["val_check_interval"]) == (2000, 1000)
    assert plain["log_interval"] == fast["log_interval"]
    frames = [content["batch_size"] * content["crop_mel_frames"] for content in (plain, fast)]
    assert frames == row_of("frames of sound in a step")


def test_the_arithmetic_of_the_voice():
    assert f"{0.9999**200:.3f}" in TEXT
    assert f"{0.999875**200:.3f}" in TEXT
    assert pytest.approx(0.70, abs=0.005) == 25.45 * 3600 / 130_000
    assert pytest.approx(0.062, abs=0.0005) == 0.293 / 4.73
