"""Stacked frames, each stored once.

An observation that stacks the last k frames shares k - 1 of them with the one before. A row
stores the newest frame of its next observation; the rest of both stacks lies in the rows before
it. Whether that holds is not assumed but compared, frame by frame, when a row is written: where
an observation is not the next observation of the row before (the first of an episode, whatever
the flags say) or a next observation is not its observation moved on by one, the stack is kept in
full in a pool. So sampled stacks are right by construction, across terminations, truncations,
time limits that reset at once, skipped rows and the cursor.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from koila_rl.buffers.ring import Ring
from koila_rl.buffers.storage import Index, Storage, Stored, to_numpy
from koila_rl.errors import ConfigurationError

__all__ = ["FrameStore"]

# A reference to a stack in the pool: number of its first frame, then one bit a frame saying
# whether it differs from the one before (stacks at a reset mostly repeat one frame).
_MASK_BITS = 16
_POOL_SHARE = 256


class FrameStore:
    """The stacks of one observation leaf and of its next observation.

    Args:
        label: Name of the leaf, for its columns in the storage.
        shape: Of one stacked observation; ``shape[dim]`` is ``k`` times a frame's.
        k: Frames in a stack, newest last; 16 at most.
        dim: The dimension of ``shape`` along which frames are stacked.
    """

    def __init__(
        self,
        label: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        k: int,
        dim: int,
        ring: Ring,
        storage: Storage,
    ) -> None:
        if k > _MASK_BITS:
            raise ConfigurationError(f"frame_stack is {k}; at most {_MASK_BITS} frames can share")
        self.shape = shape
        self._k = k
        self._dim = dim % len(shape)
        self._ring = ring
        self._storage = storage
        self._label = label
        frame = list(shape)
        frame[self._dim] //= k
        self._frame = tuple(frame)
        # The oldest row's stacks reach k rows of its environment further back.
        self._size = ring.capacity + k * ring.n_envs

        def column(name: str, shape: tuple[int, ...], dtype: torch.dtype, host: bool) -> Stored:
            return storage.column(name, shape, dtype, host=host)

        grown = storage.columns.get(f"_pool/{label}")
        least = max(2 * k * ring.n_envs, self._size // _POOL_SHARE)
        pool = least if grown is None else max(least, len(grown.tensor))
        self._frames = column(label, (self._size, *frame), dtype, False)
        self._pool = column(f"_pool/{label}", (pool, *frame), dtype, False)
        # Age (rows since a stack was kept in full, at most k) and references + 1, 0 for none.
        self._ages = _array(column(f"_age/{label}", (self._size,), torch.uint8, True))
        self._starts = _array(column(f"_start/{label}", (self._size,), torch.int64, True))
        self._odd = _array(column(f"_odd/{label}", (self._size,), torch.int64, True))
        self._ends = _array(column(f"_pool_ends/{label}", (2,), torch.int64, True))
        newest = np.arange(max(ring.first, ring.total - ring.n_envs), ring.total)
        complete = len(newest) == ring.n_envs
        self._last: Any = None
        if complete:
            self._last = _words(self._stack_of(self.gather(newest, following=True)))

    @staticmethod
    def nbytes(shape: tuple[int, ...], itemsize: int, k: int, capacity: int, n_envs: int) -> int:
        """Bytes that a store of this shape will take at first."""
        size = capacity + k * n_envs
        frame = torch.Size(shape).numel() // k * itemsize
        return size * (frame + 17) + max(2 * k * n_envs, size // _POOL_SHARE) * frame

    def write(self, observation: Tensor, following: Tensor) -> None:
        """Store the ring's next rows ``[n, *shape]``, n a multiple of ``n_envs``."""
        n, n_envs = len(observation), self._ring.n_envs
        before, after = self._stack_of(observation), self._stack_of(following)
        had, has = _words(before), _words(after)
        odd = _differ(has[:, :-1], had[:, 1:])
        fresh = np.ones(n, dtype=bool)
        # has[:-E] is what the rows one step on should begin with.
        fresh[n_envs:] = _differ(had[n_envs:], has[:-n_envs])
        if self._last is not None:
            fresh[:n_envs] = _differ(had[:n_envs], self._last)
        self._refer(before, after, fresh, odd)
        for slot, start, stop in self._ring.spans(n, self._size):
            self._frames.put(slot, after[start:stop, -1])
        last = has[-n_envs:]
        self._last = last.clone() if torch.is_tensor(last) else last.copy()

    def _refer(
        self,
        before: Tensor,
        after: Tensor,
        fresh: npt.NDArray[np.bool_],
        odd: npt.NDArray[np.bool_],
    ) -> None:
        total, n_envs = self._ring.total, self._ring.n_envs
        for at in range(0, len(fresh), n_envs):
            rows = np.arange(total + at, total + at + n_envs)
            slots, previous = rows % self._size, (rows - n_envs) % self._size
            self._forget(slots)
            here = slice(at, at + n_envs)
            # A row after an odd next observation cannot find its frames in the rows before.
            if total + at > 0:
                fresh[here] |= self._odd[previous] > 0
            age = np.minimum(self._ages[previous], self._k - 1) + 1
            age[fresh[here]] = 0
            self._ages[slots] = age
            for i in (fresh[here] | odd[here]).nonzero()[0]:
                if fresh[at + i]:
                    self._starts[slots[i]] = self._keep(before[at + i])
                if odd[at + i]:
                    self._odd[slots[i]] = self._keep(after[at + i])

    def _keep(self, stack: Tensor) -> int:
        """Put a stack into the pool; its reference + 1."""
        changes = (stack[1:] != stack[:-1]).flatten(1).any(1)
        frames = torch.cat([stack[:1], stack[1:][changes]])
        mask = sum(1 << (j + 1) for j in changes.nonzero().flatten().tolist())
        if int(self._ends[1]) + len(frames) - int(self._ends[0]) > len(self._pool.tensor):
            self._grow()
        base = int(self._ends[1])
        for j in range(len(frames)):
            self._pool.put((base + j) % len(self._pool.tensor), frames[j : j + 1])
        self._ends[1] = base + len(frames)
        return int(base << _MASK_BITS | mask) + 1

    def _forget(self, slots: Index) -> None:
        """Free the pool of what the rows in these slots kept; they are the oldest there."""
        for references in (self._starts, self._odd):
            gone = references[slots]
            if gone.any():
                for reference in gone[gone > 0] - 1:
                    frames = 1 + int(reference & 0xFFFF).bit_count()
                    end = (int(reference) >> _MASK_BITS) + frames
                    self._ends[0] = max(int(self._ends[0]), end)
                references[slots] = 0

    def _grow(self) -> None:
        old = self._pool
        size = 2 * len(old.tensor)
        self._storage.check(
            size * old.row_bytes,
            "many observations begin a stack of their own; take a smaller capacity",
        )
        pool = self._storage.allocate(
            f"_pool/{self._label}", (size, *self._frame), old.tensor.dtype
        )
        numbers = np.arange(int(self._ends[0]), int(self._ends[1]))
        for number in numbers:
            pool.put(int(number) % size, old.take(np.array([number % len(old.tensor)])))
        self._pool = pool

    def gather(self, rows: Index, *, following: bool, out: Tensor | None = None) -> Tensor:
        """Stacks ``[n, *shape]`` of the rows' observations, or of their next observations."""
        n, k, n_envs = len(rows), self._k, self._ring.n_envs
        # Column j of a next stack is column j + 1 of the observation's, its newest the row's own.
        back = (k if following else k + 1) - 1 - np.arange(k)
        age = self._ages[rows % self._size].astype(np.int64)
        index = (rows[:, None] - back * n_envs) % self._size
        # Stacked along the first dimension, frames lie where the stacks should.
        room = out.view(-1, *self._frame) if out is not None and self._dim == 0 else None
        frames = self._frames.take(index.reshape(-1), room).view(n, k, *self._frame)
        position = np.arange(k) + int(following)
        kept = back > age[:, None]
        if kept.any():
            references = self._starts[(rows - age * n_envs) % self._size]
            i, j = np.nonzero(kept)
            self._patch(frames, i, j, references[i], (position + age[:, None])[i, j])
        if following and (odd := np.flatnonzero(self._odd[rows % self._size])).size:
            i, j = np.repeat(odd, k), np.tile(np.arange(k), len(odd))
            self._patch(frames, i, j, self._odd[rows[i] % self._size], j)
        stacks = self._unstack(frames)
        return stacks if out is None or room is not None else out.copy_(stacks)

    def _patch(self, frames: Tensor, i: Index, j: Index, references: Index, at: Index) -> None:
        """Take ``frames[i, j]`` from the pool: frame ``at`` of the stack referred to."""
        reference = references - 1
        bits = reference[:, None] >> np.arange(_MASK_BITS) & 1
        # Bit b counts for frames from b on; where a row was overwritten `at` may lie outside.
        counted = bits.cumsum(1)[np.arange(len(at)), np.clip(at, 0, self._k - 1)]
        number = ((reference >> _MASK_BITS) + counted) % len(self._pool.tensor)
        where = torch.from_numpy(i).to(frames.device), torch.from_numpy(j).to(frames.device)
        frames[where] = self._pool.take(number)

    def _stack_of(self, observation: Tensor) -> Tensor:
        """``[n, *shape]`` → ``[n, k, *frame]``."""
        dim = self._dim + 1
        frames: Tensor = observation.detach().unflatten(dim, (self._k, -1))
        return frames.movedim(dim, 1).contiguous()

    def _unstack(self, frames: Tensor) -> Tensor:
        dim = self._dim + 1
        return frames.movedim(1, dim).flatten(dim, dim + 1).contiguous()


def _words(stacks: Tensor) -> Any:
    """``[n, k, words]``: frames as the longest words that they divide into, to compare quickly."""
    flat = stacks.flatten(2)
    if flat.device.type != "cpu":
        return flat
    size = flat.shape[2] * flat.element_size()
    return to_numpy(flat).view(np.uint64 if size % 8 == 0 else np.uint8)


def _differ(a: Any, b: Any) -> npt.NDArray[np.bool_]:
    """Which of the ``n`` rows of two arrays differ anywhere."""
    differ = (a != b).any(2).any(1)
    return cast("npt.NDArray[np.bool_]", differ.cpu().numpy() if torch.is_tensor(a) else differ)


def _array(column: Stored) -> Index:
    assert column.array is not None
    return column.array
