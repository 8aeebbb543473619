"""Row sources: what a lazy minibatch is made of.

A sampled column is a storage and the indices into it. Nothing moves until the engine asks
for the rows of one microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from koila_rl.buffers.delivery import Delivered, start_delivery, worker
from koila_rl.buffers.storage import Index, Stored
from koila_rl.buffers.transforms import Transform
from koila_rl.buffers.tree import Key, nest
from koila_rl.errors import StaleValueError
from koila_rl.wrapping import lazy_rows

__all__ = ["ColumnRows", "Source", "StoredSource", "TensorSource", "minibatch"]


class Source(Protocol):
    """A column of a minibatch on the storage's side."""

    @property
    def shape(self) -> torch.Size:
        """Of the whole minibatch, before any transform."""

    @property
    def dtype(self) -> torch.dtype:
        """As stored."""

    @property
    def device(self) -> torch.device:
        """Where the storage is."""

    @property
    def slow(self) -> bool:
        """Whether a gather may wait for a disk."""

    def gather(self, start: int, stop: int) -> Tensor:
        """Rows ``start:stop`` as they were sampled, on ``device``."""

    def warm(self, start: int, stop: int) -> None:
        """Have rows ``start:stop`` read from the disk."""

    def check(self) -> None:
        """Raise :class:`StaleValueError` if they cannot be had any more."""


class ColumnRows:
    """Rows of a source, delivered to a device and transformed there: the engine's ``Rows``."""

    dim = 0
    __slots__ = ("_ahead", "_source", "_transform", "device", "dtype", "nbytes_per_row", "shape")

    def __init__(
        self,
        source: Source,
        device: torch.device | None = None,
        transform: Transform | None = None,
    ) -> None:
        self._source = source
        self._transform = transform
        self._ahead: tuple[int, int, Delivered] | None = None
        self.device = source.device if device is None else device
        self.shape, self.dtype = source.shape, source.dtype
        if transform is not None:
            one = transform(torch.zeros(1, *self.shape[1:], dtype=self.dtype))
            self.shape, self.dtype = torch.Size([self.shape[0], *one.shape[1:]]), one.dtype
        self.nbytes_per_row = self.shape[1:].numel() * self.dtype.itemsize

    def read(self, start: int, stop: int) -> Tensor:
        """Rows ``start:stop``, gathered beside the storage, copied, transformed."""
        self._source.check()
        ahead, self._ahead = self._ahead, None
        if self._source.slow and stop < self.shape[0]:
            # The disk is read for the next microbatch while this one computes.
            worker().submit(self._source.warm, stop, min(self.shape[0], 2 * stop - start))
        if ahead is not None and ahead[:2] == (start, stop):
            rows = ahead[2]()
        elif self.device == self._source.device:
            rows = self._source.gather(start, stop)
        else:
            rows = self._deliver(start, stop, wait=True)()
        return rows if self._transform is None else self._transform(rows)

    def prefetch(self, start: int, stop: int) -> None:
        """Begin to fetch ``start:stop``; costs the memory of those rows until they are read.

        Only the last rows asked for ahead are kept. Nothing is done where a gather neither
        waits for a disk nor crosses a bus.
        """
        if self._source.slow or self.device != self._source.device:
            self._source.check()
            self._ahead = (start, stop, self._deliver(start, stop, wait=not self._source.slow))

    def check(self) -> None:
        """Raise :class:`StaleValueError` if the rows are no longer as they were sampled."""
        self._source.check()

    def _deliver(self, start: int, stop: int, *, wait: bool) -> Delivered:
        return start_delivery(lambda: self._source.gather(start, stop), self.device, wait=wait)


class TensorSource:
    """Rows ``index`` of a tensor ``[rows, …]``, as it was when they were sampled."""

    slow = False

    def __init__(self, tensor: Tensor, index: Tensor, what: str) -> None:
        self._tensor = tensor
        self._index = index
        self._sampled = tensor._version
        self._what = what
        self.shape = index.shape + tensor.shape[1:]
        self.dtype = tensor.dtype
        self.device = tensor.device

    def gather(self, start: int, stop: int) -> Tensor:
        """Rows ``start:stop``."""
        return self._tensor.index_select(0, self._index[start:stop])

    def warm(self, start: int, stop: int) -> None:
        """Nothing: not known to be on a disk."""

    def check(self) -> None:
        """Raise :class:`StaleValueError` if the tensor was written since the sample."""
        if self._tensor._version != self._sampled:
            raise StaleValueError(_written(self._what))


class StoredSource:
    """Rows ``index``, ``[B]`` or ``[B, L]``, of a stored column that others may write to.

    ``generation`` tells of writes that the tensor's version counter does not see.
    """

    def __init__(
        self, column: Stored, index: Index, generation: Callable[[], int], what: str
    ) -> None:
        self._column = column
        self._index = index
        self._generation = generation
        self._sampled = (column.tensor._version, generation())
        self._what = what
        self.slow = column.slow
        self.shape = torch.Size(index.shape) + column.tensor.shape[1:]
        self.dtype = column.tensor.dtype
        self.device = column.tensor.device

    def gather(self, start: int, stop: int) -> Tensor:
        """Rows ``start:stop``."""
        index = self._index[start:stop]
        rows = self._column.take(index.reshape(-1))
        return rows.view(*index.shape, *self._column.tensor.shape[1:])

    def warm(self, start: int, stop: int) -> None:
        """Have rows ``start:stop`` read from the disk."""
        self._column.warm(self._index[start:stop].reshape(-1))

    def check(self) -> None:
        """Raise :class:`StaleValueError` if the column was written since the sample."""
        if (self._column.tensor._version, self._generation()) != self._sampled:
            raise StaleValueError(_written(self._what))


def _written(what: str) -> str:
    return (
        f"{what} was written after this minibatch was drawn, so its rows are gone; run backward "
        "before writing, or draw the minibatch again"
    )


def minibatch(
    rows: Mapping[Key, ColumnRows], size: int, known: Mapping[Key, Tensor], *, lazy: bool
) -> TensorDict:
    """A TensorDict ``[size]`` of the columns: lazy tensors, or the rows read at once.

    ``known`` are small columns that are there already and stay plain.
    """
    columns: dict[Key, Tensor] = dict(known)
    if lazy:
        columns.update({key: lazy_rows(column) for key, column in rows.items()})
    else:
        columns.update({key: column.read(0, size) for key, column in rows.items()})
    return nest(columns, torch.Size([size]))
