"""Alignment search compared with another implementation and with all paths, and with extreme input.

The reference is the package monotonic-alignment-search: the Cython code of Glow-TTS's authors, which gives dense paths.
"""

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gputrain.tts import align
from gputrain.tts.align import alignment_scores, path_from_durations, position_prior, search
from tests.tables import each_row

TRITON = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is not installed")


def reference(scores_BTS: Tensor, symbols_B: Tensor, frames_B: Tensor) -> Tensor:
    package = pytest.importorskip("monotonic_alignment_search")
    _, most_frames, most_symbols = scores_BTS.shape
    real_BST = (torch.arange(most_symbols)[:, None] < symbols_B[:, None, None]) & (
        torch.arange(most_frames) < frames_B[:, None, None]
    )
    scores_BST = scores_BTS.float().mT.masked_fill(~real_BST, 0).contiguous()
    return package.maximum_path(scores_BST, real_BST.float()).sum(dim=2).long()


def best_of_all(scores_TS: np.ndarray) -> tuple[float, set[tuple[int, ...]]]:
    """Returns the largest sum in fp64, and all durations that reach it."""
    frames, symbols = scores_TS.shape
    sums = {}
    for cuts in itertools.combinations(range(1, frames), symbols - 1):
        durations = tuple(np.diff([0, *cuts, frames]).tolist())
        path = np.repeat(np.arange(symbols), durations)
        sums[durations] = scores_TS.astype(np.float64)[np.arange(frames), path].sum()
    most = max(sums.values())
    return most, {durations for durations, total in sums.items() if total == most}


