"""CUDA's caching allocator, replayed: what it takes from the card for tensors that come and go."""

from bisect import bisect_left, insort
from dataclasses import dataclass

SMALL, LARGE = 2**20, 10 * 2**20  # bytes: requests up to SMALL have a pool, from LARGE on a segment each
GRAIN, SEGMENT_GRAIN = 512, 2 * 2**20  # bytes that requests and segments are rounded to
STRETCH = 2**50  # addresses kept free for a stretch that grows


@dataclass(frozen=True)
class Event:
    """A storage comes (bytes) or goes (0)."""

    storage: int
    bytes: int


def rounded(bytes_: int) -> int:
    """What the allocator makes of a request."""
    return max(GRAIN, -(-bytes_ // GRAIN) * GRAIN)


@dataclass
class Block:
    """A stretch of a segment, between its neighbours."""

    size: int
    small: bool  # of which pool
    address: int = 0  # segments lie one after the other, in the order in which they were taken
    free: bool = False
    before: "Block | None" = None
    after: "Block | None" = None


class PlainAllocator:
    """The allocator of a CPU: it takes what is asked for, and keeps nothing."""

    def __init__(self) -> None:
        self.standing_bytes = 0
        self.reserved_bytes = 0  # the most that stood at once

    def allocate(self, size: int) -> Block:
        self.standing_bytes += size
        self.reserved_bytes = max(self.reserved_bytes, self.standing_bytes)
        return Block(size, small=False)

    def release(self, block: Block) -> None:
        self.standing_bytes -= block.size


class CachingAllocator:
    """The allocator as torch has it: what it takes from the card, and keeps.

    A block may be larger than its request: what is left of a large one is split off only where it is more than 1 MiB.
    torch counts such a block as allocated in full.

    With `expandable` segments each pool is one stretch of addresses that grows at its end, so that no hole is too small
    for what comes next and too large to be forgotten.
    https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDACachingAllocator.cpp describes the constants.
    """

    def __init__(self, *, expandable: bool = False) -> None:
        self.expandable = expandable
        self.reserved_bytes = 0
        # Of small and of large requests: sizes and addresses of the free blocks in order, and the blocks beside them.
        self.free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self.blocks: dict[int, Block] = {}  # the free ones, by address
        self.ends: dict[bool, Block] = {}  # of the stretches that grow
        self._next_address = 0

    def allocate(self, size: int) -> Block:
        small = size <= SMALL
        free = self.free[small]
        place = bisect_left(free, (size, 0))
        if place < len(free):
            end = self.ends.get(small)  # counts as large as it may grow, so that another block is preferred to it
            if end and free[place][1] == end.address and place + 1 < len(free):
                place += 1
            block = self.blocks.pop(free.pop(place)[1])
        else:
            block = self._grown(size, small) if self.expandable else self._segment(size, small)
        block.free = False
        rest = block.size - size
        if rest >= GRAIN if small or self.expandable else rest > SMALL:
            remaining = Block(rest, small, block.address + size, before=block, after=block.after)
            if block.after:
                block.after.before = remaining
            block.size, block.after = size, remaining
            if self.ends.get(small) is block:
                self.ends[small] = remaining
            self._offer(remaining)
        return block

    def _segment(self, size: int, small: bool) -> Block:
        whole = -(-size // SEGMENT_GRAIN) * SEGMENT_GRAIN
        segment = SEGMENT_GRAIN if small else 2 * LARGE if size < LARGE else whole
        self.reserved_bytes += segment
        return Block(segment, small, self._addresses(segment))

    def _addresses(self, size: int) -> int:
        """The first of so many addresses that nothing else has."""
        self._next_address += size
        return self._next_address - size

    def _grown(self, size: int, small: bool) -> Block:
        """The end of the stretch, with so many pages more that the request fits."""
        page = SEGMENT_GRAIN if small else 2 * LARGE
        end = self.ends.get(small)
        if end and end.free:
            self._withdraw(end)
            more = -(-(size - end.size) // page) * page
            end.size += more
        else:
            more = -(-size // page) * page
            block = Block(more, small, end.address + end.size if end else self._addresses(STRETCH), before=end)
            if end:
                end.after = block
            self.ends[small] = end = block
        self.reserved_bytes += more
        return end

    def release(self, block: Block) -> None:
        """Give a block back, joined with free neighbours."""
        for neighbour in (block.before, block.after):
            if neighbour and neighbour.free:
                self._withdraw(neighbour)
                block.size += neighbour.size
                if self.ends.get(block.small) is neighbour:
                    self.ends[block.small] = block
                if neighbour is block.before:
                    block.address, block.before = neighbour.address, neighbour.before
                    if block.before:
                        block.before.after = block
                else:
                    block.after = neighbour.after
                    if block.after:
                        block.after.before = block
        self._offer(block)

    def _offer(self, block: Block) -> None:
        block.free = True
        self.blocks[block.address] = block
        insort(self.free[block.small], (block.size, block.address))

    def _withdraw(self, block: Block) -> None:
        del self.blocks[block.address]
        free = self.free[block.small]
        del free[bisect_left(free, (block.size, block.address))]
