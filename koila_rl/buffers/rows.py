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

from koila_rl.buffers.delivery import Ahead
from koila_rl.buffers.storage import Index, Stored
from koila_rl.buffers.transforms import Transform
from koila_rl.buffers.tree import Key, nest
from koila_rl.errors import StaleValueError
from koila_rl.wrapping import lazy_rows

__all__ = ["ColumnRows", "Source", "StoredSource", "TensorSource", "minibatch"]

# Of smaller rows a whole microbatch lies on few pages: handing them to a thread costs more.
_SMALL_ROW = 1024


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

    def gather(self, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """Rows ``start:stop`` as they were sampled, on ``device``; into ``out`` where given."""

    def check(self) -> None:
        """Raise :class:`StaleValueError` if they cannot be had any more."""


class ColumnRows:
    """Rows of a source, delivered to a device and transformed there: the engine's ``Rows``."""

    dim = 0
    __slots__ = ("_source", "_transform", "device", "dtype", "raw_bytes", "shape")

    def __init__(
        self,
        source: Source,
        device: torch.device | None = None,
        transform: Transform | None = None,
    ) -> None:
        self._source = source
        self._transform = transform
        self.device = source.device if device is None else device
        self.shape, self.dtype = source.shape, source.dtype
        self.raw_bytes = 0
        if transform is not None:
            self.raw_bytes = self.shape[1:].numel() * self.dtype.itemsize
            one = transform(torch.zeros(1, *self.shape[1:], dtype=self.dtype))
            self.shape, self.dtype = torch.Size([self.shape[0], *one.shape[1:]]), one.dtype

    def read(self, start: int, stop: int, ahead: Callable[[], Tensor] | None = None) -> Tensor:
        """Rows ``start:stop``, gathered beside the storage, copied, transformed.

        ``ahead`` is what :attr:`prefetch` gave for the same rows.
        """
        source = self._source
        source.check()
        if ahead is not None:
            rows = ahead()
        elif self.device == source.device:
            rows = source.gather(start, stop)
        elif self.device.type == "cuda" and source.device.type == "cpu":
            pinned = torch.empty(self._raw(start, stop), dtype=source.dtype, pin_memory=True)
            rows = source.gather(start, stop, pinned).to(self.device, non_blocking=True)
        else:
            rows = source.gather(start, stop).to(self.device)
        return rows if self._transform is None else self._transform(rows)

    @property
    def prefetch(self) -> Callable[[int, int], Ahead] | None:
        """Begins to fetch rows; they take their memory from then on.

        None where a gather neither waits for a disk nor crosses a bus, so that nothing would be
        gained.
        """
        source = self._source
        if source.device.type != "cpu":
            return None
        row_bytes = self.raw_bytes or self.shape[1:].numel() * self.dtype.itemsize
        far = source.slow and self.device.type == "cpu" and row_bytes >= _SMALL_ROW
        return self._fetch if far or self.device.type == "cuda" else None

    def check(self) -> None:
        """Raise :class:`StaleValueError` if the rows are no longer as they were sampled."""
        self._source.check()

    def _fetch(self, start: int, stop: int) -> Ahead:
        source = self._source
        source.check()
        rows = torch.empty(self._raw(start, stop), dtype=source.dtype, device=self.device)
        return Ahead(lambda out: source.gather(start, stop, out), rows)

    def _raw(self, start: int, stop: int) -> tuple[int, ...]:
        return (stop - start, *self._source.shape[1:])


class TensorSource:
    """Rows ``index`` of a tensor ``[rows, …]``, as it was when they were sampled.

    ``slow`` says that the tensor lies on a disk.
    """

    def __init__(self, tensor: Tensor, index: Tensor, what: str, *, slow: bool = False) -> None:
        self.slow = slow
        self._tensor = tensor
        self._index = index
        self._sampled = tensor._version
        self._what = what
        self.shape = index.shape + tensor.shape[1:]
        self.dtype = tensor.dtype
        self.device = tensor.device

    def gather(self, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """Rows ``start:stop``."""
        index = self._index[start:stop]
        if out is None:
            return self._tensor.index_select(0, index)
        return torch.index_select(self._tensor, 0, index, out=out)

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

    def gather(self, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """Rows ``start:stop``."""
        index = self._index[start:stop]
        tail = self._column.tensor.shape[1:]
        flat = None if out is None else out.view(-1, *tail)
        return self._column.take(index.reshape(-1), flat).view(*index.shape, *tail)

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
