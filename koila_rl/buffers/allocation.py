"""Asking before allocating: a buffer that cannot fit is refused, not killed by the system."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from koila_rl.errors import InsufficientMemoryError
from koila_rl.memory.budget import active_device, available_bytes, format_bytes

__all__ = ["check_allocation"]


def check_allocation(asked: int, place: torch.device | Path, remedy: str) -> None:
    """Raise :class:`InsufficientMemoryError` if ``asked`` bytes do not fit ``place``.

    ``place`` is a device or a folder, which need not exist yet.
    """
    if isinstance(place, Path):
        existing = next(parent for parent in (place, *place.absolute().parents) if parent.exists())
        there = shutil.disk_usage(existing).free
    else:
        # A simulated device stands for the accelerator; host storage lies beside it.
        token = active_device.set(None) if place.type == "cpu" else None
        there = available_bytes(place)
        if token is not None:
            active_device.reset(token)
    if asked > there:
        raise InsufficientMemoryError(
            f"the buffer needs {format_bytes(asked)} ({asked:,} bytes) on {place}, where "
            f"{format_bytes(there)} ({there:,} bytes) are free; {remedy}"
        )
