"""One minibatch drawn from a ring: which rows, and what must survive their being overwritten."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from koila_rl.buffers.allocation import human
from koila_rl.buffers.delivery import worker_is_done
from koila_rl.buffers.ring import Ring
from koila_rl.buffers.storage import Index
from koila_rl.buffers.tree import Key
from koila_rl.buffers.views import View, Window
from koila_rl.errors import StaleValueError

__all__ = ["Sample", "SampleSource"]

_Saved = tuple[Index, dict[Key, Tensor]]


class Sample:
    """Rows ``[B]`` or ``[B, L]`` of a ring, as they were when they were drawn.

    Rows that are about to be overwritten are gathered first, up to ``save_limit`` bytes; beyond
    that the sample becomes stale and says so.
    """

    __slots__ = (
        "__weakref__",
        "_limit",
        "_oldest",
        "_ring",
        "_saved",
        "_saved_bytes",
        "_stale",
        "_total",
        "_window",
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
        self._limit = save_limit
        self._window: Window | None = None
        self._saved: list[_Saved] = []
        self._saved_bytes = 0
        self._oldest = -1
        self._stale = ""

    def gather(self, key: Key, start: int, stop: int) -> Tensor:
        """Column ``key`` of minibatch rows ``start:stop``, ``[stop - start, …]``."""
        inner = self.shape[1:].numel()
        low, high = start * inner, min(stop, self.shape[0]) * inner
        view = self.views[key]
        rows = view.gather(self.rows[low:high], self._part(low, high))
        for positions, columns in self._saved:
            first, last = np.searchsorted(positions, (low, high))
            if first < last:
                at = torch.from_numpy(positions[first:last] - low).to(rows.device)
                rows[at] = columns[key][first:last]
        return rows.view(-1, *self.shape[1:], *view.shape) if len(self.shape) > 1 else rows

    def before_overwriting(self, first: int) -> None:
        """Gather the rows before ``first`` that are not kept yet: they are about to go."""
        if self._oldest < 0:
            self._oldest = int(self.rows.min(initial=self._total))
        if self._stale or first <= self._oldest:
            return
        worker_is_done()
        lost = np.flatnonzero((self.rows < first) & (self.rows >= self._oldest))
        later = self.rows[self.rows >= first]
        size = len(lost) * sum(
            torch.Size(view.shape).numel() * view.dtype.itemsize for view in self.views.values()
        )
        self._saved_bytes += size
        if self._saved_bytes > self._limit:
            self._saved.clear()
            self._stale = (
                f"{len(lost)} of this minibatch's {len(self.rows)} rows were overwritten before it "
                f"ran, and keeping them would take {human(self._saved_bytes)} of the "
                f"{human(self._limit)} allowed; run backward before extend, or take a larger "
                "capacity or save_limit"
            )
        else:
            part = self._part_of(lost)
            columns = {k: v.gather(self.rows[lost], part) for k, v in self.views.items()}
            self._saved.append((lost, columns))
        self._oldest = int(later.min(initial=self._total))

    def check(self) -> None:
        """Raise :class:`StaleValueError` if rows were overwritten and not kept."""
        if self._stale:
            raise StaleValueError(self._stale)

    def _part(self, low: int, high: int) -> Window | None:
        return self._part_of(slice(low, high))

    def _part_of(self, at: slice | Index) -> Window | None:
        if self.n_steps == 1:
            return None
        if self._window is None:
            self._window = Window(self.rows, self._ring, self._total, self.n_steps)
        part = Window.__new__(Window)
        whole = self._window
        part.rows, part.last, part.steps = whole.rows[at], whole.last[at], whole.steps[at]
        return part


class SampleSource:
    """One column of a sample."""

    __slots__ = ("_key", "_sample", "device", "dtype", "shape", "slow")

    def __init__(self, sample: Sample, key: Key, view: View, *, slow: bool) -> None:
        self._sample, self._key = sample, key
        self.shape = sample.shape + view.shape
        self.dtype, self.device, self.slow = view.dtype, view.device, slow

    def gather(self, start: int, stop: int) -> Tensor:
        """Rows ``start:stop``."""
        return self._sample.gather(self._key, start, stop)

    def check(self) -> None:
        """Raise :class:`StaleValueError` if rows were overwritten and not kept."""
        self._sample.check()
