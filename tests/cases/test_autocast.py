"""Reduced precision: autocast as it was where a call was recorded, and scaled gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import koila_rl
from tests.helpers import allow_unsplit

N = 12
# Of the largest magnitude: a few units in the last place of each type.
ROUNDING = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
TYPES = [torch.bfloat16, torch.float16]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2)).float()


def rows() -> Tensor:
    return torch.randn(N, 3, generator=torch.Generator().manual_seed(1)).float()


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == expected.dtype
    largest = float(expected.detach().float().abs().max())
    torch.testing.assert_close(
        got.float(), expected.float(), rtol=0, atol=ROUNDING[dtype] * largest
    )


@pytest.mark.parametrize("microbatch", [None, 5])
@pytest.mark.parametrize("dtype", TYPES)
def test_values_and_gradients_under_autocast(dtype: torch.dtype, microbatch: int | None) -> None:
    def loss_of(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype):
            y = module(x)
            assert y.dtype == dtype
        # Outside again, in full precision.
        return (y.float() * x[:, :2]).pow(2).mean(), y

    module = network()
    expected, y = loss_of(module, rows())
    wanted = torch.autograd.grad(expected, list(module.parameters()))
    for _ in range(3):
        module.zero_grad()
        with koila_rl.limits(microbatch=microbatch), allow_unsplit():
            loss, z = loss_of(module, koila_rl.lazy(rows()))
            loss.backward()
            assert_near(koila_rl.materialize(loss), expected, dtype)
            assert_near(koila_rl.materialize(z), y, dtype)
        for parameter, gradient in zip(module.parameters(), wanted, strict=True):
            assert parameter.grad is not None
            assert_near(parameter.grad, gradient, dtype)


def test_autocast_and_none_in_turn() -> None:
    module = network()
    for turn in range(6):
        enabled = bool(turn % 2)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = module(koila_rl.lazy(rows()))
        assert y.dtype == (torch.bfloat16 if enabled else torch.float32)
        with torch.autocast("cpu", torch.float16, enabled=not enabled):
            # Running it elsewhere changes nothing.
            assert koila_rl.materialize(y).dtype == y.dtype


def scaled_update(
    module: nn.Module, dtype: torch.dtype, microbatch: int | None, factor: float
) -> tuple[list[Tensor], float, bool]:
    """Gradients as the optimizer sees them, the scale afterwards, and whether it stepped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = copy.deepcopy(module.state_dict())
    with koila_rl.limits(microbatch=microbatch), allow_unsplit():
        x = rows() if microbatch is None else koila_rl.lazy(rows())
        with torch.autocast("cpu", dtype):
            y = module(x)
        loss = factor * y.float().pow(2).mean()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    grads = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    scaler.step(optimizer)
    scaler.update()
    moved = any(not torch.equal(a, b) for a, b in zip(
        before.values(), module.state_dict().values(), strict=True))  # fmt: skip
    return grads, scaler.get_scale(), moved


@pytest.mark.parametrize("dtype", TYPES)
def test_scaled_gradients(dtype: torch.dtype) -> None:
    expected = scaled_update(network(), dtype, None, 1.0)
    for microbatch in (1, 5, N):
        grads, scale, moved = scaled_update(network(), dtype, microbatch, 1.0)
        assert (scale, moved) == expected[1:]
        for got, gradient in zip(grads, expected[0], strict=True):
            assert_near(got, gradient, dtype)


def test_an_overflow_skips_the_step() -> None:
    expected = scaled_update(network(), torch.float16, None, 1e8)
    assert expected[1:] == (512.0, False)
    found = scaled_update(network(), torch.float16, 5, 1e8)
    assert found[1:] == expected[1:]
    finite: list[Any] = [[bool(g.isfinite().all()) for g in grads] for grads in
                         (found[0], expected[0])]  # fmt: skip
    assert finite[0] == finite[1]


def test_a_known_scaled_gradient() -> None:
    for microbatch in (1, 2):
        p = torch.ones((), requires_grad=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.SGD([p], lr=1.0)
        with koila_rl.limits(microbatch=microbatch):
            scaler.scale((p * koila_rl.lazy(torch.tensor([1.0, 3.0]))).mean()).backward()
        scaler.unscale_(optimizer)
        assert p.grad is not None
        assert p.grad.item() == 2.0
