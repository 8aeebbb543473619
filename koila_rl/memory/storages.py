"""Questions about one operator call: which storages it is given, makes and may resize."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, UntypedStorage

__all__ = [
    "BLOCK_BYTES",
    "is_fresh",
    "may_resize",
    "round_to_block",
    "storage_of",
    "storage_sizes",
    "tensors_in",
    "wraps_other_tensors",
]

BLOCK_BYTES = 512
"""Every CUDA allocation is a multiple of this; the CPU is counted the same way."""


def round_to_block(nbytes: int) -> int:
    """Bytes that a storage of ``nbytes`` takes, in whole blocks.

    >>> round_to_block(0), round_to_block(1), round_to_block(512), round_to_block(513)
    (0, 512, 512, 1024)
    """
    return (nbytes + BLOCK_BYTES - 1) // BLOCK_BYTES * BLOCK_BYTES


@functools.lru_cache(maxsize=512)
def wraps_other_tensors(kind: type) -> bool:
    """Whether tensors of this class compute on tensors inside; infrastructure's own do not."""
    handler = getattr(kind, "__torch_dispatch__", None)
    return handler is not torch.Tensor.__torch_dispatch__ and not hasattr(kind, "_mode_key")


@functools.lru_cache(maxsize=4096)
def may_resize(func: Any) -> bool:
    """Whether an operator may give a storage another size."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return False
    return "resize" in schema.name or any(argument.is_out for argument in schema.arguments)


def tensors_in(*values: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(tensors_in(*value))
        elif isinstance(value, dict):
            found.extend(tensors_in(*value.values()))
    return found


def storage_of(tensor: Tensor) -> UntypedStorage | None:
    """The tensor's storage, if it has one; sparse and opaque tensors do not."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def storage_sizes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, int]:
    """Bytes of the storages that a call is given, by identity."""
    storages = (storage_of(tensor) for tensor in tensors_in(*args, *kwargs.values()))
    return {id(storage): storage.nbytes() for storage in storages if storage is not None}


def is_fresh(
    storage: UntypedStorage, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether a call made the storage, rather than being given it."""
    for tensor in tensors_in(*args, *kwargs.values()):
        if storage_of(tensor) is storage:
            # torch.tensor() shows its new storage to lift_fresh alone; one that wraps an array
            # of numpy comes the same way, but is not resizable.
            return func is torch.ops.aten.lift_fresh.default and storage.resizable()
    return True
