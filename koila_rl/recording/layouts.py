"""Where the batch axis of a minibatch lies in a value.

A value is *batched* when one of its dimensions has size ``outer * N * inner`` with N the
minibatch size: index ``(o * N + n) * inner + i`` belongs to sample n. ``outer`` and
``inner`` are 1 for most values; ``x.flatten(0, 1)`` of ``[T, N]`` gives ``outer = T``, of
``[N, T]`` gives ``inner = T``, and a ``cat`` of two batches gives ``outer = 2``.

A layout is positional. It never claims that the rows mean anything, only where a split
into microbatches may cut, so two tensors of N rows that meet are always cut alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

__all__ = ["Layout", "batch_layout", "join_into", "reshape_layout", "scaled_layout", "slice_rows"]


@dataclass(frozen=True, slots=True)
class Layout:
    """The batch axis lies in dimension ``dim``, whose size is ``outer * N * inner``."""

    dim: int
    outer: int = 1
    inner: int = 1

    @property
    def factor(self) -> int:
        return self.outer * self.inner

    def at(self, dim: int) -> Layout:
        return replace(self, dim=dim)


@functools.cache
def batch_layout(dim: int) -> Layout:
    """The layout of a minibatch along ``dim``."""
    return Layout(dim)


def reshape_layout(
    shape: Sequence[int], layout: Layout, new_shape: Sequence[int], n: int
) -> Layout | None:
    """The layout after a reshape that keeps the order of the elements; None if it mixes."""
    before = math.prod(shape[: layout.dim]) * layout.outer
    after = math.prod(shape[layout.dim + 1 :]) * layout.inner
    for dim, size in enumerate(new_shape):
        left, right = math.prod(new_shape[:dim]), math.prod(new_shape[dim + 1 :])
        if not left or not right or before % left or after % right:
            continue
        outer, inner = before // left, after // right
        if outer * n * inner == size:
            return Layout(dim, outer, inner)
    return None


def scaled_layout(shape: Sequence[int], other: Sequence[int], n: int, m: int) -> Layout | None:
    """The first dimension that is a multiple of n in ``shape`` and the same of m in ``other``.

    For outputs of calls that mix samples: any such dimension may carry the batch axis.
    """
    if len(shape) != len(other):
        return None
    for dim, (size, size2) in enumerate(zip(shape, other, strict=True)):
        if size != size2 and size % n == 0 and size // n * m == size2:
            return Layout(dim, 1, size // n)
    return None


def slice_rows(tensor: torch.Tensor, layout: Layout, n: int, start: int, stop: int) -> torch.Tensor:
    """Rows ``start:stop`` of a whole value of n samples, with the whole value's stride order.

    A cut in any but the outermost dimension leaves gaps, and a later ``view`` that is legal
    on the whole value would fail on them; those rows are copied together.
    """
    if start == 0 and stop == n:
        return tensor
    if layout.factor == 1:
        rows = tensor.narrow(layout.dim, start, stop - start)
        dense = layout.dim == 0 or all(size == 1 for size in tensor.shape[: layout.dim])
        return rows if dense or not _is_dense(tensor) else rows.clone()
    shape = list(tensor.shape)
    shape[layout.dim] = layout.outer * (stop - start) * layout.inner
    if layout.outer == 1:
        step = layout.inner
        rows = tensor.narrow(layout.dim, start * step, (stop - start) * step)
        return rows if layout.dim == 0 or not _is_dense(tensor) else rows.clone()
    split: torch.Tensor = tensor.unflatten(layout.dim, (layout.outer, n, layout.inner))
    rows = split.narrow(layout.dim + 1, start, stop - start)
    return rows.reshape(shape)


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 0 or all(
        stride != 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    )


def join_into(
    whole: torch.Tensor, rows: torch.Tensor, layout: Layout, n: int, start: int, stop: int
) -> None:
    """Write the rows of one microbatch to their place in a whole value of n samples."""
    if layout.outer == 1:
        step = layout.inner
        whole.narrow(layout.dim, start * step, (stop - start) * step).copy_(rows)
        return
    target = whole.unflatten(layout.dim, (layout.outer, n, layout.inner))
    source = rows.unflatten(layout.dim, (layout.outer, stop - start, layout.inner))
    target.narrow(layout.dim + 1, start, stop - start).copy_(source)
