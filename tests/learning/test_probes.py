"""Probes that say *what* is wrong with an agent: value, discount, action, or all together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from koila_rl.agents import DQN, PPO
from tests.environments import Endless, Probe

GAMMA = 0.5


def ppo(make: Callable[[], Any], steps: int) -> PPO:
    agent = PPO(
        make, n_envs=4, n_steps=16, batch_size=64, n_epochs=8, gamma=GAMMA, learning_rate=0.01,
        net_arch=(16,),
    )  # fmt: skip
    return agent.learn(steps)


def dqn(make: Callable[[], Any], steps: int) -> DQN:
    agent = DQN(
        make, n_envs=4, gamma=GAMMA, learning_rate=0.01, train_freq=2, gradient_steps=2,
        batch_size=32, exploration_fraction=1.0, exploration_final_eps=0.5, learning_starts=32,
        target_update_interval=32, net_arch=(16,),
    )  # fmt: skip
    return agent.learn(steps)


@torch.no_grad()
def value(agent: PPO | DQN, observation: float) -> float:
    batch = torch.tensor([[observation]])
    found = agent.network.value(batch) if isinstance(agent, PPO) else agent.network(batch).amax(-1)
    return float(found)


@pytest.mark.parametrize("learn", [ppo, dqn])
def test_values(learn: Callable[..., PPO | DQN]) -> None:
    assert value(learn(lambda: Probe("one-step"), 600), 0.0) == pytest.approx(1.0, abs=0.1)
    agent = learn(lambda: Probe("two-step"), 1_000)
    assert value(agent, 1.0) == pytest.approx(1.0, abs=0.15)
    assert value(agent, -1.0) == pytest.approx(-1.0, abs=0.15)
    agent = learn(lambda: Probe("discount"), 1_500)
    assert value(agent, 1.0) == pytest.approx(1.0, abs=0.1)
    assert value(agent, 0.0) == pytest.approx(GAMMA, abs=0.1)


@pytest.mark.parametrize("learn", [ppo, dqn])
def test_actions(learn: Callable[..., PPO | DQN]) -> None:
    agent = learn(lambda: Probe("action"), 600)
    assert int(agent.act([0.0], deterministic=True)) == 1
    agent = learn(lambda: Probe("both"), 1_200)
    assert int(agent.act([1.0], deterministic=True)) == 1
    assert int(agent.act([-1.0], deterministic=True)) == 0


@pytest.mark.parametrize("learn", [ppo, dqn])
def test_truncation_is_no_end(learn: Callable[..., PPO | DQN]) -> None:
    # Without bootstrapping at the time limit of 2 steps it would be 1.5 at most.
    assert value(learn(lambda: Endless(2), 2_000), 1.0) == pytest.approx(1 / (1 - GAMMA), rel=0.05)
