"""Rules of operators that look up or write by index, and of losses."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from koila_rl.recording.layouts import Layout
from koila_rl.recording.rules import (
    Op,
    Reduction,
    Use,
    Verdict,
    align,
    axis_size,
    pointwise,
    register,
    split,
)
from koila_rl.recording.rules_rows import lookup, taken, written_rows
from koila_rl.recording.rules_views import normal

__all__: list[str] = []


@register("gather", "scatter", "scatter_add", "scatter_reduce")
def _gather(op: Op) -> Verdict | None:
    """All but ``dim`` line up element by element, as far as the index reaches."""
    ndim = op.operands[0].ndim
    dim = normal(op["dim"], ndim) if ndim else 0
    layouts = {operand.layout for operand in op.operands if operand.layout is not None}
    if len(layouts) != 1:
        return None
    (layout,) = layouts
    if layout is None:
        return None
    if layout.dim == dim:
        if op.operands[0].layout is not None:
            return lookup(op, "gather", dim) if op.name == "gather" else written_rows(op, dim)
        # Each looked-up element comes from the whole of ``self``.
        return split(op, layout) if op.name == "gather" and op.only("index") else None
    size = axis_size(layout, op.n)
    if any(operand.ndim and operand.shape[layout.dim] != size for operand in op.operands):
        return None
    uses = {k: Use(layout) if operand.ndim else Use() for k, operand in enumerate(op.operands)}
    return Verdict(outs=(layout,), uses=uses)


@register("index_select", "index_fill", "index_copy", "index_add", "index_reduce")
def _index_select(op: Op) -> Verdict | None:
    source, index = op.operands[0], op.operand("index")
    dim = normal(op["dim"], source.ndim) if source.ndim else 0
    if index is None:
        return None
    if op.name == "index_select" and source.layout is None:
        return split(op, index.layout.at(dim)) if index.layout else None
    if index.layout is not None:
        return None
    layouts = {operand.layout for operand in op.operands if operand.layout is not None}
    if len(layouts) != 1:
        return None
    (layout,) = layouts
    if layout is None:
        return None
    if layout.dim == dim:
        lookup_only = op.name == "index_select"
        return lookup(op, "index_select", dim) if lookup_only else written_rows(op, dim)
    size = axis_size(layout, op.n)
    uses = {}
    for k, operand in enumerate(op.operands):
        full = operand.ndim == source.ndim and operand.name != "index"
        if full and operand.shape[layout.dim] != size:
            return None
        uses[k] = Use(layout) if full else Use()
    return Verdict(outs=(layout,), uses=uses)


@register("embedding")
def _embedding(op: Op) -> Verdict | None:
    indices = op.operand("indices")
    weight = op.operands[0].layout
    if weight is not None and weight.dim == 0 and not op["scale_grad_by_freq"]:
        return lookup(op, "embedding", 0)
    if indices is None or indices.layout is None or not op.only("indices"):
        return None
    return split(op, indices.layout)


@register("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(op: Op) -> Verdict | None:
    """Bags of equal size, a row of tokens each: the call takes its rows and counts them itself."""
    tokens, offsets = op.operands[1], op.operands[2]
    layout, step = tokens.layout, op["__step"]
    if layout is None or op["scale_grad_by_freq"] or op["include_last_offset"]:
        return None
    if layout.outer != 1 or offsets.layout is not None or step != layout.inner:
        return None
    uses = {1: Use(layout)}
    for k, operand in enumerate(op.operands):
        if operand.name == "per_sample_weights":
            if operand.layout not in (None, layout) or operand.shape != tokens.shape:
                return None
            uses[k] = Use(layout)
        elif operand.layout is not None and k != 1:
            return None
    outs = [Layout(0) if shape[:1] == (op.n,) else layout if shape == tokens.shape else None
            for shape in op.outs]  # fmt: skip
    return Verdict(outs=tuple(outs), uses=uses, native=True)


@register("take")
def _take(op: Op) -> Verdict | None:
    index = op.operand("index")
    if op.operands[0].layout is not None:
        return taken(op)
    if index is None or index.layout is None or not op.only("index"):
        return None
    return split(op, index.layout)


def _indices(op: Op) -> list[tuple[int, int]] | None:
    """(dimension of self, operand number) of each index tensor; None for boolean masks."""
    numbers = []
    k = 1
    for dim, index in enumerate(op["indices"]):
        if isinstance(index, Tensor):
            if index.dtype in (torch.bool, torch.uint8):
                return None
            numbers.append((dim, k))
            k += 1
    return numbers


def _indexed_place(op: Op, numbers: list[tuple[int, int]]) -> tuple[int, int]:
    """Where the broadcast index dimensions start in the result, and how many they are."""
    width = max(op.operands[k].ndim for _, k in numbers)
    dims = [dim for dim, _ in numbers]
    adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    return (dims[0] if adjacent else 0), width


@register("index", "_unsafe_index", "index_put", "_unsafe_index_put", "_index_put_impl")
def _index(op: Op) -> Verdict | None:
    """Advanced indexing: by per-sample indices into whole tables, beside the batch, or by rows."""
    numbers = _indices(op)
    source = op.operands[0]
    if not numbers:
        return None
    start, width = _indexed_place(op, numbers)
    which = [k for _, k in numbers]
    if source.layout is not None:
        indexed = dict(numbers)
        if source.layout.dim in indexed:
            whole = all(operand.layout is None for operand in op.operands[1:])
            if whole and not op.operands[indexed[source.layout.dim]].row_index:
                return _indexed_by_whole(op, source.layout.dim)
            return _index_rows(op, numbers, indexed[source.layout.dim], start, width)
        if any(op.operands[k].layout is not None for k in which):
            return None
        result = _place_of_kept(source.layout, [dim for dim, _ in numbers], start, width)
        return _finish_index(op, result, {0: Use(source.layout), **{k: Use() for k in which}})
    if op.name.strip("_").startswith(("index_put", "unsafe_index_put")):
        return None
    aligned = align(op, width, which)
    if aligned is None:
        return None
    target, uses = aligned
    return Verdict(outs=(target.at(target.dim + start),), uses={0: Use(), **uses})


def _indexed_by_whole(op: Op, dim: int) -> Verdict | None:
    """Indices that have nothing to do with the batch pick samples, or are written to them."""
    if op.name.strip("_").startswith(("index_put", "unsafe_index_put")):
        return written_rows(op, dim)
    return lookup(op, "index", dim)


def _place_of_kept(layout: Layout, dims: list[int], start: int, width: int) -> Layout:
    kept_before = layout.dim - sum(d < layout.dim for d in dims)
    return layout.at(kept_before + (width if kept_before >= start else 0))


def _index_rows(
    op: Op, numbers: list[tuple[int, int]], row: int, start: int, width: int
) -> Verdict | None:
    """``q[arange(N), action]``: each sample takes from its own row."""
    source = op.operands[0]
    rows = op.operands[row]
    layout = source.layout
    assert layout is not None
    if not rows.row_index or layout.factor != 1:
        return None
    dim = next((d for d, size in enumerate(rows.shape) if size == op.n), None)
    if dim is None:
        return None
    target = Layout(dim + width - rows.ndim)
    uses = {0: Use(layout)}
    for _, k in numbers:
        operand = op.operands[k]
        place = target.dim - (width - operand.ndim)
        full = place >= 0 and operand.shape[place] == op.n
        if operand.layout is not None and (not full or operand.layout != Layout(place)):
            return None
        if operand.row_index and full:
            uses[k] = Use(Layout(place), row_index=True)
        else:
            uses[k] = Use(Layout(place)) if full else Use()
    if uses[row].layout is None:
        return None
    return _finish_index(op, target.at(target.dim + start), uses)


def _finish_index(op: Op, result: Layout, uses: dict[int, Use]) -> Verdict | None:
    """The result of a lookup, or of a write whose values line up with the lookup."""
    if not op.name.strip("_").startswith(("index_put", "unsafe_index_put")):
        return Verdict(outs=(result,), uses=uses)
    values = op.operand("values")
    index = op.index("values")
    assert values is not None
    assert index is not None
    shape = torch.Size(op.args["__lookup_shape"])
    dim = result.dim - (len(shape) - values.ndim)
    full = dim >= 0 and values.shape[dim] == axis_size(result, op.n)
    if values.layout is not None and (not full or values.layout != result.at(dim)):
        return None
    uses[index] = Use(result.at(dim)) if full else Use()
    return Verdict(outs=(op.operands[0].layout,), uses=uses)


@register("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss",
          "binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss")  # fmt: skip
def _loss(op: Op) -> Verdict | None:
    """Pointwise losses with a reduction inside: none, mean (1) or sum (2)."""
    reduction = 1 if op["reduction"] is None else op["reduction"]
    ndim = max(operand.ndim for operand in op.operands)
    aligned = align(op, ndim)
    if aligned is None:
        return None
    target, uses = aligned
    if reduction == 0:
        return Verdict(outs=(target,), uses=uses)
    return Verdict(reduction=Reduction("mean" if reduction == 1 else "sum"), uses=uses)


@register("multi_margin_loss", "multilabel_margin_loss_forward")
def _margin_loss(op: Op) -> Verdict | None:
    layout = op.operands[0].layout or op.operands[1].layout
    if layout is None or layout.dim != 0 or op.operands[0].ndim != 2:
        return None
    for operand in op.operands[:2]:
        if operand.layout not in (None, layout) or operand.shape[0] != axis_size(layout, op.n):
            return None
    uses = {0: Use(layout), 1: Use(layout)}
    uses.update({k: Use() for k in range(2, len(op.operands))})
    reduction = 1 if op["reduction"] is None else op["reduction"]
    if reduction == 0:
        return split(op, *[layout] * len(op.outs), uses=uses)
    if len(op.outs) > 1:
        return None
    return Verdict(reduction=Reduction("mean" if reduction == 1 else "sum"), uses=uses)


@register("nll_loss_forward", "nll_loss2d_forward")
def _nll_loss(op: Op) -> Verdict | None:
    """Weighted means are sum / sum: the weights of all samples, then the losses of each."""
    logits, labels = op.operands[0], op.operands[1]
    layout = labels.layout
    if layout is None and logits.layout is not None and logits.layout.dim != 1:
        dim = logits.layout.dim
        layout = logits.layout.at(dim - (dim > 1))
    if layout is None or logits.ndim == 1:
        return None
    place = layout.at(layout.dim + (layout.dim >= 1))
    size = axis_size(layout, op.n)
    if logits.layout not in (None, place) or logits.shape[place.dim] != size:
        return None
    uses = {0: Use(place), 1: Use(layout)}
    uses.update({k: Use() for k in range(2, len(op.operands))})
    if op["reduction"] == 0:
        return split(op, layout, uses=uses)
    return Verdict(decomposition=partial(_explicit_nll, op.func))


def _explicit_nll(
    func: Any, logp: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: int
) -> tuple[Tensor, Tensor]:
    losses, _ = func(logp, target, weight, 0, ignore)
    counted = target != ignore
    if weight is None:
        weights = counted.to(logp.dtype)
    else:
        weights = weight[target * counted] * counted
    total = weights.sum()
    return (losses.sum() / total if reduction == 1 else losses.sum()), total


register("_prelu_kernel", "prelu")(pointwise)
