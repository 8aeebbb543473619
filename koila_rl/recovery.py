"""Out of memory all the same: start the run again, smaller, as if nothing had happened.

Another process may take memory between the plan and the run. Errors are handled after the
``except`` block, since the traceback holds the tensors of the failed run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from koila_rl.engine.program import Bound
from koila_rl.engine.replay import failed_call
from koila_rl.engine.segments import OFFLOADED, most_parts
from koila_rl.errors import InsufficientMemoryError
from koila_rl.memory.budget import budget_bytes, may_offload
from koila_rl.memory.plan import Plan
from koila_rl.recording.values import Captured

__all__ = ["Failure", "is_out_of_memory", "remember_failure", "run_smaller", "size_to_try"]

T = TypeVar("T")

# What allocators say where the error has no type of its own.
_TEXTS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, by type or by the known texts."""
    if isinstance(error, InsufficientMemoryError):
        return False
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(t in str(error).lower() for t in _TEXTS)


def run_smaller(
    bound: Bound, size: int, parts: int, attempt: Callable[[int, int], T], differentiated: bool
) -> tuple[T, int, int, int]:
    """``attempt(size, parts)``; after an out-of-memory error again with half the size.

    Where one sample does not fit, its stages run in ``parts`` that are computed again in the
    backward, in ever more of them, and at last with saved tensors on the host. Random states and
    buffers are rolled back before each further attempt, so the run ends as one at the size
    finally used. Returns the result, that size and number of parts, and the number of failures.

    Raises:
        InsufficientMemoryError: one sample in many parts does not fit either; chained to the
            last error.
    """
    failures = 0
    while True:
        before: _Snapshot | None = None
        failure: BaseException | None = None
        try:
            before = _Snapshot(bound)
            return attempt(size, parts), size, parts, failures
        except BaseException as error:
            if not is_out_of_memory(error):
                # As if it had not been run, also where somebody interrupted it.
                if before is not None:
                    before.restore()
                _name_place(error, bound)
                raise
            failure = _without_frames(error)
        failures += 1
        if before is not None:
            before.restore()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        smallest = size <= 1 or bound.program.n <= 1 or not any(bound.program.stages)
        harder = _harder(bound, parts) if smallest and differentiated else None
        if harder is not None:
            parts = harder
        elif smallest:
            raise InsufficientMemoryError(
                f"the device ran out of memory with {size:,} of {bound.program.n:,} samples at a "
                f"time ({failure}). No gradient has changed. Free memory on the device, or make "
                "the network or the observation smaller."
            ) from failure
        else:
            size = max(1, min(size, bound.program.n) // 2)


def _harder(bound: Bound, parts: int) -> int | None:
    """What to try where one sample does not fit in so many parts; None if nothing is left."""
    if parts == OFFLOADED:
        return None
    if parts < most_parts(bound.program):
        return 2 * parts
    return OFFLOADED if may_offload(bound.roots[0].meta.device) else None


def _name_place(error: BaseException, bound: Bound) -> None:
    """Say in which line of the user's code the failing call was recorded."""
    number = failed_call(error)
    if number is None or not hasattr(error, "add_note"):
        return
    call = bound.calls[number]
    note = f"{call.info.name} was recorded at {call.where[0]}:{call.where[1]}" if call.where else ""
    if note and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


@dataclass(frozen=True, slots=True)
class Failure:
    """A size that did not fit although it was planned: what ran, and what was free then."""

    size: int
    used: int
    parts: int
    free_bytes: int
    needed_bytes: int


def size_to_try(bound: Bound, size: int, parts: int) -> tuple[int, int]:
    """``size`` and ``parts``, or what ran last time where these failed and no memory came back."""
    failure: Failure | None = bound.program.failure
    if failure is None or size < failure.size:
        return size, parts
    free = _free_bytes(bound)
    if free > failure.free_bytes and free >= failure.needed_bytes:
        bound.program.failure = None
        return size, parts
    if OFFLOADED in (parts, failure.parts):
        return min(size, failure.used), OFFLOADED
    return min(size, failure.used), max(parts, failure.parts)


def remember_failure(bound: Bound, plan: Plan, size: int, used: int, parts: int) -> None:
    """The next update need not run into the same error."""
    failure = Failure(size, used, parts, _free_bytes(bound), plan.peak_bytes)
    bound.program.failure = failure


def _free_bytes(bound: Bound) -> int:
    return budget_bytes(None, bound.roots[0].meta.device)


def _without_frames(error: BaseException) -> BaseException:
    """The error without the frames and causes that keep the failed tensors alive."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


class _Snapshot:
    """Generators, random states and written buffers as they are before an attempt."""

    def __init__(self, bound: Bound) -> None:
        calls = [call for call in bound.calls if call.state is not None]
        self.states: list[Any] = [call.state for call in calls]
        self.memory = [(copy.copy(state.random), state.done) for state in self.states]
        written = [
            x
            for call in calls
            if call.info.effect and call.state is not None and not call.state.done
            for x in call.inputs
            if isinstance(x, Captured) and not x.tensor.requires_grad
        ]
        self.buffers = [(x, x.tensor.clone()) for x in written]
        self.random = bound.program.random
        if self.random:
            self.host = torch.get_rng_state()
            self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore(self) -> None:
        for state, (random, done) in zip(self.states, self.memory, strict=True):
            state.random, state.done = random, done
        with torch.no_grad():
            for x, value in self.buffers:
                x.tensor.copy_(value)
                x.version = x.tensor._version
        if self.random:
            torch.set_rng_state(self.host)
            if self.cuda:
                torch.cuda.set_rng_state_all(self.cuda)
