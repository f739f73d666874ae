"""Monotonic alignment search on a GPU, with one item per program; only `gputrain.tts.align` imports this module.

A sweep through the frames stores one bit for each cell: whether its best path comes from the previous symbol. A second
kernel follows the bits back. 32 frames of a symbol form a word, so no two symbols write to the same word.

Shapes: B items, T frames, S symbols, W words of frames. Kernels take addresses of contiguous tensors.
"""

import subprocess

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

SMALLEST_BLOCK = 128
SYMBOLS_A_WARP = 128


def search(scores_BTS: Tensor, symbols_B: Tensor, frames_B: Tensor) -> Tensor:
    """Implements `align.search` in Triton. Raises RuntimeError if Triton cannot compile."""
    items, frames, symbols = scores_BTS.shape
    device = scores_BTS.device
    counts = symbols_B.to(device), frames_B.to(device)
    words_BWS = torch.empty(items, triton.cdiv(frames, 32), symbols, dtype=torch.int32, device=device)
    durations_BS = torch.zeros(items, symbols, dtype=torch.int64, device=device)
    block = max(SMALLEST_BLOCK, triton.next_power_of_2(symbols))
    warps = min(16, block // SYMBOLS_A_WARP)
    try:
        SWEEP[(items,)](scores_BTS.contiguous(), *counts, words_BWS, frames, symbols, BLOCK=block, num_warps=warps)
        FOLLOW_BACK[(items,)](words_BWS, *counts, durations_BS, frames, symbols, num_warps=1)
    except (TritonError, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    return durations_BS


def sweep(
    scores_BTS: tl.tensor,
    symbols_B: tl.tensor,
    frames_B: tl.tensor,
    words_BWS: tl.tensor,
    most_frames: tl.tensor,
    most_symbols: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Sets bit t % 32 of word t // 32 of symbol s if the best path to s in frame t comes from s - 1."""
    item = tl.program_id(0).to(tl.int64)
    frames = tl.minimum(tl.load(frames_B + item), most_frames).to(tl.int32)
    symbols = tl.minimum(tl.load(symbols_B + item), most_symbols).to(tl.int32)
    symbols = tl.where(frames > 0, symbols, 0)
    s = tl.arange(0, BLOCK)
    row = scores_BTS + item * most_frames * most_symbols + s
    words = words_BWS + item * tl.cdiv(most_frames, 32) * most_symbols + s
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    before_first = 0.0  # score before the first frame; -inf afterwards
    ahead = tl.load(row, mask=s < symbols, other=0.0)
    for first in range(0, frames, 32):
        word = tl.zeros((BLOCK,), tl.int32)
        for bit in range(32):
            score = ahead.to(tl.float32)
            # The next frame is loaded while this one is computed.
            there = tl.where(first + bit + 1 < frames, symbols, 0)
            ahead = tl.load(row + (first + bit + 1) * most_symbols, mask=s < there, other=0.0)
            move = tl.where(s == 0, before_first, tl.gather(best, tl.maximum(s - 1, 0), 0))
            moved = best < move
            best = tl.where(s <= first + bit, tl.where(moved, move, best) + score, float("-inf"))
            word |= moved.to(tl.int32) << bit
            before_first = float("-inf")
        tl.store(words + (first // 32) * most_symbols, word, mask=s < symbols)


def follow_back(
    words_BWS: tl.tensor,
    symbols_B: tl.tensor,
    frames_B: tl.tensor,
    durations_BS: tl.tensor,
    most_frames: tl.tensor,
    most_symbols: tl.tensor,
) -> None:
    """Writes the durations of the path that ends at the last symbol in the last frame, if there is such a path."""
    item = tl.program_id(0).to(tl.int64)
    frames = tl.minimum(tl.load(frames_B + item), most_frames).to(tl.int32)
    symbols = tl.minimum(tl.load(symbols_B + item), most_symbols).to(tl.int32)
    words = words_BWS + item * tl.cdiv(most_frames, 32) * most_symbols
    durations = durations_BS + item * most_symbols
    if (symbols > 0) & (symbols <= frames):
        s = symbols - 1
        lasted = 0
        for back in range(frames):
            t = frames - 1 - back
            lasted += 1
            word = tl.load(words + (t // 32) * most_symbols + s)
            # In frame t = s every path comes from the previous symbol, even if NaN or infinity has changed the sums.
            leaves = (s == t) | (((word >> (t % 32)) & 1) == 1)
            tl.store(durations + s, lasted, mask=leaves)
            lasted = tl.where(leaves, 0, lasted)
            s = tl.where(leaves, tl.maximum(s - 1, 0), s)


# The kernels are compiled at their first call, and not again for other lengths.
SWEEP, FOLLOW_BACK = (
    triton.jit(kernel, do_not_specialize=["most_frames", "most_symbols"]) for kernel in (sweep, follow_back)
)
