"""Rules of operators that move elements: views, joins, flips, pads, triangles."""

from __future__ import annotations

from typing import Any

from koila_rl.recording.layouts import Layout, reshape_layout
from koila_rl.recording.rules import Op, Use, Verdict, align, axis_size, register, split
from koila_rl.recording.rules_rows import (
    lookup,
    moved_diagonal,
    moved_flip,
    moved_pad,
    moved_roll,
    moved_triangle,
    moved_view,
)

__all__ = ["dims_of", "normal", "view_scatter"]


def normal(dim: int, ndim: int) -> int:
    return dim + ndim if dim < 0 else dim


def dims_of(value: Any, ndim: int) -> list[int]:
    """A dimension argument as non-negative integers; None and () mean all."""
    if value is None:
        return list(range(ndim))
    dims = [value] if isinstance(value, int) else list(value)
    return [normal(dim, ndim) for dim in dims] if dims else list(range(ndim))


def _first(op: Op) -> tuple[Layout, int] | None:
    layout = op.operands[0].layout
    return None if layout is None else (layout, op.operands[0].ndim)


@register("view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy", "flatten",
          "pixel_shuffle", "pixel_unshuffle", "channel_shuffle")  # fmt: skip
def _view(op: Op) -> Verdict | None:
    layout = op.operands[0].layout
    if layout is None:
        return None
    if op.name in ("pixel_shuffle", "pixel_unshuffle", "channel_shuffle"):
        moved = 1 if op.name == "channel_shuffle" else op.operands[0].ndim - 3
        same = layout.dim < moved or (op.name == "channel_shuffle" and layout.dim > 1)
        return split(op, layout) if same else None
    if isinstance(op["dtype"], type(op.operands[0].tensor.dtype)):
        return split(op, layout) if layout.dim != op.operands[0].ndim - 1 else None
    new = reshape_layout(op.operands[0].shape, layout, op.outs[0], op.n)
    return None if new is None else split(op, new)


@register("permute")
def _permute(op: Op) -> Verdict | None:
    if (first := _first(op)) is None:
        return None
    layout, ndim = first
    return split(op, layout.at(dims_of(op["dims"], ndim).index(layout.dim)))


@register("transpose", "t", "swapaxes")
def _transpose(op: Op) -> Verdict | None:
    if (first := _first(op)) is None:
        return None
    layout, ndim = first
    if ndim < 2:
        return split(op, layout)
    a, b = (0, 1) if op.name == "t" else (normal(op["dim0"], ndim), normal(op["dim1"], ndim))
    dim = b if layout.dim == a else a if layout.dim == b else layout.dim
    return split(op, layout.at(dim))


@register("expand", "repeat")
def _expand(op: Op) -> Verdict | None:
    if (first := _first(op)) is None:
        return None
    layout, ndim = first
    dim = layout.dim + len(op.outs[0]) - ndim
    times = op.outs[0][dim] // axis_size(layout, op.n)
    return split(op, Layout(dim, layout.outer * times, layout.inner))


@register("repeat_interleave")
def _repeat_interleave(op: Op) -> Verdict | None:
    return None


@register("squeeze")
def _squeeze(op: Op) -> Verdict | None:
    """Only size-1 dimensions go; without a dim argument a microbatch of one row would too."""
    if (first := _first(op)) is None:
        return None
    layout, ndim = first
    if op.args.get("dim") is None:
        shape = op.operands[0].shape
        dims = [d for d, size in enumerate(shape) if size == 1 and d != layout.dim]

        def explicit(x: Any) -> Any:
            return x.squeeze(dims) if dims else x.view_as(x)

        return Verdict(decomposition=explicit)
    dims = [d for d in dims_of(op["dim"], ndim) if op.operands[0].shape[d] == 1]
    if layout.dim in dims_of(op["dim"], ndim):
        keep = [d for d in dims if d != layout.dim]
        return Verdict(decomposition=lambda x, dim: x.squeeze(keep) if keep else x.view_as(x))
    return split(op, layout.at(layout.dim - sum(d < layout.dim for d in dims)))


@register("unsqueeze")
def _unsqueeze(op: Op) -> Verdict | None:
    if (first := _first(op)) is None:
        return None
    layout, ndim = first
    dim = normal(op["dim"], ndim + 1)
    return split(op, layout.at(layout.dim + (dim <= layout.dim)))


