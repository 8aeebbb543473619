"""Weights that are drawn from in proportion, in float64, for any number of slots.

A tree of fan-out 16 below a wide top rather than 2: three levels hold two million slots, and
a level costs one gather and one cumulative sum for the whole minibatch. Every sum is made anew
from the level below when a weight changes, so nothing drifts.
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
_TOP = 8192


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

        Never one of weight 0, whatever is rounded on the way.
        """
        top = self._levels[-1]
        cumulated = np.empty(len(top) + 1)
        cumulated[0] = 0.0
        top.cumsum(out=cumulated[1:])
        at = np.minimum(at, math.nextafter(cumulated[-1], 0.0))
        found: Index = cumulated[1:].searchsorted(at, side="right")
        before = cumulated[found]
        for level in self._levels[-2::-1]:
            at -= before
            sums = level.reshape(-1, _FAN).take(found, axis=0).cumsum(axis=1)
            # Sums of a block differ from its parent's by rounding; stay inside.
            np.minimum(at, np.nextafter(sums[:, -1], 0.0), out=at)
            inside = (sums > at[:, None]).argmax(axis=1)
            found = found * _FAN + inside
            if level is not self._levels[0]:
                before = np.where(inside > 0, sums[np.arange(len(at)), inside - 1], 0.0)
        return found


def _padded(values: Floats) -> Floats:
    size = -(-len(values) // _FAN) * _FAN
    if size == len(values):
        return values
    padded = np.zeros(size, dtype=np.float64)
    padded[: len(values)] = values
    return padded
