"""Allocations that no operator makes: compiled code's, and the resizing of bare storages.

While somebody follows storages, the functions in question are replaced by ones that tell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage

from koila_rl.recording.private import compiled_allocations, dispatch_modes

__all__ = ["Follower", "unwatch", "watch"]


class Follower(Protocol):
    """A dispatch mode that wants to know; told while it is active in the thread at work."""

    def made(self, tensor: Tensor, maker: str) -> None:
        """Compiled code has allocated; ``torch.OutOfMemoryError`` takes the tensor away."""

    def resized(self, storage: UntypedStorage, old_size: int, maker: object) -> None:
        """A storage has another size than before."""


_followers: list[Follower] = []
_resize = UntypedStorage.resize_


def watch(follower: Follower) -> None:
    """Tell ``follower`` from now on."""
    _followers.append(follower)
    UntypedStorage.resize_ = _resize_seen  # type: ignore[method-assign,assignment]
    for module, name in compiled_allocations():
        allocate = getattr(module, name, None)
        if allocate is not None and not isinstance(allocate, _AllocationSeen):
            setattr(module, name, _AllocationSeen(allocate))


def unwatch(follower: Follower) -> None:
    """Leave ``follower`` alone again, and put back the functions after the last one."""
    _followers.remove(follower)
    if _followers:
        return
    UntypedStorage.resize_ = _resize  # type: ignore[method-assign]
    for module, name in compiled_allocations():
        allocate = getattr(module, name, None)
        if isinstance(allocate, _AllocationSeen):
            setattr(module, name, allocate.original)


def _active_here() -> list[Follower]:
    active = {id(mode) for mode in dispatch_modes()}
    return [follower for follower in _followers if id(follower) in active]


def _resize_seen(storage: UntypedStorage, size: int) -> UntypedStorage:
    old_size = storage.nbytes()
    _resize(storage, size)
    for follower in _active_here():
        follower.resized(storage, old_size, "resize_")
    return storage


class _AllocationSeen:
    def __init__(self, original: Callable[..., Tensor]) -> None:
        self.original = original

    def __call__(self, *args: Any) -> Tensor:
        tensor = self.original(*args)
        refusal = None
        try:
            for follower in _active_here():
                follower.made(tensor, "compiled code")
        except torch.OutOfMemoryError as error:
            refusal = error.with_traceback(None)
        if refusal is None:
            return tensor
        del tensor  # or the traceback would keep it
        try:
            raise refusal
        finally:
            del refusal
