"""Autograd's own entry points, and what user modules do with them: as eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules._functions import SyncBatchNorm
from torch.utils.checkpoint import checkpoint

import koila_rl
from koila_rl import UnsupportedError
from tests.helpers import allow_unsplit, assert_close, check

N = 10
SIZES = [1, 3, N]


class TanhTransform(Function):
    """A bounded action as written in policy code: tanh, whose backward avoids zero gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.tanh().clamp(-1 + 1e-6, 1 - 1e-6)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradient * (1 - y.pow(2)).clamp_min(1e-3)


class Binary(Function):
    """Straight through a threshold, the gradient cut where the input is large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, threshold: float) -> Tensor:
        ctx.save_for_backward(x)
        return (x > threshold).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 0.8), None


class Whitened(Function):
    """The identity, with a gradient normalised over the minibatch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return (gradient - gradient.mean(0)) / (gradient.std(0) + 1e-3)


class Scaled(Function):
    """A weight shared by all samples, whose gradient is their sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, 2 * (gradient * x).sum(0)


SPLIT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "tanh": lambda module, y: TanhTransform.apply(3 * y),
    "binary": lambda module, y: Binary.apply(y, 0.1) * y,
    "shared weight": lambda module, y: Scaled.apply(y, module.weight[:, 0]),
}


@pytest.mark.parametrize("name", SPLIT)
def test_functions_whose_backward_keeps_samples_apart_split(name: str) -> None:
    def program(module: Any, x: Tensor) -> Tensor:
        return (SPLIT[name](module, module(x)) * x[:, :2]).mean()

    batch = (torch.randn(N, 3, requires_grad=True),)
    check(program, batch, nn.Linear(3, 2), sizes=SIZES, splits=True)


def test_a_backward_that_mixes_is_found() -> None:
    def program(module: Any, x: Tensor) -> Tensor:
        return (Whitened.apply(module(x)) * x[:, :2]).pow(2).mean()

    found = check(program, (torch.randn(N, 3),), nn.Linear(3, 2), sizes=SIZES)
    assert "Whitened" in found[3].unsplit


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_inside_a_module(reentrant: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x + checkpoint(self.inner, x, use_reentrant=reentrant)

    def program(module: Any, x: Tensor) -> Tensor:
        loss: Tensor = module(x).pow(2).mean()
        return loss

    x = torch.randn(N, 3, requires_grad=True)
    module = nn.Sequential(Block(), Block())
    check(program, (x,), module, sizes=SIZES, splits=True)


# PyTorch's own use of TorchScript, when forward mode is first needed.
@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("microbatch", SIZES)
def test_jvp_and_grad_of_torch_func(microbatch: int) -> None:
    x, direction, weight = torch.randn(N, 3), torch.randn(N, 3), torch.randn(3, 3)

    def through(x: Tensor) -> Tensor:
        return (x @ weight).tanh()

    def total(x: Tensor) -> Tensor:
        return through(x).pow(2).sum()

    value, tangent = torch.func.jvp(through, (x,), (direction,))
    gradient = torch.func.grad(total)(x)
    with koila_rl.limits(microbatch=microbatch), allow_unsplit():
        found, derivative = torch.func.jvp(
            through, (koila_rl.lazy(x),), (koila_rl.lazy(direction),)
        )
        assert_close(koila_rl.materialize(found), value)
        assert_close(koila_rl.materialize(derivative), tangent)
        assert_close(koila_rl.materialize(torch.func.grad(total)(koila_rl.lazy(x))), gradient)


@pytest.mark.parametrize("microbatch", SIZES)
def test_parameters_replaced_by_functional_call(microbatch: int) -> None:
    layer, scale = nn.Linear(3, 2), torch.randn(2, requires_grad=True)
    x = torch.randn(N, 3)

    def loss_of(x: Tensor) -> Tensor:
        weights = {"weight": layer.weight * scale[:, None], "bias": layer.bias + scale}
        return torch.func.functional_call(layer, weights, (x,)).pow(2).mean()

    leaves = [*layer.parameters(), scale]
    wanted = torch.autograd.grad(loss_of(x), leaves)
    with koila_rl.limits(microbatch=microbatch):
        loss_of(koila_rl.lazy(x)).backward()
    for p, gradient in zip(leaves, wanted, strict=True):
        assert p.grad is not None
        assert_close(p.grad, gradient)


def backward_of_two(a: Tensor, b: Tensor) -> None:
    torch.autograd.backward([a.mean(), b], [None, torch.full_like(b, 0.5)])


def backward_of_one(a: Tensor, b: Tensor) -> None:
    torch.autograd.backward((a.mean() + b.sum(),))


def backward_twice(a: Tensor, b: Tensor) -> None:
    loss = (a * b).mean()
    loss.backward(retain_graph=True)
    loss.backward()


def backward_of_rows(a: Tensor, b: Tensor) -> None:
    torch.autograd.backward(a, torch.linspace(0, 1, a.numel()).view(a.shape))


BACKWARDS = [backward_of_two, backward_of_one, backward_twice, backward_of_rows]


@pytest.mark.parametrize("microbatch", SIZES)
@pytest.mark.parametrize("backward", BACKWARDS)
def test_entry_points_of_autograd(
    backward: Callable[[Tensor, Tensor], None], microbatch: int
) -> None:
    x = torch.randn(N, 3)

    def gradients(lazy: bool) -> list[Tensor | None]:
        torch.manual_seed(0)
        first, second = nn.Linear(3, 2), nn.Linear(2, 2)
        with koila_rl.limits(microbatch=microbatch), allow_unsplit():
            hidden = first(koila_rl.lazy(x) if lazy else x).tanh()
            backward(second(hidden), hidden * 2)
        return [p.grad for p in (*first.parameters(), *second.parameters())]

    for got, wanted in zip(gradients(True), gradients(False), strict=True):
        assert (got is None) == (wanted is None)
        if got is not None and wanted is not None:
            assert_close(got, wanted)


@pytest.mark.parametrize("microbatch", SIZES)
def test_backward_for_some_inputs_only(microbatch: int) -> None:
    first, second = nn.Linear(3, 2), nn.Linear(2, 1)
    x = torch.randn(N, 3)
    (wanted,) = torch.autograd.grad(second(first(x)).pow(2).mean(), [second.weight])
    with koila_rl.limits(microbatch=microbatch):
        second(first(koila_rl.lazy(x))).pow(2).mean().backward(inputs=[second.weight])
    assert second.weight.grad is not None
    assert_close(second.weight.grad, wanted)
    assert first.weight.grad is None
    assert second.bias.grad is None


@pytest.mark.parametrize("microbatch", SIZES)
def test_gradients_of_values_inside(microbatch: int) -> None:
    first, second = nn.Linear(3, 2), nn.Linear(2, 1)
    x = torch.randn(N, 3)
    hidden = first(x)
    wanted = torch.autograd.grad(second(hidden).pow(2).mean(), [hidden, second.weight])
    with koila_rl.limits(microbatch=microbatch), allow_unsplit():
        recorded = first(koila_rl.lazy(x))
        loss = second(recorded).pow(2).mean()
        found = torch.autograd.grad(loss, [recorded, second.weight])
    for got, gradient in zip(found, wanted, strict=True):
        assert_close(koila_rl.materialize(got), gradient)


def test_a_synchronised_batch_norm_is_refused_by_name() -> None:
    x = koila_rl.lazy(torch.randn(N, 3))
    arguments = (torch.ones(3), torch.zeros(3), torch.zeros(3), torch.ones(3), 1e-5, 0.1, None, 2)
    with pytest.raises(UnsupportedError, match=r"SyncBatchNorm.*GroupNorm.*materialize"):
        SyncBatchNorm.apply(x, *arguments)
