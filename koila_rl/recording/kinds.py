"""What about a number may change the course of a call."""

from __future__ import annotations

from typing import Any

__all__ = ["kind_of"]


def kind_of(x: float) -> Any:
    """Dropout at 0, a norm at 2 or inf: the number itself matters; else only its sign does."""
    if x in (0.0, 1.0, 2.0) or x - x != 0:
        return repr(x)
    return x < 0
