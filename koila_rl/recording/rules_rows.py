"""Rules of operators that read, move or write rows along the batch itself.

A lookup by a whole index adds up over microbatches, each giving the rows that it holds; a
write goes to the rows that a microbatch holds; rows that move are read from the whole operand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from koila_rl.recording.layouts import Layout, reshape_layout
from koila_rl.recording.rows import Lookup, Place, View, Write, flipped, padded, rolled, triangle
from koila_rl.recording.rules import WHOLE, Op, Reduction, Use, Verdict, axis_size

__all__ = [
    "lookup",
    "moved_diagonal",
    "moved_flip",
    "moved_pad",
    "moved_roll",
    "moved_triangle",
    "moved_view",
    "written_rows",
]


def lookup(op: Op, kind: str, dim: int, layout: Layout | None = None) -> Verdict | None:
    """A lookup along the batch by an index that is whole: its parts add up."""
    place = layout or op.operands[0].layout
    if place is None or not op.only(op.operands[0].name):
        return None
    own = op.operands[0].layout
    found = Lookup(kind, Place(place, op.n), dim)
    return Verdict(reduction=Reduction("sum"), uses={0: Use(own)}, instead=found)


def taken(op: Op) -> Verdict | None:
    """``take`` counts through the flattened operand."""
    operand = op.operands[0]
    if operand.layout is None:
        return None
    size = 1
    for length in operand.shape:
        size *= length
    flat = reshape_layout(operand.shape, operand.layout, (size,), op.n)
    return None if flat is None else lookup(op, "take", 0, flat)


def written_rows(op: Op, dim: int) -> Verdict | None:
    """A write along the batch by an index that is whole."""
    target = op.operands[0]
    if target.layout is None or not op.only(target.name) or target.layout.dim != dim:
        return None
    write = Write(_pure(op.func), Place(target.layout, op.n), dim)
    return Verdict(outs=(target.layout,), uses={0: Use(target.layout)}, instead=write)


def _pure(func: Any) -> Any:
    """The operator that returns its result, for one that may write in place."""
    name = func._schema.name.partition("::")[2]
    if name.endswith("_") and not name.startswith("_index"):
        return getattr(getattr(torch.ops.aten, name[:-1]), func._overloadname)
    return func


def _view(func: Any) -> Any:
    """The operator that returns a view, for one that returns a copy."""
    name = func._schema.name.partition("::")[2]
    return getattr(torch.ops.aten, name.removesuffix("_copy")).default if "_copy" in name else func


def moved(op: Op, dim: int, run: Callable[..., Tensor]) -> Verdict | None:
    """The rows of a result come from other rows of the operand, which is taken whole."""
    size, size2 = op.outs[0][dim], op.outs2[0][dim]
    if size < 2 or size2 < 2 or len(op.operands) != 1:
        return None
    if [x for d, x in enumerate(op.outs[0]) if d != dim] != [
        x for d, x in enumerate(op.outs2[0]) if d != dim
    ]:
        return None
    return Verdict(outs=(Layout(dim),), uses={0: WHOLE}, instead=run, axis=(size, size2))


def moved_view(op: Op, dim: int) -> Verdict | None:
    """Rows of a view that reorders or leaves out rows: a slice, windows, a diagonal."""
    return moved(op, dim, View(_view(op.func), dim))


def moved_diagonal(op: Op) -> Verdict | None:
    return moved_view(op, len(op.outs[0]) - 1)


def moved_flip(op: Op, dims: list[int]) -> Verdict | None:
    layout = op.operands[0].layout
    assert layout is not None
    return _permuted(op, layout, flipped(tuple(dims), layout.dim, Place(layout, op.n)))


def moved_roll(op: Op, shifts: list[int], dims: list[int]) -> Verdict | None:
    layout = op.operands[0].layout
    assert layout is not None
    run = rolled(tuple(shifts), tuple(dims), layout.dim, Place(layout, op.n))
    return _permuted(op, layout, run)


def _permuted(op: Op, layout: Layout, run: Callable[..., Tensor]) -> Verdict:
    """As many rows as before, in another order."""
    return Verdict(outs=(layout,), uses={0: WHOLE}, instead=run)


def moved_pad(op: Op) -> Verdict | None:
    """Constant padding along the batch; negative amounts leave rows out."""
    operand = op.operands[0]
    assert operand.layout is not None
    dim, pad = operand.layout.dim, list(op["pad"])
    place = 2 * (operand.ndim - 1 - dim)
    before = pad[place]
    pad[place] = pad[place + 1] = 0
    return moved(op, dim, padded(dim, before, pad))


def moved_triangle(op: Op) -> Verdict | None:
    """``tril`` and ``triu`` of a matrix whose rows or columns are samples."""
    operand = op.operands[0]
    layout = operand.layout
    assert layout is not None
    if layout.factor != 1 or axis_size(layout, op.n) != op.n:
        return None
    other = operand.ndim - 1 if layout.dim == operand.ndim - 2 else operand.ndim - 2
    run = triangle(op.name == "triu", layout.dim, other)
    return Verdict(outs=(layout,), uses={0: Use(layout)}, instead=run)
