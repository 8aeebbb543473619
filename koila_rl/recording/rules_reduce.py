"""Rules of reductions, scans, sorts and softmax: operators that mix along named dimensions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from koila_rl.recording.rules import Op, Reduction, Use, Verdict, axis_size, register, split
from koila_rl.recording.rules_rows import lookup
from koila_rl.recording.rules_views import dims_of, normal

__all__ = ["reduce"]


def _reduced_dims(op: Op) -> list[int]:
    ndim = op.operands[0].ndim
    value = op["dim"] if "dim" in op.args else op["dims"] if "dims" in op.args else None
    return dims_of(value, ndim)


def _combiner(function: Callable[..., Tensor], op: Op, **settings: Any) -> Reduction:
    return Reduction(combine=partial(_combine_stacked, function, settings))


def _combine_stacked(function: Any, settings: dict[str, Any], stacked: Tensor) -> Tensor:
    result: Tensor = function(stacked, dim=0, **settings)
    return result


def _reduction_of(op: Op) -> Reduction | None:
    name = op.name
    if name in ("sum", "nansum", "count_nonzero", "trace"):
        return Reduction("sum")
    if name == "mean":
        return Reduction("mean")
    simple: dict[str, Any] = {
        "amax": torch.amax, "amin": torch.amin, "any": torch.any, "all": torch.all,
        "prod": torch.prod, "logsumexp": torch.logsumexp,
    }  # fmt: skip
    if name in simple:
        return _combiner(simple[name], op)
    if name in ("max", "min") and len(op.operands) == 1 and op["dim"] is None:
        return _combiner(torch.amax if name == "max" else torch.amin, op)
    if name in ("norm", "linalg_vector_norm", "_foreach_norm"):
        order = op["ord"] if name == "linalg_vector_norm" else op["p"]
        if order == 0:
            return Reduction("sum")  # counts
        return _combiner(torch.linalg.vector_norm, op, ord=2 if order is None else order)
    return None


@register("sum", "nansum", "mean", "amax", "amin", "any", "all", "prod", "logsumexp",
          "norm", "linalg_vector_norm", "count_nonzero", "median", "nanmedian",
          "mode")  # fmt: skip
def reduce(op: Op) -> Verdict | None:
    operand = op.operands[0]
    if op.name in ("max", "min") and len(op.operands) == 2:
        from koila_rl.recording.rules import pointwise

        return pointwise(op)
    layout = operand.layout
    if layout is None or not op.only(operand.name):
        return None
    implicit = op.name in ("median", "nanmedian", "mode") and "dim" not in op.args
    dims = list(range(operand.ndim)) if implicit else _reduced_dims(op)
    if op.name == "mode" and op["dim"] is None:
        dims = [operand.ndim - 1]
    if layout.dim not in dims:
        keep = bool(op["keepdim"])
        dim = layout.dim if keep else layout.dim - sum(d < layout.dim for d in dims)
        return split(op, *[layout.at(dim)] * len(op.outs))
    if op.name in ("norm", "linalg_vector_norm"):
        order = op["ord"] if op.name == "linalg_vector_norm" else op["p"]
        if order is None or 0 < order < float("inf"):
            power = 2.0 if order is None else float(order)
            keep = bool(op["keepdim"])
            return Verdict(
                decomposition=lambda x, *_, dtype=None, **__: _norm(x, power, dims, keep, dtype)
            )
    reduction = _reduction_of(op)
    if reduction is None:
        return None
    return Verdict(reduction=reduction, uses={0: Use(layout)})


def _norm(x: Tensor, power: float, dims: list[int], keep: bool, dtype: Any) -> Tensor:
    """A sum of powers and its root; where all is zero the gradient is zero, as PyTorch's."""
    low = x.dtype in (torch.float16, torch.bfloat16)
    result = dtype or x.dtype
    size = (x.float() if low and dtype is None else x.to(result)).abs()
    zero = size == 0
    terms = size * size if power == 2 else torch.where(zero, 1, size).pow(power)
    total = torch.where(zero, 0, terms).sum(dims, keepdim=keep)
    none = total == 0
    root = torch.where(none, 0, torch.where(none, 1, total).pow(1 / power))
    return root if dtype else root.to(torch.empty((), dtype=x.dtype).abs().dtype)


@register("var", "std", "var_mean", "std_mean")
def _variance(op: Op) -> Verdict | None:
    operand = op.operands[0]
    layout = operand.layout
    if layout is None:
        return None
    dims = _reduced_dims(op)
    keep = bool(op["keepdim"])
    if layout.dim not in dims:
        dim = layout.dim if keep else layout.dim - sum(d < layout.dim for d in dims)
        return split(op, *[layout.at(dim)] * len(op.outs))
    if "unbiased" in op.args:
        correction: float = 1.0 if op["unbiased"] in (None, True) else 0.0
    else:
        correction = 1.0 if op["correction"] is None else float(op["correction"])
    count = 1
    for d in dims:
        count *= operand.shape[d]
    if operand.tensor.is_complex():
        return None

    def two_pass(x: Tensor, *_: Any, **__: Any) -> Any:
        return _variance_of(op.name, x, dims, keep, count, correction)

    return Verdict(decomposition=two_pass)


def _variance_of(
    name: str, x: Tensor, dims: list[int], keep: bool, count: int, correction: float
) -> Any:
    """Sums of deviations from the mean: the numerically safe form, and it splits."""
    mean = x.mean(dims, keepdim=True)
    deviation = x - mean
    divisor = max(count - correction, 0.0)
    variance = (deviation * deviation).sum(dims, keepdim=keep) / divisor
    spread = variance.sqrt() if name.startswith("std") else variance
    if name.endswith("_mean"):
        return spread, mean if keep else mean.squeeze(dims)
    return spread


