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

from koila_rl.buffers.tree import Key, nest
from koila_rl.errors import StaleValueError

__all__ = ["Rows", "TensorRows", "minibatch"]


class Rows(Protocol):
    """What the engine asks of a column of a minibatch."""

    @property
    def shape(self) -> torch.Size:
        """Of the whole minibatch, the batch dimension included."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows as delivered."""

    @property
    def device(self) -> torch.device:
        """Where the rows are delivered."""

    @property
    def dim(self) -> int:
        """The batch dimension."""

    @property
    def nbytes_per_row(self) -> int:
        """Bytes that one delivered row takes."""

    def read(self, start: int, stop: int) -> Tensor:
        """Rows ``start:stop``, on ``device``; raises :class:`StaleValueError` as ``check``."""

    def check(self) -> None:
        """Raise :class:`StaleValueError` if the rows are no longer as they were sampled."""


class TensorRows:
    """Rows ``index`` of ``source``, as ``source`` was when they were sampled.

    ``source`` is ``[rows, …]`` and ``index`` an int64 tensor ``[B]`` or ``[B, L]`` on its
    device; the minibatch is ``index.shape + source.shape[1:]``.
    """

    dim = 0

    def __init__(
        self,
        source: Tensor,
        index: Tensor,
        *,
        device: torch.device | None = None,
        generation: Callable[[], int] = int,
        what: str = "the buffer",
    ) -> None:
        self._source = source
        self._index = index
        self._generation = generation
        self._sampled = (source._version, generation())
        self._what = what
        self.shape = index.shape + source.shape[1:]
        self.dtype = source.dtype
        self.device = source.device if device is None else device
        self.nbytes_per_row = self.shape[1:].numel() * source.element_size()

    def read(self, start: int, stop: int) -> Tensor:
        """Rows ``start:stop``, gathered beside the storage and copied to ``device``."""
        self.check()
        index = self._index[start:stop]
        rows = self._source.index_select(0, index.reshape(-1))
        rows = rows.view(index.shape + self._source.shape[1:])
        return rows if rows.device == self.device else rows.to(self.device)

    def check(self) -> None:
        """Raise :class:`StaleValueError` if ``source`` was written since the sample."""
        if (self._source._version, self._generation()) != self._sampled:
            raise StaleValueError(
                f"{self._what} was written after this minibatch was drawn, so its rows are gone; "
                "run backward before writing, or draw the minibatch again"
            )


def minibatch(rows: Mapping[Key, Rows], size: int, *, lazy: bool = True) -> TensorDict:
    """A TensorDict ``[size]`` of the columns: lazy tensors, or the rows read at once."""
    batch_size = torch.Size([size])
    if not lazy:
        return nest({key: column.read(0, size) for key, column in rows.items()}, batch_size)
    from koila_rl.session import lazy_rows

    return nest({key: lazy_rows(column) for key, column in rows.items()}, batch_size)
