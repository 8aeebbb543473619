"""What a ``StorageTracker`` tells, and what may take part in its counting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from koila_rl.memory.budget import format_bytes

__all__ = ["LiveCall", "Moment", "Results", "StorageListener", "Workspaces", "short_name"]


class LiveCall(NamedTuple):
    """One storage that was live at the peak."""

    name: str
    """The operator that made it, or the tracker's label at that time."""
    nbytes: int
    """Bytes in whole blocks."""

    def __str__(self) -> str:
        return f"{short_name(self.name)} {format_bytes(self.nbytes)}"


def short_name(maker: object) -> str:
    """An operator's name without its library and overload.

    >>> short_name("aten.convolution.default"), short_name("my label")
    ('convolution', 'my label')
    """
    name = str(maker)
    return name.split(".")[1] if name.count(".") == 2 else name


class StorageListener(Protocol):
    """What may follow a tracker's storages one by one, as an allocator does."""

    def allocated(self, key: int, nbytes: int, name: str) -> None:
        """A storage came to life or grew; ``torch.OutOfMemoryError`` refuses and uncounts it."""

    def freed(self, key: int, nbytes: int) -> None:
        """The storage last announced under this key died, or is about to change its size."""


# Of a call: the operator, its arguments, keyword arguments and result.
Results = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Any]


class Workspaces(Protocol):
    """What operators take beyond their results."""

    def of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
        """Bytes of scratch memory beyond the results while the call runs."""


class Moment(NamedTuple):
    """What was taken when a storage came to life, or while an operator ran."""

    live_bytes: int
    scratch_bytes: int
    maker: object
    """The operator, or the tracker's label at that time."""
    phase: int
    """The tracker's at that time."""