@register("_softmax", "_log_softmax", "softmax", "log_softmax", "_safe_softmax")
def _softmax(op: Op) -> Verdict | None:
    operand = op.operands[0]
    if operand.layout is None:
        return None
    dim = normal(op["dim"], operand.ndim) if operand.ndim else 0
    if dim != operand.layout.dim:
        return split(op, operand.layout)
    if op.name == "_safe_softmax":
        return None

    def shifted(x: Tensor, dim: int, *_: Any) -> Tensor:
        spread = x - x.detach().amax(dim, keepdim=True)
        total = spread.exp().sum(dim, keepdim=True)
        return spread - total.log() if "log" in op.name else spread.exp() / total

    return Verdict(decomposition=shifted)


@register("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort", "argsort", "topk",
          "kthvalue", "glu", "_weight_norm_interface", "take_along_dim", "msort",
          "cosine_similarity")  # fmt: skip
def _along_dim(op: Op) -> Verdict | None:
    """Mixes along ``dim`` only; the other dimensions stay where they are."""
    operand = op.operands[0]
    layout = operand.layout
    if layout is None or not op.only(operand.name):
        return None
    default = {"sort": -1, "argsort": -1, "topk": -1, "kthvalue": -1, "glu": -1}.get(op.name, 0)
    dim = op["dim"] if op["dim"] is not None else default
    dim = normal(dim, operand.ndim) if operand.ndim else 0
    if dim == layout.dim:
        return None
    drops = op.name == "kthvalue" and not op["keepdim"]
    moved = layout.at(layout.dim - (dim < layout.dim)) if drops else layout
    return split(op, *[moved] * len(op.outs))


@register("_fft_r2c", "_fft_c2c", "_fft_c2r")
def _fft(op: Op) -> Verdict | None:
    operand = op.operands[0]
    layout = operand.layout
    if layout is None or layout.dim in dims_of(op["dim"], operand.ndim):
        return None
    return split(op, layout)


@register("trace")
def _trace(op: Op) -> Verdict | None:
    layout = op.operands[0].layout
    if layout is None or layout.factor != 1:
        return None
    if layout.dim == 1:
        return Verdict(decomposition=lambda x: torch.trace(x.t()))
    return lookup(op, "trace", 0)


@register("dist")
def _dist(op: Op) -> Verdict | None:
    order = 2.0 if op["p"] is None else op["p"]
    return Verdict(decomposition=lambda a, b, *_, **__: torch.linalg.vector_norm(a - b, ord=order))


@register("_linalg_det", "linalg_inv_ex", "linalg_cholesky_ex", "_linalg_slogdet", "linalg_eig",
          "_linalg_eigh", "_linalg_svd", "linalg_qr", "linalg_lu", "linalg_lu_factor_ex",
          "linalg_matrix_exp", "linalg_pinv", "cholesky", "cholesky_inverse", "geqrf",
          "linalg_householder_product", "linalg_ldl_factor_ex", "linalg_eigvals",
          "_linalg_eigvals", "lu_unpack", "logdet", "slogdet", "orgqr")  # fmt: skip
def _matrix(op: Op) -> Verdict | None:
    """Batches of matrices: the last two dimensions are mixed."""
    batched = op.batched
    layouts = {op.operands[k].layout for k in batched}
    if len(layouts) != 1:
        return None
    (layout,) = layouts
    vectors = op.name in ("linalg_householder_product", "lu_unpack", "orgqr") and len(batched) > 1
    limit = min(op.operands[k].ndim for k in batched) - (1 if vectors else 2)
    if layout is None or layout.dim >= limit:
        return None
    size = axis_size(layout, op.n)
    uses = {}
    for k, operand in enumerate(op.operands):
        if operand.ndim <= layout.dim or operand.shape[layout.dim] != size:
            return None
        uses[k] = Use(layout)
    outs = [layout if len(shape) > layout.dim and shape[layout.dim] == size else None
            for shape in op.outs]  # fmt: skip
    return split(op, *outs, uses=uses)


@register("_linalg_solve_ex", "linalg_solve_triangular", "triangular_solve", "cholesky_solve",
          "linalg_lu_solve", "linalg_ldl_solve", "ormqr", "linalg_lstsq",
          "linalg_cross")  # fmt: skip
def _matrix_pair(op: Op) -> Verdict | None:
    """Batches of matrix pairs of equal rank; the last two dimensions are mixed."""
    from koila_rl.recording.rules import align

    ndim = op.operands[0].ndim
    if op.name == "linalg_cross":
        dim = normal(-1 if op["dim"] is None else op["dim"], len(op.outs[0]))
        aligned = align(op, len(op.outs[0]))
        if aligned is None or aligned[0].dim == dim:
            return None
        return Verdict(outs=(aligned[0],), uses=aligned[1])
    matrices = [k for k, operand in enumerate(op.operands) if operand.ndim == ndim]
    aligned = align(op, ndim, matrices)
    if aligned is None:
        return None
    target, uses = aligned
    if target.dim >= ndim - 2:
        return None
    size = axis_size(target, op.n)
    for k, operand in enumerate(op.operands):
        if k not in matrices:
            full = operand.ndim > target.dim and operand.shape[target.dim] == size
            if not full or operand.layout not in (None, target):
                return None
            uses[k] = Use(target)
    outs = [target if len(shape) > target.dim and shape[target.dim] == size else None
            for shape in op.outs]  # fmt: skip
    return Verdict(outs=tuple(outs), uses=uses)