@register("select")
def _select(op: Op) -> Verdict | None:
    if (first := _first(op)) is None:
        return None
    layout, ndim = first
    dim = normal(op["dim"], ndim)
    if dim == layout.dim:
        return lookup(op, "select", dim)
    return split(op, layout.at(layout.dim - (dim < layout.dim)))


@register("slice", "narrow")
def _slice(op: Op) -> Verdict | None:
    if (first := _first(op)) is None:
        return None
    layout, ndim = first
    dim = normal(op["dim"] or 0, ndim)
    if dim != layout.dim:
        return split(op, layout)
    same = op.outs[0] == op.operands[0].shape and op.outs2[0] == op.operands[0].shape2
    if same and (op["step"] or 1) == 1:
        return split(op, layout)
    one = op.outs[0][dim] == op.outs2[0][dim] == 1
    return lookup(op, "slice", dim) if one else moved_view(op, dim)


@register("split", "unsafe_split", "split_with_sizes", "unsafe_split_with_sizes", "chunk",
          "unsafe_chunk", "tensor_split", "unsafe_chunk")  # fmt: skip
def _split(op: Op) -> Verdict | None:
    if (first := _first(op)) is None:
        return None
    layout, ndim = first
    if normal(op["dim"] or 0, ndim) != layout.dim:
        return split(op, *[layout] * len(op.outs))
    if layout.outer == 1:
        return None
    return _split_outer(op, layout)


