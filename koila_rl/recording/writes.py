"""Writes to lazy tensors: in-place calls, ``out=``, and assignments through views.

A write becomes a call that copies the base of the storage, goes through the chain of views to
the written part, runs the in-place call there and returns the new base. Every live member of
the storage then stands for its view of the new base. Replays are free of side effects, so the
wrapped source is never changed, and a write may meet values of any stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from koila_rl.recording.analysis import describe_function
from koila_rl.recording.callinfo import CallInfo
from koila_rl.recording.sizes import batch_shape
from koila_rl.recording.template import Slots, counted, fill, key_of
from koila_rl.recording.tensor import Group, LazyTensor
from koila_rl.recording.values import Node, Source, meta_of

__all__ = ["ViewStep", "group_of", "join_view", "node_of", "record_write", "write_at_once"]


@dataclass(slots=True)
class ViewStep:
    """One call from a base towards a view of it."""

    func: Any
    template: Any
    others: list[Any]
    consts: Sequence[Any]
    hole: int
    path: tuple[Any, ...]

    def apply(self, base: Tensor, n: int) -> Tensor:
        tensors = [base if k == self.hole else x for k, x in enumerate(self.others)]
        args, kwargs = fill(self.template, tensors, self.consts, n)
        result = self.func(*args, **kwargs)
        for key in self.path:
            result = result[key]
        view: Tensor = result
        return view

    @property
    def key(self) -> Any:
        consts = tuple(x if isinstance(x, float) else id(x) for x in self.consts)
        return (self.func, key_of(self.template), consts, self.hole, self.path)


class _Chain:
    """Functions built from a chain of views compare by what they do, so analyses repeat."""

    def __init__(self, chain: tuple[ViewStep, ...], key: Any) -> None:
        self.chain = chain
        self.key = (type(self), tuple(step.key for step in chain), key)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Chain) and self.key == other.key

    def view(self, base: Tensor, n: int) -> Tensor:
        for step in self.chain:
            base = step.apply(base, n)
        return base


class ViewOf(_Chain):
    """The view of a base at the end of a chain."""

    __name__ = "view"

    def __call__(self, base: Tensor, n: int) -> Tensor:
        return self.view(base, int(n))


class Written(_Chain):
    """The base after an in-place call on one of its views."""

    def __init__(self, chain: tuple[ViewStep, ...], func: Any, template: Any, hole: int) -> None:
        super().__init__(chain, (func, key_of(template), hole))
        self.func, self.template, self.hole = func, template, hole
        self.__name__ = getattr(func, "__name__", "write")

    def __call__(self, base: Tensor, tensors: list[Tensor], consts: list[Any], n: int) -> Tensor:
        new = base.clone()
        target = self.view(new, int(n))
        holes: list[Any] = list(tensors)
        holes.insert(self.hole, target)
        args, kwargs = fill(self.template, holes, consts, int(n))
        self.func(*args, **kwargs)
        return new


class _KeepGraph(torch.autograd.Function):
    """Other numbers in the place of a value, on its graph."""

    @staticmethod
    def forward(ctx: Any, base: Tensor, written: Tensor) -> Tensor:
        return written.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def keep_graph(base: Tensor, written: Tensor) -> Tensor:
    """A write without gradients changes the numbers of a value and not its graph."""
    kept: Tensor = _KeepGraph.apply(base, written)  # type: ignore[no-untyped-call]
    return kept


def record_write(func: Any, template: Any, slots: Slots, info: Any) -> Any:
    """Record an in-place call on a lazy tensor and move its storage group to the new base."""
    from koila_rl.recording.recorder import record

    if len(info.writes) > 1:
        return write_at_once(func, template, slots, info.writes, info.n)
    hole = info.writes[0]
    target: LazyTensor = slots.tensors[hole]
    group = group_of(target)
    runtime = target._runtime
    base = LazyTensor(group.base, runtime)
    others = [x for k, x in enumerate(slots.tensors) if k != hole]
    n = group.base.meta.n or info.n
    write = Written(target._chain, func, _in_rows_of(group, info.n, template), hole)
    size = batch_shape(n) if n > 1 else n
    written = record(write, (base, others, slots.consts, size), {})
    if not torch.is_grad_enabled() and group.base.meta.requires_grad:
        with torch.enable_grad():
            written = record(keep_graph, (base, written), {})
    group.base = node_of(written)
    new = LazyTensor(group.base, runtime)
    for member in group.live():
        if member._chain:
            with torch.set_grad_enabled(torch.is_grad_enabled() or member.requires_grad):
                member._node = node_of(record(ViewOf(member._chain, None), (new, size), {}))
        else:
            member._node = group.base
    outs = [slots.tensors[same] if same is not None else target for same in info.same]
    return fill(info.out, outs, (), 0)


def write_at_once(func: Any, template: Any, slots: Slots, holes: Sequence[int], n: int) -> Any:
    """Run a call that writes to lazy tensors now, on copies of their storages."""
    real = [x._runtime.attached(x._node) if isinstance(x, LazyTensor) else x for x in slots.tensors]
    groups = []
    for k in holes:
        target: LazyTensor = slots.tensors[k]
        group = group_of(target)
        base = target._runtime.attached(group.base).clone()
        real[k] = ViewOf(target._chain, None).view(base, group.base.meta.n or n)
        groups.append((group, base))
        target._runtime.eager(describe_function(func))
    args, kwargs = fill(template, real, slots.consts, n)
    result = func(*args, **kwargs)
    for group, base in groups:
        rows = group.base.meta.n or n
        group.base = node_of(base)
        for member in group.live():
            member._node = node_of(ViewOf(member._chain, None).view(base, rows))
    lazy = {id(x): y for x, y in zip(real, slots.tensors, strict=True)}
    return lazy.get(id(result), result)


def join_view(
    base: LazyTensor, view: LazyTensor, info: CallInfo, others: list[Any], consts: Sequence[Any],
    hole: int, index: int,
) -> None:  # fmt: skip
    """The result shares storage with an input: remember how to get there from its base."""
    group = group_of(base)
    template = _in_rows_of(group, info.n, info.template)
    step = ViewStep(info.func, template, others, consts, hole, info.paths[index])
    group.join(view, (*base._chain, step))


def _in_rows_of(group: Group, n: int, template: Any) -> Any:
    """The template of a call on n rows, for use where sizes count the rows of the group's base.

    A view may have a number of rows of its own, as all but the last have.
    """
    return template if group.base.meta.n in (0, n) else counted(template, n)


def group_of(tensor: LazyTensor) -> Group:
    if tensor._group is None:
        Group(tensor._node).join(tensor, ())
    group = tensor._group
    assert group is not None
    return group


def node_of(result: Tensor) -> Node:
    """The node of a recorded result, or of one that was computed at once."""
    if isinstance(result, LazyTensor):
        return result._node
    meta = meta_of(result)
    node = Node(Source(result.detach(), None, meta), 0, meta)
    node.attached, node.value = result, result.detach()
    return node
