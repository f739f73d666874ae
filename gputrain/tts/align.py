"""Monotonic alignment search: assigns the frames of a recording to the symbols of its text.

The algorithm is that of Kim et al. 2020, "Glow-TTS: A Generative Flow for Text-to-Speech via Monotonic Alignment
Search" (arXiv:2005.11129, section 3.1 and algorithm 1), as in VITS (Kim et al. 2021, arXiv:2106.06103, section 2.2.1).

An alignment begins at the first symbol, ends at the last, never goes back and skips no symbol. It is therefore
equivalent to durations: the number of frames of each symbol, at least one.

Shapes: B items, C channels, S symbols, T frames; `symbols_B` and `frames_B` are the numbers of valid ones in each item.
"""

import functools
import importlib
import logging
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gputrain.caches import cache_folder
from gputrain.engine.recipe import at_least_fp32

Array: TypeAlias = NDArray[Any]
Search: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
# Signature of `_search_items`: with it, numba compiles eagerly, where failures are handled, not at the first call.
SIGNATURE = "void(float32[:,:,::1], int64[::1], int64[::1], int64[:,::1], int64, int64)"
log = logging.getLogger(__name__)


@torch.no_grad()
def alignment_scores(z_p_BCT: Tensor, m_p_BCS: Tensor, logs_p_BCS: Tensor) -> Tensor:
    """Returns scores_BTS: the log-likelihood of every frame under the normal distribution of every symbol, in nats.

    It is log N(z; m, exp(logs)) summed over channels (Glow-TTS, equation 6), with the square expanded, so that it takes
    two matrix products and no tensor of size BCTS. It is computed in fp32 at least, under any autocast. Symbols are
    contiguous in memory, as the search reads them. There is no gradient, since the search has none.
    """
    with torch.autocast(z_p_BCT.device.type, enabled=False):
        z_BTC, m_BCS, logs_BCS = at_least_fp32(z_p_BCT).mT, at_least_fp32(m_p_BCS), at_least_fp32(logs_p_BCS)
        precision_BCS = torch.exp(-2 * logs_BCS)
        scaled_BCS = m_BCS * precision_BCS
        of_symbol_B1S = -(0.5 * m_BCS * scaled_BCS + logs_BCS + 0.5 * math.log(2 * math.pi)).sum(dim=1, keepdim=True)
        scores_BTS = torch.baddbmm(of_symbol_B1S, z_BTC, scaled_BCS)
        return scores_BTS.baddbmm_(z_BTC.square(), precision_BCS, alpha=-0.5)


@torch.no_grad()
def position_prior(symbols_B: Tensor, frames_B: Tensor, symbols: int, frames: int) -> Tensor:
    """Returns prior_BTS: the log-probability of every symbol at every frame by their positions alone, in nats (fp64, so
    that equal items have equal values, whatever they are padded to).

    It is the beta-binomial prior of Badlani et al. 2021, "One TTS Alignment To Rule Them All" (arXiv:2108.10447): at
    frame t of T, symbol s of S has the probability of s successes in S - 1 trials with alpha = t + 1 and beta = T - t,
    all counted from 0. It is narrowest at both ends. Cells beyond an item's symbols or frames are finite and mean
    nothing.
    """
    device = symbols_B.device
    symbol_S, frame_T1 = torch.arange(symbols, device=device), torch.arange(frames, device=device)[:, None]
    last_B11, frames_B11 = (symbols_B - 1).clamp(min=0)[:, None, None], frames_B[:, None, None]
    symbols_left_B1S = (last_B11 - symbol_S).clamp(min=0)
    frames_left_BT1 = (frames_B11 - 1 - frame_T1).clamp(min=0)
    # A table of the logarithms of factorials, as fp64 is slow on most GPUs.
    log_factorial = torch.arange(symbols + frames, device=device, dtype=torch.float64).clamp(min=1).log().cumsum(0)
    choices_B1S = log_factorial[last_B11] - log_factorial[symbol_S] - log_factorial[symbols_left_B1S]
    cells_BTS = log_factorial[symbol_S + frame_T1] + log_factorial[symbols_left_B1S + frames_left_BT1]
    of_frame_BT1 = log_factorial[frame_T1] + log_factorial[frames_left_BT1]
    of_item_B11 = log_factorial[frames_B11] - log_factorial[last_B11 + frames_B11]
    return cells_BTS + choices_B1S - of_frame_BT1 + of_item_B11


@torch.no_grad()
def search(scores_BTS: Tensor, symbols_B: Tensor, frames_B: Tensor) -> Tensor:
    """Returns durations_BS (int64): the frames of each symbol in the alignment with the largest sum of scores; 0 beyond
    the item's symbols. Where staying at a symbol and coming from the previous one have equal sums, it stays.

    `scores_BTS` may have any floating dtype and is not changed; sums are in fp32. The search runs on the device of the
    scores: in Triton on a GPU, compiled by numba on the CPU. If Triton is missing or fails, a GPU's scores are copied
    to the CPU, with a single warning. Besides the scores it takes one bit for each cell (of BTS) on a GPU, and on the
    CPU one byte for each cell of as many items as there are threads. It is a custom operator of torch, so that it
    supports fake tensors and compiled graphs.

    Raises ValueError if an item has no symbol, fewer frames than symbols, or more of either than its scores, unless
    the counts are on a GPU: there they are not checked, since that would synchronise with the device, and an item
    without an alignment has durations of 0.
    """
    durations_BS: Tensor = _search(scores_BTS, symbols_B, frames_B)
    return durations_BS


