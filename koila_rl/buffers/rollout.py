"""Rollouts: on-policy transitions ``[n_steps, n_envs]`` and their minibatches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from koila_rl.buffers.rows import ColumnRows, StoredSource, minibatch
from koila_rl.buffers.storage import Index, Place, Storage, Stored
from koila_rl.buffers.transforms import Transform, by_key, transform_of
from koila_rl.buffers.tree import Columns, Key, flatten, name, nest
from koila_rl.errors import BatchSizeError, ConfigurationError, StorageError
from koila_rl.memory.budget import format_bytes

__all__ = ["RolloutBuffer"]


class RolloutBuffer:
    """Transitions of ``n_envs`` environments over ``n_steps`` steps, for on-policy learning.

    The first :meth:`add` decides names, shapes and dtypes; memory for the whole rollout is
    taken then and kept. Minibatches come from :meth:`minibatches`; they hold no data, only
    which rows of the rollout they are.

    >>> rollout = RolloutBuffer(n_steps=2, n_envs=3, seed=0)
    >>> for step in range(2):
    ...     rollout.add(TensorDict({"reward": torch.full((3,), float(step))}, [3]))
    >>> rollout.data["advantage"] = rollout.data["reward"] - 0.5
    >>> [part["reward"].shape[0] for part in rollout.minibatches(4, 1, lazy=False)]
    [4, 2]
    """

    def __init__(
        self,
        n_steps: int,
        n_envs: int,
        seed: int | None = None,
        *,
        storage: Place = "ram",
        device: torch.device | str | None = None,
        transforms: Mapping[Key | str, Transform] | None = None,
    ) -> None:
        """Take no memory yet.

        ``storage`` is ``"ram"``, ``"pinned"``, ``"device"``, ``"memmap"`` (temporary files that
        vanish with the process) or a Path of a folder to create; minibatches are delivered to
        ``device`` (where the rollout lies, unless named) and go through ``transforms`` there.
        """
        for label, value in (("n_steps", n_steps), ("n_envs", n_envs)):
            if value < 1:
                raise ConfigurationError(f"{label} is {value}; a rollout needs at least 1")
        self.n_steps = int(n_steps)
        self.n_envs = int(n_envs)
        self.device = None if device is None else torch.device(device)
        self._transforms = by_key(transforms)
        self._storage = Storage(storage, self.device)
        self._generator = np.random.default_rng(seed)
        self._data: TensorDict | None = None
        self._columns: dict[Key, Stored] = {}
        self._filled = 0
        self._generation = 0

    @property
    def data(self) -> TensorDict:
        """The rollout ``[n_steps, n_envs]``, to read and to write.

        Put what is computed from the whole rollout (``state_value``, ``advantage``,
        ``value_target``) under new names; every name is in the minibatches.
        """
        if self._data is None:
            raise StorageError("the rollout is empty: its names and shapes come with the first add")
        return self._data

    @property
    def full(self) -> bool:
        """Whether all ``n_steps`` steps are there."""
        return self._filled == self.n_steps

    @property
    def nbytes(self) -> int:
        """Bytes that the rollout takes, columns put in by the caller included."""
        if self._data is None:
            return 0
        return sum(column.nbytes for column in flatten(self._data).values())

    @property
    def bytes_read(self) -> int:
        """Bytes gathered from the storage so far."""
        return self._storage.bytes_read

    def __len__(self) -> int:
        """Steps added since the last :meth:`clear`."""
        return self._filled

    def add(self, transition: TensorDictBase | Mapping[Any, Any]) -> None:
        """Append one step of every environment: leaves ``[n_envs, …]``, nested as they come.

        Raises :class:`StorageError` if the rollout is full or a leaf differs in name, shape or
        dtype from the first step, and :class:`InsufficientMemoryError` if the first step shows
        that the rollout does not fit; nothing is stored then.
        """
        if self.full:
            raise StorageError(
                f"the rollout holds all its n_steps={self.n_steps} steps; call clear() first"
            )
        values = flatten(transition)
        for key, value in values.items():
            if value.shape[:1] != (self.n_envs,):
                raise BatchSizeError(
                    f"{name(key)!r} has shape {tuple(value.shape)}; a step of this rollout begins "
                    f"with n_envs={self.n_envs}"
                )
        if self._data is None:
            self._allocate(values)
        else:
            self._compare(values)
        self._generation += 1
        for key, value in values.items():
            self._columns[key].put(self._filled * self.n_envs, value)
        self._filled += 1

    def release(self) -> None:
        """Let the pages of mapped files go from memory; they are read again when needed."""
        self._storage.release()

    def clear(self) -> None:
        """Forget the steps and keep the memory; columns put in by the caller are dropped.

        Minibatches drawn before raise :class:`StaleValueError` once :meth:`add` overwrites them.
        """
        self._filled = 0
        if self._data is not None:
            self._data = self._nested()

    def minibatches(
        self,
        batch_size: int,
        n_epochs: int = 1,
        *,
        skip: Tensor | None = None,
        lazy: bool = True,
    ) -> Iterator[TensorDict]:
        """Minibatches of the full rollout, shuffled anew each epoch.

        Every transition is in exactly one minibatch of an epoch; the last is smaller where
        ``batch_size`` does not divide their number. ``skip`` is a bool tensor
        ``[n_steps, n_envs]``, True where a transition belongs in no loss (the reset rows of
        NEXT_STEP autoreset). Yields TensorDicts ``[batch_size]`` of lazy tensors, or of plain
        ones with ``lazy=False``.
        """
        self._check_minibatches(batch_size, n_epochs)
        return self._epochs(self._rows_to_visit(skip), int(batch_size), int(n_epochs), lazy)

    def sequences(
        self, length: int, batch_size: int, n_epochs: int = 1, *, lazy: bool = True
    ) -> Iterator[TensorDict]:
        """Minibatches ``[batch_size, length]`` of consecutive steps, for recurrent policies.

        Each environment's rollout is cut every ``length`` steps; each sequence is in one minibatch
        of an epoch. ``mask`` is False behind the end of the rollout, where the last step is
        repeated. Reset the recurrent state inside a sequence where an episode ended.
        """
        if length < 1:
            raise ConfigurationError(f"length is {length}; it must be at least 1")
        self._check_minibatches(batch_size, n_epochs)
        starts = np.arange(0, self.n_steps, length)
        step = starts[:, None] + np.arange(length)
        there = np.repeat(step < self.n_steps, self.n_envs, axis=0)
        step = np.minimum(step, self.n_steps - 1)
        rows = (step[:, None] * self.n_envs + np.arange(self.n_envs)[None, :, None]).reshape(
            -1, length
        )
        return self._epochs(rows, int(batch_size), int(n_epochs), lazy, there)

    def _check_minibatches(self, batch_size: int, n_epochs: int) -> None:
        if not self.full:
            raise StorageError(
                f"the rollout holds {self._filled} of {self.n_steps} steps; minibatches are drawn "
                "from a full one"
            )
        if batch_size < 1 or n_epochs < 1:
            raise ConfigurationError(
                f"batch_size is {batch_size} and n_epochs {n_epochs}; both must be at least 1"
            )

    def _rows_to_visit(self, skip: Tensor | None) -> Index:
        if skip is None:
            return np.arange(self.n_steps * self.n_envs)
        if skip.shape != (self.n_steps, self.n_envs) or skip.dtype != torch.bool:
            raise BatchSizeError(
                f"skip is {skip.dtype} of shape {tuple(skip.shape)}; it must be bool of shape "
                f"{(self.n_steps, self.n_envs)}"
            )
        rows: Index = np.flatnonzero(~skip.cpu().numpy())
        if len(rows) == 0:
            raise ConfigurationError("skip leaves no transition to learn from")
        return rows

    def _epochs(
        self,
        rows: Index,
        batch_size: int,
        n_epochs: int,
        lazy: bool,
        mask: npt.NDArray[np.bool_] | None = None,
    ) -> Iterator[TensorDict]:
        for _ in range(n_epochs):
            order = self._generator.permutation(len(rows))
            for start in range(0, len(order), batch_size):
                chosen = order[start : start + batch_size]
                if self._storage.folder is not None:
                    # The same minibatch, read from the files from front to back.
                    chosen.sort()
                known: Columns = {} if mask is None else {("mask",): torch.from_numpy(mask[chosen])}
                columns = self._rows(rows[chosen])
                yield minibatch(columns, len(chosen), known, lazy=lazy)

    def _rows(self, index: Index) -> dict[Key, ColumnRows]:
        rows = {}
        for key, column in flatten(self.data).items():
            stored, what = self._columns.get(key), f"{name(key)!r} of the rollout"
            flat = column.detach().reshape(self.n_steps * self.n_envs, *column.shape[2:])
            if stored is None or stored.tensor.data_ptr() != flat.data_ptr():
                stored = Stored(self._storage, flat.contiguous())
            source = StoredSource(stored, index, lambda: self._generation, what)
            rows[key] = ColumnRows(source, self.device, transform_of(self._transforms, key))
        return rows

    def _allocate(self, values: Columns) -> None:
        if not values:
            raise StorageError("the first step of the rollout holds no tensors")
        self._storage.check(
            self.n_steps * sum(value.nbytes for value in values.values()),
            f"use fewer than n_steps={self.n_steps}, fewer than n_envs={self.n_envs}, a smaller "
            "dtype (uint8 for images) or storage=Path(…) on a larger disk",
        )
        rows = self.n_steps * self.n_envs
        for key, value in values.items():
            shape = (rows, *value.shape[1:])
            self._columns[key] = self._storage.allocate("/".join(key), shape, value.dtype)
        self._data = self._nested()

    def _nested(self) -> TensorDict:
        steps = {
            key: column.tensor.view(self.n_steps, self.n_envs, *column.tensor.shape[1:])
            for key, column in self._columns.items()
        }
        return nest(steps, torch.Size([self.n_steps, self.n_envs]))

    def _compare(self, values: Columns) -> None:
        if values.keys() != self._columns.keys():
            raise StorageError(
                f"the rollout stores {_names(self._columns)}, but this step has {_names(values)}; "
                "every step must have the names of the first"
            )
        for key, value in values.items():
            column = self._columns[key].tensor
            if column.shape[1:] != value.shape[1:] or column.dtype != value.dtype:
                raise StorageError(
                    f"{name(key)!r} is {value.dtype} {tuple(value.shape)} in this step, but "
                    f"{column.dtype} {(self.n_envs, *column.shape[1:])} in the first; cast or "
                    "reshape it"
                )

    def __repr__(self) -> str:
        """Fill, bytes, and shape and dtype of every column."""
        head = f"RolloutBuffer({self._filled}/{self.n_steps} steps of {self.n_envs} environments"
        if self._data is None:
            return f"{head}, empty)"
        lines = [
            f"  {name(key)}: {tuple(column.shape)} {str(column.dtype).removeprefix('torch.')}"
            for key, column in flatten(self._data).items()
        ]
        return "\n".join([f"{head}, {format_bytes(self.nbytes)}", *lines]) + ")"


def _names(columns: Mapping[Key, object]) -> list[str]:
    return [name(key) for key in columns]
