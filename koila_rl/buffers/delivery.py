"""Rows on their way from the storage to the device that computes on them.

On CUDA, rows go through pinned memory and a copy stream of their own, so that the copy of one
microbatch can run while the one before it computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["Delivered", "start_delivery", "worker", "worker_is_done"]

Delivered: TypeAlias = Callable[[], Tensor]


@functools.cache
def worker() -> ThreadPoolExecutor:
    """The thread that gathers ahead where a gather waits for a disk."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="koila_rl-rows")


def worker_is_done() -> None:
    """Wait for what was gathered ahead: the rows are about to change."""
    if worker.cache_info().currsize:
        worker().submit(int).result()


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def start_delivery(gather: Callable[[], Tensor], device: torch.device, *, wait: bool) -> Delivered:
    """Gather and begin to copy to ``device``; the result gives the rows when called.

    With ``wait`` false the gather runs on the worker thread.
    """
    if wait:
        return _copy(gather(), device)
    pending: Future[Delivered] = worker().submit(lambda: _copy(gather(), device))
    return lambda: pending.result()()


def _copy(rows: Tensor, device: torch.device) -> Delivered:
    if rows.device == device:
        return lambda: rows
    if device.type != "cuda" or rows.device.type != "cpu":
        moved = rows.to(device)
        return lambda: moved
    stream = _copy_stream(device)
    with torch.cuda.stream(stream):
        pinned = rows if rows.is_pinned() else rows.pin_memory()
        copied = pinned.to(device, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record(stream)

    def receive() -> Tensor:
        computing = torch.cuda.current_stream(device)
        computing.wait_event(ready)
        # Allocated on the copy stream: its memory must not be reused while still computed on.
        copied.record_stream(computing)
        return copied

    return receive
