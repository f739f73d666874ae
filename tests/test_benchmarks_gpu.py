"""The measurements of a GPU: the parts of benchmarks/gpu.sh, and the predicted times beside the measured ones."""

import argparse
import importlib
import re
import shutil
import subprocess
import sys
import tarfile
from functools import partial
from pathlib import Path

import pytest
import torch

from gputrain.bench.runner import BenchResult
from gputrain.planner.fake_runtime import FakeRuntime, on_fake_tensors
from gputrain.planner.memory_timeline import MemoryTimeline
from gputrain.planner.roofline import DeviceRates, StepTotals
from gputrain.vae.architecture import VaeArchitecture
from tests.toy import cpu_runtime

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
predictions = importlib.import_module("predictions")
vae_targets = importlib.import_module("vae_targets")

# An interpreter that runs nothing: it prints its arguments, and leaves a result of each part behind.
STAND_IN = """#!/usr/bin/env bash
[[ $1 == -c ]] && exit {found}
printf 'ran %s\\n' "$*"
while (($#)); do
    [[ $1 != --output-dir ]] || touch "$2/$RANDOM$RANDOM$RANDOM.json"
    shift
done
"""
ARITHMETIC_ALONE = DeviceRates(1e12, 1e12, float("inf"), launch_seconds=0.0, least_seconds=0.0)