@torch.library.custom_op("gputrain::alignment_search", mutates_args=())
def _search(scores_BTS: Tensor, symbols_B: Tensor, frames_B: Tensor) -> Tensor:
    on_gpu = triton_search() if scores_BTS.is_cuda else None
    if on_gpu is None or not (symbols_B.is_cuda or frames_B.is_cuda):
        _check(scores_BTS, symbols_B, frames_B)
    return (on_gpu or _search_on_cpu)(scores_BTS, symbols_B, frames_B)


@_search.register_fake
def _search_on_shapes(scores_BTS: Tensor, symbols_B: Tensor, frames_B: Tensor) -> Tensor:
    items, _, symbols = scores_BTS.shape
    return scores_BTS.new_empty(items, symbols, dtype=torch.int64)


def _check(scores_BTS: Tensor, symbols_B: Tensor, frames_B: Tensor) -> None:
    """Raises ValueError for items that have no path, whose search would write beyond the durations."""
    items, most_frames, most_symbols = scores_BTS.shape
    counts = list(zip(symbols_B.tolist(), frames_B.tolist(), strict=True))
    wrong = [pair for pair in counts if not 1 <= pair[0] <= min(pair[1], most_symbols) or pair[1] > most_frames]
    if wrong or len(counts) != items:
        raise ValueError(f"{wrong or len(counts)} (symbols, frames) of items for scores of {tuple(scores_BTS.shape)}")


@functools.cache
def triton_search() -> Search | None:
    """Returns the search in Triton if it finds a known path on the current GPU; otherwise None, with a warning."""
    known_BS = torch.tensor([[1, 2, 3, 34, 1]], device="cuda")  # more frames than the 32 of a word
    frames = int(known_BS.sum())
    counts = (torch.tensor([count], device="cuda") for count in (5, frames))
    try:
        search_on_gpu: Search = importlib.import_module("gputrain.tts.align_triton").search
        if torch.equal(search_on_gpu(path_from_durations(known_BS, frames).float(), *counts), known_BS):
            return search_on_gpu
        reason = "it does not find the best path"
    except torch.OutOfMemoryError:
        raise
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error)
    log.warning("alignment search runs on the CPU, which is slower, because Triton fails: %s", reason)
    return None


def _search_on_cpu(scores_BTS: Tensor, symbols_B: Tensor, frames_B: Tensor) -> Tensor:
    scores = scores_BTS.detach().float().cpu().contiguous().numpy()
    symbols, frames = (counts_B.long().cpu().contiguous().numpy() for counts_B in (symbols_B, frames_B))
    durations = np.zeros((len(scores), scores.shape[2]), np.int64)
    threads = max(1, min(len(scores), torch.get_num_threads()))
    search_items = functools.partial(_compiled(), scores, symbols, frames, durations, threads)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(search_items, range(threads)))  # Reading the results raises the threads' errors.
    return torch.from_numpy(durations).to(scores_BTS.device)


@functools.cache
def _compiled() -> Callable[..., None]:
    """Returns `_search_items` compiled by numba, which caches the machine code if it finds a writable folder.

    The caller uses its own threads: numba's abort the process if two threads use them at once.
    """
    numba = importlib.import_module("numba")  # It is imported here, because that takes half a second.
    numba.config.CACHE_DIR = numba.config.CACHE_DIR or str(cache_folder() / "numba")  # Its own is NUMBA_CACHE_DIR.
    try:
        compiled: Callable[..., None] = numba.njit(SIGNATURE, nogil=True, cache=True)(_search_items)
    except (RuntimeError, OSError):  # There is no such folder, or the disk is full.
        compiled = numba.njit(SIGNATURE, nogil=True)(_search_items)
    return compiled


def _search_items(
    scores_BTS: Array, symbols_B: Array, frames_B: Array, durations_BS: Array, threads: int, thread: int
) -> None:
    """Adds the durations of one thread's items to `durations_BS`, which is zero. It is a scalar loop for numba.

    best[s + 1] is the sum of the best path that ends at symbol s in this frame; best[0] is the state before the first
    symbol: 0 before the first frame, where every path begins, and -inf afterwards. Only symbols that a complete path
    can contain in a frame are visited.
    """
    for item in range(thread, len(scores_BTS), threads):
        symbols, frames = symbols_B[item], frames_B[item]
        moved_TS = np.empty((frames, symbols), np.bool_)
        before = np.full(symbols + 1, -np.inf, np.float32)
        best = before.copy()
        before[0] = 0
        for t in range(frames):
            for s in range(max(0, symbols - frames + t), min(symbols, t + 1)):
                stay, move = before[s + 1], before[s]
                moved_TS[t, s] = stay < move
                best[s + 1] = (move if stay < move else stay) + scores_BTS[item, t, s]
            before[0] = -np.inf
            before, best = best, before
        s = symbols - 1
        for t in range(frames - 1, -1, -1):
            durations_BS[item, s] += 1
            # In frame t = s every path comes from the previous symbol, even if NaN or infinity has changed the sums.
            if s == t or moved_TS[t, s]:
                s -= 1


def path_from_durations(durations_BS: Tensor, frames: int) -> Tensor:
    """Returns path_BTS (bool): True where a frame belongs to a symbol; False after the last frame."""
    ends_B1S = durations_BS.cumsum(dim=1)[:, None]
    at_T1 = torch.arange(frames, device=durations_BS.device)[:, None]
    return (at_T1 < ends_B1S) & (at_T1 >= ends_B1S - durations_BS[:, None])
