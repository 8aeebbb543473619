"""Where a run may pause: before each of its microbatches.

A backward that is run in slices hands over here, to whoever wants to do something else in
between; in other runs nothing happens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["pause", "paused_seconds", "pausing"]


class _Local(threading.local):
    pause: Callable[[], None] | None = None
    seconds = 0.0


_local = _Local()


def pause() -> None:
    """A microbatch is about to run."""
    if _local.pause is not None:
        began = time.perf_counter()
        _local.pause()
        _local.seconds += time.perf_counter() - began


def paused_seconds() -> float:
    """How long runs in this thread have paused so far."""
    return _local.seconds


@contextmanager
def pausing(hand_over: Callable[[], None]) -> Iterator[None]:
    """Call ``hand_over`` before each microbatch that runs inside, in this thread."""
    before, _local.pause = _local.pause, hand_over
    try:
        yield
    finally:
        _local.pause = before
