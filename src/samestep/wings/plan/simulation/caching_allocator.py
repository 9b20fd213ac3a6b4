"""Model of torch's caching allocator of a GPU: which bytes it takes from the device, given what is allocated and freed in which order.

    allocated   bytes of blocks that tensors have, each rounded up to 512
    reserved    bytes that the allocator has taken from the device: it keeps what is freed, for later allocations

The rules are those of torch's `CUDACachingAllocator`:

    pools       one for each stream and each of two kinds of blocks, small (up to 1 MiB) and large; a block is used again only on
                the stream that it was allocated on, so what one stream has freed is of no use to another
    best fit    of the free blocks of a pool that are large enough the smallest one, at the lowest address
    splitting   a block that is larger than needed is split, but in the large pool only where more than 1 MiB would be left
    merging     a freed block is merged with free neighbours of its segment
    segments    what no free block can hold is taken from the device: 2 MiB for small blocks, 20 MiB for those below 10 MiB, else
                the bytes themselves, in whole 2 MiB

With `expandable_segments` (`PYTORCH_ALLOC_CONF`), which samestep sets on GPUs, each pool is one segment that grows at its end by pages
of 2 MiB (small) or 20 MiB (large); then every remainder of 512 bytes is split off.

Blocks that one stream allocates and another uses are taken to be free as soon as they are freed, and nothing is given back.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from samestep.program.buckets import round_up

LEAST_BLOCK = 512
"""Bytes to whose multiples all sizes are rounded up."""
MOST_SMALL = 2**20
"""Bytes of the largest block of a small pool; in a large one no remainder of at most that size is split off."""
SMALL_SEGMENT = 2 * 2**20
"""Bytes of a segment of small blocks, and of a page of an expandable one."""
LARGE_SEGMENT = 20 * 2**20
"""Bytes of a segment of blocks below `LEAST_OWN`, and of a page of an expandable one with large blocks."""
LEAST_OWN = 10 * 2**20
"""Bytes from which on a block gets a segment of its own."""
OWN_UNIT = 2 * 2**20
"""Bytes to whose multiples such segments are rounded up."""


def block_bytes(size_bytes: int) -> int:
    """Return the bytes of the block that a tensor of a size in bytes gets."""
    return max(LEAST_BLOCK, round_up(size_bytes, LEAST_BLOCK))


class MemoryBlock:
    """A run of bytes of a segment, which a tensor has or which is free; `before` and `after` are its neighbours."""

    __slots__ = ("address", "after", "before", "is_free", "pool", "size")

    def __init__(self, pool: _Pool, address: int, size: int) -> None:
        self.pool, self.address, self.size = pool, address, size
        self.is_free = False
        self.before: MemoryBlock | None = None
        self.after: MemoryBlock | None = None


class CachingAllocator:
    """The allocator of one device: `take` allocates a block, `give` frees it."""

    def __init__(self, *, expandable: bool) -> None:
        """Begin with nothing taken from the device; `expandable` is whether segments grow."""
        self._expandable = expandable
        self._pools: dict[tuple[str, bool], _Pool] = {}
        self.allocated_bytes = self.most_allocated_bytes = self.reserved_bytes = 0

    def take(self, size_bytes: int, stream: str) -> MemoryBlock:
        """Return the block of a tensor of a size in bytes, allocated on a stream."""
        size = block_bytes(size_bytes)
        key = stream, size <= MOST_SMALL
        if key not in self._pools:
            self._pools[key] = _Pool(is_small=key[1], expandable=self._expandable)
        block, added = self._pools[key].take(size)
        self.reserved_bytes += added
        self.allocated_bytes += block.size
        self.most_allocated_bytes = max(self.most_allocated_bytes, self.allocated_bytes)
        return block

    def give(self, block: MemoryBlock) -> None:
        """Free a block that `take` has returned."""
        self.allocated_bytes -= block.size
        block.pool.give(block)

    def reserved_by_stream(self) -> dict[str, int]:
        """Return the bytes taken from the device, by the stream whose blocks they hold."""
        sizes: dict[str, int] = {}
        for (stream, _), pool in self._pools.items():
            sizes[stream] = sizes.get(stream, 0) + pool.reserved_bytes
        return sizes


class _Pool:
    """The blocks of one stream, small or large ones; the end of a segment is the size of an expandable pool's only one."""

    def __init__(self, *, is_small: bool, expandable: bool) -> None:
        self._is_small, self._expandable = is_small, expandable
        self._free: list[tuple[int, int, MemoryBlock]] = []
        self._last: MemoryBlock | None = None
        self.reserved_bytes = 0

    def take(self, size: int) -> tuple[MemoryBlock, int]:
        """Return a block of a rounded size in bytes, and the bytes that were taken from the device for it."""
        added = 0
        block = self._best_fit(size)
        if block is None:
            added = self._grow(size)
            block = self._best_fit(size)
            assert block is not None, "a segment that cannot hold the block it was taken for"
        rest = block.size - size
        if rest >= LEAST_BLOCK if self._is_small or self._expandable else rest > MOST_SMALL:
            self._split(block, size)
        return block, added

    def give(self, block: MemoryBlock) -> None:
        """Free a block, and merge it with its free neighbours."""
        previous, after = block.before, block.after
        if previous is not None and previous.is_free:
            self._remove(previous)
            previous.size += block.size
            self._join(previous, after)
            block = previous
        if after is not None and after.is_free:
            self._remove(after)
            block.size += after.size
            self._join(block, after.after)
        self._insert(block)

    def _best_fit(self, size: int) -> MemoryBlock | None:
        """Return the smallest free block that holds a size, no longer free; the block at the end of an expandable segment last,
        because it counts as large as it can grow."""
        index = bisect_left(self._free, (size, -1))
        if index == len(self._free):
            return None
        if self._expandable and self._free[index][2] is self._last and index + 1 < len(self._free):
            index += 1
        block = self._free.pop(index)[2]
        block.is_free = False
        return block

    def _grow(self, size: int) -> int:
        """Take bytes from the device so that a free block holds a size; return how many."""
        page = SMALL_SEGMENT if self._is_small else LARGE_SEGMENT
        if not self._expandable:
            taken = page if size < LEAST_OWN else round_up(size, OWN_UNIT)
            self._insert(MemoryBlock(self, self.reserved_bytes, taken))
        else:
            last = self._last
            has = last.size if last is not None and last.is_free else 0
            taken = round_up(size - has, page)
            if last is not None and last.is_free:
                self._remove(last)
                last.size += taken
                self._insert(last)
            else:
                block = MemoryBlock(self, self.reserved_bytes, taken)
                self._join(last, block)
                self._last = block
                self._insert(block)
        self.reserved_bytes += taken
        return taken

    def _split(self, block: MemoryBlock, size: int) -> None:
        rest = MemoryBlock(self, block.address + size, block.size - size)
        block.size = size
        after = block.after
        self._join(block, rest)
        self._join(rest, after)
        if self._last is block:
            self._last = rest
        self._insert(rest)

    def _join(self, memory_block: MemoryBlock | None, after: MemoryBlock | None) -> None:
        """Make two blocks neighbours; a block without a successor ends its segment."""
        if memory_block is not None:
            memory_block.after = after
        if after is not None:
            after.before = memory_block
        elif self._expandable:
            self._last = memory_block

    def _insert(self, block: MemoryBlock) -> None:
        block.is_free = True
        insort(self._free, (block.size, block.address, block))

    def _remove(self, block: MemoryBlock) -> None:
        del self._free[bisect_left(self._free, (block.size, block.address))]
        block.is_free = False
