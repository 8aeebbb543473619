"""The allocator model against sequences derived by hand, its invariants, and a real device."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from koila_rl.errors import InsufficientMemoryError
from koila_rl.memory.allocator import AllocatorListener, Block, CachingAllocator
from koila_rl.memory.tracking import StorageTracker

MIB = 1 << 20

# Derived by hand from the rules in c10/cuda/CUDACachingAllocator.cpp, not recorded on a device.
# Each: requests in MiB (positive) or the position of the request to free (negative, from 1),
# then active and reserved MiB at the end.
BY_HAND: dict[str, tuple[list[float], float, float]] = {
    "a small request reserves 2 MiB": ([0.25], 0.25, 2),
    "two of 1 MiB share a segment": ([1, 1], 2, 2),
    "the third needs another": ([1, 1, 1], 3, 4),
    "over 1 MiB reserves 20": ([1.5], 1.5, 20),
    "small and large apart": ([1.5, 0.25], 1.75, 22),
    "just under 10 MiB still shares 20": ([9, 9], 18, 20),
    "whoever comes last takes the remainder of 1 MiB": ([9.5, 9.5], 20, 20),
    "from 10 MiB on, its own size": ([10, 12], 22, 22),
    "rounded to 2 MiB, and 1 MiB is no remainder to keep": ([11], 12, 12),
    "more than 1 MiB is": ([10.5], 10.5, 12),  # 1.5 MiB are left to be used
    "that remainder serves": ([10.5, 1.25], 12, 12),
    "small blocks split down to 512 bytes": ([0.5, -1, 0.25, 0.25], 0.5, 2),
    "best fit, not first fit": ([14, 12, -1, -2, 11.5], 12, 26),
    "a free segment serves a smaller request, remainder split": ([40, -1, 24, 16], 40, 40),
    "neighbours merge whatever the order": ([6, 6, 6, -2, -1, -3, 18], 18, 20),
    "a hole too small is passed over": ([6, 6, 6, -2, 7], 6 + 6 + 7, 40),
    "large blocks do not serve small requests": ([2, -1, 0.5], 0.5, 22),
    "freed memory stays reserved": ([30, -1], 0, 30),
}
EXPANDABLE: dict[str, tuple[list[float], float, float]] = {
    "small pages of 2 MiB": ([0.25], 0.25, 2),
    "large pages of 20 MiB": ([30], 30, 40),
    "any remainder is kept": ([30.5, 9.5], 40, 40),
    "grows in place behind a free tail": ([30, 20], 50, 60),
    "no fragmentation between segments": ([20, 20, -1, -2, 40], 40, 40),
    "holes stay": ([20, 20, 20, -2, 25], 65, 100),
    "small and large apart": ([30, 0.5], 30.5, 42),
    "a hole serves before the tail, which can grow": ([9, 3, -1, 8, 28], 39, 40),
}


def run(allocator: CachingAllocator, steps: list[float]) -> None:
    requests = itertools.count(1)
    for step in steps:
        if step < 0:
            allocator.free(int(-step))
        else:
            allocator.allocate(next(requests), int(step * MIB))


@pytest.mark.parametrize("name", BY_HAND)
def test_sequences_by_hand(name: str):
    steps, active, reserved = BY_HAND[name]
    allocator = CachingAllocator()
    run(allocator, steps)
    assert (allocator.active_bytes / MIB, allocator.reserved_bytes / MIB) == (active, reserved)


@pytest.mark.parametrize("name", EXPANDABLE)
def test_expandable_sequences_by_hand(name: str):
    steps, active, reserved = EXPANDABLE[name]
    allocator = CachingAllocator(expandable_segments=True)
    run(allocator, steps)
    assert (allocator.active_bytes / MIB, allocator.reserved_bytes / MIB) == (active, reserved)


def test_peaks_stay():
    allocator = CachingAllocator()
    run(allocator, [30, 10, -1, -2])
    assert allocator.peak_active_bytes == 40 * MIB
    assert allocator.peak_reserved_bytes == 40 * MIB
    allocator.release_cached()
    assert (allocator.active_bytes, allocator.reserved_bytes) == (0, 0)
    assert allocator.peak_reserved_bytes == 40 * MIB


def test_a_full_device_first_gives_back_free_segments():
    allocator = CachingAllocator(60 * MIB)
    run(allocator, [20, 20, 20, -1, -3])
    assert allocator.releasable_bytes == 40 * MIB
    allocator.allocate(4, 30 * MIB)
    assert (allocator.active_bytes, allocator.reserved_bytes) == (50 * MIB, 50 * MIB)


def test_fragmentation_fails_where_bytes_would_suffice():
    allocator = CachingAllocator(40 * MIB)
    run(allocator, [5] * 8)
    for key in (1, 3, 5, 7):
        allocator.free(key)
    assert allocator.releasable_bytes == 0
    with pytest.raises(InsufficientMemoryError, match="10,485,760 bytes do not fit: 41,943,040 of"):
        allocator.allocate(9, 10 * MIB)
    assert allocator.active_bytes == 20 * MIB
    allocator.allocate(9, 5 * MIB)


def test_expandable_segments_give_back_whole_pages():
    allocator = CachingAllocator(80 * MIB, expandable_segments=True)
    run(allocator, [5, 50, 5, -2])  # free from 5 to 55 MiB: the page from 20 to 40 is whole
    assert allocator.reserved_bytes == 60 * MIB
    assert allocator.releasable_bytes == 20 * MIB
    allocator.release_cached()
    assert allocator.reserved_bytes == 40 * MIB
    allocator.allocate(4, 50 * MIB)  # the gap is mapped again and joins both its neighbours
    assert (allocator.active_bytes, allocator.reserved_bytes) == (60 * MIB, 60 * MIB)
    with pytest.raises(InsufficientMemoryError):
        allocator.allocate(5, 30 * MIB)


def test_zero_bytes_and_keys():
    allocator = CachingAllocator()
    allocator.allocate(1, 0)
    assert allocator.reserved_bytes == 0
    allocator.free(1)
    allocator.allocate(2, 1)
    with pytest.raises(ValueError, match="key 2 is in use"):
        allocator.allocate(2, 1)


def test_follows_a_tracker_and_refuses_what_does_not_fit():
    allocator = CachingAllocator(22 * MIB)
    with StorageTracker(AllocatorListener(allocator)) as tracker:
        x = torch.empty(2 * MIB, dtype=torch.uint8)
        y = x[: MIB // 2] + 1
        with pytest.raises(torch.OutOfMemoryError, match=r"aten\.empty\.memory_format: 20,9"):
            torch.empty(20 * MIB - 1, dtype=torch.uint8)
        assert allocator.active_bytes == tracker.live_bytes
        del x, y
    assert (allocator.active_bytes, allocator.reserved_bytes) == (0, 22 * MIB)


SIZES = st.one_of(
    st.integers(0, 4096),
    st.integers(0, 30 * MIB),
    st.sampled_from([MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 20 * MIB]),
)
STEPS = st.lists(st.one_of(SIZES, st.integers(-50, -1)), max_size=60)


@settings(deadline=None, max_examples=150)
@given(STEPS, st.booleans(), st.sampled_from([None, 70 * MIB]))
def test_invariants(steps: list[int], expandable: bool, capacity: int | None):
    allocator = CachingAllocator(capacity, expandable_segments=expandable)
    live: dict[int, int] = {}
    for key, step in enumerate(steps):
        if step == -50:
            before, releasable = allocator.reserved_bytes, allocator.releasable_bytes
            allocator.release_cached()
            assert allocator.reserved_bytes == before - releasable
        elif step < 0:
            if live:
                gone = sorted(live)[-step % len(live)]
                del live[gone]
                allocator.free(gone)
        else:
            try:
                allocator.allocate(key, step)
                live[key] = step
            except InsufficientMemoryError:
                assert capacity is not None
        check(allocator, live, expandable)
    for key in live:
        allocator.free(key)
    allocator.release_cached()
    assert (allocator.active_bytes, allocator.reserved_bytes) == (0, 0)


def check(allocator: CachingAllocator, live: dict[int, int], expandable: bool) -> None:
    blocks = [block for segment in allocator.segments() for block in segment]
    for segment in allocator.segments():
        for one, other in itertools.pairwise(segment):
            assert one.address + one.size == other.address, "blocks neither overlap nor leave gaps"
            same_state = not one.in_use and not other.in_use and one.mapped == other.mapped
            assert not same_state, "free neighbours have merged"
    by_address = sorted(blocks, key=lambda block: block.address)
    for one, other in itertools.pairwise(by_address):
        assert one.address + one.size <= other.address, "segments do not overlap"
    used = [block for block in blocks if block.in_use]
    needed = [-(-size // 512) * 512 for size in live.values() if size]
    for size in needed:
        # Small requests are served from the small pool and large ones from the large.
        assert any(b.size >= size and b.pool.small == (size <= MIB) for b in used)
    assert len(used) == len(needed)
    slack = 0 if expandable else MIB
    assert sum(needed) <= allocator.active_bytes <= sum(needed) + slack * len(needed)
    assert allocator.active_bytes == total(used)
    assert allocator.reserved_bytes == total([block for block in blocks if block.mapped])
    assert allocator.reserved_bytes <= (allocator.capacity or allocator.reserved_bytes)
    assert allocator.active_bytes <= allocator.peak_active_bytes <= allocator.peak_reserved_bytes


def total(blocks: list[Block]) -> int:
    return sum(block.size for block in blocks)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", BY_HAND)
def test_sequences_on_a_device(name: str):
    steps, active, reserved = BY_HAND[name]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_stats()
    held: list[torch.Tensor | None] = []
    for step in steps:
        if step < 0:
            held[int(-step) - 1] = None
        else:
            held.append(torch.empty(int(step * MIB), dtype=torch.uint8, device="cuda"))
    stats = torch.cuda.memory_stats()
    grown = [stats[k] - base[k] for k in ("active_bytes.all.current", "reserved_bytes.all.current")]
    assert [nbytes / MIB for nbytes in grown] == [active, reserved]
