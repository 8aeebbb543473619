"""`lazy` and `materialize`: from real tensors to recorded values and back, structure kept."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from koila_rl.errors import BatchSizeError, ConfigurationError
from koila_rl.memory.budget import checked_device
from koila_rl.pending import PENDING
from koila_rl.recording import (  # noqa: F401
    entrypoints,
    looking,
    noise,
    rules_explicit,
    rules_index,
    rules_linear,
    rules_reduce,
    rules_views,
)
from koila_rl.recording import handlers as _handlers  # noqa: F401  (registers itself)
from koila_rl.recording.layouts import batch_layout
from koila_rl.recording.tensor import LazyTensor
from koila_rl.recording.values import Meta, Node, Rows, Source, intern, meta_of, scaled, second_size

__all__ = ["lazy", "lazy_rows", "materialize"]

entrypoints.install()


def lazy(*values: Any, batch: int = 0, device: torch.device | str | None = None) -> Any:
    """Wrap a minibatch: computation on it is recorded, and runs in microbatches when needed.

    Args:
        values: tensors, NumPy arrays, TensorDicts, or nested tuples, lists, dicts and dataclasses
            of them. Dimension ``batch`` of every tensor has the same size N, the minibatch;
            tensors without dimensions and other objects stay as they are.
        batch: the dimension of the samples, negative from the end.
        device: where the rows of a microbatch are moved when it runs.

    Returns:
        The same structure with lazy tensors; a tuple if several values are given.

    Raises:
        BatchSizeError: if the tensors have different sizes along ``batch``.
        ConfigurationError: if there is no tensor to wrap, or no such dimension or device.
    """
    if isinstance(batch, bool) or not isinstance(batch, int):
        raise ConfigurationError(f"batch is {batch!r} but must be the number of a dimension")
    if device is not None:
        checked_device(device)
    entrypoints.guard_sharded()
    sizes: dict[int, tuple[int, ...]] = {}

    def note(x: Tensor) -> Tensor:
        if x.ndim:
            dim = _dimension(x, batch)
            sizes.setdefault(x.shape[dim], tuple(x.shape))
        return x

    for value in values:
        _map(value, note)
    if not sizes:
        kinds = ", ".join(type(value).__name__ for value in values) or "nothing"
        raise ConfigurationError(
            f"lazy() got {kinds}, without a tensor that has dimensions; wrap the minibatch itself"
        )
    if len(sizes) > 1:
        listed = ", ".join(f"{n} in {shape}" for n, shape in sizes.items())
        raise BatchSizeError(
            f"the values of one minibatch have different sizes along dimension {batch}: {listed}; "
            "wrap values of another minibatch in a call of their own"
        )

    def wrap(x: Tensor) -> Tensor:
        if isinstance(x, LazyTensor) or not x.ndim or x.layout != torch.strided:
            return x
        wrapped = _wrap(x, _dimension(x, batch))
        return wrapped.to(device) if device is not None else wrapped

    wrapped = tuple(_map(value, wrap) for value in values)
    return wrapped[0] if len(wrapped) == 1 else wrapped


def _dimension(x: Tensor, batch: int) -> int:
    if not -x.ndim <= batch < x.ndim:
        raise BatchSizeError(
            f"batch={batch} is not a dimension of a tensor of shape {tuple(x.shape)}; give the "
            "dimension of the samples"
        )
    return batch % x.ndim


def _wrap(x: Tensor, dim: int) -> LazyTensor:
    n = int(x.shape[dim])
    meta = meta_of(x, n, batch_layout(dim) if n > 1 else None)
    node = Node(Source(x, None, meta), 0, meta)
    return LazyTensor(node, PENDING)


def lazy_rows(rows: Rows) -> LazyTensor:
    """A lazy tensor whose rows are read when a microbatch runs; see `Rows`."""
    entrypoints.guard_sharded()
    meta = _rows_meta(tuple(rows.shape), rows.dim, rows.dtype, torch.device(rows.device))
    return LazyTensor(Node(Source(None, rows, meta), 0, meta), PENDING)


@functools.lru_cache(maxsize=1024)
def _rows_meta(shape: tuple[int, ...], dim: int, dtype: torch.dtype, device: torch.device) -> Meta:
    stride = tuple(torch.empty(shape, device="meta").stride())
    n = shape[dim]
    layout = batch_layout(dim) if n > 1 else None
    shape2, stride2 = scaled(shape, stride, dim, second_size(n)) if layout else (shape, stride)
    return intern(Meta(shape, stride, dtype, device, False, layout, n, shape2, stride2))


def materialize(value: Any) -> Any:
    """The real tensors behind lazy ones, attached to the graph as in eager; structure kept.

    Raises:
        StaleValueError: if something the values depend on has changed since.
    """
    return _map(value, lambda x: PENDING.attached(x._node) if isinstance(x, LazyTensor) else x)


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``change`` to every tensor of a nested structure."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value).__module__ == "numpy" and hasattr(value, "__array__"):
        return change(torch.as_tensor(value))
    if isinstance(value, dict):
        items = {key: _map(item, change) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(item, change) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(_map(item, change) for item in value)
    if hasattr(value, "_fast_apply") and hasattr(value, "batch_size"):
        return value._fast_apply(change)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _map(getattr(value, f.name), change) for f in dataclasses.fields(value)}
        try:
            return dataclasses.replace(value, **fields)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"cannot rebuild {type(value).__name__}: {error}") from error
    return value
