"""Environments that a right PPO learns in two thousand steps."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import koila_rl
from koila_rl.agents.ppo import PPO
from tests.environments import Identity, Pictures

# Every step is a decision by itself, so the discount is 0.
QUICK: dict[str, Any] = {"n_envs": 4, "n_steps": 32, "batch_size": 32, "gamma": 0.0}


@pytest.mark.parametrize("seed", [0, 1])
def test_discrete(seed: int) -> None:
    def env() -> Identity:
        return Identity(gym.spaces.Discrete(3))

    agent = PPO(env, seed=seed, learning_rate=1e-3, **QUICK)
    agent.learn(2_000)
    assert koila_rl.evaluate(agent, env, episodes=5).mean >= 19


def test_box() -> None:
    def env() -> Identity:
        return Identity(gym.spaces.Box(-1.0, 1.0, (1,), np.float32))

    agent = PPO(env, learning_rate=3e-3, log_std_init=-1.0, **QUICK)
    agent.learn(2_000)
    # A policy that ignores the observation loses 0.5 a step: -10 an episode.
    assert koila_rl.evaluate(agent, env, episodes=5).mean >= -3


def test_pictures() -> None:
    agent = PPO(
        Pictures, n_envs=4, n_steps=32, batch_size=64, n_epochs=4, gamma=0.0, learning_rate=1e-3
    )
    agent.learn(512)
    assert koila_rl.evaluate(agent, Pictures, episodes=5).mean >= 9
