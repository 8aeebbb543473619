"""PPO with a memory on CartPole that hides its velocities, which only a memory can tell.

python examples/recurrent.py [TIMESTEPS]
"""

from __future__ import annotations

import sys
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import TransformObservation

import koila_rl
from koila_rl.agents.presets import preset


def without_velocities() -> gym.Env[Any, Any]:
    """Position and angle alone."""
    env = gym.make("CartPole-v1")
    space = env.observation_space
    assert isinstance(space, gym.spaces.Box)
    seen = gym.spaces.Box(space.low[[0, 2]], space.high[[0, 2]], dtype=np.float32)
    return TransformObservation(env, lambda observation: observation[[0, 2]], seen)


def main(total_timesteps: int = 100_000) -> None:
    """Train with an LSTM; a minibatch is eight sequences of 32 steps, split as memory asks."""
    result = koila_rl.train(
        without_velocities,
        agent="recurrent_ppo",
        total_timesteps=total_timesteps,
        memory="1MiB",
        **preset("recurrent_ppo", "CartPoleNoVel-v1"),
    )
    print(result.plan)
    print(koila_rl.evaluate(result.agent, without_velocities, episodes=20))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
