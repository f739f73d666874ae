"""A replay of CUDA's caching allocator: the memory that it reserves for a sequence of allocations."""

from bisect import bisect_left, insort
from dataclasses import dataclass

SMALL, LARGE = 2**20, 10 * 2**20  # Bytes: requests up to SMALL have a pool, those from LARGE on a segment each.
GRAIN, SEGMENT_GRAIN = 512, 2 * 2**20  # Bytes that requests and segments are rounded up to.
STRETCH = 2**50  # Address range reserved for an expandable segment.


@dataclass(frozen=True)
class StorageEvent:
    """The allocation of a storage; with 0 bytes, its release."""

    storage: int
    bytes: int
    weights: int = 0  # Bytes of copies of weights among them, which do not grow with the items.


def rounded(bytes_: int) -> int:
    """Returns the size that the allocator rounds a request to."""
    return max(GRAIN, -(-bytes_ // GRAIN) * GRAIN)


@dataclass
class MemoryBlock:
    """A part of a segment, with its neighbours."""

    size: int
    small: bool  # True for the pool of small requests.
    address: int = 0  # Segments follow one another, in the order of their allocation.
    free: bool = False
    before: "MemoryBlock | None" = None
    after: "MemoryBlock | None" = None


class PlainAllocator:
    """The allocator of a CPU: it allocates exact sizes and caches nothing."""

    def __init__(self) -> None:
        self.standing_bytes = 0
        self.reserved_bytes = 0  # The peak of the allocated bytes.

    def allocate(self, size: int) -> MemoryBlock:
        self.standing_bytes += size
        self.reserved_bytes = max(self.reserved_bytes, self.standing_bytes)
        return MemoryBlock(size, small=False)

    def release(self, block: MemoryBlock) -> None:
        self.standing_bytes -= block.size


class CachingAllocator:
    """torch's caching allocator: the memory that it reserves and keeps.

    A block may be larger than its request: the remainder of a large one is split off only if it is more than 1 MiB.
    torch counts such a block as allocated in full.

    With `expandable` segments each pool is one segment that grows at its end, which avoids fragmentation.
    https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDACachingAllocator.cpp describes the constants.
    """

    def __init__(self, *, expandable: bool = False) -> None:
        self.expandable = expandable
        self.reserved_bytes = 0
        # Sizes and addresses of the free blocks in order, for small and for large requests.
        self.free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self.blocks: dict[int, MemoryBlock] = {}  # The free blocks by address.
        self.ends: dict[bool, MemoryBlock] = {}  # Last blocks of the expandable segments.
        self._next_address = 0

    def allocate(self, size: int) -> MemoryBlock:
        small = size <= SMALL
        free = self.free[small]
        place = bisect_left(free, (size, 0))
        if place < len(free):
            end = self.ends.get(small)  # It counts as large as it may grow, so that other blocks are preferred.
            if end and free[place][1] == end.address and place + 1 < len(free):
                place += 1
            block = self.blocks.pop(free.pop(place)[1])
        else:
            block = self._grown(size, small) if self.expandable else self._segment(size, small)
        block.free = False
        rest = block.size - size
        if rest >= GRAIN if small or self.expandable else rest > SMALL:
            remaining = MemoryBlock(rest, small, block.address + size, before=block, after=block.after)
            if block.after:
                block.after.before = remaining
            block.size, block.after = size, remaining
            if self.ends.get(small) is block:
                self.ends[small] = remaining
            self._offer(remaining)
        return block

    def _segment(self, size: int, small: bool) -> MemoryBlock:
        whole = -(-size // SEGMENT_GRAIN) * SEGMENT_GRAIN
        segment = SEGMENT_GRAIN if small else 2 * LARGE if size < LARGE else whole
        self.reserved_bytes += segment
        return MemoryBlock(segment, small, self._addresses(segment))

    def _addresses(self, size: int) -> int:
        """Returns the first address of an unused range."""
        self._next_address += size
        return self._next_address - size

    def _grown(self, size: int, small: bool) -> MemoryBlock:
        """Returns the last block of the expandable segment, grown by the pages that the request needs."""
        page = SEGMENT_GRAIN if small else 2 * LARGE
        end = self.ends.get(small)
        if end and end.free:
            self._withdraw(end)
            more = -(-(size - end.size) // page) * page
            end.size += more
        else:
            more = -(-size // page) * page
            block = MemoryBlock(more, small, end.address + end.size if end else self._addresses(STRETCH), before=end)
            if end:
                end.after = block
            self.ends[small] = end = block
        self.reserved_bytes += more
        return end

    def release(self, block: MemoryBlock) -> None:
        """Frees a block, and joins it with free neighbours."""
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

    def _offer(self, block: MemoryBlock) -> None:
        block.free = True
        self.blocks[block.address] = block
        insort(self.free[block.small], (block.size, block.address))

    def _withdraw(self, block: MemoryBlock) -> None:
        del self.blocks[block.address]
        free = self.free[block.small]
        del free[bisect_left(free, (block.size, block.address))]
