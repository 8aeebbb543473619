"""Bytes at every moment of a program as lines in the microbatch size, from two traces.

Each moment's bytes grow in proportion to the samples of the microbatch at work. Traces at two
sizes pass the same moments, so they tell every line; the peak at any size is the largest of
them. It is a maximum of lines, not a line, which is why two peaks alone would not do.
"""

from __future__ import annotations

from dataclasses import dataclass

from koila_rl.memory.estimate import OUTSIDE, Estimate

__all__ = ["Lines"]


@dataclass(frozen=True, slots=True)
class Lines:
    """Bytes as ``base + slope · samples`` for moments in each phase; repeated ones left out."""

    phases: dict[int, tuple[tuple[float, float], ...]]

    @classmethod
    def through(cls, few: int, low: Estimate, many: int, high: Estimate) -> Lines | None:
        """Lines through traces at two sizes; None where they did not pass the same moments."""
        if len(low.timeline) != len(high.timeline):
            return None
        phases: dict[int, set[tuple[float, float]]] = {}
        for x, y in zip(low.timeline, high.timeline, strict=True):
            if x.phase != y.phase:
                return None
            before, after = x.live_bytes + x.scratch_bytes, y.live_bytes + y.scratch_bytes
            slope = (after - before) / (many - few)
            phases.setdefault(x.phase, set()).add((before - slope * few, slope))
        return cls({phase: _upper(lines) for phase, lines in phases.items()})

    def peak(self, size: int, n: int) -> float:
        """Bytes at the peak in microbatches of ``size`` out of n samples."""
        most = 0.0
        for phase, lines in self.phases.items():
            # Only the last microbatch may be smaller, and the third stands for all others.
            samples = size if phase == OUTSIDE else min(size, n - phase * size)
            if samples > 0:
                most = max(most, max(base + slope * samples for base, slope in lines))
        return most

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


def _upper(lines: set[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Without those that another one passes at every size."""
    kept: list[tuple[float, float]] = []
    highest = float("-inf")
    for base, slope in sorted(lines, key=lambda line: (-line[1], -line[0])):
        if base > highest:
            kept.append((base, slope))
            highest = base
    return tuple(kept)
