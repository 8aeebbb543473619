"""Rows on their way to what computes on them, while the microbatch before computes.

A thread gathers them, since a gather may wait for a disk. On CUDA they go through pinned memory
and a copy stream of their own.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["Ahead", "worker_is_done"]

Gather: TypeAlias = Callable[[Tensor], object]


@functools.cache
def _worker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="koila_rl-rows")


# A forked process has the executor but not its thread.
os.register_at_fork(after_in_child=_worker.cache_clear)


def worker_is_done() -> None:
    """Wait for what is gathered ahead: the rows are about to change."""
    if _worker.cache_info().currsize:
        _worker().submit(int).result()


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Ahead:
    """Rows that ``gather`` writes on the worker thread; calling it waits for them.

    ``rows`` were allocated by the thread that computes, so that whoever follows its memory sees
    them; there they are used and freed too.
    """

    __slots__ = ("_held", "_landed", "_pending", "_rows")

    def __init__(self, gather: Gather, rows: Tensor) -> None:
        self._rows: Tensor | None = rows
        self._landed: torch.cuda.Event | None = None
        # The thread takes them out of here: it must not hold them longer than it writes to them.
        self._held = [rows]
        self._pending: Future[None]
        if rows.device.type != "cuda":
            self._pending = _worker().submit(_gather, gather, self._held)
            return
        self._held.append(torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True))
        # The memory may have been given back by work that the device has yet to do.
        free, self._landed = torch.cuda.Event(), torch.cuda.Event()
        free.record(torch.cuda.current_stream(rows.device))
        self._pending = _worker().submit(
            _gather_and_copy, gather, self._held, free, self._landed
        )  # fmt: skip

    def __call__(self) -> Tensor:
        """The rows; raises what went wrong in the thread."""
        self._pending.result()
        rows, self._rows = self._rows, None
        assert rows is not None
        if self._landed is not None:
            torch.cuda.current_stream(rows.device).wait_event(self._landed)
        return rows

    def drop(self) -> None:
        """Let the rows go; on return nothing writes to them any more."""
        if not self._pending.cancel():
            self._pending.exception()
        if self._landed is not None:
            self._landed.synchronize()
        self._held.clear()
        self._rows = None


def _gather(gather: Gather, held: list[Tensor]) -> None:
    rows = held.pop()
    with torch.inference_mode(rows.is_inference()), torch.no_grad():
        gather(rows)


def _gather_and_copy(
    gather: Gather, held: list[Tensor], free: torch.cuda.Event, landed: torch.cuda.Event
) -> None:
    pinned, rows = held.pop(), held.pop()
    with torch.inference_mode(rows.is_inference()), torch.no_grad():
        gather(pinned)
        stream = _copy_stream(rows.device)
        with torch.cuda.stream(stream):
            stream.wait_event(free)
            rows.copy_(pinned, non_blocking=True)
            landed.record(stream)
