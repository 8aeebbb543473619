"""Means over the transitions of a minibatch, some of which may not count."""

from __future__ import annotations

from torch import Tensor

__all__ = ["mean", "normalized"]


def mean(values: Tensor, weight: Tensor | None = None) -> Tensor:
    """Mean of ``values`` ``[N]``; with ``weight`` ``[N]`` of zeros and ones, over the ones.

    0 where nothing counts, as in a minibatch of steps that only reset an environment.
    """
    if weight is None:
        return values.mean()
    return (values * weight).sum() / weight.sum().clamp(min=1.0)


def normalized(values: Tensor, weight: Tensor | None = None) -> Tensor:
    """``values`` with mean 0 and deviation 1 (unbiased) over those that count."""
    if weight is None:
        return (values - values.mean()) / (values.std() + 1e-8)
    centred = values - mean(values, weight)
    # A single sample has no deviation: its advantage becomes 0 and teaches the policy nothing.
    variance = (centred.square() * weight).sum() / (weight.sum() - 1.0).clamp(min=1.0)
    return centred / (variance.sqrt() + 1e-8)
