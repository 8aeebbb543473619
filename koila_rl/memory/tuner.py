"""The fastest microbatch size of those that fit: each is timed over the first updates.

More samples at once are not always faster: what one pass writes should still lie in the cache
when the next reads it. Candidates take turns, so that a machine that slows down slows all alike,
and the least time of each counts, since nothing makes a pass faster than it is.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch

from koila_rl.engine.program import Program
from koila_rl.engine.turns import paused_seconds

__all__ = ["Tuner", "candidates", "keeping_sizes", "signature"]

T = TypeVar("T")

# Updates a candidate is timed for. The first of each is left out: memory is mapped then.
ROUNDS = 5
# The smallest candidate is this part of the largest.
SMALLEST = 64

# Sizes found before, by program: of the run that goes on, and of what it finds.
_kept: ContextVar[dict[str, int] | None] = ContextVar("kept", default=None)


@contextmanager
def keeping_sizes(sizes: dict[str, int]) -> Iterator[None]:
    """Inside, sizes that were timed are put into ``sizes``; those in there are not timed again."""
    token = _kept.set(sizes)
    try:
        yield
    finally:
        _kept.reset(token)


def signature(program: Program) -> str:
    """The same for a program recorded again in another process: minibatch size, calls, shapes."""
    form = [(call.name, [(m.shape, str(m.dtype)) for m in call.metas]) for call in program.calls]
    return f"{program.n}-{hashlib.sha256(repr(form).encode()).hexdigest()[:16]}"


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

    def __init__(self, sizes: list[int], name: str = "") -> None:
        self.seconds: dict[int, list[float]] = {size: [] for size in sizes}
        self._name = name

    @property
    def _known(self) -> int | None:
        """A size found in a run before, if it fits."""
        kept = (_kept.get() or {}).get(self._name)
        return kept if kept is not None and kept <= max(self.seconds) else None

    @property
    def done(self) -> bool:
        enough = all(len(taken) >= ROUNDS for taken in self.seconds.values())
        return enough or self._known is not None

    @property
    def size(self) -> int:
        if self._known is not None:
            return self._known
        if not self.done:
            return min(self.seconds, key=lambda size: len(self.seconds[size]))
        fastest = min(self.seconds, key=lambda size: min(self.seconds[size][1:]))
        kept = _kept.get()
        if self._name and kept is not None:
            kept[self._name] = fastest
        return fastest

    def failed(self, size: int) -> None:
        """The device ran out of memory at this size: it and larger ones are out."""
        kept = {known: taken for known, taken in self.seconds.items() if known < size}
        self.seconds = kept or {1: []}

    def timed(self, size: int, device: torch.device, run: Callable[[], T]) -> T:
        """``run()``, an update at ``size``, and how long it took on the device.

        Pauses of a backward in slices do not count; on CUDA, where the device works on in a
        pause, such an update is not timed.
        """
        taken, paused = self.seconds.get(size), paused_seconds()
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
        paused = paused_seconds() - paused
        if taken is not None and not (paused and device.type == "cuda"):
            taken.append(seconds - paused)
        return result
