"""A model of PyTorch's caching allocator for CUDA: from bytes that are live to bytes reserved.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` in its default configuration, for one
stream: best fit within a pool, segments of fixed sizes, split and merged blocks, and expandable
segments where asked for. Nothing here touches a device.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

import torch

from koila_rl.errors import InsufficientMemoryError

__all__ = ["AllocatorListener", "Block", "CachingAllocator"]

MIB = 1 << 20
MIN_BLOCK = 512
SMALL_SIZE = 1 * MIB  # requests up to this come from the small pool
SMALL_SEGMENT = 2 * MIB
MIN_LARGE_SEGMENT = 10 * MIB  # requests from this on get a segment of their own size
LARGE_SEGMENT = 20 * MIB
ROUND_LARGE = 2 * MIB
ADDRESS_SPACE = LARGE_SEGMENT << 36  # of each pool's expandable segment; more than any device has


@dataclass(eq=False)
class Block:
    """A stretch of one segment: in use, free, or (in an expandable segment) not mapped."""

    pool: _Pool = field(repr=False)
    address: int
    size: int
    mapped: bool = True
    in_use: bool = False
    before: Block | None = field(default=None, repr=False)
    after: Block | None = field(default=None, repr=False)

    @property
    def is_free(self) -> bool:
        """Whether a request may be served from here without reserving more."""
        return self.mapped and not self.in_use

    @property
    def whole_segment(self) -> bool:
        """Whether nothing else is left in its segment."""
        return self.before is None and self.after is None

    @property
    def room(self) -> int:
        """Bytes that it could grow to without moving."""
        after = self.after
        return self.size + (after.size if after is not None and not after.mapped else 0)

    def split_off(self, size: int) -> Block:
        """Cut to ``size`` bytes; the rest becomes the next block, in the same state."""
        rest = Block(self.pool, self.address + size, self.size - size, self.mapped)
        rest.before, rest.after = self, self.after
        if self.after is not None:
            self.after.before = rest
        self.after, self.size = rest, size
        return rest

    def absorb_after(self) -> None:
        """Take the next block into this one."""
        gone = self.after
        assert gone is not None
        self.size += gone.size
        self.after = gone.after
        if self.after is not None:
            self.after.before = self


class _Pool:
    """The blocks that are not in use, for small or for large requests."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT  # of an expandable segment
        self.free: list[Block] = []  # by size, then address
        self.unmapped: list[Block] = []  # by address

    def add(self, block: Block) -> Block:
        """Keep a block that is not in use, merged with neighbours in the same state."""
        for neighbour in (block.before, block.after):
            if neighbour is not None and self._alike(neighbour, block):
                self.remove(neighbour)
        if block.after is not None and self._alike(block.after, block):
            block.absorb_after()
        if block.before is not None and self._alike(block.before, block):
            block = block.before
            block.absorb_after()
        if block.mapped:
            insort(self.free, block, key=_size_and_address)
        else:
            insort(self.unmapped, block, key=_address)
        return block

    def remove(self, block: Block) -> None:
        if block.mapped:
            del self.free[bisect_left(self.free, _size_and_address(block), key=_size_and_address)]
        else:
            del self.unmapped[bisect_left(self.unmapped, block.address, key=_address)]

    def best_fit(self, size: int) -> Block | None:
        """The smallest free block of at least ``size`` bytes, the lowest address among equals."""
        i = bisect_left(self.free, (size, 0), key=_size_and_address)
        if i == len(self.free):
            return None
        # A block that borders on unmapped space counts as what it can grow to, so that the space
        # stays in one piece.
        while i + 1 < len(self.free) and self.free[i + 1].room < self.free[i].room:
            i += 1
        return self.free[i]

    @staticmethod
    def _alike(one: Block, other: Block) -> bool:
        return not one.in_use and one.mapped == other.mapped


def _size_and_address(block: Block) -> tuple[int, int]:
    return block.size, block.address


def _address(block: Block) -> int:
    return block.address


