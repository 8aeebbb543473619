"""Hyperparameters that change while learning: a number, or a function of the remaining progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Linear", "Schedule", "at"]


@dataclass(frozen=True)
class Linear:
    """From ``start`` at the beginning (progress 1) in a straight line to ``end`` (progress 0).

    >>> Linear(1e-3)(0.5)
    0.0005
    """

    start: float
    end: float = 0.0

    def __call__(self, progress: float) -> float:
        """The value at ``progress``, which falls from 1 to 0."""
        return self.end + (self.start - self.end) * progress


Schedule: TypeAlias = float | Callable[[float], float]


def at(schedule: Schedule, progress: float) -> float:
    """Value of ``schedule`` when ``progress``, from 1 down to 0, remains."""
    return float(schedule(progress) if callable(schedule) else schedule)
