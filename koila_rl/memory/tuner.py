"""The fastest microbatch size of those that fit: each is timed over the first updates.

More samples at once are not always faster: what one pass writes should still lie in the cache
when the next reads it. Candidates take turns, so that a machine that slows down slows all alike,
and the least time of each counts, since nothing makes a pass faster than it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

__all__ = ["Tuner", "candidates"]

T = TypeVar("T")

# Updates a candidate is timed for. The first of each is left out: memory is mapped then.
ROUNDS = 5
# The smallest candidate is this part of the largest.
SMALLEST = 64


def candidates(fit: int, n: int) -> list[int]:
    """Sizes to try, largest first: the whole minibatch if it fits, ``fit``, and powers of two.

    Only one of those that lead to as many microbatches.
    """
    largest = n if fit >= n else fit
    sizes = [largest]
    power = 1 << (largest.bit_length() - 1)
    while power >= max(1, largest // SMALLEST):
        sizes.append(power)
        power //= 2
    by_count: dict[int, int] = {}
    for size in sizes:
        by_count.setdefault(-(-n // size), size)
    return list(by_count.values())


class Tuner:
    """Times the candidates of one program and keeps the fastest.

    ``size`` is what the next update should run at, and ``done`` whether it is settled.
    """

    def __init__(self, sizes: list[int]) -> None:
        self.seconds: dict[int, list[float]] = {size: [] for size in sizes}

    @property
    def done(self) -> bool:
        return all(len(taken) >= ROUNDS for taken in self.seconds.values())

    @property
    def size(self) -> int:
        if not self.done:
            return min(self.seconds, key=lambda size: len(self.seconds[size]))
        return min(self.seconds, key=lambda size: min(self.seconds[size][1:]))

    def failed(self, size: int) -> None:
        """The device ran out of memory at this size: it and larger ones are out."""
        kept = {known: taken for known, taken in self.seconds.items() if known < size}
        self.seconds = kept or {1: []}

    def timed(self, size: int, device: torch.device, run: Callable[[], T]) -> T:
        """``run()``, an update at ``size``, and how long it took on the device."""
        taken = self.seconds.get(size)
        if device.type == "cuda":
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            result = run()
            end.record()
            end.synchronize()
            seconds = begin.elapsed_time(end) / 1e3
        else:
            start = time.perf_counter()
            result = run()
            if device.type == "mps":
                torch.mps.synchronize()
            seconds = time.perf_counter() - start
        if taken is not None:
            taken.append(seconds)
        return result
