"""The model of torch's caching allocator against its published rules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputrain.planner.memory.allocator import GRAIN, SEGMENT_GRAIN, CachingAllocator, StorageEvent
from gputrain.planner.memory.timeline import MemoryTimeline

MB = 2**20


def replay(*sizes: int) -> int:
    """Positive: a storage of so many bytes comes, numbered from 1; negative: storage -n goes."""
    number, timeline, allocator = 0, MemoryTimeline(kinds=["activations"] * 20), CachingAllocator()
    for size in sizes:
        number += size > 0
        timeline.events.append(StorageEvent(number, size) if size > 0 else StorageEvent(-size, 0))
    timeline.peak(allocator)
    return allocator.reserved_bytes


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ((1,), 2 * MB),  # a small one: a segment of 2 MB
        ((1, MB, 1000), 2 * MB),  # shared by small ones
        ((MB, MB, MB), 4 * MB),
        ((MB + 1,), 20 * MB),  # Requests of 1 to 10 MB share a segment of 20 MB.
        ((6 * MB, 6 * MB, 6 * MB), 20 * MB),
        ((6 * MB, 6 * MB, 6 * MB, 6 * MB), 40 * MB),
        ((10 * MB,), 10 * MB),  # larger ones: their own, rounded to 2 MB
        ((11 * MB,), 12 * MB),
        ((30 * MB, -1, 12 * MB, 12 * MB), 30 * MB),  # Freed blocks are split and reused.
        ((30 * MB, -1, 12 * MB, 19 * MB), 50 * MB),
        ((30 * MB, -1, 12 * MB, 12 * MB, -2, -3, 30 * MB), 30 * MB),  # They are joined again.
        ((12 * MB, 12 * MB, -1, -2, 24 * MB), 48 * MB),  # Blocks of different segments are never joined.
        ((30 * MB, -1, 29 * MB + 1, 512 * 1024), 32 * MB),  # a rest of 1 MB is not split off, and not for small ones
    ],
)
def test_allocator(sizes, reserved):
    assert replay(*sizes) == reserved


class PlainRules:
    """The allocator's published rules, said once more without its bookkeeping: segments as lists of [size, free]."""

    def __init__(self):
        self.segments = []  # (small, blocks)

    def allocate(self, size):
        small = size <= MB
        found = [
            (block[0], number, index)
            for number, (kind, blocks) in enumerate(self.segments)
            if kind is small
            for index, block in enumerate(blocks)
            if block[1] and block[0] >= size
        ]
        if found:
            _, number, index = min(found)
        else:
            whole = 2 * MB if small else 20 * MB if size < 10 * MB else -(-size // (2 * MB)) * 2 * MB
            self.segments.append((small, [[whole, True]]))
            number, index = len(self.segments) - 1, 0
        blocks = self.segments[number][1]
        block = blocks[index]
        rest = block[0] - size
        if (rest >= 512) if small else (rest > MB):
            block[0] = size
            blocks.insert(index + 1, [rest, True])
        block[1] = False
        return block

    def release(self, block):
        block[1] = True
        for _, blocks in self.segments:
            for index in range(len(blocks) - 1, 0, -1):
                if blocks[index][1] and blocks[index - 1][1]:
                    blocks[index - 1][0] += blocks.pop(index)[0]

    @property
    def totals(self):
        blocks = [block for _, blocks in self.segments for block in blocks]
        return sum(size for size, _ in blocks), sum(size for size, free in blocks if not free)


SIZES = st.one_of(
    st.integers(1, 40).map(lambda count: count * MB),
    st.integers(1, 3000),
    st.integers(1, 3 * MB),
    st.integers(1, 40 * MB),
)


@given(st.lists(st.tuples(SIZES, st.booleans()), max_size=60))
def test_allocated_and_reserved_by_the_published_rules(steps):
    """To the byte, block by block, the rests that are not split off included."""
    allocator, oracle, held = CachingAllocator(), PlainRules(), []
    for size, release in steps:
        if release and held:
            ours, theirs = held.pop(size % len(held))
            allocator.release(ours)
            oracle.release(theirs)
        grains = -(-size // GRAIN) * GRAIN
        held.append((allocator.allocate(grains), oracle.allocate(grains)))
        assert (allocator.reserved_bytes, sum(ours.size for ours, _ in held)) == oracle.totals


@given(st.lists(st.tuples(st.integers(1, 64 * MB), st.booleans()), max_size=60))
def test_allocator_reserves_what_is_needed_and_keeps_no_two_neighbours_free(steps):
    allocator, held, needed, most = CachingAllocator(), [], 0, 0
    for size, release in steps:
        if release and held:
            block, bytes_ = held.pop(size % len(held))
            allocator.release(block)
            needed -= bytes_
        rounded = -(-size // GRAIN) * GRAIN
        held.append((allocator.allocate(rounded), rounded))
        needed += rounded
        most = max(most, needed)
    assert allocator.reserved_bytes >= most
    assert allocator.reserved_bytes % SEGMENT_GRAIN == 0
    free = list(allocator.blocks.values())
    assert all(not (block.after and block.after.free) for block in free)
    for block, _ in held:
        allocator.release(block)
    # All free: whole segments again.
    assert sum(block.size for block in allocator.blocks.values()) == allocator.reserved_bytes
    assert all(block.before is block.after is None for block in allocator.blocks.values())


def test_expandable_segments_grow_by_pages_and_leave_no_hole():
    def reserved(*sizes: int) -> int:
        allocator = CachingAllocator(expandable=True)
        held = {}
        for number, size in enumerate(sizes, 1):
            if size > 0:
                held[number] = allocator.allocate(size)
            else:
                allocator.release(held.pop(-size))
        return allocator.reserved_bytes

    assert reserved(MB) == 2 * MB  # small ones have a stretch of their own, of pages of 2 MB
    assert reserved(30 * MB) == 40 * MB  # large ones one of 20 MB
    assert reserved(30 * MB, 10 * MB) == 40 * MB
    assert reserved(30 * MB, -1, 50 * MB) == 60 * MB  # the free end grows; a segment of its own would make 80
    assert reserved(30 * MB, 30 * MB, -1, 20 * MB, 10 * MB) == 60 * MB  # a hole is filled by what fits in it
    assert reserved(30 * MB, 30 * MB, -1, 40 * MB) == 100 * MB  # A smaller one does not.


@given(st.lists(st.integers(1, 60 * MB), min_size=1, max_size=30), st.data())
def test_expandable_segments_hold_all_and_never_more_than_the_sum_of_requests(sizes, data):
    allocator = CachingAllocator(expandable=True)
    held, standing, most = [], 0, 0
    for size in sizes:
        held.append(allocator.allocate(-(-size // GRAIN) * GRAIN))
        standing = sum(block.size for block in held)
        most = max(most, standing)
        assert allocator.reserved_bytes >= standing
        if data.draw(st.booleans()):
            allocator.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
    free = [block for blocks in allocator.free.values() for _, key in blocks for block in [allocator.blocks[key]]]
    assert sum(b.size for b in free) + sum(b.size for b in held) == allocator.reserved_bytes
    total = sum(-(-size // GRAIN) * GRAIN for size in sizes)
    assert allocator.reserved_bytes <= total + 22 * MB
