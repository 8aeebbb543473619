"""PyTorch functions that look at values to validate them: recorded, and validated at the run."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from koila_rl.recording.tensor import HANDLERS, LazyTensor

__all__: list[str] = []


def _gaussian_nll(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """`torch.nn.functional.gaussian_nll_loss`; that no variance is negative is checked later."""
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(reduction + " is not valid")
    if isinstance(var, float):
        var = var * torch.ones_like(input)
    negative = (var < 0).any()
    if isinstance(negative, LazyTensor):
        valid: Any = negative.logical_not()
        negative._runtime.defer_check(valid, "var has negative entry/entries")
    elif negative:
        raise ValueError("var has negative entry/entries")
    if tuple(var.shape) == tuple(input.shape[:-1]):
        var = var.unsqueeze(-1)
    elif tuple(var.shape) != tuple(input.shape):
        pairs = list(zip(input.shape, var.shape, strict=False))
        if input.ndim != var.ndim or sum(b for a, b in pairs if a != b) != 1:
            raise ValueError("var is of incorrect size")
    var = var.clone()
    with torch.no_grad():
        var.clamp_(min=eps)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def _handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _gaussian_nll(*args, **kwargs)


HANDLERS[F.gaussian_nll_loss] = _handle
