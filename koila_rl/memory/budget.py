"""How many bytes there are: sizes as people write them, and what a device has to give."""

from __future__ import annotations

import math
import os
import re
import warnings
from contextvars import ContextVar
from pathlib import Path
from typing import Protocol

import torch

from koila_rl.errors import ConfigurationError

__all__ = [
    "BudgetDevice",
    "active_device",
    "available_bytes",
    "budget_bytes",
    "format_bytes",
    "may_offload",
    "parse_bytes",
    "total_bytes",
]

UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    UNITS |= {f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}

MARGIN = 32 << 20
"""Left free on a CUDA device: libraries allocate handles and workspaces of their own."""

MEMINFO = Path("/proc/meminfo")
CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")


class BudgetDevice(Protocol):
    """A device that answers for itself."""

    @property
    def capacity_bytes(self) -> int:
        """All of its memory."""

    @property
    def free_bytes(self) -> int:
        """What of it an update may still take."""


active_device: ContextVar[BudgetDevice | None] = ContextVar("active_device", default=None)


def may_offload(device: torch.device) -> bool:
    """Whether the host has memory of its own beside the device."""
    return device.type != "cpu" or active_device.get() is not None


"""The simulated device that stands for all devices here, if one is active."""


def format_bytes(nbytes: float) -> str:
    """Bytes for people, in binary units.

    >>> format_bytes(1536), format_bytes(512 * 2**20), format_bytes(0)
    ('1.5 KiB', '512 MiB', '0 B')
    """
    size, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    digits = f"{size:,.2f}" if abs(size) < 10 else f"{size:,.1f}"
    return f"{digits.rstrip('0').rstrip('.')} {unit}"


def parse_bytes(value: str | float, free: int | None = None) -> int:
    """Bytes from ``"2GiB"``, ``"1.5 GB"``, a count of bytes, or a fraction of ``free``.

    Integers are bytes; floats are fractions in (0, 1].

    Args:
        value: the size.
        free: bytes that fractions refer to.

    Raises:
        ConfigurationError: the size cannot be read, or is not positive.

    >>> parse_bytes("2GiB"), parse_bytes("1.5 GB"), parse_bytes(4096)
    (2147483648, 1500000000, 4096)
    >>> parse_bytes(0.5, free=1000)
    500
    """
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ConfigurationError(f"memory {value!r} is a {type(value).__name__}; {_EXAMPLES}")
    if isinstance(value, str):
        return _parse_text(value)
    if isinstance(value, int):
        if value <= 0:
            raise ConfigurationError(f"memory {value} is not positive; {_EXAMPLES}")
        return value
    if not 0 < value <= 1:  # also refuses nan
        raise ConfigurationError(
            f"memory {value} is a fraction of what is free, so it must lie in (0, 1]; {_EXAMPLES}"
        )
    if free is None:
        raise ConfigurationError(f"memory {value} is a fraction, but of what is not known here")
    return max(1, math.floor(value * free))


_EXAMPLES = 'give e.g. "2GiB", "512MiB", a number of bytes as an int, or a fraction like 0.8'


def _parse_text(text: str) -> int:
    match = re.fullmatch(r"\s*([-+]?\d[\d_,]*\.?\d*|[-+]?\.\d+)\s*([a-z]*)\s*", text.lower())
    if match is None:
        raise ConfigurationError(f"memory {text!r} is not a size; {_EXAMPLES}")
    number, unit = match.groups()
    if unit not in UNITS:
        near = (
            f'; did you mean "{number} {unit.upper()}iB"?' if unit in ("k", "m", "g", "t") else ""
        )
        raise ConfigurationError(
            f"memory {text!r} has the unknown unit {unit!r}{near}; {_EXAMPLES}"
        )
    nbytes = math.floor(float(number.replace(",", "").replace("_", "")) * UNITS[unit])
    if nbytes <= 0:
        raise ConfigurationError(f"memory {text!r} comes to {nbytes} bytes; {_EXAMPLES}")
    return nbytes


def budget_bytes(memory: str | float | None, device: torch.device | str) -> int:
    """Bytes that an update may take on ``device`` above what is resident.

    ``memory`` is as in :func:`parse_bytes`; ``None`` is all that is free. Warns where more is
    asked for than there is, and goes on with what was asked.

    Raises:
        ConfigurationError: the size is unusable, or the device does not exist.
    """
    free = available_bytes(device)
    if memory is None:
        return free
    asked = parse_bytes(memory, free)
    if asked > free:
        warnings.warn(
            f"a budget of {format_bytes(asked)} is asked for, but {device} has "
            f"{format_bytes(free)} free; an update may run out of memory",
            stacklevel=3,
        )
    return asked


