"""TorchRL's replay buffers with lazy minibatches, and our buffers as TorchRL's.

TorchRL draws indices from a sampler and asks its storage for them. A wrapped buffer is the same
buffer over a storage that answers with row sources, so its samplers, transforms and metadata work
as ever, on lazy tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import MemoryMappedTensor, TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor
from torchrl import data as theirs
from torchrl.envs.transforms import Transform

from koila_rl.buffers.replay import ReplayBuffer
from koila_rl.buffers.rows import ColumnRows, TensorSource
from koila_rl.errors import StorageError
from koila_rl.wrapping import lazy, lazy_rows

__all__ = ["LazyMinibatch", "fill_from_torchrl", "to_torchrl", "wrap_torchrl"]


class LazyMinibatch(Transform):  # type: ignore[misc]
    """Appended to a TorchRL buffer, makes what it gives lazy.

    Rows were gathered by then; :func:`koila_rl.wrap` leaves them where they are.

    >>> buffer.append_transform(LazyMinibatch())  # doctest: +SKIP
    """

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The minibatch with lazy leaves."""
        wrapped: TensorDictBase = lazy(tensordict)
        return wrapped


def wrap_torchrl(buffer: Any) -> Any:
    """The buffer over the same storage, sampler and writer, with lazy minibatches.

    Over a storage of tensors or of memory maps rows move when a microbatch runs; they are stale,
    by name, once anything was written to the storage. Over another storage minibatches are
    wrapped when they are complete.
    """
    storage = buffer._storage
    if not isinstance(storage, theirs.TensorStorage) or storage.ndim != 1:
        from koila_rl.buffers.wrapping import LazyBuffer

        return LazyBuffer(buffer)
    wrapped = object.__new__(type(buffer))
    wrapped.__dict__.update(buffer.__dict__)
    lazy_storage = object.__new__(_lazy_storage(type(storage)))
    # One set of attributes for both: length and content stay common.
    lazy_storage.__dict__ = storage.__dict__
    wrapped._storage = lazy_storage
    return wrapped


def _lazy_storage(kind: Any) -> Any:
    def get(self: Any, index: Any) -> Any:
        at = index[0] if isinstance(index, tuple) and len(index) == 1 else index
        at = torch.as_tensor(at)
        if at.ndim != 1 or at.dtype == torch.bool or not self.initialized:
            return kind.get(self, index)
        return _rows(self._storage, at)

    def getitem(self: Any, index: Any) -> Any:
        return kind.get(self, index)

    return type(f"Lazy{kind.__name__}", (kind,), {"get": get, "__getitem__": getitem})


def _rows(stored: Any, index: Tensor) -> Any:
    def column(tensor: Tensor) -> Tensor:
        plain = tensor.as_subclass(Tensor)
        source = TensorSource(
            plain, index.to(plain.device), "the TorchRL storage",
            slow=isinstance(tensor, MemoryMappedTensor),
        )  # fmt: skip
        return lazy_rows(ColumnRows(source))

    if isinstance(stored, Tensor):
        return column(stored)
    if not is_tensor_collection(stored):
        return torch.utils._pytree.tree_map(column, stored)
    minibatch = stored._fast_apply(column, batch_size=[len(index), *stored.batch_size[1:]])
    return minibatch.unlock_() if minibatch.is_locked else minibatch


def to_torchrl(buffer: ReplayBuffer, batch_size: int | None = None) -> Any:
    """A TorchRL buffer of the same capacity that holds a copy of what ours holds."""
    if len(buffer) == 0:
        raise StorageError("the buffer is empty; TorchRL's storage takes its shape from content")
    copy = theirs.TensorDictReplayBuffer(
        storage=theirs.LazyTensorStorage(buffer.capacity), batch_size=batch_size
    )
    step = max(1, len(buffer) // 64)
    for start in range(0, len(buffer), step):
        copy.extend(buffer[start : start + step])
    return copy


def fill_from_torchrl(buffer: ReplayBuffer, theirs: Any) -> None:
    """Store what a TorchRL buffer holds, oldest first."""
    storage = theirs._storage
    size, capacity = len(storage), int(storage.max_size)
    cursor = int(getattr(theirs._writer, "_cursor", 0)) if size == capacity else 0
    step = max(1, size // 64)
    for start in range(0, size, step):
        at = (torch.arange(start, min(size, start + step)) + cursor) % capacity
        content: TensorDict = storage[at]
        buffer.extend(content.exclude("index", "_weight", "priority_weight"))
