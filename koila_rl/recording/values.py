"""What a recorded value is: its description, the call it came from, and its cached results.

References point only to older things: tensor -> node -> call -> nodes. Nothing needs the
garbage collector to go away.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from koila_rl.recording.layouts import Layout
from koila_rl.recording.places import Where

if TYPE_CHECKING:
    from koila_rl.recording.analysis import CallInfo

__all__ = [
    "SMALL",
    "Call",
    "CallState",
    "Captured",
    "Meta",
    "Node",
    "Rows",
    "Source",
    "meta_of",
    "moment",
    "second_size",
    "seeded_since",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Meta:
    """Shape, strides, type and layout of a value at minibatch size ``n`` and at ``n2``.

    ``n`` is 0 for values that have nothing to do with a minibatch (captured tensors).
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    layout: Layout | None
    n: int
    shape2: tuple[int, ...]
    stride2: tuple[int, ...]
    row_index: bool = False
    # The shape as users see it, once it has been asked for.
    seen: list[torch.Size] = field(default_factory=list, init=False, compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


_INTERNED: dict[Meta, Meta] = {}


def intern(meta: Meta) -> Meta:
    """The one object for equal descriptions, so that keys compare by identity."""
    if len(_INTERNED) > 100_000:
        _INTERNED.clear()
        _DESCRIBED.clear()
    return _INTERNED.setdefault(meta, meta)


def second_size(n: int) -> int:
    """A prime above n: the size at which each call is tried again. Coprime by construction."""
    candidate = max(n + 1, 3)
    while any(candidate % d == 0 for d in range(2, int(candidate**0.5) + 1)):
        candidate += 1
    return candidate


def scaled(shape: tuple[int, ...], stride: tuple[int, ...], dim: int, size: int) -> Any:
    """Shape and strides with dimension ``dim`` of another size, memory order kept."""
    new_shape = (*shape[:dim], size, *shape[dim + 1 :])
    new_stride = list(stride)
    base = stride[dim] * shape[dim]
    for d, step in enumerate(stride):
        if d != dim and shape[dim] and step >= base > 0 and step % base == 0:
            new_stride[d] = step // base * stride[dim] * size
    return new_shape, tuple(new_stride)


# Descriptions of real tensors by what is asked of them.
_DESCRIBED: dict[Any, Meta] = {}


def meta_of(tensor: Tensor, n: int = 0, layout: Layout | None = None) -> Meta:
    """Describe a real tensor; with ``layout``, as a minibatch of n samples."""
    key = (
        tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, n, layout,
    )  # fmt: skip
    found = _DESCRIBED.get(key)
    if found is None:
        if len(_DESCRIBED) > 10_000:
            _DESCRIBED.clear()
        found = _DESCRIBED[key] = _describe(tensor, n, layout)
    return found


def _describe(tensor: Tensor, n: int, layout: Layout | None) -> Meta:
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    shape2, stride2 = shape, stride
    if layout is not None:
        size = layout.factor * second_size(n)
        shape2, stride2 = scaled(shape, stride, layout.dim, size)
    return intern(
        Meta(
            shape, stride, tensor.dtype, tensor.device, tensor.requires_grad, layout, n,
            shape2, stride2,
        )
    )  # fmt: skip


class Ahead(Protocol):
    """Rows that are on their way: calling it waits for them, ``drop`` lets them go."""

    def __call__(self) -> Tensor: ...

    def drop(self) -> None: ...


class Rows(Protocol):
    """A minibatch whose rows are delivered when a microbatch runs.

    ``shape`` describes all N rows along ``dim``; ``read(start, stop)`` returns rows
    ``start:stop`` on ``device``; ``check()`` raises `StaleValueError` if the storage behind
    them has been overwritten.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    dim: int
    # What a row takes before it is transformed; 0 where it is not.
    raw_bytes: int

    def read(self, start: int, stop: int, ahead: Ahead | None = None) -> Tensor: ...

    @property
    def prefetch(self) -> Callable[[int, int], Ahead] | None:
        """Begins to fetch rows for a later ``read``; None where that gains nothing."""

    def check(self) -> None: ...


# Values of up to so many bytes a sample are small: held ones are computed along.
SMALL = 64

_sequence = itertools.count()


def moment() -> int:
    """A place in time between the calls recorded before and after."""
    return next(_sequence)


class _Seed:
    """The seed in force when a minibatch was last wrapped."""

    value = 0


def seeded_since() -> bool:
    """Whether somebody has set a seed since a minibatch was last wrapped."""
    return torch.initial_seed() != _Seed.value


class Source:
    """A wrapped minibatch: a real tensor, or rows that are read on demand."""

    __slots__ = ("data", "meta", "pointer", "rows", "sequence", "version")

    def __init__(self, data: Tensor | None, rows: Rows | None, meta: Meta) -> None:
        self.data = data
        self.rows = rows
        self.meta = meta
        self.sequence = next(_sequence)
        _Seed.value = torch.initial_seed()
        self.version = data._version if data is not None and not data.is_inference() else 0
        self.pointer = data.data_ptr() if data is not None else 0

    def is_here(self) -> bool:
        """Whether all rows can be had, as they were when they were wrapped, without a run."""
        if self.rows is not None:
            return True
        data = self.data
        if data is None or data.is_inference() or data.requires_grad != self.meta.requires_grad:
            return False
        return data._version == self.version and data.data_ptr() == self.pointer


class Captured:
    """A real tensor that a recorded call took by reference, as it was at that time."""

    __slots__ = ("pointer", "requires_grad", "steps", "tensor", "version")

    def __init__(self, tensor: Tensor, steps: int) -> None:
        self.tensor = tensor
        self.requires_grad = tensor.requires_grad
        self.version = 0 if tensor.is_inference() else tensor._version
        self.pointer = tensor.data_ptr() if tensor.layout == torch.strided else 0
        self.steps = steps

    def as_recorded(self) -> Tensor:
        """The tensor, without gradients if it asked for none when the call was recorded."""
        frozen = self.tensor.requires_grad and not self.requires_grad
        return self.tensor.detach() if frozen else self.tensor


class CallState:
    """What a call with random numbers or effects remembers between replays.

    Apart from the call, so that graphs which replay it do not hold its inputs.
    """

    __slots__ = ("done", "random")

    def __init__(self) -> None:
        self.done = False
        self.random: dict[Any, Any] = {}


class Call:
    """One recorded call: its analysis, its inputs and constants, and its place in time."""

    __slots__ = (
        "__weakref__", "checks", "consts", "grad", "info", "inputs", "sequence", "state", "where",
    )  # fmt: skip

    def __init__(
        self,
        info: CallInfo,
        inputs: list[Node | Captured],
        consts: Sequence[Any],
        grad: bool,
        checks: Sequence[tuple[Node, str]] = (),
        where: Where = None,
    ) -> None:
        self.info = info
        self.inputs = inputs
        self.consts = consts
        self.grad = grad
        self.sequence = next(_sequence)
        self.where = where
        self.state = CallState() if info.stateful else None
        # Validations that were deferred before this call: (node of a truth value, message).
        self.checks = checks


class Node:
    """One recorded value: output ``index`` of ``call``, or a source.

    ``value`` is the detached result once computed; ``attached`` the result with its graph.
    """

    __slots__ = ("__weakref__", "attached", "call", "index", "meta", "value")

    def __init__(self, call: Call | Source, index: int, meta: Meta) -> None:
        self.call = call
        self.index = index
        self.meta = meta
        self.value: Tensor | None = None
        self.attached: Tensor | None = None
