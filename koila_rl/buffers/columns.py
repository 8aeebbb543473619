"""The columns of a replay buffer: made from the first transitions, checked and written after."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from koila_rl.buffers.checks import as_mask, number, whole
from koila_rl.buffers.frames import FrameStore
from koila_rl.buffers.ring import ENDED, SKIPPED, Ring
from koila_rl.buffers.storage import Flags, Storage, Stored, to_numpy
from koila_rl.buffers.tree import Columns, Key, following, name
from koila_rl.buffers.views import DiscountView, RewardView, StackView, StoredView, View
from koila_rl.errors import BatchSizeError, ConfigurationError, StorageError
from koila_rl.memory.budget import format_bytes

__all__ = ["Options", "TransitionColumns"]

Leaf: TypeAlias = "tuple[Key, tuple[int, ...], torch.dtype]"
_REWARD: Key = ("next", "reward")
_DISCOUNT: Key = ("next", "discount")
_ENDS: tuple[Key, ...] = (("next", "terminated"), ("next", "truncated"), ("next", "done"))


def leaves_of(values: Columns, n: int) -> list[Leaf]:
    """What the first transitions ``[n, …]`` say of all: names, shapes, dtypes."""
    for key, value in values.items():
        if value.ndim == 0 or len(value) != n:
            raise BatchSizeError(f"{name(key)!r} is {tuple(value.shape)}; others have {n} rows")
        if any("/" in part for part in key) or key[0].startswith("_"):
            raise StorageError(f"{name(key)!r}: names must not hold '/' or begin with '_'")
    return [(key, tuple(value.shape[1:]), value.dtype) for key, value in values.items()]


def describe(head: str, nbytes: int, leaves: list[Leaf]) -> str:
    """A buffer as its ``repr`` shows it: a line for itself and one for each leaf."""
    if not leaves:
        return f"{head}, empty)"
    lines = [
        f"  {name(key)}: {shape} {str(dtype).removeprefix('torch.')}"
        for key, shape, dtype in leaves
    ]
    return "\n".join([f"{head}, {format_bytes(nbytes)}", *lines]) + ")"


def leaves_from(state: Iterable[Any]) -> list[Leaf]:
    """Leaves from what :func:`leaves_state` gave, after a passage through JSON."""
    return [(tuple(key), tuple(shape), getattr(torch, dtype)) for key, shape, dtype in state]


def leaves_state(leaves: Iterable[Leaf]) -> list[Any]:
    """Leaves as JSON takes them."""
    return [
        [list(key), list(shape), str(dtype).removeprefix("torch.")] for key, shape, dtype in leaves
    ]


class _EXACT:
    """Whole numbers that float64 holds."""

    min, max = -(2**53), 2**53


@dataclass(frozen=True)
class Options:
    """What decides the meaning of a stored row; kept beside the columns on disk."""

    capacity: int
    n_envs: int
    n_steps: int
    gamma: float
    frame_stack: int
    frame_dim: int
    frame_keys: tuple[Key, ...] | None

    def state(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Options:
        """The options that :meth:`state` described."""
        keys = state["frame_keys"]
        return cls(**{**state, "frame_keys": keys and tuple(tuple(key) for key in keys)})

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for label in ("n_envs", "n_steps", "frame_stack"):
            whole(label, getattr(self, label))
        whole("frame_dim", self.frame_dim, None)
        number("gamma", self.gamma, 1.0)
        if self.capacity < self.n_envs * self.n_steps:
            raise ConfigurationError(
                f"capacity is {self.capacity}; n_envs={self.n_envs} with n_steps={self.n_steps} "
                f"need {self.n_envs * self.n_steps} or more"
            )


class TransitionColumns:
    """Columns, flags and frame stores for transitions of one schema."""

    def __init__(self, leaves: list[Leaf], options: Options, storage: Storage, ring: Ring) -> None:
        self.leaves = sorted(leaves)
        self.stored: dict[Key, Stored] = {}
        self.views: dict[Key, View] = {}
        self._stacks: dict[Key, FrameStore] = {}
        self._expected: tuple[int, list[tuple[Key, torch.Size, torch.dtype]]] = (-1, [])
        shapes = {key: (shape, dtype) for key, shape, dtype in self.leaves}
        self._ends = [key for key in _ENDS if key in shapes]
        self._dtypes = {key: dtype for key, shape, dtype in leaves if not shape}
        self._ring = ring
        self._storage = storage
        stacked = stacked_keys(shapes, options)
        for key, shape, dtype in self.leaves:
            if key[0] == "next" and key[1:] in stacked:
                continue
            if key in stacked:
                self._stacks[key] = store = FrameStore(
                    "/".join(key), shape, dtype, k=options.frame_stack, dim=options.frame_dim,
                    ring=ring, storage=storage,
                )  # fmt: skip
                where = storage.device
                self.views[key] = StackView(store, dtype, where, following=False)
                self.views[following(key)] = StackView(store, dtype, where, following=True)
            else:
                label = "/".join(key)
                self.stored[key] = storage.column(label, (options.capacity, *shape), dtype)
                self.views[key] = StoredView(self.stored[key], last=key[0] == "next")
        self.slow = storage.folder is not None
        self.plain = options.n_steps == 1 and not self._stacks
        if options.n_steps > 1:
            column = self.stored[_REWARD]
            view = RewardView(column, ring, options.gamma, options.n_steps)
            self.views[_REWARD] = view
            self.views[_DISCOUNT] = DiscountView(view.shape, view.dtype, options.gamma)

    @staticmethod
    def nbytes(leaves: list[Leaf], options: Options) -> int:
        """Bytes that these columns will take."""
        shapes = {key: (shape, dtype) for key, shape, dtype in leaves}
        stacked = stacked_keys(shapes, options)
        total = options.capacity
        for key, shape, dtype in leaves:
            if key in stacked:
                total += FrameStore.nbytes(
                    shape, dtype.itemsize, options.frame_stack, options.capacity, options.n_envs
                )
            elif not (key[0] == "next" and key[1:] in stacked):
                total += options.capacity * torch.Size(shape).numel() * dtype.itemsize
        return total

    def check(self, values: Columns, n: int) -> None:
        """Refuse values ``[n, …]`` that differ from the stored in name, shape or dtype."""
        if self._expected[0] != n:
            shapes = [(key, torch.Size([n, *shape]), dtype) for key, shape, dtype in self.leaves]
            self._expected = (n, shapes)
        for key, shape, dtype in self._expected[1]:
            value = values.get(key)
            if value is None or value.shape != shape or value.dtype is not dtype:
                raise self._difference(values, n)
        if len(values) != len(self.leaves):
            raise self._difference(values, n)

    def _difference(self, values: Columns, n: int) -> StorageError | BatchSizeError:
        known = {key: (shape, dtype) for key, shape, dtype in self.leaves}
        if values.keys() != known.keys():
            return StorageError(
                f"the buffer stores {[name(key) for key in known]}, but these transitions have "
                f"{[name(key) for key in values]}; every transition needs the names of the first"
            )
        for key, (shape, dtype) in known.items():
            value = values[key]
            if value.dtype is not dtype or value.shape[1:] != shape:
                return StorageError(
                    f"{name(key)!r} is {value.dtype} {tuple(value.shape[1:])} here, but {dtype} "
                    f"{shape} in the first transition; cast or reshape it"
                )
        wrong = next(key for key in known if len(values[key]) != n)
        return BatchSizeError(f"{name(wrong)!r} has {len(values[wrong])} rows, others have {n}")

    def write(self, values: Columns, n: int, skip: Tensor | None) -> Flags:
        """Store checked values as the ring's next ``n`` rows; their flags."""
        flags = np.zeros(n, dtype=np.uint8)
        spans = list(self._ring.spans(n, self._ring.capacity))
        for key, column in self.stored.items():
            value = values[key]
            if column.array is None:
                for slot, start, stop in spans:
                    column.tensor[slot : slot + stop - start].copy_(value[start:stop].detach())
                if key in _ENDS:
                    flags |= value.reshape(n, -1).any(1).cpu().numpy()
                continue
            array = to_numpy(value)
            for slot, start, stop in spans:
                column.array[slot : slot + stop - start] = array[start:stop]
            if key in _ENDS:
                flags |= array if array.ndim == 1 else array.reshape(n, -1).any(1)
        if skip is not None:
            flags[skip.cpu().numpy()] |= SKIPPED | ENDED
        for key, store in self._stacks.items():
            device = self._storage.device
            store.write(values[key].to(device), values[following(key)].to(device))
        return flags

    def as_stored(self, transition: Mapping[Any, Any], path: Key = ()) -> dict[Any, Any]:
        """A transition whose Python numbers have the types that are stored, where they can."""
        found = dict(transition)
        for key, value in transition.items():
            here = (*path, *key) if isinstance(key, tuple) else (*path, str(key))
            if isinstance(value, dict):
                found[key] = self.as_stored(value, here)
            elif type(value) in (bool, int, float):
                found[key] = _number_as(self._dtypes.get(here), value)
        return found

    def row(self, transition: dict[str, Any]) -> dict[Key, Any] | None:
        """One transition by column where the fast way can take it, else None."""
        if self._stacks or self._storage.device.type != "cpu":
            return None
        row: dict[Key, Any] = {}
        for key, shape, dtype in self.leaves:
            value: Any = transition
            for part in key:
                if type(value) is not dict or (value := value.get(part)) is None:
                    return None
            if isinstance(value, (np.ndarray, np.generic)):
                array = self.stored[key].array
                if array is None or value.dtype != array.dtype or value.shape != shape:
                    return None
            elif type(value) is Tensor:
                if value.dtype is not dtype or value.shape != shape:
                    return None
                value = to_numpy(value)
            elif (
                shape
                or type(value) not in (bool, int, float)
                or self.stored[key].carried
                or not _takes(dtype, value)
            ):
                return None
            row[key] = value
        return row if _leaf_count(transition) == len(row) else None

    def put_row(self, row: dict[Key, Any], slot: int) -> int:
        """Write what :meth:`row` gave to a slot; its flags."""
        for key, value in row.items():
            array = self.stored[key].array
            assert array is not None
            array[slot] = value
        for key in self._ends:
            value = row[key]
            if value.any() if isinstance(value, np.ndarray) else value:
                return ENDED
        return 0


