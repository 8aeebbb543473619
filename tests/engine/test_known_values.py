"""A value that was read is not computed again for the next one that needs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila_rl
from tests.helpers import ForwardCounter, allow_unsplit, double_precision

N = 23


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 7)
        self.head = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.head(torch.tanh(self.trunk(x)))
        return torch.log_softmax(out[:, :3], -1), out[:, 3]


def minibatch() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(N, 5, generator=generator),
        torch.randint(0, 3, (N, 1), generator=generator),
        *torch.randn(3, N, generator=generator),
    )


def update(module: nn.Module, batch: tuple[Any, ...]) -> list[float]:
    """PPO as written where each part of the loss is read before the next is computed."""
    observation, action, old, advantage, target = batch
    log_probs, value = module(observation)
    log_prob = log_probs.gather(1, action).squeeze(1)
    ratio = (log_prob - old).exp()
    policy_loss = -torch.min(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)).mean()
    read = [policy_loss.item(), ((ratio - 1).abs() > 0.2).double().mean().item()]
    value_loss = F.mse_loss(target, value)
    read.append(value_loss.item())
    entropy = -(log_probs * log_probs.exp()).sum(-1)
    entropy_loss = -entropy.mean()
    read.append(entropy_loss.item())
    loss = policy_loss + 0.5 * value_loss + 0.01 * entropy_loss
    with torch.no_grad():
        read.append(float((((log_prob - old).exp() - 1) - (log_prob - old)).mean().numpy()))
    loss.backward()
    return [*read, loss.item()]


@pytest.mark.parametrize("microbatch", [1, 5, N])
def test_parts_of_a_loss_that_are_read_one_by_one(microbatch: int) -> None:
    with double_precision(), allow_unsplit():
        torch.manual_seed(0)
        module = ActorCritic()
        batch = tuple(x.double() if x.is_floating_point() else x for x in minibatch())
        expected = update(module, batch)
        wanted = [p.grad for p in module.parameters()]
        module.zero_grad()
        with koila_rl.limits(microbatch=microbatch), ForwardCounter(module.trunk) as counter:
            got = update(module, koila_rl.lazy(*batch))
    assert got == pytest.approx(expected, rel=1e-12, abs=1e-13)
    for mine, theirs in zip(module.parameters(), wanted, strict=True):
        torch.testing.assert_close(mine.grad, theirs, rtol=0, atol=1e-13)
    assert counter.rows == (N if microbatch == N else 2 * N)


@pytest.mark.parametrize("microbatch", [1, 5])
def test_a_value_behind_a_detach_is_not_computed_again(microbatch: int) -> None:
    with double_precision(), koila_rl.limits(microbatch=microbatch):
        actor, temperature = nn.Linear(5, 2), torch.zeros((), requires_grad=True)
        x = koila_rl.lazy(torch.randn(N, 5))
        with ForwardCounter(actor) as counter:
            log_prob = actor(x).tanh().sum(1)
            assert log_prob.mean().item() == pytest.approx(log_prob.detach().mean().item())
            loss = -(temperature * (log_prob + 1).detach()).mean()
            loss.backward()
            assert counter.rows == N
            expected = log_prob.mean().item()
            (log_prob * temperature.exp()).mean().backward()
        assert counter.rows == 2 * N
    assert temperature.grad is not None
    assert temperature.grad.item() == pytest.approx(-(expected + 1) + expected, abs=1e-12)
    whole = nn.Linear(5, 2).double()
    whole.load_state_dict(actor.state_dict())
    whole(koila_rl.materialize(x)).tanh().sum(1).mean().backward()
    torch.testing.assert_close(actor.weight.grad, whole.weight.grad, rtol=0, atol=1e-12)
