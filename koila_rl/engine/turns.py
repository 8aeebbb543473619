"""Where a run may pause: before each of its microbatches.

A backward that is run in slices hands over here, to whoever wants to do something else in
between; in other runs nothing happens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["pause", "pausing"]


class _Local(threading.local):
    pause: Callable[[], None] | None = None


_local = _Local()


def pause() -> None:
    """A microbatch is about to run."""
    if _local.pause is not None:
        _local.pause()


@contextmanager
def pausing(hand_over: Callable[[], None]) -> Iterator[None]:
    """Call ``hand_over`` before each microbatch that runs inside, in this thread."""
    before, _local.pause = _local.pause, hand_over
    try:
        yield
    finally:
        _local.pause = before