def stacked_keys(
    shapes: dict[Key, tuple[tuple[int, ...], torch.dtype]], options: Options
) -> set[Key]:
    """The observation leaves whose frames are stored once."""
    if options.frame_stack == 1:
        return set()
    if options.frame_keys is not None:
        wanted = set(options.frame_keys)
        if unknown := wanted - shapes.keys():
            raise ConfigurationError(
                f"frame_keys names {[name(key) for key in unknown]}, which the transitions lack; "
                f"they have {[name(key) for key in shapes]}"
            )
    else:
        # A stack of vectors or images; a plain vector that happens to be divisible is none.
        wanted = {
            key for key, (shape, _) in shapes.items() if key[0] == "observation" and len(shape) > 1
        }
    found = {key for key in wanted if _stackable(key, shapes, options)}
    if not found or (options.frame_keys is not None and found != wanted):
        listed = {name(key): shapes[key][0] for key in wanted} or "no observation of two dimensions"
        raise ConfigurationError(
            f"frame_stack={options.frame_stack} along frame_dim={options.frame_dim} does not fit "
            f"{listed}: that dimension must be a multiple of frame_stack, and ('next', …) of the "
            "same shape and dtype must be stored too"
        )
    return found


def _stackable(
    key: Key, shapes: dict[Key, tuple[tuple[int, ...], torch.dtype]], options: Options
) -> bool:
    shape, _ = shapes[key]
    dim = options.frame_dim
    return (
        -len(shape) <= dim < len(shape)
        and shape[dim] % options.frame_stack == 0
        and shapes.get(following(key)) == shapes[key]
    )


