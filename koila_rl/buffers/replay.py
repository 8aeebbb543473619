"""Replay: a ring of transitions, sampled as lazy minibatches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from koila_rl.buffers import persistence
from koila_rl.buffers.checks import as_device, as_seed, whole
from koila_rl.buffers.columns import (
    Leaf,
    Options,
    TransitionColumns,
    check_count,
    check_windows,
    describe,
    leaves_from,
    leaves_of,
    leaves_state,
)
from koila_rl.buffers.minibatches import Minibatches
from koila_rl.buffers.ring import Ring
from koila_rl.buffers.samplers import Sampler, Shuffled, draw_from
from koila_rl.buffers.storage import Index, Place, Storage, Stored
from koila_rl.buffers.transforms import Transform, by_key
from koila_rl.buffers.tree import Columns, Key, flatten
from koila_rl.errors import StorageError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ReplayBuffer"]

_NONE: Mapping[str, Tensor] = MappingProxyType({})
_Positions = int | slice | list[int] | Tensor | np.ndarray[Any, Any]


class ReplayBuffer:
    """The last ``capacity`` transitions, for off-policy learning.

    The first :meth:`extend` or :meth:`add` decides names, shapes and dtypes and takes the memory.

    Args:
        capacity: Transitions kept; rounded down to a multiple of ``n_envs``.
        storage: ``"ram"``, ``"pinned"``, ``"device"``, ``"memmap"`` (temporary files that
            vanish with the process) or a Path of a folder to create, whose files stay.
        n_steps: Steps of the return in ``("next", "reward")``. Above 1, ``("next", …)`` is that of
            the last step taken and ``("next", "discount")`` is ``gamma ** steps``.
        gamma: Discount of the n-step return.
        frame_stack: Frames stacked in an observation, newest last. Above 1 each frame is stored
            once; sampled observations are the stacks that were put in.
        device: Where minibatches are delivered; the storage's own unless named.
        seed: Of the sampler.
        n_envs: Environments that one ``extend`` interleaves: row i is of environment
            ``i % n_envs``. Must be named where ``n_steps`` or ``frame_stack`` exceed 1.
        frame_dim: Dimension of an observation along which frames are stacked, 0 or -1.
        frame_keys: The stacked leaves; all observations of two dimensions or more unless named.
        transforms: By key, what is done to rows on ``device``; a key stands for its leaves.
        save_limit: Bytes a drawn minibatch may keep of rows that are overwritten before it runs.

    >>> replay = ReplayBuffer(100, seed=0)
    >>> replay.extend(TensorDict({"observation": torch.zeros(8, 4)}, [8]))
    >>> replay.sample(32, lazy=False)["observation"].shape
    torch.Size([32, 4])
    """

    def __init__(
        self,
        capacity: int,
        storage: Place = "ram",
        n_steps: int = 1,
        gamma: float = 0.99,
        frame_stack: int = 1,
        device: torch.device | str | None = None,
        seed: int | None = None,
        *,
        n_envs: int | None = None,
        frame_dim: int = 0,
        frame_keys: tuple[Key | str, ...] | None = None,
        transforms: Mapping[Key | str, Transform] | None = None,
        save_limit: int = 256 * 2**20,
    ) -> None:
        """Take no memory yet."""
        envs = 1 if n_envs is None else whole("n_envs", n_envs)
        given = whole("capacity", capacity)
        keys = None if frame_keys is None else tuple(_key(key) for key in frame_keys)
        rounded = given // envs * envs or given
        self.options = Options(rounded, envs, n_steps, gamma, frame_stack, frame_dim, keys)
        self.device = as_device(device)
        self.save_limit = whole("save_limit", save_limit, 0)
        self._transforms = by_key(transforms)
        self._n_envs_named = n_envs is not None
        self._generator = np.random.default_rng(as_seed(seed))
        self._storage = Storage(storage, self.device)
        self._ring = Ring(self.options.capacity, envs, self._storage)
        self._columns: TransitionColumns | None = None
        self._minibatches: Minibatches | None = None

    @property
    def capacity(self) -> int:
        """Transitions kept at most."""
        return self.options.capacity

    @property
    def nbytes(self) -> int:
        """Bytes that the columns take, bookkeeping included."""
        return self._storage.nbytes

    @property
    def storage(self) -> Storage:
        """Where the columns lie."""
        return self._storage

    def saved_columns(self) -> dict[str, tuple[Stored, int]]:
        """What a save holds: columns, and how many of their rows were ever written."""
        stored = self._ring.total
        # Slots beyond the rows ever stored hold nothing; pools and counters go by no row.
        return {
            label: (column, len(column.tensor) if label.startswith(("_pool", "_ring", "_tree"))
                    else min(len(column.tensor), stored))
            for label, column in self._storage.columns.items()
        }  # fmt: skip

    @property
    def rows_stored(self) -> int:
        """Transitions ever stored, those that were replaced included."""
        return self._ring.total

    @property
    def bytes_read(self) -> int:
        """Bytes gathered from the storage so far."""
        return self._storage.bytes_read

    @property
    def full(self) -> bool:
        """Whether the next transition replaces the oldest."""
        return self._ring.held == self.capacity

    def __len__(self) -> int:
        """Transitions that can be sampled."""
        return self._ring.held - self._ring.skipped

    def extend(
        self, transitions: TensorDictBase | Mapping[Any, Any], *, skip: Tensor | None = None
    ) -> None:
        """Store transitions ``[n, …]``, oldest first, interleaved by environment.

        ``skip`` is bool ``[n]``, True for rows that must never be sampled (the reset rows of
        NEXT_STEP autoreset). Raises before anything is stored: :class:`StorageError` where
        names, shapes or dtypes are not those of the first, :class:`InsufficientMemoryError` where
        the buffer does not fit.
        """
        values = flatten(transitions)
        if not values:
            raise StorageError("the transitions hold no tensors")
        n = next((len(value) for value in values.values() if value.ndim), 0)
        columns = self._columns or self._make_columns(values, n)
        columns.check(values, n)
        check_count(n, skip, self.options, self._n_envs_named)
        if n > self.capacity:
            surplus = n - self.capacity
            values = {key: value[surplus:] for key, value in values.items()}
            n, skip = self.capacity, None if skip is None else skip[surplus:]
        if n == 0:
            return
        first = self._ring.total
        self._begin(n)
        self._ring.finish(columns.write(values, n, skip))
        self._on_stored(first, n, skip)

    def add(self, **transition: Any) -> None:
        """Store one transition: ``add(observation=…, action=…, next={"reward": …, …})``.

        Values are arrays, tensors or numbers without a batch dimension.
        """
        columns = self._columns
        row = None if columns is None else columns.row(transition)
        if columns is None or row is None:
            known = transition if columns is None else columns.as_stored(transition)
            self.extend({key: value[None] for key, value in flatten(known).items()})
            return
        check_count(1, None, self.options, self._n_envs_named)
        first = self._ring.total
        self._begin(1)
        self._ring.finish_one(columns.put_row(row, first % self.capacity))
        self._on_stored(first, 1, None)

    def to_torchrl(self, batch_size: int | None = None) -> Any:
        """A TorchRL replay buffer of the same capacity with a copy of the content."""
        from koila_rl.integrations.torchrl import to_torchrl

        return to_torchrl(self, batch_size)

    @classmethod
    def from_torchrl(cls, buffer: Any, **settings: Any) -> Self:
        """A copy of what a TorchRL buffer holds; ``settings`` are the constructor's."""
        from koila_rl.integrations.torchrl import fill_from_torchrl

        copy = cls(int(buffer._storage.max_size), **settings)
        fill_from_torchrl(copy, buffer)
        return copy

    def end_episodes(self) -> None:
        """Let no n-step window or sequence go on past what is stored now.

        For environments that are reset without a transition saying so, as after a resume.
        """
        self._ring.end_episodes()

    def sample(
        self, batch_size: int, sampler: Sampler | None = None, *, lazy: bool = True
    ) -> TensorDict:
        """A minibatch ``[batch_size]``, uniform with replacement unless a sampler is given.

        Leaves are lazy tensors whose rows are gathered when a microbatch runs, or plain tensors
        with ``lazy=False``.
        """
        return self._make(self._draw(batch_size, sampler), lazy=lazy)

    def minibatches(
        self,
        batch_size: int,
        n_epochs: int = 1,
        sampler: Sampler | None = None,
        *,
        lazy: bool = True,
    ) -> Iterator[TensorDict]:
        """Minibatches for whole epochs, each transition once an epoch unless a sampler is given."""
        chosen = Shuffled() if sampler is None else sampler
        size = whole("batch_size", batch_size)
        for _ in range(whole("n_epochs", n_epochs)):
            left = chosen.epoch_size(len(self))
            while left > 0:
                rows = self._draw(min(size, left), chosen)
                left -= len(rows)
                yield self._make(rows, lazy=lazy)

    def sequences(self, batch_size: int, length: int, *, lazy: bool = True) -> TensorDict:
        """``[batch_size, length]`` sub-sequences of one environment, for recurrent agents.

        Each begins at a transition drawn uniformly and follows its episode. ``mask`` is False
        where the episode or the buffer ended before ``length``; those rows repeat the last one.
        """
        steps = whole("length", length)
        rows, there = self._ring.follow(self._draw(batch_size, None), steps)
        return self._make(rows, {"mask": torch.from_numpy(there)}, lazy=lazy)

    def __getitem__(self, index: _Positions) -> TensorDict:
        """Transitions by position, 0 the oldest, as plain tensors; an int gives a single one."""
        if self._columns is None:
            raise StorageError("the buffer is empty")
        rows: Any
        if isinstance(index, (int, np.integer)) and not self._ring.skipped:
            rows = range(self._ring.first, self._ring.total)[index]
        else:
            rows = self._ring.valid_rows()[_plain(index)]
        found = self._make(np.atleast_1d(rows), lazy=False)
        return found[0] if np.ndim(rows) == 0 else found

    def __iter__(self) -> Iterator[TensorDict]:
        """Single transitions, oldest first."""
        for position in range(len(self)):
            yield self[position]

    def __repr__(self) -> str:
        """Fill, bytes, and shape and dtype of every column."""
        options, place = self.options, self._storage.place
        head = f"{type(self).__name__}({len(self):,}/{self.capacity:,} transitions in {place}"
        extra = [
            f"{label}={getattr(options, label)}"
            for label in ("n_steps", "frame_stack", "n_envs")
            if getattr(options, label) > 1
        ]
        head = ", ".join([head, *extra])
        leaves = [] if self._columns is None else self._columns.leaves
        return describe(head, self.nbytes, leaves)

    def save(self, path: Path | str) -> None:
        """Write the buffer to a folder; an earlier save there stays whole until this one is."""
        if self._columns is None:
            raise StorageError("the buffer is empty; there is nothing to save")
        persistence.save(self, Path(path))

    @classmethod
    def load(cls, path: Path | str, storage: Place = "ram", **settings: Any) -> Self:
        """A saved buffer, in a storage of its own; it goes on to give the samples it would have.

        ``settings`` are those of the constructor that are not saved: ``device``, ``transforms``,
        ``save_limit``.
        """
        return cast("Self", persistence.load(cls, Path(path), storage, settings))

    @classmethod
    def open(cls, path: Path | str, **settings: Any) -> Self:
        """The buffer whose files lie in the folder, mapped there and written there from now on."""
        return cast("Self", persistence.open_folder(cls, Path(path), settings))

    def flush(self) -> None:
        """Write a mapped buffer's pages and its state to the disk."""
        if self._columns is not None:
            persistence.flush(self)

    def state(self) -> dict[str, Any]:
        """What the buffer is beside its columns, as JSON takes it."""
        assert self._columns is not None
        return {
            "kind": type(self).__name__,
            "options": self.options.state(),
            "leaves": leaves_state(self._columns.leaves),
            "generator": self._generator.bit_generator.state,
        }

    @classmethod
    def restored(cls, state: dict[str, Any], storage: Storage, settings: dict[str, Any]) -> Self:
        """The buffer of a :meth:`state` over columns that are filled already."""
        options = Options.from_state(state["options"])
        buffer = cls(options.capacity, n_envs=options.n_envs, **settings)
        buffer.options, buffer._storage = options, storage
        buffer._ring = Ring(options.capacity, options.n_envs, storage)
        buffer._set_columns(leaves_from(state["leaves"]))
        buffer._generator.bit_generator.state = state["generator"]
        # The environments are reset before what comes next.
        buffer.end_episodes()
        return buffer

    def _draw(self, size: int, sampler: Sampler | None) -> Index:
        if type(size) is not int or size < 1:
            size = whole("batch_size", size)
        n, ring = len(self), self._ring
        if n == 0:
            raise StorageError("the buffer holds no transitions to sample")
        if sampler is not None:
            drawn = draw_from(sampler, n, size, self._generator)
            return ring.valid_rows()[drawn] if ring.skipped else drawn + ring.first
        return ring.draw(size, self._generator)

    def _make(self, rows: Index, known: Mapping[str, Tensor] = _NONE, *, lazy: bool) -> TensorDict:
        assert self._minibatches is not None
        return self._minibatches.make(rows, known, lazy=lazy)

    def _begin(self, n: int) -> None:
        if self._minibatches is not None:
            self._minibatches.before_overwriting(self._ring.total + n - self.capacity)
        self._ring.begin(n)

    def _on_stored(self, first: int, n: int, skip: Tensor | None) -> None:
        """What else must know of the ``n`` rows from ``first`` on."""

    def _make_columns(self, values: Columns, n: int) -> TransitionColumns:
        leaves = leaves_of(values, n)
        check_count(n, None, self.options, self._n_envs_named)
        check_windows(leaves, self.options)
        self._storage.check(
            TransitionColumns.nbytes(leaves, self.options),
            f"take a smaller capacity than {self.capacity:,}, uint8 for images, frame_stack to "
            "store frames once, or storage=Path(…) on a larger disk",
        )
        return self._set_columns(leaves)

    def _set_columns(self, leaves: list[Leaf]) -> TransitionColumns:
        columns = TransitionColumns(leaves, self.options, self._storage, self._ring)
        self._columns = columns
        self._minibatches = Minibatches(
            self._ring, columns, self.options.n_steps, device=self.device,
            transforms=self._transforms, save_limit=self.save_limit,
        )  # fmt: skip
        self._storage.describe(self.state())
        return columns


def _key(key: Key | str) -> Key:
    return (key,) if isinstance(key, str) else tuple(key)


def _plain(index: _Positions) -> Any:
    return index.cpu().numpy() if isinstance(index, Tensor) else index
