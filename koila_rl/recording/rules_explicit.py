"""Rules that write an operator out in others, which split."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from koila_rl.recording.layouts import Layout
from koila_rl.recording.rows import diagonal, selected, sliced
from koila_rl.recording.rules import Op, Reduction, Use, Verdict, register, search, split
from koila_rl.recording.rules_linear import convolution
from koila_rl.recording.rules_reduce import reduce
from koila_rl.recording.rules_views import dims_of, normal, view_scatter

__all__: list[str] = []


@register("argmax", "argmin")
def _arg_extreme(op: Op) -> Verdict | None:
    """The first place of the extreme value: an extreme, then the least number among its places."""
    operand = op.operands[0]
    layout = operand.layout
    if layout is None:
        return None
    keep, name = bool(op["keepdim"]), op.name
    if op["dim"] is None:
        flat = [1] * operand.ndim if keep else []
        return Verdict(
            decomposition=lambda x, *_, **__: _first_place(x.reshape(-1), 0, name, False).view(flat)
        )
    dim = normal(op["dim"], operand.ndim)
    if dim != layout.dim:
        return split(op, layout.at(layout.dim if keep else layout.dim - (dim < layout.dim)))
    return Verdict(decomposition=lambda x, *_, **__: _first_place(x, dim, name, keep))


def _first_place(x: Tensor, dim: int, name: str, keep: bool) -> Tensor:
    size = x.shape[dim]
    shape = [size if d == dim else 1 for d in range(x.ndim)]
    numbers = torch.arange(size, device=x.device).view(shape).expand(x.shape)
    x = x.detach()
    best = x.amax(dim, keepdim=True) if "max" in name else x.amin(dim, keepdim=True)
    there = (x == best) | (x != x)
    return torch.where(there, numbers, torch.full_like(numbers, size)).amin(dim, keepdim=keep)


@register("max", "min")
def _extreme(op: Op) -> Verdict | None:
    """``max(dim)`` over the batch: the place, then the value at that place."""
    operand = op.operands[0]
    if len(op.operands) == 2 or op["dim"] is None or operand.layout is None:
        return reduce(op)
    dim, keep, name = normal(op["dim"], operand.ndim), bool(op["keepdim"]), op.name
    if dim != operand.layout.dim:
        return reduce(op)

    def explicit(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        place = _first_place(x, dim, name, True)
        value = x.gather(dim, place)
        return (value, place) if keep else (value.squeeze(dim), place.squeeze(dim))

    return Verdict(decomposition=explicit)


@register("aminmax")
def _aminmax(op: Op) -> Verdict | None:
    operand = op.operands[0]
    layout = operand.layout
    if layout is None:
        return None
    dims, keep = dims_of(op["dim"], operand.ndim), bool(op["keepdim"])
    if layout.dim not in dims:
        moved = layout if keep else layout.at(layout.dim - sum(d < layout.dim for d in dims))
        return split(op, moved, moved)
    return Verdict(
        decomposition=lambda x, **_: (x.amin(dims, keepdim=keep), x.amax(dims, keepdim=keep))
    )


@register("_softmax_backward_data", "_log_softmax_backward_data")
def _softmax_backward(op: Op) -> Verdict | None:
    layouts = {operand.layout for operand in op.operands if operand.layout is not None}
    if len(layouts) != 1:
        return None
    (layout,) = layouts
    ndim = op.operands[0].ndim
    dim = normal(op["dim"], ndim) if ndim else 0
    assert layout is not None
    if dim != layout.dim:
        return split(op, layout, uses={0: Use(layout), 1: Use(layout)})

    def explicit(grad: Tensor, output: Tensor, dim: int, *_: Any) -> Tensor:
        if op.name.startswith("_log"):
            return grad - output.exp() * grad.sum(dim, keepdim=True)
        part = grad * output
        return part - output * part.sum(dim, keepdim=True)

    return Verdict(decomposition=explicit)


@register("renorm")
def _renorm(op: Op) -> Verdict | None:
    """Each slice along ``dim`` is scaled down to a norm of at most ``maxnorm``."""
    operand = op.operands[0]
    layout = operand.layout
    if layout is None:
        return None
    dim = normal(op["dim"], operand.ndim)
    if dim == layout.dim:
        return split(op, layout)

    def explicit(x: Tensor, p: float, _: int, maxnorm: float) -> Tensor:
        rest = [d for d in range(x.ndim) if d != dim]
        norm = torch.linalg.vector_norm(x, p, rest, keepdim=True)
        return x * torch.where(norm > maxnorm, maxnorm / (norm + 1e-7), torch.ones_like(norm))

    return Verdict(decomposition=explicit)


@register("hash_tensor")
def _hash(op: Op) -> Verdict | None:
    """An exclusive or of all elements' bits."""
    operand = op.operands[0]
    layout = operand.layout
    if layout is None:
        return None
    dims, keep = dims_of(op["dim"], operand.ndim), bool(op["keepdim"])
    if layout.dim in dims:
        return Verdict(reduction=Reduction(combine=_exclusive_or), uses={0: Use(layout)})
    return split(op, layout.at(layout.dim - (0 if keep else sum(d < layout.dim for d in dims))))


def _exclusive_or(stacked: Tensor) -> Tensor:
    signed = stacked.view(torch.int64) if stacked.dtype == torch.uint64 else stacked
    whole = functools.reduce(torch.bitwise_xor, signed.unbind(0))
    return whole.view(stacked.dtype)