def _split_outer(op: Op, layout: Layout) -> Verdict | None:
    """Split a ``cat`` of batches back into batches."""
    unit = op.n * layout.inner
    sizes = [shape[layout.dim] for shape in op.outs]
    if any(size % unit for size in sizes):
        return None
    return split(op, *[Layout(layout.dim, size // unit, layout.inner) for size in sizes])


@register("unbind")
def _unbind(op: Op) -> Verdict | None:
    if (first := _first(op)) is None:
        return None
    layout, ndim = first
    dim = normal(op["dim"] or 0, ndim)
    if dim == layout.dim:
        return None
    return split(op, *[layout.at(layout.dim - (dim < layout.dim))] * len(op.outs))


@register("diagonal", "unfold")
def _diagonal(op: Op) -> Verdict | None:
    if (first := _first(op)) is None:
        return None
    layout, ndim = first
    if op.name == "unfold":
        dim = normal(op["dimension"], ndim)
        return moved_view(op, dim) if dim == layout.dim else split(op, layout)
    a, b = (normal(op[name] if op[name] is not None else default, ndim)
            for name, default in (("dim1", 0), ("dim2", 1)))  # fmt: skip
    if layout.dim in (a, b):
        return moved_diagonal(op)
    return split(op, layout.at(layout.dim - (a < layout.dim) - (b < layout.dim)))


@register("flip", "fliplr", "flipud")
def _flip(op: Op) -> Verdict | None:
    if (first := _first(op)) is None:
        return None
    layout, ndim = first
    dims = [normal(dim, ndim) for dim in op["dims"]]
    return moved_flip(op, dims) if layout.dim in dims else split(op, layout)


@register("roll")
def _roll(op: Op) -> Verdict | None:
    if (first := _first(op)) is None:
        return None
    layout, ndim = first
    shifts = [op["shifts"]] if isinstance(op["shifts"], int) else list(op["shifts"])
    if not op["dims"]:
        count = shifts[0]
        return Verdict(decomposition=lambda x, *_: x.reshape(-1).roll(count, 0).reshape(x.shape))
    dims = dims_of(op["dims"], ndim)
    return moved_roll(op, shifts, dims) if layout.dim in dims else split(op, layout)


@register("rot90")
def _rot90(op: Op) -> Verdict | None:
    """Flips and a transposition."""
    if (first := _first(op)) is None:
        return None
    layout, ndim = first
    a, b = dims_of(op["dims"] or [0, 1], ndim)
    if layout.dim not in (a, b):
        return split(op, layout)
    turns = (1 if op["k"] is None else op["k"]) % 4

    def turned(x: Any, *_: Any, **__: Any) -> Any:
        if turns == 2:
            return x.flip([a, b])
        if turns == 1:
            return x.flip([b]).transpose(a, b)
        return x.flip([a]).transpose(a, b) if turns == 3 else x.clone()

    return Verdict(decomposition=turned)


@register("tril", "triu")
def _triangle(op: Op) -> Verdict | None:
    if (first := _first(op)) is None:
        return None
    layout, ndim = first
    return moved_triangle(op) if layout.dim >= ndim - 2 else split(op, layout)


@register("cat", "concat", "_chunk_cat")
def _cat(op: Op) -> Verdict | None:
    ndim = len(op.outs[0])
    dim = normal(op["dim"] or 0, ndim)
    layouts = {operand.layout for operand in op.operands if operand.layout is not None}
    if any(operand.ndim != ndim for operand in op.operands) or op.name == "_chunk_cat":
        return None
    if all(layout.dim != dim for layout in layouts):
        aligned = align(op, ndim)
        if aligned is None:
            return None
        target, uses = aligned
        if any(use.layout is None for use in uses.values()):
            return None
        return Verdict(outs=(target,), uses=uses)
    return _cat_along_batch(op, dim)


def _cat_along_batch(op: Op, dim: int) -> Verdict | None:
    """A cat of batches is a batch with a larger ``outer``; all parts must be batches."""
    outer, inner, uses = 0, None, {}
    for k, operand in enumerate(op.operands):
        layout = operand.layout
        if layout is None:
            if operand.shape[dim] % op.n or operand.shape == operand.shape2:
                return None
            layout = Layout(dim, 1, operand.shape[dim] // op.n)
        if layout.dim != dim or (inner is not None and layout.inner != inner):
            return None
        inner, outer = layout.inner, outer + layout.outer
        uses[k] = Use(layout)
    return Verdict(outs=(Layout(dim, outer, inner or 1),), uses=uses)


@register("stack")
def _stack(op: Op) -> Verdict | None:
    aligned = align(op, op.operands[0].ndim)
    if aligned is None:
        return None
    target, uses = aligned
    if any(use.layout is None for use in uses.values()):
        return None
    dim = normal(op["dim"] or 0, len(op.outs[0]))
    return Verdict(outs=(target.at(target.dim + (dim <= target.dim)),), uses=uses)


@register("constant_pad_nd")
def _pad(op: Op) -> Verdict | None:
    if (first := _first(op)) is None:
        return None
    layout, ndim = first
    padded = range(ndim - len(op["pad"]) // 2, ndim)
    touched = [d for d in padded if any(op["pad"][2 * (ndim - 1 - d) :][:2])]
    return moved_pad(op) if layout.dim in touched else split(op, layout)


@register("reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d",
          "replication_pad2d", "replication_pad3d")  # fmt: skip
def _spatial_pad(op: Op) -> Verdict | None:
    if (first := _first(op)) is None:
        return None
    layout, ndim = first
    return split(op, layout) if layout.dim < ndim - int(op.name[-2]) else None


@register("view_as_real", "view_as_complex")
def _view_complex(op: Op) -> Verdict | None:
    if (first := _first(op)) is None:
        return None
    return split(op, first[0])


def view_scatter(op: Op) -> Verdict | None:
    """Write ``src`` into a view of ``self``."""
    target, src = op.operands[0], op.operands[1]
    if target.layout is None and src.layout is None:
        return None
    ndim = target.ndim
    if op.name == "slice_scatter":
        layout = target.layout or src.layout
        if layout is None or normal(op["dim"] or 0, ndim) == layout.dim:
            return None
        if src.layout not in (None, layout) or target.layout not in (None, layout):
            return None
        return Verdict(outs=(layout,), uses={0: Use(layout), 1: Use(layout)})
    if op.name == "select_scatter":
        removed = [normal(op["dim"], ndim)]
    else:
        removed = [normal(op[name] if op[name] is not None else default, ndim)
                   for name, default in (("dim1", 0), ("dim2", 1))]  # fmt: skip
    kept = [d for d in range(ndim) if d not in removed]
    if target.layout is not None:
        layout = target.layout
    else:
        assert src.layout is not None
        if op.name == "diagonal_scatter" and src.layout.dim == src.ndim - 1:
            return None
        layout = src.layout.at(kept[src.layout.dim])
    if layout.dim in removed:
        return None
    inner = layout.at(kept.index(layout.dim))
    if src.layout not in (None, inner):
        return None
    return Verdict(outs=(layout,), uses={0: Use(layout), 1: Use(inner)})
