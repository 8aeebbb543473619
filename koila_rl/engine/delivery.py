"""Hand over gradients that have been computed in full, or say that a graph is used up.

The gradients of a backward are computed on aliases of the captured tensors. Only when all of
them are there does one node of PyTorch's graph deliver them: hooks fire once, and a failure on
the way leaves every ``.grad`` as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["aliases_of", "deliver", "spent"]


def aliases_of(tensors: Sequence[Any]) -> tuple[list[Any], list[Tensor], list[Tensor]]:
    """Inputs with leaves in the place of tensors that require gradients; leaves and originals."""
    inputs: list[Any] = []
    leaves: list[Tensor] = []
    originals: list[Tensor] = []
    for x in tensors:
        if isinstance(x, Tensor) and x.requires_grad:
            leaf = x.detach().requires_grad_()
            leaves.append(leaf)
            originals.append(x)
            inputs.append(leaf)
        else:
            inputs.append(x)
    return inputs, leaves, originals


class _Delivery(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: list[Tensor], grads: list[Tensor | None], *to: Tensor) -> Tensor:
        ctx.save_for_backward(*to)
        ctx.grads = grads
        return value.pop()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        _ = ctx.saved_tensors  # PyTorch's own error where the graph is used a second time
        # With no other reference, autograd takes the gradients without a copy.
        given, ctx.grads = ctx.grads, None
        return (None, None, *given)


class _Spent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: list[Tensor], *to: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.count = len(to)
        return value.pop()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            # Only its value was used, behind a detach.
            return (None,) * (ctx.count + 1)
        raise RuntimeError(
            "Trying to backward through the graph a second time: a backward through a value of "
            "the same lazy program has used it up. Call that backward with retain_graph=True, or "
            "add the losses and call backward once."
        )


# PyTorch's stubs leave ``apply`` untyped.
_deliver: Any = _Delivery.apply
_spend: Any = _Spent.apply


def deliver(value: Tensor, grads: Sequence[Tensor | None], to: Sequence[Tensor]) -> Tensor:
    """``value`` with a graph whose backward gives ``grads`` to the tensors ``to``."""
    every = list(zip(grads, to, strict=True))
    reached = [(grad, x) for grad, x in every if grad is not None] or every
    # Where nobody is reached, it is still a graph that may be gone through.
    result: Tensor = _deliver([value.detach()], [g for g, _ in reached], *(x for _, x in reached))
    return result


def spent(value: Tensor, to: Sequence[Tensor]) -> Tensor:
    """``value`` with a graph that is used up."""
    result: Tensor = _spend([value.detach()], *to)
    return result
