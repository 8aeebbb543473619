"""Environments that a right agent learns in two thousand steps."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import koila_rl
from koila_rl.agents import DQN, PPO, RecurrentPPO
from tests.environments import Identity, Nested, Pictures

# Every step is a decision by itself, so the discount is 0.
QUICK: dict[str, Any] = {"n_envs": 4, "n_steps": 32, "batch_size": 64, "n_epochs": 6, "gamma": 0.0}


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Discrete(3, start=2),
        gym.spaces.MultiDiscrete([2, 3], start=[0, 1]),
        gym.spaces.MultiBinary(3),
    ],
    ids=lambda space: type(space).__name__,
)
def test_ppo_on_what_is_counted(space: gym.Space[Any]) -> None:
    def env() -> Identity:
        return Identity(space)

    agent = PPO(env, learning_rate=5e-3, **QUICK)
    agent.learn(2_000)
    # 20 steps an episode; a policy that ignores the observation earns at most half.
    assert koila_rl.evaluate(agent, env, episodes=5).mean >= 18


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"state_dependent_std": True},
        {"squash_output": True},
        {"squash_output": True, "state_dependent_std": True},
    ],
    ids=["std", "state-std", "squash", "squash-state-std"],
)
def test_ppo_on_a_box(settings: dict[str, Any]) -> None:
    def env() -> Identity:
        return Identity(gym.spaces.Box(-2.0, 2.0, (1,), np.float32))

    agent = PPO(env, learning_rate=8e-3, log_std_init=-1.0, **QUICK, **settings)
    agent.learn(2_000)
    # A policy that ignores the observation loses 1 a step: −20 an episode.
    assert koila_rl.evaluate(agent, env, episodes=5).mean >= -6


def test_ppo_on_pictures() -> None:
    agent = PPO(
        Pictures, n_envs=4, n_steps=32, batch_size=64, n_epochs=4, gamma=0.0, learning_rate=1e-3
    )
    agent.learn(512)
    assert koila_rl.evaluate(agent, Pictures, episodes=5).mean >= 9


def test_ppo_on_nested_observations() -> None:
    settings: dict[str, Any] = {"features_extractor": "impala", "net_arch": (16,)}
    agent = PPO(
        Nested, n_envs=4, n_steps=16, batch_size=64, n_epochs=8, gamma=0.0, learning_rate=3e-3,
        **settings,
    )  # fmt: skip
    agent.learn(1_000)
    assert koila_rl.evaluate(agent, Nested, episodes=5).mean >= 3.8


@pytest.mark.parametrize(
    "switches",
    [
        {},
        pytest.param(
            {"double": True, "dueling": True, "prioritized": True, "n_steps": 3},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["plain", "all"],
)
def test_dqn(switches: dict[str, Any]) -> None:
    def env() -> Identity:
        return Identity(gym.spaces.Discrete(3, start=2))

    agent = DQN(
        env, n_envs=4, gamma=0.0, learning_rate=5e-3, train_freq=4, gradient_steps=4, batch_size=64,
        exploration_fraction=0.5, target_update_interval=50, **switches,
    )  # fmt: skip
    agent.learn(2_000)
    assert koila_rl.evaluate(agent, env, episodes=5).mean >= 18


class Recall(Identity):
    """Reward for repeating the observation *before* the last: only memory helps."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.before = None
        return super().reset(seed=seed)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        right, self.before = action == self.before, self.state
        state, _, terminated, truncated, info = super().step(action)
        return state, float(right), terminated, truncated, info


@pytest.mark.parametrize("cell", ["lstm", pytest.param("gru", marks=pytest.mark.slow)])
def test_recurrent_ppo_remembers(cell: str) -> None:
    def env() -> Recall:
        return Recall(gym.spaces.Discrete(2))

    agent = RecurrentPPO(
        env, n_envs=8, n_steps=32, sequence_length=8, batch_size=128, n_epochs=8, gamma=0.0,
        learning_rate=0.01, hidden_size=16, net_arch=(), cell=cell,
    )  # fmt: skip
    agent.learn(3_000)
    # Without memory half of 19 is all there is to earn.
    assert koila_rl.evaluate(agent, env, episodes=5).mean >= 17