def available_bytes(device: torch.device | str) -> int:
    """Bytes that an update may take on ``device`` now, above what is resident.

    - An active ``SimulatedDevice`` answers whatever device is asked for.
    - CPU: available memory, or what the control groups of this process leave of their limits;
      half of the memory where the system is not Linux and does not say.
    - CUDA: what the driver has free, within ``set_per_process_memory_fraction``, plus cached
      blocks that can be used again, less a margin of 32 MiB. Other processes are counted.
    - MPS: the recommended maximum less what is allocated. Untested: no such machine was at hand.

    Raises:
        ConfigurationError: there is no such device, or its memory cannot be asked for.
    """
    simulated = active_device.get()
    if simulated is not None:
        return simulated.free_bytes
    device = checked_device(device)
    if device.type == "cuda":
        return _cuda_available(device)
    if device.type == "mps":
        recommended = torch.mps.recommended_max_memory()
        return max(0, recommended - torch.mps.driver_allocated_memory())
    return _host_available()


def total_bytes(device: torch.device | str) -> int:
    """All memory that this process could have on ``device``."""
    simulated = active_device.get()
    if simulated is not None:
        return simulated.capacity_bytes
    device = checked_device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    return min([_host_memory()[0], *(limit for limit, _ in _cgroups())])


def checked_device(device: torch.device | str) -> torch.device:
    """The device, with its index, if it exists here and has memory to ask for."""
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ConfigurationError(f"{device!r} is not a device: {error}") from None
    if device.type == "cpu":
        return device
    if device.type == "mps":
        if not torch.backends.mps.is_available():
            raise ConfigurationError(f"{device} does not exist here; use device='cpu'")
        return device
    if device.type != "cuda":
        raise ConfigurationError(f"the memory of {device} cannot be asked for; use cpu or cuda")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index
    if index is None:
        index = torch.cuda.current_device() if count else 0
    if index >= count:
        raise ConfigurationError(f"{device} does not exist: {count} CUDA devices are here")
    return torch.device("cuda", index)


def _cuda_available(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    reserved = stats.get("reserved_bytes.all.current", 0)
    active = stats.get("active_bytes.all.current", 0)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total) - reserved
    return max(0, int(min(free, allowed) + (reserved - active) - MARGIN))


def _host_available() -> int:
    free = [_host_memory()[1], *(limit - used for limit, used in _cgroups())]
    return max(0, min(free))


def _host_memory() -> tuple[int, int]:
    """Total and available bytes of the machine."""
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return _host_memory_elsewhere()
    fields = (line.split() for line in lines)
    kib = {field[0].rstrip(":"): int(field[1]) for field in fields if len(field) == 3}
    return kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024


def _host_memory_elsewhere() -> tuple[int, int]:
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        raise ConfigurationError(
            "this system does not say how much memory it has; run on cuda, or on Linux or macOS"
        ) from None
    return total, total // 2


def _cgroups() -> list[tuple[int, int]]:
    """Limit and use in bytes of each control group that holds this process, if limited."""
    try:
        lines = CGROUP_MEMBERSHIP.read_text().splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            names = ("memory.max", "memory.current", "inactive_file")
            root = CGROUP_ROOT
        elif "memory" in controllers.split(","):  # version 1
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            root = CGROUP_ROOT / "memory"
        else:
            continue
        # Inside a container the path may be the host's, of which only the root is mounted.
        relative = Path(path.lstrip("/"))
        folders = [root / parent for parent in (relative, *relative.parents)]
        groups += [group for folder in folders if (group := _cgroup(folder, *names)) is not None]
    return groups


def _cgroup(folder: Path, limit: str, used: str, cache: str) -> tuple[int, int] | None:
    try:
        bound = (folder / limit).read_text().strip()
        usage = int((folder / used).read_text())
        rows = [line.split() for line in (folder / "memory.stat").read_text().splitlines()]
    except OSError:
        return None
    if bound == "max":
        return None  # version 1 writes a number above any machine's memory instead
    reclaimable = sum(int(value) for name, value in rows if name == cache)
    return int(bound), max(0, usage - reclaimable)
