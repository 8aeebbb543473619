"""The usual PPO and DQN losses, exact under any split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Normal

import koila_rl
from tests.helpers import (
    ForwardCounter,
    allow_unsplit,
    check,
    double_precision,
    microbatch_sizes,
)

N = 23
SIZES = microbatch_sizes(N)


class ActorCritic(nn.Module):
    """A shared trunk with a policy head and a value head."""

    def __init__(self, continuous: bool) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 17)
        self.policy = nn.Linear(17, 3)
        self.value = nn.Linear(17, 1)
        self.log_std = nn.Parameter(torch.zeros(3)) if continuous else None

    def forward(self, observation: Tensor) -> tuple[Distribution, Tensor]:
        features = torch.tanh(self.trunk(observation))
        head = self.policy(features)
        value = self.value(features).squeeze(-1)
        if self.log_std is None:
            return Categorical(logits=head), value
        return Normal(head, self.log_std.exp().expand_as(head)), value


def log_prob(distribution: Distribution, action: Tensor) -> Tensor:
    found = distribution.log_prob(action)
    return found if isinstance(distribution, Categorical) else found.sum(-1)


def entropy(distribution: Distribution) -> Tensor:
    found = distribution.entropy()
    return found if isinstance(distribution, Categorical) else found.sum(-1)


def rollout(continuous: bool, size: int = N) -> tuple[Tensor, ...]:
    """Observation, action, old log-probability, old value, advantage and value target."""
    generator = torch.Generator().manual_seed(size)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    action = normal(size, 3) if continuous else torch.randint(0, 3, (size,), generator=generator)
    old = -1.0 + 0.3 * normal(size) - (3.0 if continuous else 0.0)
    return normal(size, 5), action, old, normal(size), 3 * normal(size), normal(size)


def ppo(
    module: Any,
    observation: Tensor,
    action: Tensor,
    old_log_prob: Tensor,
    old_value: Tensor,
    advantage: Tensor,
    target: Tensor,
    *,
    clip: float = 0.2,
    value_loss: str = "clipped",
) -> tuple[Tensor, ...]:
    distribution, value = module(observation)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    log_ratio = log_prob(distribution, action) - old_log_prob
    ratio = log_ratio.exp()
    unclipped = advantage * ratio
    policy_loss = -torch.min(unclipped, advantage * ratio.clamp(1 - clip, 1 + clip)).mean()
    if value_loss == "clipped":
        clipped = old_value + (value - old_value).clamp(-clip, clip)
        errors = torch.max((value - target) ** 2, (clipped - target) ** 2)
        critic_loss = 0.5 * errors.mean()
    elif value_loss == "huber":
        critic_loss = F.smooth_l1_loss(value, target)
    else:
        critic_loss = F.mse_loss(target, value)
    entropy_loss = -entropy(distribution).mean()
    loss = policy_loss + 0.5 * critic_loss + 0.01 * entropy_loss
    with torch.no_grad():
        kl = ((ratio - 1) - log_ratio).mean()
        fraction = ((ratio - 1).abs() > clip).to(ratio.dtype).mean()
    return loss, policy_loss, critic_loss, entropy_loss, kl, fraction, log_ratio


@pytest.mark.parametrize("continuous", [False, True], ids=["discrete", "box"])
@pytest.mark.parametrize("value_loss", ["plain", "clipped", "huber"])
def test_ppo(continuous: bool, value_loss: str) -> None:
    def program(module: Any, *batch: Tensor) -> tuple[Tensor, ...]:
        return ppo(module, *batch, value_loss=value_loss)

    outcomes = check(program, rollout(continuous), ActorCritic(continuous), sizes=SIZES)
    # Only what reads the advantages alone, with no network behind it, may run whole.
    assert all("std" in name for name in outcomes[7].unsplit)


@pytest.mark.parametrize("size", [1, 2, 13])
def test_ppo_without_normalised_advantages_in_odd_minibatches(size: int) -> None:
    def program(module: Any, *batch: Tensor) -> Tensor:
        observation, action, old, _, advantage, target = batch
        distribution, value = module(observation)
        ratio = (log_prob(distribution, action) - old).exp()
        return -(ratio * advantage).mean() + F.mse_loss(value, target)

    check(program, rollout(False, size), ActorCritic(False), splits=True)


def test_policy_loss_whose_terms_cancel() -> None:
    module = ActorCritic(False).double()
    observation, action, _, _, advantage, _ = rollout(False)

    def program(module: Any, observation: Tensor, action: Tensor, advantage: Tensor) -> Any:
        found = log_prob(module(observation)[0], action)
        ratio = (found - found.detach()).exp()
        normalised = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        return -(normalised * ratio).mean(), ratio

    outcomes = check(program, (observation, action, advantage), module, magnitude=1.0)
    assert all(bool((outcome.values[1] == 1).all()) for outcome in outcomes.values())


def test_advantages_normalised_within_a_mask() -> None:
    def program(module: Any, *batch: Tensor) -> Tensor:
        observation, action, old, _, advantage, target = batch
        mask = (target > -0.5).double()
        mean = (advantage * mask).sum() / mask.sum()
        variance = (((advantage - mean) ** 2) * mask).sum() / mask.sum()
        normalised = (advantage - mean) * torch.rsqrt(variance + 1e-8)
        ratio = (log_prob(module(observation)[0], action) - old).exp()
        return -(normalised * ratio * mask).sum() / mask.sum()

    check(program, rollout(False), ActorCritic(False), splits=True)


@pytest.mark.parametrize("microbatch", SIZES)
def test_items_read_before_and_after_backward(microbatch: int) -> None:
    batch = tuple(t.double() if t.is_floating_point() else t for t in rollout(False))
    torch.manual_seed(0)
    with double_precision(), allow_unsplit():
        module = ActorCritic(False)
        expected = ppo(module, *batch)
        expected[0].backward()
        gradients = [p.grad for p in module.parameters()]
        module.zero_grad()
        optimizer = torch.optim.SGD(module.parameters(), 1e-2)
        with koila_rl.limits(microbatch=microbatch), ForwardCounter(module.trunk) as counter:
            values = ppo(module, *koila_rl.lazy(*batch))
            before = [value.item() for value in values[:3]]
            values[0].backward()
            after = [value.item() for value in values[:6]]
            mine = [p.grad for p in module.parameters()]
            optimizer.step()
            late = [value.item() for value in values[:6]]
    eager = [value.item() for value in expected[:6]]
    assert before == pytest.approx(eager[:3], rel=1e-12, abs=1e-13)
    assert after == pytest.approx(eager, rel=1e-12, abs=1e-13)
    assert late == after
    for got, wanted in zip(mine, gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-13)
    assert counter.rows <= (N if microbatch == N else 2 * N)


@pytest.mark.parametrize("microbatch", SIZES)
def test_one_forward_a_sample_where_one_is_enough(microbatch: int) -> None:
    batch = tuple(t.double() if t.is_floating_point() else t for t in rollout(False))
    with double_precision(), allow_unsplit():
        module = ActorCritic(False)
        with koila_rl.limits(microbatch=microbatch), ForwardCounter(module.trunk) as counter:
            values = ppo(module, *koila_rl.lazy(*batch))
            values[0].backward()
            _ = [value.item() for value in values[:6]]
            assert len(values[6].tolist()) == N
    assert counter.rows == N


class Q(nn.Module):
    """An action-value network with its target network."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 4))
        self.target = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 4))


