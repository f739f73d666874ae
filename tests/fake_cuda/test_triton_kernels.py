"""The Triton kernels, without a GPU: compiled to the machine code of cards, and run in Triton's interpreter.

Kernels of our own are those of the alignment search (more of them in tests/tts/test_align.py); those of the
memory-efficient layers are inductor's.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gputrain.tts.align import path_from_durations, search
from gputrain.vae.norm_arithmetic import EAGER

triton = pytest.importorskip("triton", reason="Triton is not installed")
CPU_BUILD = pytest.mark.skipif(bool(torch.version.cuda), reason="a build of torch with CUDA asks its driver")
CAPABILITIES = (75, 80, 86, 89, 90, 100, 120)
ROOT = Path(__file__).parents[2]
COUNTS = {"symbols_B": "*i64", "frames_B": "*i64", "most_frames": "i32", "most_symbols": "i32"}


def run(module: str, *arguments: str, folder: Path, **environment: str) -> None:
    """A module in a process of its own, with empty caches."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
    for cache in caches.values():
        Path(cache).mkdir()
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, **caches, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_alignment_search_compiles_for_every_card(capability: int, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from gputrain.tts import align_triton

    sweep = {"scores_BTS": "*fp32", "words_BWS": "*i32", "BLOCK": "constexpr", **COUNTS}
    # A block of one warp, and one of several, whose gather goes through shared memory.
    kernels = [(align_triton.SWEEP, sweep, {"BLOCK": block}, block // 128) for block in (128, 512)]
    kernels.append((align_triton.FOLLOW_BACK, {"words_BWS": "*i32", "durations_BS": "*i64", **COUNTS}, {}, 1))
    for kernel, kinds, constants, warps in kernels:
        signature = {name: kinds[name] for name in kernel.arg_names}
        source = ASTSource(kernel, signature, {(kernel.arg_names.index(k),): v for k, v in constants.items()})
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
        assert f".target sm_{capability}" in made.asm["ptx"]
        code = made.asm["cubin"]
        flags = int.from_bytes(
            code[48:52], "little"
        )  # The lowest bytes of this ELF header field hold the architecture.
        assert code.startswith(b"\x7fELF")
        assert capability in (flags & 0xFF, flags >> 8 & 0xFF)


SEARCH_CODE = """
import sys, torch
from gputrain.tts import align_triton
folder = sys.argv[1]
torch.save([align_triton.search(*case) for case in torch.load(folder + "/cases.pt")], folder + "/found.pt")
"""


@pytest.mark.slow
def test_the_alignment_search_with_many_symbols_bad_scores_and_impossible_counts(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    symbols_B, frames_B = torch.tensor([140, 33, 1]), torch.tensor([150, 70, 40])  # more symbols than a warp sees
    scores_BTS = 20 * torch.randn(3, 152, 141, generator=draw) - 100
    bad_BTS = scores_BTS.clone()
    bad_BTS[torch.rand(bad_BTS.shape, generator=draw) < 0.1] = torch.nan
    bad_BTS[0, 7] = torch.inf
    even_BS = torch.ones(
        1, 64, dtype=torch.long
    )  # There are as many frames as symbols, and a word of 32 frames ends here.
    possible = [(scores_BTS, symbols_B, frames_B), (bad_BTS, symbols_B, frames_B)]
    possible.append((path_from_durations(even_BS, 64).float(), torch.tensor([64]), torch.tensor([64])))
    impossible = (scores_BTS[:, :9, :5], torch.tensor([5, 0, 4]), torch.tensor([4, 9, 0]))
    torch.save([*possible, impossible], tmp_path / "cases.pt")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", SEARCH_CODE, str(tmp_path)], check=True, env=environment, cwd=ROOT)
    *found, of_impossible = torch.load(tmp_path / "found.pt")
    for found_BS, case in zip(found, possible, strict=True):
        assert torch.equal(found_BS, search(*case))
    assert torch.equal(of_impossible, torch.zeros(3, 5, dtype=torch.int64))


@CPU_BUILD
@pytest.mark.slow
def test_compiled_kernels_of_the_memory_efficient_layers_equal_eager_ones(tmp_path: Path) -> None:
    """Inductor's kernels for a card against fp64.

    A sum over a group has 120 terms, and a gradient is made of two such sums and about ten operations: with rounding
    errors of 2**-24 each, of values that are at most 8 times the largest of a result, 8 * (2 * 120 + 10) * 2**-24 =
    1.2e-4. Results in bf16 are rounded once more, which the interpreter does by cutting bits off: 2**-7 at the most.
    """
    from tests.fake_cuda.interpreted_layers import layer

    file = tmp_path / "layers.pt"
    run("tests.fake_cuda.interpreted_layers", str(file), folder=tmp_path, TRITON_INTERPRET="1")
    cases = torch.load(file)
    assert [case["dtype"] for case in cases] == [torch.float32, torch.bfloat16]
    for case in cases:
        exact = {name: value.double() for name, value in case["given"].items()}
        expected = layer(EAGER, exact, torch.float64)
        for name, found in case["made"].items():
            error = relative_error(found, expected[name])
            bound = 1.2e-4 + (2**-7 if found.dtype == torch.bfloat16 else 0)
            assert error < bound, (case["dtype"], name, error)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest value."""
    return float((found.double() - expected).abs().max() / expected.abs().max())
