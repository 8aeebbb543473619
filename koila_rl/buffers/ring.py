"""Row numbers of a ring: every transition ever stored has one, and its slot is row % capacity."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from koila_rl.buffers.storage import Flags, Index, Storage
from koila_rl.errors import StorageError

__all__ = ["Ring"]

# What is known of a row beside what the caller stored.
ENDED = 1
SKIPPED = 2


class Ring:
    """The counters and flags of a ring of ``capacity`` slots.

    Row ``r`` belongs to environment ``r % n_envs`` and follows row ``r - n_envs``. Counters and
    flags lie in the storage, so that a mapped file left by a killed process is still readable:
    rows that a write had begun to replace are no longer counted, half-written ones not yet.
    """

    def __init__(self, capacity: int, n_envs: int, storage: Storage) -> None:
        self.capacity = capacity
        self.n_envs = n_envs
        counters = storage.column("_ring", (2,), torch.int64, host=True)
        assert counters.array is not None
        # Through NumPy: a torch element assignment costs more than storing a small transition.
        self._counters: Index = counters.array
        flags = storage.column("_flags", (capacity,), torch.uint8, host=True)
        assert flags.array is not None
        self._flags: Flags = flags.array
        self.begun, self.total = (int(count) for count in self._counters)
        if not 0 <= self.total <= self.begun <= self.total + capacity:
            raise StorageError(
                f"a ring of {capacity} slots cannot have begun {self.begun} rows and ended "
                f"{self.total}"
            )
        live = self._flags[self.slots(np.arange(self.first, self.total))]
        self.skipped = int(np.count_nonzero(live & SKIPPED))

    @property
    def first(self) -> int:
        """The oldest row still there."""
        return max(0, self.begun - self.capacity)

    @property
    def held(self) -> int:
        """Rows still there, skipped ones included."""
        return self.total - self.first

    def slots(self, rows: Index) -> Index:
        """Where the rows lie."""
        return rows % self.capacity

    def flags(self, rows: Index) -> Flags:
        """``ENDED`` and ``SKIPPED`` of each row."""
        return self._flags[rows % self.capacity]

    def valid_rows(self) -> Index:
        """The rows that may be sampled, oldest first."""
        rows = np.arange(self.first, self.total)
        return rows[(self.flags(rows) & SKIPPED) == 0] if self.skipped else rows

    def draw(self, size: int, generator: np.random.Generator) -> Index:
        """``size`` rows that may be sampled, uniformly with replacement; there is at least one."""
        if self.skipped * 2 > self.held:
            valid = self.valid_rows()
            return valid[generator.integers(0, len(valid), size)]
        rows: Index = generator.integers(0, self.held, size)
        if self.first:
            rows += self.first
        while self.skipped and (bad := (self.flags(rows) & SKIPPED) != 0).any():
            rows[bad] = generator.integers(0, self.held, int(bad.sum())) + self.first
        return rows

    def spans(self, n: int, size: int) -> Iterator[tuple[int, int, int]]:
        """The next ``n`` rows in a ring of ``size`` slots as ``(slot, from, to)``."""
        done = 0
        while done < n:
            slot = (self.total + done) % size
            count = min(n - done, size - slot)
            yield slot, done, done + count
            done += count

    def begin(self, n: int) -> None:
        """From now on the rows that ``n`` new ones replace are gone."""
        if self.skipped:
            gone = np.arange(self.first, max(self.first, self.total + n - self.capacity))
            self.skipped -= int(np.count_nonzero(self.flags(gone) & SKIPPED))
        self.begun = self.total + n
        self._counters[0] = self.begun

    def finish(self, flags: Flags) -> None:
        """The new rows are written; ``flags`` has one entry for each."""
        for slot, start, stop in self.spans(len(flags), self.capacity):
            self._flags[slot : slot + stop - start] = flags[start:stop]
        if flags.max(initial=0) >= SKIPPED:
            self.skipped += int(np.count_nonzero(flags & SKIPPED))
        self.total = self.begun
        self._counters[1] = self.total

    def finish_one(self, flag: int) -> None:
        """:meth:`finish` for a single row that is not skipped."""
        self._flags[self.total % self.capacity] = flag
        self.total = self.begun
        self._counters[1] = self.total

    def follow(self, rows: Index, length: int) -> tuple[Index, npt.NDArray[np.bool_]]:
        """The ``length`` rows from each of ``rows`` on, ``[n, length]``, and which are there.

        Where the episode or the ring ends before, the last row is repeated and False.
        """
        at, going = rows, np.ones(len(rows), dtype=bool)
        found, there = [at], [going]
        for _ in range(length - 1):
            following = at + self.n_envs
            going = going & ((self.flags(at) & ENDED) == 0) & (following < self.total)
            going &= (self.flags(following) & SKIPPED) == 0
            at = np.where(going, following, at)
            found.append(at)
            there.append(going)
        return np.stack(found, axis=1), np.stack(there, axis=1)

    def end_episodes(self) -> None:
        """Let no window go on past the newest row of each environment."""
        newest = np.arange(max(self.first, self.total - self.n_envs), self.total)
        self._flags[self.slots(newest)] |= ENDED
