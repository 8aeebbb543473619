"""The calls that random programs are made of.

Each takes two values and a small number, decides by shapes alone what to do with them, and
returns a new value, or None where the shapes do not suit it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Call = Callable[[Tensor, Tensor, int], Tensor | None]


def weights(rows: int, columns: int) -> Tensor:
    """A constant matrix that depends on nothing but its shape."""
    return torch.linspace(-1, 1, rows * columns).sin().view(rows, columns)


def fits(a: Tensor, b: Tensor) -> bool:
    try:
        torch.broadcast_shapes(a.shape, b.shape)
    except RuntimeError:
        return False
    return True


def axis(a: Tensor, k: int) -> int:
    return k % a.ndim if a.ndim else 0


def pair(function: Callable[[Tensor, Tensor], Tensor]) -> Call:
    return lambda a, b, k: function(a, b) if fits(a, b) else None


def along(function: Callable[[Tensor, int], Tensor]) -> Call:
    return lambda a, b, k: function(a, axis(a, k)) if a.ndim else None


def alone(function: Callable[[Tensor], Tensor]) -> Call:
    return lambda a, b, k: function(a)


POINTWISE: dict[str, Call] = {
    "tanh": alone(torch.tanh),
    "sigmoid": alone(torch.sigmoid),
    "bounded exp": alone(lambda a: a.clamp(-2, 2).exp()),
    "relu": alone(torch.relu),
    "square": alone(lambda a: a.tanh() ** 2),
    "affine": lambda a, b, k: a * (0.5 + k) - 1,
    "double": lambda a, b, k: 2 * a if k % 2 else a.detach(),
    "add": pair(torch.add),
    "subtract": pair(lambda a, b: b - a),
    "multiply": pair(torch.mul),
    "divide": pair(lambda a, b: a / (1 + b * b)),
    "maximum": pair(torch.maximum),
    "where": pair(lambda a, b: torch.where(a > 0.1, a, b)),
    "lerp": pair(lambda a, b: a.lerp(b.expand(torch.broadcast_shapes(a.shape, b.shape)), 0.3)),
    "divide by size": lambda a, b, k: a / a.shape[axis(a, k)] if a.ndim else None,
}

REDUCTIONS: dict[str, Call] = {
    "sum": along(lambda a, d: a.sum(d)),
    "mean": along(lambda a, d: a.mean(d)),
    "mean, kept": along(lambda a, d: a.mean(d, keepdim=True)),
    "mean of all": alone(torch.mean),
    "sum of all": alone(lambda a: a.sum() / 7),
    "std": along(lambda a, d: a.std(d) if a.shape[d] > 1 else a.sum(d)),
    "var, kept": along(lambda a, d: a.var(d, correction=0, keepdim=True)),
    "largest": along(lambda a, d: a.max(d).values),
    "amin": along(lambda a, d: a.amin(d, keepdim=True)),
    "logsumexp": along(lambda a, d: a.logsumexp(d)),
    "norm": along(lambda a, d: (1 + a.norm(dim=d)).log()),
    "standardised": along(
        lambda a, d: (a - a.mean(d, keepdim=True)) / (0.1 + a.pow(2).mean(d, True))
    ),
}

AXIS: dict[str, Call] = {
    "softmax": along(lambda a, d: a.softmax(d)),
    "log_softmax": along(lambda a, d: a.log_softmax(d)),
    "cumsum": along(lambda a, d: a.cumsum(d)),
    "sort": along(lambda a, d: a.sort(d).values),
    "topk": along(lambda a, d: a.topk(1, dim=d).values),
    "flip": along(lambda a, d: a.flip(d)),
    "roll": along(lambda a, d: a.roll(1, d)),
    "layer_norm": alone(lambda a: F.layer_norm(a, a.shape[-1:]) if a.ndim else a),
    "normalize": along(lambda a, d: F.normalize(a + 0.5, dim=d)),
    "gather": along(lambda a, d: a.gather(d, a.detach().argmax(d, keepdim=True))),
    "ordered": along(lambda a, d: a.take_along_dim(a.detach().argsort(d), d)),
    "index_select": along(lambda a, d: a.index_select(d, torch.tensor([0, 0, a.shape[d] - 1]))),
    "cat": lambda a, b, k: (
        torch.cat([a, a.tanh()], axis(a, k)) if a.ndim and a.numel() < 200 else None
    ),
    "cat two": lambda a, b, k: (
        torch.cat([a, b], axis(a, k)) if a.ndim and a.shape == b.shape else None
    ),
    "stack": lambda a, b, k: (
        torch.stack([a, b], k % (a.ndim + 1)) if a.shape == b.shape and a.numel() < 200 else None
    ),
}

VIEWS: dict[str, Call] = {
    "transpose": lambda a, b, k: a.transpose(0, axis(a, k)) if a.ndim > 1 else None,
    "unsqueeze": lambda a, b, k: a.unsqueeze(k % (a.ndim + 1)) if a.ndim < 4 else None,
    "first": lambda a, b, k: a.select(axis(a, k), 0) if a.ndim else None,
    "last": lambda a, b, k: a[-1] if a.ndim else None,
    "narrow": along(lambda a, d: a.narrow(d, 0, max(1, a.shape[d] - 1))),
    "strided": lambda a, b, k: a[::2] if a.ndim else None,
    "flatten": alone(lambda a: a.flatten()),
    "flatten first two": lambda a, b, k: a.flatten(0, 1) if a.ndim > 1 else None,
    "rows": lambda a, b, k: a.reshape(a.shape[0], -1) if a.ndim > 1 else None,
    "expand": lambda a, b, k: a.expand(2, *a.shape) if a.ndim < 3 else None,
    "chunk": lambda a, b, k: a.chunk(2, axis(a, k))[0] if a.ndim else None,
    "squeeze": alone(lambda a: a.squeeze()),
}

CONTRACTIONS: dict[str, Call] = {
    "linear": lambda a, b, k: F.linear(a, weights(3, a.shape[-1])) if a.ndim else None,
    "gram of rows": lambda a, b, k: a @ a.T / a.shape[1] if a.ndim == 2 else None,
    "gram of columns": lambda a, b, k: a.T @ a / a.shape[0] if a.ndim == 2 else None,
    "matmul": lambda a, b, k: a @ b if a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0] else None,
    "einsum": lambda a, b, k: (
        torch.einsum("ij,ik->jk", a, b) / a.shape[0]
        if a.ndim == b.ndim == 2 and a.shape[0] == b.shape[0]
        else None
    ),
    "outer": lambda a, b, k: (
        torch.outer(a, b) if a.ndim == b.ndim == 1 and len(a) * len(b) < 200 else None
    ),
}


@dataclass(frozen=True)
class Write:
    """A call that changes its first value."""

    apply: Callable[[Tensor, Tensor, int], object]


def masked_rows(a: Tensor, b: Tensor, k: int) -> Tensor | None:
    return a[a[..., 0] > 0].sum(0) if a.ndim == 2 else None


def write_row(a: Tensor, b: Tensor, k: int) -> object:
    if a.ndim:
        a[0] = 0.5 * k
    return a


def write_column(a: Tensor, b: Tensor, k: int) -> object:
    return a[..., 0].mul_(0.5) if a.ndim else a


def write_other(a: Tensor, b: Tensor, k: int) -> object:
    suits = fits(a, b) and torch.broadcast_shapes(a.shape, b.shape) == a.shape
    return a.add_(b) if suits else a


WRITES: dict[str, Write] = {
    "mul_": Write(lambda a, b, k: a.mul_(0.5 + k)),
    "add_": Write(write_other),
    "clamp_": Write(lambda a, b, k: a.clamp_(-1, 1)),
    "row": Write(write_row),
    "column": Write(write_column),
    "masked_fill_": Write(lambda a, b, k: a.masked_fill_(a > 0.8, 0.3)),
    "tanh_": Write(lambda a, b, k: a.tanh_()),
}

CALLS: dict[str, Call | Write] = {
    **POINTWISE,
    **REDUCTIONS,
    **AXIS,
    **VIEWS,
    **CONTRACTIONS,
    "masked rows": masked_rows,
    **WRITES,
}
