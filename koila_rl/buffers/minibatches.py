"""From row numbers of a ring to a minibatch, lazy or not."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import MappingProxyType

import torch
from tensordict import TensorDict
from torch import Tensor

from koila_rl.buffers.columns import TransitionColumns
from koila_rl.buffers.ring import Ring
from koila_rl.buffers.rows import ColumnRows, minibatch
from koila_rl.buffers.sample import Sample, SampleSource
from koila_rl.buffers.storage import Index
from koila_rl.buffers.transforms import Transform, transform_of
from koila_rl.buffers.tree import Key, nest

__all__ = ["Minibatches"]


class Minibatches:
    """Makes minibatches, and keeps the lazy ones right while the ring goes on.

    ``save_limit`` are the bytes that one may keep of rows that are overwritten before it runs.
    """

    def __init__(
        self,
        ring: Ring,
        columns: TransitionColumns,
        n_steps: int,
        *,
        device: torch.device | None,
        transforms: Mapping[Key, Transform],
        save_limit: int,
    ) -> None:
        self._ring = ring
        self._columns = columns
        self._n_steps = n_steps
        self._device = device
        self._transforms = transforms
        self._save_limit = save_limit
        self._live: list[weakref.ref[Sample]] = []

    def make(
        self,
        rows: Index,
        known: Mapping[str, Tensor] = MappingProxyType({}),
        *,
        lazy: bool,
    ) -> TensorDict:
        """A TensorDict of rows ``[B]`` or ``[B, L]``; ``known`` columns are put beside them."""
        extra: dict[Key, Tensor] = {(label,): value for label, value in known.items()}
        if not lazy and self._device is None and not self._transforms:
            return nest({**self._gather(rows), **extra}, torch.Size([len(rows)]))
        return minibatch(self.row_sources(rows), len(rows), extra, lazy=lazy)

    def row_sources(self, rows: Index) -> dict[Key, ColumnRows]:
        """The columns of a lazy minibatch."""
        sample = self._sample(rows)
        if len(self._live) > 32:
            self._live = [live for live in self._live if live() is not None]
        self._live.append(weakref.ref(sample))
        return {
            key: ColumnRows(
                SampleSource(sample, key, view, slow=self._columns.slow),
                self._device,
                transform_of(self._transforms, key),
            )
            for key, view in sample.views.items()
        }

    def before_overwriting(self, first: int) -> None:
        """Lazy minibatches that are alive take what they need of the rows before ``first``."""
        if first > self._ring.first:
            for reference in self._live:
                if (sample := reference()) is not None:
                    sample.before_overwriting(first)

    def _gather(self, rows: Index) -> dict[Key, Tensor]:
        if self._columns.plain and rows.ndim == 1:
            # Nothing but stored rows: no need of a sample that could outlive them.
            slots = rows % self._ring.capacity if self._ring.first else rows
            return {key: column.take(slots) for key, column in self._columns.stored.items()}
        sample = self._sample(rows)
        return {key: sample.gather(key, 0, len(rows)) for key in sample.views}

    def _sample(self, rows: Index) -> Sample:
        return Sample(rows, self._ring, self._columns.views, self._n_steps, self._save_limit)
