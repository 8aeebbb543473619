"""Weights that are drawn from in proportion, in float64, for any number of slots.

A tree of fan-out 16 below a wide top rather than 2: three levels below it hold four million
slots, and a level costs one gather and one small product for the whole minibatch. Every sum is
made anew from the level below when a weight changes, so nothing drifts.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from koila_rl.buffers.storage import Index

__all__ = ["SumTree"]

Floats: TypeAlias = "npt.NDArray[np.float64]"

_FAN = 16
# The top is searched as a whole, so it may be this wide.
_TOP = 1024
# A row of weights times this is 0 and its cumulative sums.
_CUMULATE = np.triu(np.ones((_FAN, _FAN + 1)), 1)


class SumTree:
    """``weights`` is the lowest level, an array of ``capacity`` slots that the tree writes to."""

    def __init__(self, weights: Floats) -> None:
        self.weights = weights
        self._levels = [_padded(weights)]
        # Where no padding was needed the level is the caller's own memory, else a copy.
        self._shared = self._levels[0].base is weights or self._levels[0] is weights
        while len(self._levels[-1]) > _TOP:
            sums = self._levels[-1].reshape(-1, _FAN).sum(axis=1)
            self._levels.append(_padded(sums))

    @property
    def total(self) -> float:
        """Sum of all weights."""
        return float(self._levels[-1].sum())

    def set(self, slots: Index, weights: Floats | float) -> None:
        """Change weights; of a slot named twice the last counts."""
        self._levels[0][slots] = weights
        if not self._shared:
            self.weights[slots] = weights
        for below, level in zip(self._levels, self._levels[1:], strict=False):
            slots = slots // _FAN
            if len(slots) > 8:
                slots = np.unique(slots)
            level[slots] = below.reshape(-1, _FAN)[slots].sum(axis=1)

    def find(self, at: Floats) -> Index:
        """The slot in which each of ``at``, cumulated weights in [0, total), falls.

        Never one of weight 0, whatever is rounded on the way. Fastest where ``at`` ascends.
        """
        top = self._levels[-1]
        cumulated = np.empty(len(top) + 1)
        cumulated[0] = 0.0
        top.cumsum(out=cumulated[1:])
        left = np.minimum(at, math.nextafter(cumulated[-1], 0.0))
        found: Index = cumulated[1:].searchsorted(left, side="right")
        left -= cumulated[found]
        first = np.arange(len(at)) * (_FAN + 1)
        for level in self._levels[-2::-1]:
            # One product instead of a cumulative sum: a quarter of the time for short rows.
            sums = level.reshape(-1, _FAN).take(found, axis=0) @ _CUMULATE
            inside = (sums[:, 1:] > left[:, None]).argmax(axis=1)
            left -= sums.take(first + inside)
            found = found * _FAN + inside
        return self._corrected(found, at)

    def _corrected(self, slots: Index, at: Floats) -> Index:
        """Sums of a block differ from its parent's by rounding, which may lead beside it."""
        wrong = self._levels[0][slots] == 0.0
        if wrong.any():
            cumulated = self._levels[0].cumsum()
            inside = np.minimum(at[wrong], math.nextafter(cumulated[-1], 0.0))
            slots[wrong] = cumulated.searchsorted(inside, side="right")
        return slots


def _padded(values: Floats) -> Floats:
    size = -(-len(values) // _FAN) * _FAN
    if size == len(values):
        return values
    padded = np.zeros(size, dtype=np.float64)
    padded[: len(values)] = values
    return padded
