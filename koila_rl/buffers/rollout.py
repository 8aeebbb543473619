"""Rollouts: on-policy transitions ``[n_steps, n_envs]`` and their minibatches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from koila_rl.buffers import persistence
from koila_rl.buffers.checks import as_device, as_mask, as_seed, whole
from koila_rl.buffers.columns import Leaf, leaves_from, leaves_of, leaves_state
from koila_rl.buffers.rows import ColumnRows, StoredSource, minibatch
from koila_rl.buffers.storage import Index, Place, Storage, Stored
from koila_rl.buffers.transforms import Transform, by_key, transform_of
from koila_rl.buffers.tree import Columns, Key, flatten, name, nest
from koila_rl.errors import BatchSizeError, ConfigurationError, StorageError
from koila_rl.memory.budget import format_bytes

if TYPE_CHECKING:
    from typing_extensions import Self

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
        self.n_steps = whole("n_steps", n_steps)
        self.n_envs = whole("n_envs", n_envs)
        self.device = as_device(device)
        self._transforms = by_key(transforms)
        self._generator = np.random.default_rng(as_seed(seed))
        self._storage = Storage(storage, self.device)
        self._data: TensorDict | None = None
        self._columns: dict[Key, Stored] = {}
        # Steps that are there; in the storage, so that files left by a killed process tell.
        self._counter = np.zeros(1, dtype=np.int64)
        self._generation = 0

    @property
    def _filled(self) -> int:
        return int(self._counter[0])

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
    def storage(self) -> Storage:
        """Where the columns lie."""
        return self._storage

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
        self._counter[0] += 1

    def release(self) -> None:
        """Let the pages of mapped files go from memory; they are read again when needed."""
        self._storage.release()

    def clear(self) -> None:
        """Forget the steps and keep the memory; columns put in by the caller are dropped.

        Minibatches drawn before raise :class:`StaleValueError` once :meth:`add` overwrites them.
        """
        self._counter[0] = 0
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
        size, epochs = self._checked(batch_size, n_epochs)
        return self._epochs(self._rows_to_visit(skip), size, epochs, lazy)

    def sequences(
        self, length: int, batch_size: int, n_epochs: int = 1, *, lazy: bool = True
    ) -> Iterator[TensorDict]:
        """Minibatches ``[batch_size, length]`` of consecutive steps, for recurrent policies.

        Each environment's rollout is cut every ``length`` steps; each sequence is in one minibatch
        of an epoch. ``mask`` is False behind the end of the rollout, where the last step is
        repeated. Reset the recurrent state inside a sequence where an episode ended.
        """
        length = whole("length", length)
        size, epochs = self._checked(batch_size, n_epochs)
        starts = np.arange(0, self.n_steps, length)
        step = starts[:, None] + np.arange(length)
        there = np.repeat(step < self.n_steps, self.n_envs, axis=0)
        step = np.minimum(step, self.n_steps - 1)
        rows = (step[:, None] * self.n_envs + np.arange(self.n_envs)[None, :, None]).reshape(
            -1, length
        )
        return self._epochs(rows, size, epochs, lazy, there)

    def _checked(self, batch_size: int, n_epochs: int) -> tuple[int, int]:
        if not self.full:
            raise StorageError(
                f"the rollout holds {self._filled} of {self.n_steps} steps; minibatches are drawn "
                "from a full one"
            )
        return whole("batch_size", batch_size), whole("n_epochs", n_epochs)

    def _rows_to_visit(self, skip: Tensor | None) -> Index:
        if skip is None:
            return np.arange(self.n_steps * self.n_envs)
        mask = as_mask("skip", skip, (self.n_steps, self.n_envs))
        rows: Index = np.flatnonzero(~mask.cpu().numpy())
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
        leaves = leaves_of(values, self.n_envs)
        self._storage.check(
            self.n_steps * sum(value.nbytes for value in values.values()),
            f"use fewer than n_steps={self.n_steps}, fewer than n_envs={self.n_envs}, a smaller "
            "dtype (uint8 for images) or storage=Path(…) on a larger disk",
        )
        self._set_columns(leaves)
        self._storage.describe(self.state())

    def _set_columns(self, leaves: list[Leaf]) -> None:
        rows = self.n_steps * self.n_envs
        for key, shape, dtype in leaves:
            self._columns[key] = self._storage.column("/".join(key), (rows, *shape), dtype)
        counter = self._storage.column("_steps", (1,), torch.int64, host=True).array
        assert counter is not None
        self._counter = counter
        if not 0 <= self._filled <= self.n_steps:
            raise StorageError(f"a rollout of {self.n_steps} steps cannot hold {self._filled}")
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

    def __getitem__(self, index: Any) -> TensorDict:
        """Steps by position among those added, as plain tensors ``[…, n_envs]``."""
        found: TensorDict = self.data[: self._filled][index]
        return found

    def __iter__(self) -> Iterator[TensorDict]:
        """The steps added, each ``[n_envs]``."""
        return (self[step] for step in range(self._filled))

    def save(self, path: Path | str) -> None:
        """Write the rollout to a folder, columns put in by the caller included.

        An earlier save there stays whole until this one is.
        """
        if self._data is None:
            raise StorageError("the rollout is empty; there is nothing to save")
        persistence.save(self, Path(path))

    @classmethod
    def load(cls, path: Path | str, storage: Place = "ram", **settings: Any) -> Self:
        """A saved rollout in a storage of its own; it gives the minibatches it would have given.

        ``settings`` are those of the constructor that are not saved: ``device``, ``transforms``.
        """
        return cast("Self", persistence.load(cls, Path(path), storage, settings))

    @classmethod
    def open(cls, path: Path | str, **settings: Any) -> Self:
        """The rollout whose files lie in the folder, mapped there and written there from now on.

        Columns that the caller put into :attr:`data` are in no file.
        """
        return cast("Self", persistence.open_folder(cls, Path(path), settings))

    def flush(self) -> None:
        """Write a mapped rollout's pages and its state to the disk."""
        if self._data is not None:
            persistence.flush(self)

    def state(self) -> dict[str, Any]:
        """What the rollout is beside its columns, as JSON takes it."""
        known = [(key, column.tensor) for key, column in self._columns.items()]
        own = self._computed().items()
        return {
            "kind": type(self).__name__,
            "n_steps": self.n_steps,
            "n_envs": self.n_envs,
            "leaves": leaves_state((key, tuple(x.shape[1:]), x.dtype) for key, x in known),
            "computed": leaves_state((key, tuple(x.shape[2:]), x.dtype) for key, x in own),
            "generator": self._generator.bit_generator.state,
        }

    @classmethod
    def restored(cls, state: dict[str, Any], storage: Storage, settings: dict[str, Any]) -> Self:
        """The rollout of a :meth:`state` over columns that are filled already."""
        rollout = cls(state["n_steps"], state["n_envs"], **settings)
        rollout._storage = storage
        rollout._set_columns(leaves_from(state["leaves"]))
        rows = rollout.n_steps * rollout.n_envs
        for key, shape, dtype in leaves_from(state["computed"]):
            if "/".join(key) in storage.columns:
                column = storage.column("/".join(key), (rows, *shape), dtype).tensor
                rollout.data[key] = column.view(rollout.n_steps, rollout.n_envs, *shape)
        rollout._generator.bit_generator.state = state["generator"]
        return rollout

    def saved_columns(self) -> dict[str, tuple[Stored, int]]:
        """What a save holds: columns, and how many of their rows were ever written."""
        found = {
            label: (column, len(column.tensor)) for label, column in self._storage.columns.items()
        }
        for key, column in self._computed().items():
            flat = column.detach().reshape(self.n_steps * self.n_envs, *column.shape[2:])
            found["/".join(key)] = (Stored(self._storage, flat.contiguous()), len(flat))
        return found

    def _computed(self) -> Columns:
        """Columns that the caller put into the data, or put in the place of stored ones."""
        found = {}
        for key, column in flatten(self.data).items():
            stored = self._columns.get(key)
            if stored is None or stored.tensor.data_ptr() != column.data_ptr():
                found[key] = column
        return found

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
