"""Bytes at every moment of a program as lines in the microbatch size, from one trace.

Each moment's bytes grow in proportion to the samples of the microbatch at work. A trace whose
second microbatch has half the size of the third passes the same moments in both, so it tells
every line; the peak at any size is the largest of them. It is a maximum of lines, not a line,
which is why two peaks alone would not do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from koila_rl.memory.estimate import OUTSIDE, Estimate

__all__ = ["Lines"]

Line = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Lines:
    """Bytes as ``base + slope · samples``, highest lines only.

    ``first`` of the first microbatch of each pass, ``later`` of the others, which find gradients
    and sums of those before; ``outside`` bytes between passes.
    """

    first: tuple[Line, ...]
    later: tuple[Line, ...]
    outside: float

    @classmethod
    def of(cls, few: int, many: int, estimate: Estimate) -> Lines | None:
        """Lines from a trace with ``two_sizes``; None where microbatches were not alike."""
        phases: dict[int, list[float]] = {}
        for moment in estimate.timeline:
            taken = moment.live_bytes + moment.scratch_bytes
            phases.setdefault(moment.phase, []).append(taken)
        first: set[Line] = set()
        later: set[Line] = set()
        outside = max(phases.pop(OUTSIDE, [0.0]))
        for number in {phase // 3 for phase in phases}:
            opening, low, high = (phases.get(3 * number + k, []) for k in range(3))
            if len(low) != len(high):
                return None
            slopes = [(y - x) / (many - few) for x, y in zip(low, high, strict=True)]
            lines = [(y - slope * many, slope) for y, slope in zip(high, slopes, strict=True)]
            later.update(lines)
            if len(opening) == len(high):
                pairs = zip(opening, slopes, strict=True)
                first.update((x - slope * many, slope) for x, slope in pairs)
            else:
                first.update(lines)
        return cls(_upper(first), _upper(later), outside) if later else None

    def peak(self, size: int, n: int) -> float:
        """Bytes at the peak in microbatches of ``size`` out of n samples."""
        following = min(size, n - size)
        return max(self.outside, _highest(self.first, size), _highest(self.later, following))

    def largest(self, n: int, budget: int) -> int:
        """The largest size below n whose peak is within the budget; 0 if there is none."""
        low, high = 0, n
        while high - low > 1:
            middle = (low + high) // 2
            if self.peak(middle, n) <= budget:
                low = middle
            else:
                high = middle
        return low


def _highest(lines: tuple[Line, ...], samples: int) -> float:
    return max((base + slope * samples for base, slope in lines), default=0.0)


def _upper(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Without those that another one passes at every size."""
    kept: list[Line] = []
    highest = float("-inf")
    for base, slope in sorted(lines, key=lambda line: (-line[1], -line[0])):
        if base > highest:
            kept.append((base, slope))
            highest = base
    return tuple(kept)