class CachingAllocator:
    """Serves requests as PyTorch's allocator would, and keeps its statistics.

    Args:
        capacity: bytes that may be reserved; ``None`` for no limit.
        expandable_segments: as ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``.

    >>> allocator = CachingAllocator()
    >>> allocator.allocate(1, nbytes=100)
    >>> allocator.active_bytes, allocator.reserved_bytes
    (512, 2097152)
    """

    def __init__(self, capacity: int | None = None, *, expandable_segments: bool = False) -> None:
        self.capacity = capacity
        self.active_bytes = 0
        """Bytes of the blocks in use, as ``active_bytes.all`` of ``torch.cuda.memory_stats``."""
        self.reserved_bytes = 0
        """Bytes taken from the device, as ``reserved_bytes.all``."""
        self.peak_active_bytes = 0
        self.peak_reserved_bytes = 0
        self._expandable = expandable_segments
        self._small, self._large = _Pool(small=True), _Pool(small=False)
        self._heads: dict[int, Block] = {}  # address -> first block of each segment
        self._in_use: dict[int, Block] = {}
        self._next_address = 0
        if expandable_segments:
            for pool in (self._small, self._large):
                pool.add(self._new_segment(pool, ADDRESS_SPACE, mapped=False))

    def allocate(self, key: int, nbytes: int) -> None:
        """Serve a request under a key of the caller's; zero bytes take nothing, as on CUDA.

        Raises:
            InsufficientMemoryError: not even releasing all cached segments makes room.
        """
        if key in self._in_use:
            raise ValueError(f"key {key} is in use")
        if nbytes == 0:
            return
        size = -(-nbytes // MIN_BLOCK) * MIN_BLOCK
        pool = self._small if size <= SMALL_SIZE else self._large
        block = pool.best_fit(size) or self._reserve(pool, size)
        if block is None:
            self.release_cached()
            block = self._reserve(pool, size)
        if block is None:
            raise InsufficientMemoryError(
                f"{nbytes:,} bytes do not fit: {self.reserved_bytes:,} of {self.capacity:,} "
                f"bytes are reserved, {self.active_bytes:,} of them in use"
            )
        pool.remove(block)
        block.in_use = True
        rest = block.size - size
        if rest >= MIN_BLOCK if pool.small or self._expandable else rest > SMALL_SIZE:
            pool.add(block.split_off(size))
        self._in_use[key] = block
        self.active_bytes += block.size
        self.peak_active_bytes = max(self.peak_active_bytes, self.active_bytes)

    def free(self, key: int) -> None:
        """Give the key's block back to the cache, merged with free neighbours."""
        block = self._in_use.pop(key, None)
        if block is None:
            return
        block.in_use = False
        self.active_bytes -= block.size
        block.pool.add(block)

    def release_cached(self) -> None:
        """Give back to the device what ``torch.cuda.empty_cache()`` would."""
        for block in (*self._small.free, *self._large.free):
            if self._expandable:
                self._unmap(block)
            elif block.whole_segment:
                block.pool.remove(block)
                del self._heads[block.address]
                self.reserved_bytes -= block.size

    @property
    def releasable_bytes(self) -> int:
        """Reserved bytes that :meth:`release_cached` would give back."""
        free = (*self._small.free, *self._large.free)
        if self._expandable:
            return sum(max(0, end - start) for start, end in map(_whole_pages, free))
        return sum(block.size for block in free if block.whole_segment)

    def segments(self) -> list[list[Block]]:
        """The blocks of every segment, in the order of their addresses."""
        segments = []
        for head in self._heads.values():
            blocks = [head]
            while (after := blocks[-1].after) is not None:
                blocks.append(after)
            segments.append(blocks)
        return segments

    def _reserve(self, pool: _Pool, size: int) -> Block | None:
        """A free block of at least ``size`` bytes in memory new from the device."""
        if self._expandable:
            return self._expand(pool, size)
        if size <= SMALL_SIZE:
            segment = SMALL_SEGMENT
        elif size < MIN_LARGE_SEGMENT:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // ROUND_LARGE) * ROUND_LARGE
        if not self._take(segment):
            return None
        return pool.add(self._new_segment(pool, segment, mapped=True))

    def _take(self, nbytes: int) -> bool:
        if self.capacity is not None and self.reserved_bytes + nbytes > self.capacity:
            return False
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _new_segment(self, pool: _Pool, size: int, mapped: bool) -> Block:
        head = Block(pool, self._next_address, size, mapped)
        self._heads[head.address] = head
        self._next_address += size
        return head

    def _expand(self, pool: _Pool, size: int) -> Block | None:
        """Map pages behind the lowest free block or gap that can grow to ``size``."""
        for lowest in pool.unmapped:
            free = lowest.before is not None and lowest.before.is_free
            start = lowest.before if lowest.before is not None and free else lowest
            if _reach(start) >= size:
                break
        else:
            raise AssertionError("the address space of the model is used up")
        gap: Block | None = start.after if start.mapped else start
        missing = size - start.size if start.mapped else size
        while missing > 0:
            assert gap is not None
            pages = -(-min(missing, gap.size) // pool.page) * pool.page
            if not self._take(pages):
                return None
            pool.remove(gap)
            rest = gap.split_off(pages) if pages < gap.size else None
            gap.mapped = True
            if rest is not None:
                pool.add(rest)
            start = pool.add(gap)
            missing, gap = size - start.size, start.after
        return start

    def _unmap(self, block: Block) -> None:
        """Give back the whole pages of a free block."""
        start, end = _whole_pages(block)
        if start >= end:
            return
        pool = block.pool
        pool.remove(block)
        pieces = [block]
        for cut in (start, end):
            last = pieces[-1]
            if last.address < cut < last.address + last.size:
                pieces.append(last.split_off(cut - last.address))
        for piece in pieces:
            piece.mapped = piece.address != start
        for piece in pieces:
            pool.add(piece)
        self.reserved_bytes -= end - start


def _reach(block: Block) -> int:
    """Bytes from here to the next block in use."""
    total, at = 0, block
    while not at.in_use:
        total += at.size
        if at.after is None:
            break
        at = at.after
    return total


def _whole_pages(block: Block) -> tuple[int, int]:
    page = block.pool.page
    start = -(-block.address // page) * page
    return start, (block.address + block.size) // page * page


class AllocatorListener:
    """Lets a :class:`CachingAllocator` follow the storages of a ``StorageTracker``."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator

    def allocated(self, key: int, nbytes: int, name: str) -> None:
        """Serve the storage's request; raises ``torch.OutOfMemoryError`` where that fails."""
        try:
            self.allocator.allocate(key, nbytes)
        except InsufficientMemoryError as error:
            raise torch.OutOfMemoryError(f"{name}: {error}") from None

    def freed(self, key: int, nbytes: int) -> None:
        """Give the storage's block back to the cache."""
        self.allocator.free(key)
