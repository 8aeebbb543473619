"""Arguments as a buffer can take them, or an error that says what was given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from koila_rl.arguments import whole
from koila_rl.errors import BatchSizeError, ConfigurationError
from koila_rl.memory.budget import checked_device

__all__ = ["as_device", "as_mask", "as_seed", "number", "whole"]


def number(label: str, value: Any, most: float = float("inf")) -> float:
    """``value`` as a finite float between 0 and ``most``."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = float("nan")
    if isinstance(value, (bool, str)) or not 0.0 <= found <= most or found == float("inf"):
        limits = "0 or more" if most == float("inf") else f"between 0 and {most:g}"
        raise ConfigurationError(f"{label} is {value!r}; it must be a number, {limits}")
    return found


def as_device(device: Any) -> torch.device | None:
    """The device that is named, if it is one of this machine."""
    if device is None:
        return None
    if not isinstance(device, (str, torch.device)):
        raise ConfigurationError(f"device is {device!r}; it must be a name or a torch.device")
    return checked_device(device)


def as_seed(seed: Any) -> int | None:
    """A seed, or None for one that differs each time."""
    return None if seed is None else whole("seed", seed, 0)


def as_mask(label: str, value: Any, shape: tuple[int, ...]) -> Tensor:
    """A bool tensor of a shape."""
    if not isinstance(value, Tensor) or value.shape != shape or value.dtype != torch.bool:
        found = type(value).__name__
        if isinstance(value, Tensor):
            found = f"{value.dtype} of shape {tuple(value.shape)}"
        raise BatchSizeError(f"{label} is {found}; it must be a bool tensor of shape {shape}")
    return value
