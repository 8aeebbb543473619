"""Scratch memory of kernels: what the CPU's allocator gives out beyond the tensors seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import Tensor
from torch.autograd.profiler import record_function

from koila_rl.errors import UnsupportedError
from koila_rl.memory.storages import storage_of, tensors_in
from koila_rl.memory.tracking import StorageTracker
from koila_rl.recording.private import TorchDispatchMode, allocator_record, profiler_enabled

__all__ = ["OperatorWorkspaces", "Workspace", "allocator_peak", "measure_workspace"]

Shapes = tuple[tuple[int, ...], ...]


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


class OperatorWorkspaces:
    """Scratch memory of every operator in a run, told for other sizes of the minibatch too.

    Given to a ``StorageTracker`` that follows the program on fake tensors, they make its
    ``allocator_peak_bytes`` what the allocator would give out in a real run. Kernels that are
    chosen by size, as some are for a single sample, are told only at sizes that were measured.
    """

    def __init__(self) -> None:
        self._scratch: dict[Any, dict[Shapes, int]] = {}
        self._results: dict[Any, dict[Shapes, int]] = {}  # by operator and number of the result

    def measure(self, run: Callable[[], object]) -> None:
        """Learn from a run on the CPU in this thread; runs of other sizes make it more exact.

        Raises:
            UnsupportedError: a profiler is active.
        """
        if profiler_enabled():
            raise UnsupportedError("workspaces cannot be measured while a profiler is active")
        marker = _Marker()

        def marked() -> None:
            with marker:
                run()

        total = 0
        inside: list[_Frame] = []
        for event, nbytes in allocator_record(marked):
            total += nbytes
            if event.startswith("push:"):
                inside.append(_Frame(event.removeprefix("push:"), total))
                continue
            if inside:
                inside[-1].peak = max(inside[-1].peak, total)
            if event == "pop":
                frame = inside.pop()
                self._learn(marker, frame, total)
                if inside:
                    inside[-1].peak = max(inside[-1].peak, frame.peak)

    def of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Bytes of scratch memory that a call takes beyond its results.

        Sizes that were not measured are inferred from ones that differ by a single factor, as a
        different number of samples makes them: in proportion to one such size, on the line
        through two. Zero for calls unlike any measured one.
        """
        measured = self._scratch.get(func)
        if measured is None:
            return 0
        return _at_shapes(measured, _shapes(args, kwargs))

    def result_bytes(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], index: int
    ) -> int:
        """Bytes of one of a call's results, where fake kernels leave it empty.

        They do so for what oneDNN and cuDNN keep for the backward of a recurrent layer.
        """
        return _at_shapes(self._results.get((func, index), {}), _shapes(args, kwargs))

    def _learn(self, marker: _Marker, frame: _Frame, end: int) -> None:
        if not frame.name.startswith(_Marker.PREFIX):
            return
        func, shapes, results = marker.calls[int(frame.name.removeprefix(_Marker.PREFIX))]
        if frame.peak > end:
            scratch = self._scratch.setdefault(func, {})
            scratch[shapes] = max(frame.peak - end, scratch.get(shapes, 0))
        if len(results) > 1:
            for index, size in enumerate(results):
                self._results.setdefault((func, index), {})[shapes] = size


@dataclass(slots=True)
class _Frame:
    """An operator or a mark at work, and the most bytes given out since it began."""

    name: str
    peak: int


class _Marker(TorchDispatchMode):
    """Marks every operator's call in the profiler's record, by its number."""

    PREFIX = "koila_rl call "

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Shapes, tuple[int, ...]]] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with record_function(f"{self.PREFIX}{len(self.calls)}"):
            out = func(*args, **kwargs)
        storages = [storage_of(tensor) for tensor in tensors_in(out)]
        results = tuple(0 if storage is None else storage.nbytes() for storage in storages)
        self.calls.append((func, _shapes(args, kwargs), results))
        return out


def _at_shapes(measured: dict[Shapes, int], shapes: Shapes) -> int:
    """What was measured at these shapes, or what similar ones suggest; else zero."""
    if shapes in measured:
        return measured[shapes]
    sizes = {
        1 / factor: nbytes
        for other, nbytes in measured.items()
        if (factor := _common_factor(other, shapes)) is not None
    }
    # In units of the size asked for: through the two sizes nearest to 1, or proportional to one.
    nearest = sorted(sizes, key=lambda size: abs(size - 1))[:2]
    if not nearest:
        return 0
    if nearest[0] == 1 or len(nearest) == 1:
        return round(sizes[nearest[0]] / nearest[0])
    near, far = nearest
    slope = (sizes[far] - sizes[near]) / (far - near)
    return max(0, round(sizes[near] + slope * (1 - near)))


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes:
    tensors: list[Tensor] = tensors_in(*args, *kwargs.values())
    return tuple(tuple(tensor.shape) for tensor in tensors)


def _common_factor(old: Shapes, new: Shapes) -> float | None:
    """The factor by which all dimensions grew that differ; ``None`` if there is no such.

    Tensors that a fake kernel has left empty say nothing.
    """
    if [len(shape) for shape in old] != [len(shape) for shape in new]:
        return None
    factor = Fraction(1)
    for shape, other in zip(old, new, strict=True):
        for before, after in zip(shape, other, strict=True):
            if before == after or 0 in other:
                continue
            grown = Fraction(after, before) if before else None
            if grown is None or factor not in (1, grown):
                return None
            factor = grown
    return float(factor)
