"""Bytes at every moment of a program as lines in the microbatch size, from one trace.

Each moment's bytes grow in proportion to the samples of the microbatch at work. A trace whose
second microbatch has half the size of the third passes the same moments in both, so it tells
every line; the peak at any size is the largest of them. It is a maximum of lines, not a line,
which is why two peaks alone would not do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from koila_rl.memory.estimate import OUTSIDE, Estimate
from koila_rl.memory.live import Moment

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
        phases: dict[int, list[Moment]] = {}
        for moment in estimate.timeline:
            phases.setdefault(moment.phase, []).append(moment)
        first: set[Line] = set()
        later: set[Line] = set()
        outside = max(map(_taken, phases.pop(OUTSIDE, [])), default=0.0)
        for number in {phase // 3 for phase in phases}:
            opening, low, high = (phases.get(3 * number + k, []) for k in range(3))
            if len(low) != len(high):
                return None
            lines = [_line(few, _taken(x), many, _taken(y)) for x, y in zip(low, high, strict=True)]
            later.update(lines)
            first.update(_opening_lines(opening, high, lines, many))
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


def _taken(moment: Moment) -> float:
    return moment.live_bytes + moment.scratch_bytes


def _line(few: int, low: float, many: int, high: float) -> Line:
    slope = (high - low) / (many - few)
    return high - slope * many, slope


def _opening_lines(
    opening: list[Moment], later: list[Moment], lines: list[Line], many: int
) -> Iterator[Line]:
    """Lines of the first microbatch, whose slopes are those of the same moments in a later one.

    It has its own moments where it makes what later ones add to, so moments are matched from
    both ends by what made them; a later line stands for those in between.
    """
    makers = [(x.maker, y.maker) for x, y in zip(opening, later, strict=False)]
    ahead = next((k for k, (x, y) in enumerate(makers) if x is not y), len(makers))
    tail = [(x.maker, y.maker) for x, y in zip(opening[::-1], later[::-1], strict=False)]
    behind = next((k for k, (x, y) in enumerate(tail) if x is not y), len(tail))
    behind = min(behind, len(makers) - ahead)
    pairs = [*zip(opening[:ahead], lines[:ahead], strict=True)]
    pairs += zip(opening[len(opening) - behind :], lines[len(lines) - behind :], strict=True)
    for moment, (_, slope) in pairs:
        yield _taken(moment) - slope * many, slope
    yield from lines[ahead : len(lines) - behind]


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
