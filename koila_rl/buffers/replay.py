"""Replay: a ring of transitions, sampled as lazy minibatches."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from koila_rl.buffers import persistence
from koila_rl.buffers.columns import (
    Leaf,
    Options,
    TransitionColumns,
    check_windows,
    leaves_from,
    leaves_state,
)
from koila_rl.buffers.ring import SKIPPED, Ring
from koila_rl.buffers.rows import ColumnRows, minibatch
from koila_rl.buffers.sample import Sample, SampleSource
from koila_rl.buffers.samplers import Sampler, Shuffled, Uniform
from koila_rl.buffers.storage import Index, Place, Storage
from koila_rl.buffers.transforms import Transform, by_key, transform_of
from koila_rl.buffers.tree import Columns, Key, flatten, name, nest
from koila_rl.errors import BatchSizeError, ConfigurationError, StorageError
from koila_rl.memory.budget import format_bytes

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ReplayBuffer"]

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
        envs = 1 if n_envs is None else n_envs
        keys = None if frame_keys is None else tuple(_key(key) for key in frame_keys)
        self.options = Options(
            int(capacity) // max(1, envs) * max(1, envs), envs, n_steps, gamma, frame_stack,
            frame_dim, keys,
        )  # fmt: skip
        self.device = None if device is None else torch.device(device)
        self.save_limit = save_limit
        self._transforms = by_key(transforms)
        self._n_envs_named = n_envs is not None
        self._generator = np.random.default_rng(seed)
        self._uniform = Uniform()
        self._storage = Storage(storage, self.device)
        self._ring = Ring(self.options.capacity, envs, self._storage)
        self._columns: TransitionColumns | None = None
        self._live: list[weakref.ref[Sample]] = []

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
        self._check_rows(n, skip)
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
            self.extend({key: value[None] for key, value in flatten(transition).items()})
            return
        self._check_rows(1, None)
        first = self._ring.total
        self._begin(1)
        self._ring.finish_one(columns.put_row(row, first % self.capacity))
        self._on_stored(first, 1, None)

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
        return self._minibatch(self._draw(batch_size, sampler), lazy)

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
        for _ in range(n_epochs):
            left = chosen.epoch_size(len(self))
            while left > 0:
                rows = self._draw(min(batch_size, left), chosen)
                left -= len(rows)
                yield self._minibatch(rows, lazy)

    def sequences(self, batch_size: int, length: int, *, lazy: bool = True) -> TensorDict:
        """``[batch_size, length]`` sub-sequences of one environment, for recurrent agents.

        Each begins at a transition drawn uniformly and follows its episode. ``mask`` is False
        where the episode or the buffer ended before ``length``; those rows repeat the last one.
        """
        if length < 1:
            raise ConfigurationError(f"length is {length}; it must be at least 1")
        rows, there = self._ring.follow(self._draw(batch_size, None), length)
        return self._minibatch(rows, lazy, {"mask": torch.from_numpy(there)})

    def __getitem__(self, index: _Positions) -> TensorDict:
        """Transitions by position, 0 the oldest, as plain tensors; an int gives a single one."""
        if self._columns is None:
            raise StorageError("the buffer is empty")
        rows: Any
        if isinstance(index, (int, np.integer)) and not self._ring.skipped:
            rows = range(self._ring.first, self._ring.total)[index]
        else:
            rows = self._ring.valid_rows()[_plain(index)]
        found = self._minibatch(np.atleast_1d(rows), lazy=False)
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
        if self._columns is None:
            return f"{head}, empty)"
        lines = [
            f"  {name(key)}: {shape} {str(dtype).removeprefix('torch.')}"
            for key, shape, dtype in self._columns.leaves
        ]
        return "\n".join([f"{head}, {format_bytes(self.nbytes)}", *lines]) + ")"

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
        if state["kind"] != cls.__name__:
            raise StorageError(f"this is a {state['kind']}, not a {cls.__name__}")
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
        if size < 1:
            raise ConfigurationError(f"batch_size is {size}; it must be at least 1")
        n, ring = len(self), self._ring
        if n == 0:
            raise StorageError("the buffer holds no transitions to sample")
        if sampler is not None:
            drawn = sampler.draw(n, size, self._generator)
            return ring.valid_rows()[drawn] if ring.skipped else drawn + ring.first
        if ring.skipped * 2 > ring.held:
            return ring.valid_rows()[self._uniform.draw(n, size, self._generator)]
        rows = self._uniform.draw(ring.held, size, self._generator)
        if ring.first:
            rows += ring.first
        while ring.skipped and (bad := (ring.flags(rows) & SKIPPED) != 0).any():
            again = self._uniform.draw(ring.held, int(bad.sum()), self._generator)
            rows[bad] = again + ring.first
        return rows

    def _minibatch(
        self, rows: Index, lazy: bool, known: Mapping[str, Tensor] = MappingProxyType({})
    ) -> TensorDict:
        extra: dict[Key, Tensor] = {(label,): value for label, value in known.items()}
        if not lazy and self.device is None and not self._transforms:
            return nest({**self._gather(rows), **extra}, torch.Size([len(rows)]))
        return minibatch(self._rows_of(rows), len(rows), extra, lazy=lazy)

    def _gather(self, rows: Index) -> dict[Key, Tensor]:
        assert self._columns is not None
        if self._columns.plain and rows.ndim == 1:
            # Nothing but stored rows: no need of a sample that could outlive them.
            slots = rows % self.capacity if self._ring.total > self.capacity else rows
            return {key: column.take(slots) for key, column in self._columns.stored.items()}
        sample = self._sample_of(rows)
        return {key: sample.gather(key, 0, len(rows)) for key in sample.views}

    def _sample_of(self, rows: Index) -> Sample:
        assert self._columns is not None
        views, options = self._columns.views, self.options
        return Sample(rows, self._ring, views, options.n_steps, self.save_limit)

    def _rows_of(self, rows: Index) -> dict[Key, ColumnRows]:
        sample = self._sample_of(rows)
        if len(self._live) > 32:
            self._live = [live for live in self._live if live() is not None]
        self._live.append(weakref.ref(sample))
        slow = self._storage.folder is not None
        return {
            key: ColumnRows(
                SampleSource(sample, key, view, slow=slow),
                self.device,
                transform_of(self._transforms, key),
            )
            for key, view in sample.views.items()
        }

    def _begin(self, n: int) -> None:
        kept_from = self._ring.total + n - self.capacity
        if kept_from > self._ring.first and self._live:
            for reference in self._live:
                if (sample := reference()) is not None:
                    sample.before_overwriting(kept_from)
        self._ring.begin(n)

    def _on_stored(self, first: int, n: int, skip: Tensor | None) -> None:
        """What else must know of the ``n`` rows from ``first`` on."""

    def _check_rows(self, n: int, skip: Tensor | None) -> None:
        options = self.options
        follows = options.n_steps > 1 or options.frame_stack > 1
        if follows and not self._n_envs_named and n > 1:
            raise ConfigurationError(
                f"n_steps={options.n_steps} and frame_stack={options.frame_stack} follow "
                f"transitions through time, but {n} came at once: name n_envs, the environments "
                "that they interleave (1 if they are consecutive steps of one)"
            )
        if n % options.n_envs:
            raise BatchSizeError(
                f"{n} transitions are not a whole number of steps of n_envs={options.n_envs}"
            )
        if skip is not None and (skip.shape != (n,) or skip.dtype != torch.bool):
            raise BatchSizeError(
                f"skip is {skip.dtype} {tuple(skip.shape)}; it must be bool of shape ({n},)"
            )

    def _make_columns(self, values: Columns, n: int) -> TransitionColumns:
        for key, value in values.items():
            if value.ndim == 0 or len(value) != n:
                raise BatchSizeError(f"{name(key)!r} is {tuple(value.shape)}; others have {n} rows")
            if any("/" in part for part in key) or key[0].startswith("_"):
                raise StorageError(f"{name(key)!r}: names must not hold '/' or begin with '_'")
        leaves = [(key, tuple(value.shape[1:]), value.dtype) for key, value in values.items()]
        self._check_rows(n, None)
        check_windows(leaves, self.options)
        self._storage.check(
            TransitionColumns.nbytes(leaves, self.options),
            f"take a smaller capacity than {self.capacity:,}, uint8 for images, frame_stack to "
            "store frames once, or storage=Path(…) on a larger disk",
        )
        return self._set_columns(leaves)

    def _set_columns(self, leaves: list[Leaf]) -> TransitionColumns:
        self._columns = TransitionColumns(leaves, self.options, self._storage, self._ring)
        if self._storage.folder is not None and not self._storage.folder.description["buffer"]:
            # From here on a killed process leaves a folder that can be opened.
            self._storage.folder.description["buffer"] = self.state()
            self._storage.folder.write_description()
        return self._columns


def _key(key: Key | str) -> Key:
    return (key,) if isinstance(key, str) else tuple(key)


def _plain(index: _Positions) -> Any:
    return index.cpu().numpy() if isinstance(index, Tensor) else index
