"""What a sampled transition is made of: one view for each name in a minibatch.

A view gathers the rows of a sample from what is stored: as stored, at the end of an n-step
window, summed over it, or stacked from frames.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from koila_rl.buffers.frames import FrameStore
from koila_rl.buffers.ring import ENDED, SKIPPED, Ring
from koila_rl.buffers.storage import Index, Stored

__all__ = ["DiscountView", "Drawn", "RewardView", "StackView", "StoredView", "View", "windows"]


class Drawn:
    """Rows to gather and, where ``n_steps`` exceeds 1, the windows that begin at them.

    A window ends with the row that ends its episode, before a skipped row, with the newest row
    stored when the minibatch was drawn, or after ``n_steps`` rows. ``last`` is its last row and
    ``steps`` how many it has.
    """

    __slots__ = ("last", "last_slots", "rows", "slots", "steps")

    def __init__(self, rows: Index, capacity: int, last: Index, steps: Index | None) -> None:
        self.rows, self.slots = rows, rows % capacity
        self.last, self.steps = last, steps
        self.last_slots = self.slots if last is rows else last % capacity


def windows(rows: Index, ring: Ring, total: int, n_steps: int) -> tuple[Index, Index]:
    """Last row and number of steps of the windows from ``rows``, rows below ``total`` stored."""
    last, steps = rows, np.ones(len(rows), dtype=np.int64)
    going = np.ones(len(rows), dtype=bool)
    for _ in range(n_steps - 1):
        following = last + ring.n_envs
        going &= (ring.flags(last) & ENDED) == 0
        going &= following < total
        going &= (ring.flags(following) & SKIPPED) == 0
        last = np.where(going, following, last)
        steps += going
    return last, steps


class View(Protocol):
    """One name of a minibatch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def gather(self, at: Drawn, out: Tensor | None = None) -> Tensor:
        """``[len(at.rows), *shape]``; in ``out`` where given."""


class StoredView:
    """A stored column, at the first or the last row of the window."""

    __slots__ = ("_column", "_last", "device", "dtype", "shape")

    def __init__(self, column: Stored, *, last: bool) -> None:
        self._column, self._last = column, last
        tensor = column.tensor
        self.shape, self.dtype, self.device = tuple(tensor.shape[1:]), tensor.dtype, tensor.device

    def gather(self, at: Drawn, out: Tensor | None = None) -> Tensor:
        """The column's rows."""
        return self._column.take(at.last_slots if self._last else at.slots, out)


class StackView:
    """Stacked frames, of the first row's observation or the last row's next observation."""

    __slots__ = ("_following", "_store", "device", "dtype", "shape")

    def __init__(
        self, store: FrameStore, dtype: torch.dtype, device: torch.device, *, following: bool
    ) -> None:
        self._store, self._following = store, following
        self.shape, self.dtype, self.device = store.shape, dtype, device

    def gather(self, at: Drawn, out: Tensor | None = None) -> Tensor:
        """The stacks."""
        rows = at.last if self._following else at.rows
        return self._store.gather(rows, following=self._following, out=out)


class RewardView:
    """Σ γʲ·r over the window: ``j`` from 0 to its steps - 1, added up in float64."""

    def __init__(self, column: Stored, ring: Ring, gamma: float, n_steps: int) -> None:
        self._column, self._ring, self._gamma, self._n_steps = column, ring, gamma, n_steps
        tensor = column.tensor
        self.shape, self.device = tuple(tensor.shape[1:]), tensor.device
        floating = tensor.dtype.is_floating_point
        self.dtype = tensor.dtype if floating else torch.get_default_dtype()

    def gather(self, at: Drawn, out: Tensor | None = None) -> Tensor:
        """The discounted sums."""
        assert at.steps is not None
        total = torch.zeros(len(at.rows), *self.shape, dtype=torch.float64, device=self.device)
        for j in range(self._n_steps):
            inside = j < at.steps
            if not inside.any():
                break
            rows = np.where(inside, at.rows + j * self._ring.n_envs, at.rows)
            reward = self._column.take(self._ring.slots(rows)).to(torch.float64)
            factor = torch.from_numpy(np.where(inside, self._gamma**j, 0.0)).to(self.device)
            # A reward outside the window may be infinite; 0 times it must not become NaN.
            factor = factor.view(-1, *[1] * len(self.shape))
            total += torch.where(factor != 0, factor * reward, 0.0)
        return _put(total.to(self.dtype), out)


class DiscountView:
    """γ to the steps taken: what the value at the window's end is worth at its start."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, gamma: float) -> None:
        self.shape, self.dtype, self._gamma = shape, dtype, gamma
        self.device = torch.device("cpu")

    def gather(self, at: Drawn, out: Tensor | None = None) -> Tensor:
        """The discounts, in the shape of the rewards."""
        assert at.steps is not None
        discount = torch.from_numpy(self._gamma ** at.steps.astype(np.float64))
        discount = discount.view(-1, *[1] * len(self.shape)).expand(-1, *self.shape)
        return _put(discount.to(self.dtype), out)


def _put(rows: Tensor, out: Tensor | None) -> Tensor:
    return rows if out is None else out.copy_(rows)
