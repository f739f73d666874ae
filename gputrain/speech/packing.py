"""Packs clips of similar lengths into buckets with little padding, and shuffles them by length: functions of lengths.

Shape suffixes: N clips, sorted by length where it is said; K buckets; C shapes; P places at which a shape may end.
"""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
SHAPE_PLACES = 400  # lengths at which a shape of buckets may end
FINEST = 24  # bisection steps for the cost of a bucket


def random_words(seed: int, epoch: int, count: int) -> npt.NDArray[np.uint64]:
    """Returns random numbers of an epoch. numpy guarantees that they do not change between versions (NEP 19)."""
    return np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(2, epoch))).random_raw(count)


def shuffled_by_length(
    lengths_N: Integers | npt.NDArray[np.float64], stretch: float, seed: int, epoch: int
) -> Integers:
    """Returns the indices of clips, sorted by length times a random factor from 1 to `stretch`, which is excluded."""
    words_N = random_words(seed, epoch, len(lengths_N))
    factors_N = 1 + (stretch - 1) * (words_N >> np.uint64(11)) * 2.0**-53
    return np.argsort(lengths_N * factors_N, kind="stable")  # A stable sort does not change between versions either.


def cut(frames_N: Integers, batch_size: int, batch_frames: int, max_padding: float) -> Integers:
    """Cuts clips, sorted by length, into as few buckets as the limits allow. Returns the end of each, (K,).

    The cost of a bucket is its padded frames plus a constant. The cheapest cut is found by dynamic programming, for
    the highest constant at which padding is at most `max_padding`.
    """
    highest = float(frames_N.sum() * batch_size + 1)
    ends_K = _cheapest(frames_N, batch_size, batch_frames, highest)
    if padding_share(frames_N, ends_K) <= max_padding:
        return ends_K
    ends_K = _cheapest(frames_N, batch_size, batch_frames, 0.5)  # frames are whole: no padding where none is needed
    low, high = 0.5, highest
    for _ in range(FINEST):
        price = math.sqrt(low * high)
        tried_K = _cheapest(frames_N, batch_size, batch_frames, price)
        if padding_share(frames_N, tried_K) <= max_padding:
            low, ends_K = price, tried_K
        else:
            high = price
    return ends_K


def shape_borders(frames_N: Integers, shapes: int, count: Callable[[int], int]) -> Integers:
    """Divides clips, sorted by length, into at most `shapes` (two or more) ranges with little padding to the longest of
    each. Returns the end of each range, (C,).

    Ranges consist of whole buckets, except for the first, with the clips that are left. `count(end)` returns the number
    of clips of a bucket whose range ends at `end`.
    """
    places_P = np.unique(np.linspace(0, len(frames_N), SHAPE_PLACES + 1).round().astype(np.int64))
    padded_PP = (places_P[None, :] - places_P[:, None]) * frames_N[places_P - 1][None, :].astype(float)
    padded_PP[padded_PP < 0] = np.inf
    paid_P, begins = padded_PP[0], []
    for _ in range(shapes - 2):  # Dynamic programming: one more range, which may be empty.
        prices_PP = paid_P[:, None] + padded_PP
        begins.append(prices_PP.argmin(axis=0))
        paid_P = prices_PP.min(axis=0)
    place, ends = len(places_P) - 1, [len(frames_N)]
    for begin_P in [*reversed(begins), np.zeros(len(places_P), np.int64)]:  # What is left are the shortest clips.
        place = int(begin_P[place])
        if ends[-1]:
            size = count(ends[-1])
            buckets = min(round((ends[-1] - int(places_P[place])) / size), ends[-1] // size)
            ends.append(ends[-1] - max(0, buckets) * size)
    return np.unique([end for end in ends if end])


def _cheapest(frames_N: Integers, batch_size: int, batch_frames: int, price: float) -> Integers:
    """Returns the ends of the buckets that minimise padded frames plus `price` for each bucket."""
    paid = np.zeros(len(frames_N) + 1)
    begins = np.zeros(len(frames_N) + 1, dtype=np.int64)
    for end in range(1, len(frames_N) + 1):
        longest = int(frames_N[end - 1])
        most = min(batch_size, max(1, batch_frames // longest)) if batch_frames else batch_size
        begin = np.arange(max(0, end - most), end)
        prices = paid[begin] + (end - begin) * longest
        best = int(prices.argmin())
        paid[end], begins[end] = prices[best] + price, begin[best]
    ends = [len(frames_N)]
    while begins[ends[-1]]:
        ends.append(int(begins[ends[-1]]))
    return np.array(ends[::-1], dtype=np.int64)


def padding_share(frames_N: Integers, ends_K: Integers) -> float:
    """Returns the share of padding in buckets that end at `ends_K`, for clips with `frames_N` frames in this order."""
    begins_K = np.concatenate([[0], ends_K[:-1]])
    padded = int((np.maximum.reduceat(frames_N, begins_K) * (ends_K - begins_K)).sum())
    return 1 - int(frames_N.sum()) / padded