def _number_as(dtype: torch.dtype | None, value: Any) -> Any:
    if dtype is None or not _takes(dtype, value):
        return value
    return torch.tensor(value, dtype=dtype)


def _takes(dtype: torch.dtype, value: Any) -> bool:
    """Whether a Python number is stored as it is, or to the rounding of its column."""
    if type(value) is int and dtype is not torch.bool:
        limits = _EXACT if dtype.is_floating_point else torch.iinfo(dtype)
        return limits.min <= value <= limits.max
    return dtype is torch.bool if type(value) is bool else dtype.is_floating_point


def _leaf_count(transition: dict[str, Any]) -> int:
    count = len(transition)
    for value in transition.values():
        if type(value) is dict:
            count += _leaf_count(value) - 1
    return count


def check_count(n: int, skip: Tensor | None, options: Options, named: bool) -> None:
    """Refuse ``n`` rows that cannot be told apart by environment; ``named``: ``n_envs`` was."""
    if not named and n > 1 and (options.n_steps > 1 or options.frame_stack > 1):
        raise ConfigurationError(
            f"n_steps={options.n_steps} and frame_stack={options.frame_stack} follow transitions "
            f"through time, but {n} came at once: name n_envs, the environments that they "
            "interleave (1 if they are consecutive steps of one)"
        )
    if n % options.n_envs:
        raise BatchSizeError(
            f"{n} transitions are not a whole number of steps of n_envs={options.n_envs}"
        )
    if skip is not None:
        as_mask("skip", skip, (n,))


def check_windows(leaves: list[Leaf], options: Options) -> None:
    """Refuse transitions that n-step windows cannot be built from."""
    if options.n_steps == 1:
        return
    keys = {key for key, _, _ in leaves}
    if _REWARD not in keys or not keys & set(_ENDS):
        raise ConfigurationError(
            f"n_steps={options.n_steps} needs next.reward and next.terminated, next.truncated or "
            f"next.done; the transitions have {sorted(name(key) for key in keys)}"
        )
    if _DISCOUNT in keys:
        raise ConfigurationError(
            "next.discount is what n_steps > 1 puts into the minibatch; store yours by another name"
        )
