"""Environments in processes of their own: which of them have died, and how all are ended."""

from __future__ import annotations

import signal
from multiprocessing.connection import wait
from typing import Any

from gymnasium.vector import AsyncVectorEnv, VectorEnv

__all__ = ["end", "ended", "workers_of"]

_PATIENCE = 2.0
"""Seconds that a process is given to end."""


def workers_of(env: VectorEnv[Any, Any, Any]) -> AsyncVectorEnv | None:
    """The environments in processes below all wrappers, if they are."""
    base = env.unwrapped
    return base if isinstance(base, AsyncVectorEnv) else None


def ended(workers: AsyncVectorEnv) -> dict[int, str]:
    """Environments whose processes have ended, and how each has."""
    # A pipe closes a moment before its process has ended.
    ready = wait([process.sentinel for process in workers.processes], timeout=_PATIENCE)
    found = {}
    for index, process in enumerate(workers.processes):
        if process.sentinel in ready:
            process.join(_PATIENCE)
            found[index] = _how(process.exitcode)
    return found


def end(workers: AsyncVectorEnv) -> None:
    """End all processes, whatever they are at.

    gymnasium's ``close`` waits for the answer to a call that is under way, also where that has
    been read or its process is dead: it hangs, or hides the error for which one closes.
    """
    for process in workers.processes:
        process.terminate()
    for process in workers.processes:
        process.join(_PATIENCE)
        if process.is_alive():
            process.kill()
            process.join()
    for pipe in workers.parent_pipes:
        if pipe is not None:
            pipe.close()
    workers.closed = True


def _how(code: int | None) -> str:
    if code is None or code >= 0:
        return f"its process ended with exit code {code}"
    return f"its process was ended by {signal.Signals(-code).name}"
