"""What counts is how things were when a call was recorded, not when it runs."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila_rl
from tests.helpers import check

N = 13
SIZES = (1, 3, N)


@pytest.mark.parametrize("microbatch", SIZES)
def test_a_network_frozen_while_it_was_recorded_gets_no_gradient(microbatch: int) -> None:
    critic, actor, x = nn.Linear(4, 1), nn.Linear(4, 4), torch.randn(N, 4)
    batch = koila_rl.lazy(x)
    critic.requires_grad_(False)
    loss = -critic(actor(batch)).mean()
    critic.requires_grad_(True)
    with koila_rl.limits(microbatch=microbatch):
        loss.backward()
    assert critic.weight.grad is None
    assert actor.weight.grad is not None
    expected = torch.autograd.grad(-critic(actor(x)).mean(), actor.weight)[0]
    torch.testing.assert_close(actor.weight.grad, expected)


def test_a_network_used_frozen_and_not_in_one_loss() -> None:
    def program(module: Any, x: Tensor) -> Tensor:
        module.requires_grad_(False)
        frozen = module(x * 2)
        module.requires_grad_(True)
        loss: Tensor = (frozen * module(x)).mean()
        return loss

    check(program, (torch.randn(N, 3),), nn.Linear(3, 2), sizes=SIZES, splits=True)


def test_batch_norm_in_training_and_evaluation_by_turns() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))

    def program(module: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        module.eval()
        # Without gradients: eager's backward in evaluation reads statistics updated meanwhile.
        before = module(y).detach()
        module.train()
        a = module(x)
        module.eval()
        between = module(y).detach()
        module.train()
        c = module(x * 2 + 1)
        return (a - between).pow(2).mean() + c.mean() + before.sin().mean(), before, between

    check(program, (torch.randn(N, 3), torch.randn(N, 3)), module, sizes=SIZES)


@pytest.mark.parametrize("microbatch", SIZES)
def test_statistics_are_updated_though_nobody_looks_at_the_output(microbatch: int) -> None:
    lazy, plain = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    x = torch.randn(N, 3)
    with torch.no_grad(), koila_rl.limits(microbatch=microbatch):
        plain(x)
        lazy(koila_rl.lazy(x))
    torch.testing.assert_close(lazy.running_mean, plain.running_mean)
    torch.testing.assert_close(lazy.running_var, plain.running_var)


def test_an_index_array_that_is_written_afterwards() -> None:
    x = torch.randn(N, 4)
    order = np.arange(N)[::-1].copy()
    rows = (koila_rl.lazy(x) * 1)[order]
    order[:] = 0
    with koila_rl.limits(microbatch=4):
        assert torch.equal(koila_rl.materialize(rows), x.flip(0))


def test_data_of_a_parameter_that_is_stepped_meanwhile() -> None:
    layer = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    batch = koila_rl.lazy(torch.randn(N, 4))
    held = F.linear(batch, layer.weight.data)
    other = nn.Linear(4, 2)
    other.weight = layer.weight
    (layer(koila_rl.lazy(torch.randn(N, 4)))).mean().backward()
    optimizer.step()
    with pytest.raises(koila_rl.StaleValueError):
        _ = held.sum().item()


@pytest.mark.parametrize("microbatch", SIZES)
def test_losses_joined_behind_a_detach_go_backward_each(microbatch: int) -> None:
    torch.manual_seed(0)
    critic, actor, x = nn.Linear(4, 1), nn.Linear(4, 1), torch.randn(N, 4)

    def gradients(modules: Any, batch: Tensor) -> list[Tensor]:
        value = modules[0](batch)
        first = value.pow(2).mean()
        second = (modules[1](batch) * value.detach()).mean()
        first.backward()
        second.backward()
        return [p.grad for m in modules for p in m.parameters()]

    expected = gradients(copy.deepcopy([critic, actor]), x)
    with koila_rl.limits(microbatch=microbatch):
        got = gradients([critic, actor], koila_rl.lazy(x))
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_view_of_a_value_put_together_from_single_rows() -> None:
    x = torch.randn(12, 2)
    with koila_rl.limits(microbatch=1):
        y = (koila_rl.lazy(x) * 2).t().contiguous().view(12, 2)
        assert torch.equal(koila_rl.materialize(y), (x * 2).t().contiguous().view(12, 2))


@pytest.mark.parametrize(
    "call",
    [
        koila_rl.lazy,
        lambda: koila_rl.lazy(None),
        lambda: koila_rl.lazy(torch.tensor(1.0)),
        lambda: koila_rl.lazy(torch.ones(3), batch=1.5),  # type: ignore[arg-type]
        lambda: koila_rl.lazy(torch.ones(3), device="tpu"),
    ],
)
def test_nothing_to_wrap_is_told(call: Any) -> None:
    with pytest.raises(koila_rl.ConfigurationError):
        call()


@pytest.mark.parametrize("microbatch", [3, 12])
def test_whole_numbers_divide_into_the_default_type_of_the_time(microbatch: int) -> None:
    x = torch.arange(12)
    for _ in range(4):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            expected = torch.div(x, 7).sin()
            got = torch.div(koila_rl.lazy(x), 7).sin()
        finally:
            torch.set_default_dtype(before)
        with koila_rl.limits(microbatch=microbatch):
            value = koila_rl.materialize(got)
        assert value.dtype == torch.float64
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
        assert torch.get_default_dtype() == before
