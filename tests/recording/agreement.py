"""Hold one recorded function against eager PyTorch: value, gradients, and whether it split."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import koila_rl

__all__ = ["agree"]


def agree(
    function: Callable[..., Tensor], *tensors: Tensor, microbatch: int = 2, splits: bool = True
) -> None:
    """Check ``function`` on minibatches of these tensors in microbatches.

    Args:
        function: of the tensors; returns one tensor.
        tensors: batched along dimension 0, all of one size.
        microbatch: samples at once.
        splits: whether nothing may run on the whole minibatch.
    """

    def fresh() -> list[Tensor]:
        return [x.clone().requires_grad_(x.is_floating_point()) for x in tensors]

    theirs, mine = fresh(), fresh()
    expected = function(*theirs)
    weight = torch.rand(expected.shape, dtype=torch.float64) + 0.5
    differs = expected.requires_grad
    if differs:
        (expected * weight).sum().backward()
    with koila_rl.limits(microbatch=microbatch):
        result: Any = function(*(koila_rl.lazy(x) for x in mine))
        if differs:
            (result * weight).sum().backward()
            _check_split(splits)
        value = koila_rl.materialize(result)
        _check_split(splits)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    for one, two in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-12, atol=1e-12)


def _check_split(splits: bool) -> None:
    plan = copy.copy(koila_rl.last_plan())
    assert plan is not None
    if splits:
        assert plan.unsplit == ()
        assert plan.split