@register("_scaled_mm", "_scaled_mm_v2")
def _scaled_product(op: Op) -> Verdict | None:
    """Rows of the left matrix, where scales belong to the whole tensors."""
    layout = op.operands[0].layout
    if layout is None or layout.dim != 0 or not op.only("self"):
        return None
    for operand in op.operands[2:]:
        count = 1
        for size in operand.shape:
            count *= size
        if "scale" in operand.name and count != 1:
            return None
    return split(op, layout)


@register("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")
def _factory(op: Op) -> Verdict | None:
    """Sizes that follow the minibatch make the new tensor batched; else it is whole."""
    if op.outs == op.outs2:
        fill = {"new_zeros": 0, "new_ones": 1}.get(op.name, op["fill_value"])
        if op.name.startswith("new_empty"):
            fill = 0
        meta = op.operands[0].tensor

        def made(_: Tensor, size: Any, *__: Any, dtype: Any = None, device: Any = None,
                 **___: Any) -> Tensor:  # fmt: skip
            return torch.full(size, fill, dtype=dtype or meta.dtype, device=device or meta.device)

        return Verdict(decomposition=made)
    for dim, (size, size2) in enumerate(zip(op.outs[0], op.outs2[0], strict=True)):
        if size != size2:
            if size % op.n or size // op.n * op.n2 != size2 or op.name == "new_empty_strided":
                return None
            return split(op, Layout(dim, 1, size // op.n))
    return None


@register("diag_embed")
def _diag_embed(op: Op) -> Verdict | None:
    """A row of the matrix holds one element; rows are samples where the batch comes last."""
    operand = op.operands[0]
    layout, ndim = operand.layout, operand.ndim
    if layout is None:
        return None
    a, b = (normal(op[name] if op[name] is not None else default, ndim + 1)
            for name, default in (("dim1", -2), ("dim2", -1)))  # fmt: skip
    rest = [d for d in range(ndim + 1) if d not in (a, b)]
    if layout.dim < ndim - 1:
        return split(op, layout.at(rest[layout.dim]))
    if layout.factor != 1 or op["offset"]:
        return None

    def explicit(x: Tensor, *_: Any, **__: Any) -> Tensor:
        size = x.shape[-1]
        numbers = torch.arange(size, device=x.device)
        there = numbers.unsqueeze(1) == torch.arange(size, device=x.device)
        full = torch.where(there, x.unsqueeze(-1), torch.zeros((), dtype=x.dtype, device=x.device))
        return full.movedim((-2, -1), (a, b))

    return Verdict(decomposition=explicit)


@register("searchsorted", "bucketize")
def _search(op: Op) -> Verdict | None:
    """The number of boundaries below a value, where those are the samples."""
    boundaries = op.operand("boundaries") or op.operand("sorted_sequence")
    alone = boundaries is not None and boundaries.layout is not None and boundaries.ndim == 1
    if not alone or op["sorter"] is not None or not op.only("boundaries", "sorted_sequence"):
        return search(op)
    below = torch.le if op["right"] or op["side"] == "right" else torch.lt
    kind = torch.int32 if op["out_int32"] else torch.int64
    first = op.name == "searchsorted"

    def explicit(one: Any, two: Any, **_: Any) -> Tensor:
        edges, values = (one, two) if first else (two, one)
        values = torch.as_tensor(values, device=edges.device)
        return below(edges, values.unsqueeze(-1)).sum(-1, dtype=kind)

    return Verdict(decomposition=explicit)


@register("slice_scatter", "select_scatter", "diagonal_scatter")
def _view_scatter(op: Op) -> Verdict | None:
    """A write into a view along the batch: each row takes what is written to it, or stays."""
    target = op.operands[0]
    known = view_scatter(op)
    if known is not None or target.layout is None or not op.only("self"):
        return known
    base, ndim, size = target.layout, target.ndim, target.shape[target.layout.dim]
    if base.factor != 1:
        return None
    if op.name == "select_scatter":
        run = selected(base.dim, op["index"] % size)
    elif op.name == "slice_scatter":
        start, _, step = slice(op["start"], op["end"], op["step"]).indices(size)
        run = sliced(base.dim, start, step)
    else:
        dims = [normal(op[name] if op[name] is not None else default, ndim)
                for name, default in (("dim1", 0), ("dim2", 1))]  # fmt: skip
        run = diagonal(dims[0], dims[1], op["offset"] or 0, base.dim)
    return Verdict(outs=(base,), uses={0: Use(base), 1: Use()}, instead=run)


@register("convolution", "_convolution")
def _convolution(op: Op) -> Verdict | None:
    """Samples apart; where the channels of one sample are the batch, a sum over them."""
    image, weight = op.operands[0], op.operands[1]
    layout = image.layout
    if layout is None or layout.dim != 1 or image.ndim != weight.ndim or op["groups"] != 1:
        return convolution(op)
    if len(op.operands) == 3:
        func = op.func

        def apart(x: Tensor, w: Tensor, b: Tensor, *rest: Any) -> Tensor:
            plain: Tensor = func(x, w, None, *rest)
            return plain + b.view(1, -1, *[1] * (x.ndim - 2))

        return Verdict(decomposition=apart)
    place = layout.at(0 if op["transposed"] else 1)
    if weight.layout not in (None, place):
        return None
    return Verdict(reduction=Reduction("sum"), uses={0: Use(layout), 1: Use(place)})
