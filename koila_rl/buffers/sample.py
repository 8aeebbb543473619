"""One minibatch drawn from a ring: which rows, and what must survive their being overwritten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from koila_rl.buffers.delivery import worker_is_done
from koila_rl.buffers.ring import Ring
from koila_rl.buffers.storage import Index
from koila_rl.buffers.tree import Key
from koila_rl.buffers.views import Drawn, View, windows
from koila_rl.errors import StaleValueError
from koila_rl.memory.budget import format_bytes

__all__ = ["Kept", "Sample", "SampleSource"]


class Kept:
    """Rows of a minibatch that were gathered because their slots were to be overwritten."""

    __slots__ = ("_limit", "_parts", "bytes", "stale")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: list[tuple[Index, dict[Any, Tensor]]] = []
        self.bytes = 0
        self.stale = ""

    def keep(
        self, positions: Index, total: int, row_bytes: int, gather: Callable[[], dict[Any, Tensor]]
    ) -> None:
        """Gather rows at ``positions`` (ascending) of a minibatch of ``total``, or give up."""
        self.bytes += len(positions) * row_bytes
        if self.bytes <= self._limit:
            self._parts.append((positions, gather()))
            return
        self._parts.clear()
        self.stale = (
            f"{len(positions)} of this minibatch's {total} rows were overwritten before it ran; "
            f"keeping them would take {format_bytes(self.bytes)} of the "
            f"{format_bytes(self._limit)} allowed; run backward before storing more, or take a "
            "larger capacity or save_limit"
        )

    def patch(self, key: Any, rows: Tensor, low: int, high: int) -> None:
        """Put kept rows of column ``key`` into ``rows``, the minibatch's ``low:high``."""
        for positions, columns in self._parts:
            first, last = np.searchsorted(positions, (low, high))
            if first < last:
                at = torch.from_numpy(positions[first:last] - low).to(rows.device)
                rows[at] = columns[key][first:last]

    def check(self) -> None:
        """Raise :class:`StaleValueError` if rows were overwritten and not kept."""
        if self.stale:
            raise StaleValueError(self.stale)


class Sample:
    """Rows ``[B]`` or ``[B, L]`` of a ring, as they were when they were drawn.

    Rows that are about to be overwritten are gathered first, up to ``save_limit`` bytes; beyond
    that the sample becomes stale and says so.
    """

    __slots__ = (
        "__weakref__",
        "_kept",
        "_latest",
        "_oldest",
        "_ring",
        "_total",
        "_windows",
        "n_steps",
        "rows",
        "shape",
        "views",
    )

    def __init__(
        self, rows: Index, ring: Ring, views: dict[Key, View], n_steps: int, save_limit: int
    ) -> None:
        self.shape = torch.Size(rows.shape)
        self.rows = rows.reshape(-1)
        self.n_steps = n_steps
        self._ring = ring
        self.views = views
        self._total = ring.total
        self._windows: tuple[Index, Index] | None = None
        self._latest: tuple[int, int, Drawn] | None = None
        self._kept = Kept(save_limit)
        self._oldest = -1

    def gather(self, key: Key, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """Column ``key`` of minibatch rows ``start:stop``, ``[stop - start, …]``."""
        inner = len(self.rows) // self.shape[0]
        low, high = start * inner, min(stop, self.shape[0]) * inner
        view = self.views[key]
        part = self._latest
        if part is None or part[:2] != (low, high):
            # The columns of one microbatch are asked for one after another.
            self._latest = part = (low, high, self._drawn(slice(low, high)))
        rows = view.gather(part[2], None if out is None else out.view(-1, *view.shape))
        self._kept.patch(key, rows, low, high)
        return rows.view(-1, *self.shape[1:], *view.shape) if len(self.shape) > 1 else rows

    def before_overwriting(self, first: int) -> None:
        """Gather the rows before ``first`` that are not kept yet: they are about to go."""
        if self._oldest < 0:
            self._oldest = int(self.rows.min(initial=self._total))
        if self._kept.stale or first <= self._oldest:
            return
        worker_is_done()
        lost = np.flatnonzero((self.rows < first) & (self.rows >= self._oldest))
        later = self.rows[self.rows >= first]
        row_bytes = sum(
            torch.Size(view.shape).numel() * view.dtype.itemsize for view in self.views.values()
        )
        self._kept.keep(lost, len(self.rows), row_bytes, lambda: self._gather_all(lost))
        self._oldest = int(later.min(initial=self._total))

    def check(self) -> None:
        """Raise :class:`StaleValueError` if rows were overwritten and not kept."""
        self._kept.check()

    def _gather_all(self, at: Index) -> dict[Any, Tensor]:
        part = self._drawn(at)
        return {key: view.gather(part) for key, view in self.views.items()}

    def _drawn(self, at: slice | Index) -> Drawn:
        rows, capacity = self.rows[at], self._ring.capacity
        if self.n_steps == 1:
            return Drawn(rows, capacity, rows, None)
        if self._windows is None:
            self._windows = windows(self.rows, self._ring, self._total, self.n_steps)
        last, steps = self._windows
        return Drawn(rows, capacity, last[at], steps[at])


class SampleSource:
    """One column of a sample."""

    __slots__ = ("_key", "_sample", "device", "dtype", "shape", "slow")

    def __init__(self, sample: Sample, key: Key, view: View, *, slow: bool) -> None:
        self._sample, self._key = sample, key
        self.shape = sample.shape + view.shape
        self.dtype, self.device, self.slow = view.dtype, view.device, slow

    def gather(self, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """Rows ``start:stop``."""
        return self._sample.gather(self._key, start, stop, out)

    def check(self) -> None:
        """Raise :class:`StaleValueError` if rows were overwritten and not kept."""
        self._sample.check()