def random_case(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns scores of items with different lengths; every other case is a special one."""
    draw = torch.Generator().manual_seed(seed)
    items = int(torch.randint(1, 6, (), generator=draw))
    symbols_B = torch.randint(1, 60, (items,), generator=draw)
    frames_B = symbols_B + torch.randint(0, 120, (items,), generator=draw)
    shape = items, int(frames_B.max()) + seed % 3, int(symbols_B.max()) + seed % 2
    scores_BTS = 20 * torch.randn(shape, generator=draw) - 100
    match seed % 10:
        case 1:
            scores_BTS = scores_BTS.div(20).round()  # ties
        case 3:
            scores_BTS = torch.zeros(shape)  # only ties
        case 5:
            frames_B = symbols_B.clone()
            scores_BTS = scores_BTS[:, : shape[2]]
        case 7:
            symbols_B = torch.ones_like(symbols_B)
            scores_BTS = 1e4 * scores_BTS
        case 9:  # Some cells are forbidden, but none of one path.
            kept_BTS = path_from_durations(evenly(symbols_B, frames_B, shape[2]), shape[1])
            scores_BTS[(torch.rand(shape, generator=draw) < 0.3) & ~kept_BTS] = -torch.inf
    return scores_BTS, symbols_B, frames_B


def evenly(symbols_B: Tensor, frames_B: Tensor, most: int) -> Tensor:
    """Returns durations (B, most) with small differences."""
    cuts_BS = torch.arange(most + 1).clamp(max=symbols_B[:, None]) * frames_B[:, None] // symbols_B[:, None]
    return cuts_BS.diff(dim=1)


@each_row(*range(10))
def test_paths_are_those_of_the_reference(of_ten):
    for seed in range(of_ten, 200, 10):
        case = random_case(seed)
        assert torch.equal(search(*case), reference(*case)), seed


def test_paths_of_scores_under_autocast_are_those_of_the_reference():
    """As in training, latents and means are in bf16, and scores in fp32."""
    for seed in range(20):
        scores_BTS, symbols_B, frames_B = random_case(seed)
        items, frames, symbols = scores_BTS.shape
        draw = torch.Generator().manual_seed(seed)
        layer = torch.nn.Conv1d(8, 32, 1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z_BCT, m_BCS = (layer(torch.randn(items, 8, length, generator=draw)) for length in (frames, symbols))
            assert z_BCT.dtype == torch.bfloat16
            scores_BTS = alignment_scores(z_BCT, m_BCS, 0.1 * m_BCS)
            assert scores_BTS.dtype == torch.float32
            found_BS = search(scores_BTS, symbols_B, frames_B)
        assert torch.equal(found_BS, reference(scores_BTS, symbols_B, frames_B))


def test_a_clip_of_86_seconds():
    frames, symbols = 86 * 22050 // 256, 2001
    scores_BTS = torch.randn(1, frames, symbols, generator=torch.Generator().manual_seed(0))
    case = scores_BTS, torch.tensor([symbols]), torch.tensor([frames])
    assert torch.equal(search(*case), reference(*case))


def test_no_other_path_is_better():
    """Compares with all paths, including cases where the reference fails: it ignores sums below -1e9."""
    draw = np.random.default_rng(0)
    for scale in (1.0, 1e9, 1e30):
        for _ in range(20):
            frames, symbols = 8, int(draw.integers(1, 7))
            scores_TS = (scale * (draw.integers(-9, 9, (frames, symbols)) - 20)).astype(np.float32)
            found_BS = search(torch.from_numpy(scores_TS)[None], torch.tensor([symbols]), torch.tensor([frames]))
            most, durations = best_of_all(scores_TS)
            path = np.repeat(np.arange(symbols), found_BS[0])
            total = scores_TS.astype(np.float64)[np.arange(frames), path].sum()
            assert total == pytest.approx(most, rel=1e-6)
            assert scale > 1 or tuple(found_BS[0].tolist()) in durations


@each_row(float("nan"), float("inf"), -float("inf"))
def test_every_symbol_keeps_a_frame_whatever_the_scores(value):
    scores_BTS, symbols_B, frames_B = random_case(2)
    scores_BTS[torch.rand(scores_BTS.shape, generator=torch.Generator().manual_seed(0)) < 0.1] = value
    for scores in (scores_BTS, torch.full_like(scores_BTS, value)):
        durations_BS = search(scores, symbols_B, frames_B)
        assert torch.equal(durations_BS.sum(dim=1), frames_B)
        assert torch.equal((durations_BS > 0).sum(dim=1), symbols_B)


@each_row(torch.float16, torch.bfloat16, torch.float64)
def test_sums_are_in_fp32_and_scores_stay(dtype):
    scores_BTS, symbols_B, frames_B = random_case(4)
    given_BTS = scores_BTS.to(dtype)
    kept_BTS = given_BTS.clone()
    found_BS = search(given_BTS.mT.contiguous().mT, symbols_B, frames_B)  # Any memory layout is accepted.
    assert torch.equal(found_BS, reference(given_BTS.float(), symbols_B, frames_B))
    assert torch.equal(given_BTS, kept_BTS)


def test_impossible_items_are_named():
    scores_BTS = torch.zeros(2, 5, 7)
    with pytest.raises(ValueError, match=r"\[\(6, 5\)\] .* for scores of \(2, 5, 7\)"):
        search(scores_BTS, torch.tensor([3, 6]), torch.tensor([5, 5]))
    with pytest.raises(ValueError, match=r"\[\(0, 5\)\]"):
        search(scores_BTS, torch.tensor([0, 3]), torch.tensor([5, 5]))
    with pytest.raises(ValueError, match=r"\[\(3, 6\)\]"):
        search(scores_BTS, torch.tensor([3, 3]), torch.tensor([6, 5]))
    with pytest.raises(ValueError, match="1 "):
        search(scores_BTS, torch.tensor([3]), torch.tensor([5]))


def test_the_number_of_threads_changes_nothing():
    scores_BTS = torch.randn(7, 50, 20, generator=torch.Generator().manual_seed(0))
    case = scores_BTS, torch.tensor([20, 3, 1, 9, 20, 7, 12]), torch.tensor([50, 50, 2, 9, 20, 31, 40])
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(search(*case))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


def test_the_operator_runs_on_shapes_and_in_a_compiled_graph():
    case = random_case(8)
    torch.library.opcheck(torch.ops.gputrain.alignment_search.default, case)
    compiled = torch.compile(search, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*case), search(*case))


@pytest.mark.slow
def test_importing_compiles_nothing_and_an_unwritable_folder_does_no_harm(tmp_path):
    """Runs a separate process in which numba can cache its machine code neither next to the module nor at home."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    code = (
        "import sys, torch, gputrain.tts.align as align\n"
        "assert 'numba' not in sys.modules and 'triton' not in sys.modules\n"
        "import numba.core.caching as caching\n"
        "caching.CacheImpl._locator_classes = []\n"  # as if no folder were writable
        "print(align.search(torch.eye(3)[None], torch.tensor([3]), torch.tensor([3])).tolist())\n"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(blocked / "within"), "HOME": str(blocked)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout == "[[1, 1, 1]]\n", done.stderr


@pytest.mark.slow
def test_processes_that_compile_at_once_leave_code_that_later_ones_load(tmp_path):
    code = (
        "import torch, gputrain.tts.align as align\n"
        "input()\n"
        "print(align.search(torch.eye(3)[None], torch.tensor([3]), torch.tensor([3])).tolist())\n"
    )

    def durations(processes: int) -> list[str]:
        command, environment = [sys.executable, "-c", code], {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started = [subprocess.Popen(command, env=environment, **pipes) for _ in range(processes)]
        return [process.communicate("\n")[0] for process in started]

    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb*")}

    assert durations(3) == ["[[1, 1, 1]]\n"] * 3
    compiled = times()
    assert {path.suffix for path in compiled} == {".nbi", ".nbc"}
    assert durations(1) == ["[[1, 1, 1]]\n"]
    assert times() == compiled  # Nothing was compiled again.


@TRITON
@pytest.mark.slow
def test_triton_follows_the_same_paths(tmp_path):
    """Uses Triton's interpreter, which needs no GPU, in a separate process, because it is chosen at the import."""
    cases = [random_case(seed) for seed in range(10)]
    torch.save(cases, tmp_path / "cases.pt")
    code = (
        "import sys, torch\n"
        "from gputrain.tts import align_triton\n"
        "folder = sys.argv[1]\n"
        "found = [align_triton.search(*case) for case in torch.load(folder + '/cases.pt')]\n"
        "torch.save(found, folder + '/found.pt')\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=environment)
    for found_BS, case in zip(torch.load(tmp_path / "found.pt"), cases, strict=True):
        assert torch.equal(found_BS, search(*case))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_paths_on_a_gpu_are_those_on_the_cpu(dtype):
    assert align.triton_search() is not None
    for seed in range(200):
        scores_BTS, *counts = random_case(seed)
        scores_BTS = scores_BTS.to(dtype)
        found_BS = search(scores_BTS.cuda(), *(count_B.cuda() for count_B in counts))
        assert torch.equal(found_BS.cpu(), search(scores_BTS, *counts)), seed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_without_triton_a_gpus_scores_go_to_the_cpu_and_a_warning_says_so_once(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "gputrain.tts.align_triton", None)
    align.triton_search.cache_clear()
    scores_BTS, *counts = random_case(0)
    for _ in range(2):
        assert torch.equal(search(scores_BTS.cuda(), *counts).cpu(), search(scores_BTS, *counts))
    align.triton_search.cache_clear()
    assert [record.getMessage().split(",")[0] for record in caplog.records] == ["alignment search runs on the CPU"]


def test_scores_are_those_of_normal_distributions():
    draw = torch.Generator().manual_seed(0)
    z_BCT, m_BCS, logs_BCS = (torch.randn(2, 16, length, generator=draw) for length in (30, 7, 7))
    normal = torch.distributions.Normal(m_BCS.double()[:, :, None], logs_BCS.double().exp()[:, :, None])
    expected_BTS = normal.log_prob(z_BCT.double()[..., None]).sum(dim=1)
    assert torch.allclose(alignment_scores(z_BCT, m_BCS, logs_BCS).double(), expected_BTS, rtol=1e-5, atol=1e-4)
    assert alignment_scores(z_BCT.double(), m_BCS.double(), logs_BCS.double()).dtype == torch.float64
    assert not alignment_scores(z_BCT.requires_grad_(), m_BCS, logs_BCS).requires_grad


def test_the_prior_of_positions_is_that_of_scipy():
    from scipy.stats import betabinom

    symbols_B, frames_B = torch.tensor([7, 1, 40]), torch.tensor([20, 5, 200])
    prior_BTS = position_prior(symbols_B, frames_B, 40, 200)
    assert prior_BTS.isfinite().all()
    for prior_TS, symbols, frames in zip(prior_BTS, symbols_B.tolist(), frames_B.tolist(), strict=True):
        rows = [betabinom.logpmf(np.arange(symbols), symbols - 1, t + 1, frames - t) for t in range(frames)]
        # Eight logarithms of the gamma function up to lgamma(240) = 1075 are added.
        assert np.abs(prior_TS[:frames, :symbols].numpy() - np.array(rows)).max() < 8 * 1075 * 2.0**-52 * 4
    alone_TS = position_prior(symbols_B[:1], frames_B[:1], 7, 20)[0]
    assert torch.equal(alone_TS.float(), prior_BTS[0, :20, :7].float())


def test_by_the_prior_alone_all_symbols_last_alike():
    symbols_B, frames_B = torch.tensor([7, 3]), torch.tensor([70, 30])
    durations_BS = search(position_prior(symbols_B, frames_B, 7, 70), symbols_B, frames_B)
    assert (durations_BS[0] - 10).abs().max() <= 1
    assert (durations_BS[1, :3] - 10).abs().max() <= 1


def test_paths_and_durations_say_the_same():
    durations_BS = torch.tensor([[2, 0, 1], [1, 1, 0]])
    path_BTS = path_from_durations(durations_BS, 4)
    assert path_BTS.dtype == torch.bool
    assert path_BTS[0].nonzero().tolist() == [[0, 0], [1, 0], [2, 2]]
    assert path_BTS[1].nonzero().tolist() == [[0, 0], [1, 1]]
    assert torch.equal(path_BTS.sum(dim=1), durations_BS)
