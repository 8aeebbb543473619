"""What calls of one form have in common, and steps that run a call as it was written."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from koila_rl.recording.layouts import Layout
from koila_rl.recording.rows import View
from koila_rl.recording.rules import WHOLE, Use
from koila_rl.recording.steps import Step
from koila_rl.recording.template import Const, Ref, fill
from koila_rl.recording.values import Meta, intern, scaled, second_size

__all__ = ["CallInfo", "described", "described_along", "native_step", "rows_of_view"]


@dataclass
class CallInfo:
    """What every call of this form has in common.

    ``metas`` describe the output tensors; ``out`` is the returned structure with holes for them.
    ``func(*args, **kwargs)`` from ``template`` is the call as it was written; ``steps`` replay
    it on microbatches, numbering inputs first; ``results`` are the numbers of the outputs.
    """

    func: Any
    template: tuple[Any, Any]
    name: str
    metas: list[Meta]
    paths: list[tuple[Any, ...]]
    out: Any
    steps: list[Step]
    results: tuple[int, ...]
    n: int
    random: bool = False
    # The casting in force when the call was recorded, or None.
    autocast: Any = None
    # The default type then, where the result depends on it.
    default: Any = None
    keep: Any = None
    aliases: list[int | None] = field(default_factory=list)
    same: list[int | None] = field(default_factory=list)
    writes: tuple[int, ...] = ()
    exploded: bool = False
    mixes: bool = False
    # Bytes of all results inside the call at full size.
    traffic: int = 0
    # How often the call has been met the general way.
    met: int = 0

    @functools.cached_property
    def lone(self) -> bool:
        """Whether the call returns one tensor, new and with storage of its own."""
        return type(self.out) is Ref and self.same == [None] and self.aliases == [None]

    @functools.cached_property
    def view(self) -> bool:
        """Whether the call returns one tensor, a view of an input."""
        return type(self.out) is Ref and self.same == [None] and self.aliases != [None]

    @functools.cached_property
    def stateful(self) -> bool:
        """Whether its calls remember random numbers or effects between replays."""
        return self.random or self.effect

    @functools.cached_property
    def combines(self) -> bool:
        """Whether partial results of microbatches are combined by more than adding them up."""
        return any(step.reduction is not None and step.reduction.combine is not None
                   for step in self.steps)  # fmt: skip

    @property
    def effect(self) -> bool:
        """Whether the call writes to tensors outside the program."""
        return hasattr(self.func, "whole")


def described(x: Tensor, n: int, layout: Layout | None = None, other: Tensor | None = None) -> Meta:
    shape, stride = tuple(x.shape), tuple(x.stride())
    shape2 = tuple(other.shape) if other is not None else shape
    stride2 = tuple(other.stride()) if other is not None else stride
    return intern(
        Meta(shape, stride, x.dtype, x.device, x.requires_grad, layout, n, shape2, stride2)
    )


def described_along(x: Tensor, n: int, layout: Layout | None) -> Meta:
    """A result whose batch axis has n rows, another size than the minibatch's."""
    if layout is None or n <= 1:
        return described(x, n)
    shape, stride = tuple(x.shape), tuple(x.stride())
    size = layout.factor * second_size(n)
    shape2, stride2 = scaled(shape, stride, layout.dim, size)
    return intern(
        Meta(shape, stride, x.dtype, x.device, x.requires_grad, layout, n, shape2, stride2)
    )


def native_step(
    info: CallInfo, kind: str, inputs: int, uses: dict[int, Use], reduction: Any
) -> Step:
    """The call as it was written, as one step."""
    return Step(
        kind=kind, func=info.func, template=info.template,
        operands=tuple((k, uses.get(k, WHOLE)) for k in range(inputs)),
        outputs=info.results, paths=tuple(info.paths),
        layouts=tuple(meta.layout for meta in info.metas),
        requires_grad=tuple(meta.requires_grad for meta in info.metas),
        metas=tuple((meta.shape, meta.dtype, meta.device) for meta in info.metas), name=info.name,
        reduction=reduction, random=info.random, autocast=None,
        bytes_per_sample=sum(meta.nbytes for meta in info.metas) // max(info.n, 1),
    )  # fmt: skip


def rows_of_view(info: CallInfo, metas: list[Meta], consts: int) -> CallInfo:
    """A view that makes no sense at another size: each microbatch takes rows of the result."""
    out = info.metas[0]
    dim = next(d for d, size in enumerate(out.shape) if size > 1)
    size, layout = out.shape[dim], Layout(dim)
    shape2, stride2 = scaled(out.shape, out.stride, dim, second_size(size))
    info.metas = [intern(replace(out, layout=layout, n=size, shape2=shape2, stride2=stride2))]
    rows, result = len(metas) + 1, len(metas)
    numbers = Step(
        kind="global", func=torch.arange, template=((size,), {}), operands=(), outputs=(rows,),
        paths=((),), layouts=(Layout(0),), requires_grad=(False,), name="arange",
        metas=(((size,), torch.int64, torch.device("cpu")),), n=size,
    )  # fmt: skip
    step = native_step(info, "split", len(metas), {}, None)
    holes_of = [Ref(k) for k in range(len(metas))], [Const(k, object) for k in range(consts)]
    args, kwargs = fill(info.template, *holes_of, info.n)
    step.func, step.n = View(info.func, dim), size
    step.template = ((Ref(len(metas)), *args), kwargs)
    step.operands = (*step.operands, (rows, Use(Layout(0))))
    step.outputs = info.results = (result,)
    info.steps = [numbers, step]
    return info
