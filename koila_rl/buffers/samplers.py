"""Which transitions come next: positions 0 (oldest) to ``n - 1`` (newest) of a buffer.

A sampler whose epochs visit every transition once gives fewer than asked at the end of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from koila_rl.buffers.storage import Index
from koila_rl.errors import ConfigurationError

__all__ = ["Sampler", "Sequential", "Shuffled", "Subset", "Uniform", "Weighted", "draw_from"]


class Sampler(Protocol):
    """Draws positions; ``generator`` is the buffer's own, so that its seed decides."""

    def draw(self, n: int, size: int, generator: np.random.Generator) -> Index:
        """Up to ``size`` positions below ``n``, int64."""

    def epoch_size(self, n: int) -> int:
        """Positions in one epoch."""


def draw_from(sampler: Sampler, n: int, size: int, generator: np.random.Generator) -> Index:
    """What the sampler draws, checked: a position that is not there would be another's row."""
    if not callable(getattr(sampler, "draw", None)):
        raise ConfigurationError(
            f"sampler is {sampler!r}; it must have draw(n, size, generator) and epoch_size(n)"
        )
    drawn = np.asarray(sampler.draw(n, size, generator), dtype=np.int64)
    if drawn.ndim != 1 or len(drawn) == 0 or drawn.min() < 0 or drawn.max() >= n:
        raise ConfigurationError(
            f"{type(sampler).__name__} drew {drawn.tolist()[:4]} of {n} transitions; positions "
            f"are 0 to {n - 1}, at least one"
        )
    return drawn


class Uniform:
    """Each draw independent, with replacement."""

    def draw(self, n: int, size: int, generator: np.random.Generator) -> Index:
        """``size`` positions, each of ``n`` equally likely."""
        return generator.integers(0, n, size)

    def epoch_size(self, n: int) -> int:
        """As many draws as there are transitions."""
        return n


class Sequential:
    """In order of age, again from the oldest when all were drawn."""

    def __init__(self) -> None:
        self._next = 0

    def draw(self, n: int, size: int, generator: np.random.Generator) -> Index:
        """The next positions, ending with the newest."""
        if self._next >= n:
            self._next = 0
        start, self._next = self._next, min(n, self._next + size)
        return np.arange(start, self._next)

    def epoch_size(self, n: int) -> int:
        """All transitions."""
        return n


class Shuffled:
    """Without replacement: every transition once an epoch, in an order of its own each time.

    A buffer that has grown or shrunk begins a new epoch.
    """

    def __init__(self) -> None:
        self._order: Index = np.empty(0, dtype=np.int64)
        self._n = 0

    def draw(self, n: int, size: int, generator: np.random.Generator) -> Index:
        """The next positions of the epoch; fewer at its end."""
        if n != self._n or len(self._order) == 0:
            self._n, self._order = n, generator.permutation(n)
        drawn, self._order = self._order[:size], self._order[size:]
        return drawn

    def epoch_size(self, n: int) -> int:
        """All transitions."""
        return n


class Subset:
    """Without replacement from the positions given."""

    def __init__(self, positions: Sequence[int] | npt.NDArray[np.integer]) -> None:
        given = np.asarray(positions)
        if given.dtype.kind not in "iu" and given.size:
            raise ConfigurationError(f"a subset takes whole numbers, not {positions!r}")
        self._positions = given.astype(np.int64).reshape(-1)
        if len(self._positions) == 0 or self._positions.min() < 0:
            raise ConfigurationError("a subset needs at least one position, none below 0")
        self._inner = Shuffled()

    def draw(self, n: int, size: int, generator: np.random.Generator) -> Index:
        """The next of the given positions in shuffled order; fewer at the end of an epoch."""
        if (largest := int(self._positions.max())) >= n:
            raise ConfigurationError(f"the subset asks for position {largest} of {n} transitions")
        chosen = self._inner.draw(len(self._positions), size, generator)
        return self._positions[chosen]

    def epoch_size(self, n: int) -> int:
        """The positions given."""
        return len(self._positions)


class Weighted:
    """With replacement, in proportion to one weight a position; weight 0 is never drawn."""

    def __init__(self, weights: Sequence[float] | npt.NDArray[np.floating]) -> None:
        given = np.asarray(weights)
        if given.dtype.kind not in "biuf":
            raise ConfigurationError(f"weights are numbers, not {weights!r}")
        self._weights = given.astype(np.float64).reshape(-1)
        if not np.isfinite(self._weights).all() or (self._weights < 0).any():
            raise ConfigurationError("weights must be finite and at least 0")
        if self._weights.sum() <= 0:
            raise ConfigurationError("all weights are 0; nothing can be drawn")
        self._cumulated = self._weights.cumsum()

    def draw(self, n: int, size: int, generator: np.random.Generator) -> Index:
        """``size`` positions, position i with probability ``weights[i] / sum(weights)``."""
        if len(self._weights) != n:
            raise ConfigurationError(
                f"{len(self._weights)} weights were given for {n} transitions; give one for each"
            )
        total = self._cumulated[-1]
        # A product that rounds up to the total would fall behind the last positive weight.
        at = np.minimum(generator.random(size) * total, np.nextafter(total, 0.0))
        found: Index = self._cumulated.searchsorted(at, side="right")
        return found

    def epoch_size(self, n: int) -> int:
        """As many draws as there are transitions."""
        return n
