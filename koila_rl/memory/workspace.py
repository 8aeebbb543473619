"""Scratch memory of kernels: what the CPU's allocator gives out beyond the tensors seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from koila_rl.errors import UnsupportedError
from koila_rl.memory.tracking import StorageTracker
from koila_rl.recording.private import allocator_record, profiler_enabled

__all__ = ["Workspace", "allocator_peak", "measure_workspace"]


@dataclass(frozen=True, slots=True)
class Workspace:
    """What one run took, by the allocator's own record and by its tensors. Sizes in bytes."""

    allocator_bytes: int
    """Most that the allocator had given out at once, above what it had at the start."""
    live_bytes: int
    """Most that the tensors took that operators returned."""
    call: str
    """The operator inside which the allocator's peak came, such as ``aten::mm``."""

    @property
    def workspace_bytes(self) -> int:
        """What must be added to the tensors' peak to arrive at the allocator's."""
        return max(0, self.allocator_bytes - self.live_bytes)


def measure_workspace(run: Callable[[], object], live_bytes: int | None = None) -> Workspace:
    """Run on the CPU under the allocator's record and compare with the tensors' peak.

    Args:
        run: what to measure; its work must be done in this thread.
        live_bytes: peak of the tensors, if known; else ``run`` runs once more to find it.

    Raises:
        UnsupportedError: a profiler is active.
    """
    allocator_bytes, call = allocator_peak(run)
    if live_bytes is None:
        with StorageTracker() as tracker:
            run()
        live_bytes = tracker.peak_bytes
    return Workspace(allocator_bytes, live_bytes, call)


def allocator_peak(run: Callable[[], object]) -> tuple[int, str]:
    """Most bytes that the CPU's allocator had given out at once while ``run`` ran, and where.

    Counted from what it had given out at the start; what existed then should live on, since its
    end is in the record only if an earlier measurement saw its beginning. Memory that libraries
    take without PyTorch's allocator is not in it.

    Raises:
        UnsupportedError: a profiler is active.
    """
    if profiler_enabled():
        raise UnsupportedError("workspaces cannot be measured while a profiler is active")
    total, peak, call = 0, 0, ""
    inside: list[str] = []
    for event, nbytes in allocator_record(run):
        if event.startswith("push:"):
            inside.append(event.removeprefix("push:"))
        elif event == "pop":
            inside.pop()
        total += nbytes
        if total > peak:
            peak, call = total, inside[-1] if inside else ""
    return peak, call
