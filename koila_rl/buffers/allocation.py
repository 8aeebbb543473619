"""Asking before allocating: a buffer that cannot fit is refused, not killed by the system."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from koila_rl.errors import InsufficientMemoryError

__all__ = ["available_bytes", "check_allocation", "human"]

_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def human(size: int) -> str:
    """Bytes as a person reads them: ``6.57 GiB``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def available_bytes(place: torch.device | Path) -> int | None:
    """Bytes that can still be allocated on a device or below a folder; None if unknown."""
    if isinstance(place, Path):
        existing = next(parent for parent in (place, *place.parents) if parent.exists())
        return shutil.disk_usage(existing).free
    if place.type == "cuda":
        free, _ = torch.cuda.mem_get_info(place)
        return int(free)
    if place.type == "cpu":
        return _host_bytes()
    return None


def _host_bytes() -> int | None:
    found = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = meminfo.read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for limit, used in _CGROUPS:
        if limit.exists() and (text := limit.read_text().strip()).isdigit():
            found.append(max(0, int(text) - int(used.read_text())))
    return min(found) if found else None


def check_allocation(asked: int, place: torch.device | Path, remedy: str) -> None:
    """Raise :class:`InsufficientMemoryError` if ``asked`` bytes do not fit ``place``."""
    there = available_bytes(place)
    if there is not None and asked > there:
        raise InsufficientMemoryError(
            f"the buffer needs {human(asked)} ({asked:,} bytes) on {place}, where {human(there)} "
            f"({there:,} bytes) are free; {remedy}"
        )
