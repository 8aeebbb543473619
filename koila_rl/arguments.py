"""Whole numbers that callers hand over, or an error that says what was given instead."""

from __future__ import annotations

import operator
from typing import Any

from koila_rl.errors import ConfigurationError

__all__ = ["whole"]


def whole(label: str, value: Any, least: int | None = 1, most: int | None = None) -> int:
    """``value``, also one of numpy's, as an int from ``least`` to ``most``.

    Raises:
        ConfigurationError: It is no whole number, or beyond; the message says both.
    """
    try:
        found = operator.index(value)
    except TypeError:
        found = None
    if found is None or isinstance(value, bool):
        raise ConfigurationError(
            f"{label} is {value!r} ({type(value).__name__}); it must be a whole number"
        )
    if least is not None and found < least:
        raise ConfigurationError(f"{label} is {found}; it must be {least} or more")
    if most is not None and found > most:
        raise ConfigurationError(f"{label} is {found}; it must be {most} or less")
    return found
