"""``verify`` shows the deviation of a split from the whole, and changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import koila_rl
from tests.helpers import allow_unsplit


class Halving(torch.autograd.Function):
    """A gradient that depends, against the rules, on how often the backward has run."""

    runs = 0

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        Halving.runs += 1
        return gradient / Halving.runs


def module() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    return layers.double()


def batch() -> Tensor:
    return torch.randn(13, 3, generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize("microbatch", [1, 4, 12])
def test_whole_and_split_agree_to_rounding(microbatch: int) -> None:
    network = module()
    with koila_rl.limits(microbatch=microbatch), allow_unsplit():
        found = koila_rl.verify(network(koila_rl.lazy(batch())).pow(2).mean(), network)
    assert found.batch_size == 13
    assert found.microbatch_size == microbatch
    assert {d.name for d in found.deviations} == {name for name, _ in network.named_parameters()}
    assert all(d.relative < 1e-11 for d in found.deviations)
    assert found.split == pytest.approx(found.whole, rel=1e-12)
    expected = copy.deepcopy(network)(batch()).pow(2).mean()
    assert found.whole == pytest.approx(expected.item(), rel=1e-12)


def test_nothing_changes() -> None:
    network = module()
    x = batch()
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = torch.get_rng_state()
    with koila_rl.limits(microbatch=4), allow_unsplit():
        loss = nn.functional.dropout(network(koila_rl.lazy(x)), 0.5).pow(2).mean()
        before = copy.deepcopy(network.state_dict())
        assert koila_rl.verify(loss).random
        assert torch.equal(torch.get_rng_state(), state)
        assert all(bool((p.grad == 1).all()) for p in network.parameters() if p.grad is not None)
        for name, value in network.state_dict().items():
            assert torch.equal(value, before[name]), name
        loss.backward()
    assert any(not bool((p.grad == 1).all()) for p in network.parameters() if p.grad is not None)


def test_a_deviation_is_seen() -> None:
    layer = nn.Linear(3, 2).double()
    Halving.runs = 0
    with koila_rl.limits(microbatch=4):
        loss = Halving.apply(layer(koila_rl.lazy(batch()))).mean()
        found = koila_rl.verify(loss, layer)
    assert found.worst > 0.1
    assert "weight" in str(found)


def test_a_loss_that_cannot_be_verified_is_refused() -> None:
    with pytest.raises(koila_rl.ConfigurationError, match="recorded scalar"):
        koila_rl.verify(torch.ones((), requires_grad=True))
    with pytest.raises(koila_rl.ConfigurationError, match="recorded scalar"):
        koila_rl.verify(koila_rl.lazy(batch()) * 2)
    layer = nn.Linear(3, 2).double()
    loss = layer(koila_rl.lazy(batch())).mean()
    loss.backward()
    with pytest.raises(koila_rl.ConfigurationError, match="before"):
        koila_rl.verify(loss)