@pytest.fixture
def gpu_sh(tmp_path):
    """Returns a function that runs the script with the stand-in, and gives its parts' limits, commands and output."""
    if sys.platform != "linux" or not shutil.which("timeout"):
        pytest.skip("benchmarks/gpu.sh needs coreutils")

    def run(*words, has_piper=True):
        python = tmp_path / "python"
        python.write_text(STAND_IN.format(found=0 if has_piper else 1), encoding="utf-8")
        python.chmod(0o755)
        command = [
            "bash",
            str(ROOT / "benchmarks" / "gpu.sh"),
            "--smoke",
            "--output-dir",
            str(tmp_path / "out"),
            *words,
        ]
        done = subprocess.run(
            command, env={"PATH": "/usr/bin:/bin", "PYTHON": str(python)}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        limits = {
            name: int(seconds) for name, seconds in re.findall(r"^== (.*) \(at most (\d+) s\)$", done.stdout, re.M)
        }
        return limits, re.findall(r"^ran (.*)$", done.stdout, re.M), done.stdout

    return run


@pytest.mark.parametrize(("words", "whole"), [((), 600), (("--peer", "peer"), 944)])
def test_shares_of_the_parts_are_the_whole_time(gpu_sh, words, whole):
    limits, commands, _ = gpu_sh(*words)
    names = list(limits)
    assert names[:4] == [
        "correctness",
        "correctness of the vocoder",
        "correctness of the voice",
        "T1: a step of the voice",
    ]
    assert len(commands) == len(names) == 17
    seconds = list(limits.values())
    assert 600 * 54 // whole - 1 <= seconds[0] <= 600 * 54 // whole
    assert 540 < seconds[-1] <= 600  # The last part may take all that is left, as no part before took any.


def test_everything_is_measured_without_peers(gpu_sh, tmp_path):
    _, commands, shown = gpu_sh(has_piper=False)
    assert any("vocoder_vs_openvpi.py --smoke" in command for command in commands)
    assert not any("vits_vs_piper" in command for command in commands)
    assert "not run   T: against Piper" in shown
    benches = {command.split(" bench ")[1].split()[0]: command for command in commands if "--inference" in command}
    assert benches.keys() == {"train-vae", "train-vocoder", "train-tts"}
    assert any("bench train-asr" in command for command in commands)
    with tarfile.open(tmp_path / "out" / "gpu_results.tar") as results:
        assert len(results.getnames()) == len(commands) == 16


@pytest.mark.slow
def test_operators_of_a_real_step_are_those_of_a_fake_one():
    versus = pytest.importorskip("diffusers") and importlib.import_module("vae_vs_diffusers")
    sizes = VaeArchitecture(block_out_channels=(8, 16), latent_channels=4, layers_per_block=1, norm_num_groups=4)
    found = []
    for side_name in ("stock", "ours"):
        runtime = cpu_runtime()
        timeline = MemoryTimeline()
        side = versus.make_side(side_name, sizes, versus.stock_autoencoder(sizes).state_dict(), runtime)
        step = partial(versus.step, side, versus.make_batch(sizes, 16, 2, runtime), runtime)
        step()
        real = StepTotals.of(predictions.kernels_of(step, timeline))
        seconds = versus.predicted_seconds(side_name, sizes, 16, 2, runtime, ARITHMETIC_ALONE)
        fake = FakeRuntime(runtime.plan, MemoryTimeline())
        with on_fake_tensors():
            side = versus.make_side(side_name, sizes, versus.stock_autoencoder(sizes).state_dict(), fake)
            step = partial(versus.step, side, versus.make_batch(sizes, 16, 2, fake), fake)
            step()
            counted = StepTotals.of(predictions.kernels_of(step))
        assert real == pytest.approx(counted, rel=1e-9)
        assert counted.tflop <= seconds  # A tile that is not filled takes as long as a full one.
        found.append(seconds)
    assert found[1] < 2 * found[0]


def test_the_time_of_a_peers_step_is_that_of_its_operators(monkeypatch):
    monkeypatch.setattr(predictions, "rates_of", lambda runtime: ARITHMETIC_ALONE)
    weight = torch.randn(256, 256, requires_grad=True)

    def step():
        (torch.randn(256, 256) @ weight).sum().backward()

    product = 2 * 256**3 / 1e12
    assert predictions.peer_seconds(step, torch.device("cpu")) == pytest.approx(
        2 * product
    )  # Its input has no gradient.


def test_a_cpu_launches_nothing_ahead():
    rates = predictions.rates_of(cpu_runtime())
    assert rates.launch_seconds == 0
    assert 1e-7 < rates.least_seconds < 1e-2
    assert rates.fp32_flops > 1e8


def test_every_model_is_compared_on_a_gpu_before_a_second_size():
    check = importlib.import_module("benchmarks.roofline_check")
    cases = list(check.on_cuda())
    assert len({(case.family, case.size) for case in cases}) == len(cases)
    families = [case.family for case in cases]
    assert len(set(families[:6])) == 6
    assert set(families) == set(families[:6])
    compiled = [f"{case.family} {case.size}" for case in cases if case.compiled]
    assert compiled[0] == "vae flux 512 px x 4, compiled"


def test_a_row_of_the_roofline_has_both_times_or_a_reason(monkeypatch):
    pytest.importorskip("diffusers")
    check = importlib.import_module("benchmarks.roofline_check")
    case = check.Case("stock", "32 px", check.of_stock, {"channels": (32, 32), "size": 32, "batch": 1}, ours=False)
    row = check.row_of(case, ARITHMETIC_ALONE, "cpu", 0.0)
    assert row["measured_ms"] > 0
    assert row["predicted_ms"] >= round(row["gflop"], 2) > 0  # At one TFLOP a second.
    assert check.summary_of([row])["rank_correlation"] is None

    def out_of_memory(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(check, "other_row", out_of_memory)
    assert check.row_of(case, ARITHMETIC_ALONE, "cpu", 0.0) == {
        "model": "stock",
        "size": "32 px",
        "reason": "out of memory",
    }


@pytest.mark.parametrize(
    ("device", "seconds", "shown"),
    [("NVIDIA H100 80GB HBM3", 1.9, "MISSED"), ("NVIDIA H100", 1.8, "met"), ("L4", 9, "")],
)
def test_targets_of_the_vae_hold_on_an_h100(device, seconds, shown):
    figures = {"seconds_per_step": seconds, "predicted_seconds_per_step": 1.5, "tflops": 1.0, "share_of_product": 0.5,
               "peak_gb": 20.0, "micro_batch_size": 4, "first_step_seconds": 1.0}  # fmt: skip
    line = vae_targets.line("V2", BenchResult("flux", {}, figures, machine={"device": device}))
    assert "roofline 1.5" in line
    assert (f"target 1.85: {shown}" in line) if shown else ("target" not in line)
    limited = BenchResult("flux", {}, {**figures, "limit_gb": 18.0}, machine={"device": device})
    assert "limit 18: MISSED" in vae_targets.line("V1", limited)


def test_without_the_peer_only_ours_is_measured_and_what_compiles_last():
    versus = importlib.import_module("vocoder_vs_openvpi")
    options = argparse.Namespace(
        peer=None, device="cuda", configurations=["standard", "optimised"], threads=[0], sides=None, rounds=1,
        batch_size=None, crop_frames=None, channels=None, warmup=10, steps=10,
    )  # fmt: skip
    options.sides = ["ours", "ours-compiled"]
    rows = list(versus.rows(options, Path("scratch")))
    assert [row.label for row in rows] == [
        "standard: ours", "optimised: ours", "standard: ours-compiled", "optimised: ours-compiled"
    ]  # fmt: skip
    assert {row.settings["peer"] for row in rows} == {""}
