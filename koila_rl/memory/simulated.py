"""A device of any size on any machine: follows live tensors and raises where it would be full."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextvars import Token
from typing import Any

import torch
from torch import Tensor, nn

from koila_rl.errors import ConfigurationError, InsufficientMemoryError
from koila_rl.memory.allocator import CachingAllocator
from koila_rl.memory.budget import (
    BudgetDevice,
    active_device,
    format_bytes,
    parse_bytes,
    total_bytes,
)
from koila_rl.memory.tracking import LiveCall, StorageTracker

__all__ = ["SimulatedDevice"]


class SimulatedDevice:
    """Context manager: tensors made inside live on a device of this capacity, on the CPU.

    The call whose allocation passes the capacity raises ``torch.OutOfMemoryError``, with a
    message of PyTorch's kind, in place of its result. Planning inside goes by this device.

    What existed at entry counts once it is registered, and zero otherwise; ``str(device)`` says
    how much of the latter was seen. Followed are the storages of tensors made in this thread, in
    whole 512-byte blocks, by operators and by code that ``torch.compile`` has compiled (and that
    stays compiled); not scratch memory inside kernels.

    Args:
        capacity: as in ``parse_bytes``; a fraction is one of the machine's memory.
        allocator: serve the storages from a model of PyTorch's caching allocator, so that
            fragmentation counts.
        expandable_segments: of that allocator.

    Raises:
        ConfigurationError: the capacity cannot be read.
        torch.OutOfMemoryError: from operators inside, and from :meth:`register`.

    >>> with SimulatedDevice("1MiB") as device:
    ...     x = torch.zeros(1024)
    >>> device.peak_bytes
    4096
    """

    def __init__(
        self,
        capacity: str | float,
        *,
        allocator: bool = False,
        expandable_segments: bool = False,
    ) -> None:
        host = total_bytes("cpu")
        self.capacity_bytes = parse_bytes(capacity, host)
        if self.capacity_bytes > host:
            warnings.warn(
                f"a simulated device of {format_bytes(self.capacity_bytes)} is larger than this "
                f"machine's {format_bytes(host)}, which will be full first",
                stacklevel=2,
            )
        if expandable_segments and not allocator:
            raise ConfigurationError("expandable_segments=True needs allocator=True")
        self.allocator = (
            CachingAllocator(self.capacity_bytes, expandable_segments=expandable_segments)
            if allocator
            else None
        )
        self._before_section = 0
        self.resident_bytes = 0
        """Bytes that were registered."""
        self._tracker = StorageTracker(self, follow_fake=False, note_unknown=True)
        self._token: Token[BudgetDevice | None] | None = None

    @property
    def live_bytes(self) -> int:
        """Bytes of the tensors on the device now."""
        return self._tracker.live_bytes

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes that were live at once, registered ones included."""
        return max(self._before_section, self._tracker.peak_bytes)

    @property
    def section_peak_bytes(self) -> int:
        """The same since :meth:`start_section`."""
        return self._tracker.peak_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the allocator holds; without a model of it, the live bytes."""
        return self.live_bytes if self.allocator is None else self.allocator.reserved_bytes

    @property
    def unregistered_bytes(self) -> int:
        """Bytes of tensors that operators were given here, but that count zero."""
        return self._tracker.unknown_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that can still be allocated, whatever the sizes they come in."""
        if self.allocator is None:
            return self.capacity_bytes - self.live_bytes
        kept = self.allocator.reserved_bytes - self.allocator.releasable_bytes
        return self.capacity_bytes - kept

    def peak_calls(self) -> tuple[LiveCall, ...]:
        """What was live at the peak, largest first."""
        return self._tracker.peak_calls()

    def reset_peak(self) -> None:
        """Begin a new peak at what is live now."""
        self._before_section = 0
        self._tracker.reset_peak()

    def start_section(self) -> None:
        """Begin a section, such as one update, with a peak of its own."""
        self._before_section = self.peak_bytes
        self._tracker.reset_peak()

    def register(self, *owners: nn.Module | torch.optim.Optimizer | Tensor) -> SimulatedDevice:
        """Put on the device what modules, optimizers and tensors hold, their gradients too.

        May be called before entering or inside, and again after something was added. Returns
        the device, so that ``with SimulatedDevice("2GiB").register(model, optimizer):`` works.
        """
        for owner in owners:
            if not isinstance(owner, (nn.Module, torch.optim.Optimizer, Tensor)):
                raise ConfigurationError(
                    f"cannot register a {type(owner).__name__}; give modules, optimizers, tensors"
                )
        for owner in owners:
            self.resident_bytes += self._tracker.adopt(_tensors_of(owner), "registered")
        return self

    def __enter__(self) -> SimulatedDevice:
        if self._token is not None:
            raise ConfigurationError("this SimulatedDevice is active already")
        self._token = active_device.set(self)
        self._tracker.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._tracker.__exit__(*exc_info)
        assert self._token is not None
        active_device.reset(self._token)
        self._token = None

    def allocated(self, key: int, nbytes: int, name: str) -> None:
        """A storage came to life; called by the tracker."""
        if self.allocator is None:
            if self.live_bytes + nbytes > self.capacity_bytes:
                raise torch.OutOfMemoryError(self._message(nbytes, name))
            return
        try:
            self.allocator.allocate(key, nbytes)
        except InsufficientMemoryError:
            raise torch.OutOfMemoryError(self._message(nbytes, name)) from None

    def freed(self, key: int, nbytes: int) -> None:
        """A storage died; called by the tracker."""
        if self.allocator is not None:
            self.allocator.free(key)

    def _message(self, nbytes: int, name: str) -> str:
        # Begins as CUDA's, since handlers in the field look for these very words.
        text = (
            f"CUDA out of memory. Tried to allocate {format_bytes(nbytes)} for {name}. "
            f"SimulatedDevice has a total capacity of {format_bytes(self.capacity_bytes)} of "
            f"which {format_bytes(self.capacity_bytes - self.reserved_bytes)} is free. "
            f"{format_bytes(self.live_bytes)} is allocated by PyTorch"
        )
        if self.allocator is not None:
            cached = self.allocator.reserved_bytes - self.allocator.active_bytes
            text += f", and {format_bytes(cached)} is reserved by PyTorch but unallocated"
        return f"{text}."

    def __str__(self) -> str:
        text = (
            f"SimulatedDevice of {format_bytes(self.capacity_bytes)}: peak "
            f"{format_bytes(self.peak_bytes)}, {format_bytes(self.resident_bytes)} registered"
        )
        if self.allocator is not None:
            text += f", at most {format_bytes(self.allocator.peak_reserved_bytes)} reserved"
        if self.unregistered_bytes:
            text += (
                f"; {format_bytes(self.unregistered_bytes)} that existed at entry, or that no "
                f"operator made, count zero"
            )
        return text

    __repr__ = __str__


def _tensors_of(owner: nn.Module | torch.optim.Optimizer | Tensor) -> Iterator[Tensor]:
    if isinstance(owner, Tensor):
        held: Iterable[Any] = (owner,)
    elif isinstance(owner, nn.Module):
        held = (*owner.parameters(), *owner.buffers())
    else:
        parameters = (p for group in owner.param_groups for p in group["params"])
        states = (value for state in owner.state.values() for value in state.values())
        held = (*parameters, *states)
    for value in held:
        if isinstance(value, Tensor):
            yield value
            if value.is_leaf and value.grad is not None:
                yield value.grad