def transitions() -> tuple[Tensor, ...]:
    """Observation, action, next observation, reward and terminated."""
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(N, 5, generator=generator),
        torch.randint(0, 4, (N,), generator=generator),
        torch.randn(N, 5, generator=generator),
        torch.randn(N, generator=generator),
        torch.rand(N, generator=generator) < 0.2,
    )


def dqn(module: Any, *batch: Tensor, double: bool, loss: str) -> tuple[Tensor, Tensor]:
    observation, action, following, reward, terminated = batch
    with torch.no_grad():
        future = module.target(following)
        if double:
            best = module.online(following).argmax(dim=1, keepdim=True)
            value = future.gather(1, best).squeeze(1)
        else:
            value = future.max(dim=1).values
        target = reward + 0.99 * (1 - terminated.double()) * value
    chosen = module.online(observation).gather(1, action.unsqueeze(1)).squeeze(1)
    error = target - chosen
    if loss == "huber":
        return F.smooth_l1_loss(chosen, target), error
    if loss == "weighted":
        weights = error.detach().abs().pow(-0.4)
        return (weights / weights.max() * error**2).mean(), error
    return F.mse_loss(chosen, target), error


@pytest.mark.parametrize("double", [False, True], ids=["single", "double"])
@pytest.mark.parametrize("loss", ["mse", "huber"])
def test_dqn(double: bool, loss: str) -> None:
    def program(module: Any, *batch: Tensor) -> tuple[Tensor, ...]:
        return dqn(module, *batch, double=double, loss=loss)

    check(program, transitions(), Q(), sizes=SIZES, splits=True)


def test_dqn_weighted_by_a_maximum_over_the_minibatch() -> None:
    def program(module: Any, *batch: Tensor) -> tuple[Tensor, ...]:
        return dqn(module, *batch, double=True, loss="weighted")

    check(program, transitions(), Q(), sizes=SIZES)


@pytest.mark.parametrize("microbatch", [1, 7, N])
def test_dqn_runs_each_network_once_a_sample(microbatch: int) -> None:
    batch = tuple(t.double() if t.is_floating_point() else t for t in transitions())
    with double_precision():
        module = Q()
        with (
            koila_rl.limits(microbatch=microbatch),
            ForwardCounter(module.online[0]) as online,
            ForwardCounter(module.target[0]) as target,
        ):
            loss, error = dqn(module, *koila_rl.lazy(*batch), double=False, loss="huber")
            loss.backward()
            assert len(error.detach().abs().tolist()) == N
    assert (online.rows, target.rows) == (N, N)
