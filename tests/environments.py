"""Small environments whose right answers are known."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv


class Counting(gym.Env[Any, Any]):
    """Observes 0, 1, 2, …; reward 1 a step; ends at ``end``, terminated or truncated."""

    observation_space = gym.spaces.Box(0.0, 100.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, end: int = 3, truncate: bool = False) -> None:
        self.end, self.truncate, self.count = end, truncate, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return np.array([0.0], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        over = self.count >= self.end
        observation = np.array([self.count], np.float32)
        return observation, 1.0, over and not self.truncate, over and self.truncate, {}


class Endless(gym.Env[Any, Any]):
    """One state, reward 1 for ever; a time limit of ``limit`` steps truncates."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, limit: int = 5) -> None:
        self.limit, self.count = limit, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return np.array([1.0], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return np.array([1.0], np.float32), 1.0, False, self.count >= self.limit, {}


class Identity(gym.Env[Any, Any]):
    """Reward for repeating the observation: share that is equal, or minus the distance (Box)."""

    def __init__(self, action_space: gym.Space[Any], length: int = 20) -> None:
        self.action_space = self.observation_space = action_space
        self.length, self.count = length, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.count, self.state = 0, self.observation_space.sample()
        return self.state, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if isinstance(self.action_space, gym.spaces.Box):
            reward = -float(np.abs(action - self.state).mean())
        else:
            reward = float(np.mean(action == self.state))
        self.count, self.state = self.count + 1, self.observation_space.sample()
        return self.state, reward, False, self.count >= self.length, {}


class Probe(gym.Env[Any, Any]):
    """The smallest tasks on which an agent can fail in one way only; each step observes a sign.

    ``one-step`` pays 1 at once. ``two-step`` pays the sign that it shows. ``discount`` shows 0
    and pays nothing, then shows 1 and pays 1. ``action`` pays 1 for action 1 and −1 for action 0.
    ``both`` pays 1 where the action is the sign shown and −1 where not.
    """

    observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, kind: str) -> None:
        self.kind, self.count, self.sign = kind, 0, 0.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count, self.sign = 0, 0.0
        if self.kind in ("two-step", "both"):
            self.sign = float(self.np_random.choice([-1.0, 1.0]))
        return np.array([self.sign], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        chosen = 1.0 if action == 1 else -1.0
        reward = {
            "one-step": 1.0,
            "two-step": self.sign,
            "discount": float(self.count),
            "action": chosen,
            "both": chosen * self.sign,
        }[self.kind]
        self.count += 1
        over = self.kind != "discount" or self.count == 2
        return (
            np.array([1.0 if self.kind == "discount" else 0.0], np.float32),
            reward,
            over,
            False,
            {},
        )


class Nested(gym.Env[Any, Any]):
    """A Dict of a picture, a number and a Tuple; the number says which action is right."""

    observation_space = gym.spaces.Dict(
        {
            "picture": gym.spaces.Box(0, 255, (3, 8, 8), np.uint8),
            "number": gym.spaces.Discrete(2, start=1),
            "rest": gym.spaces.Tuple(
                (gym.spaces.MultiBinary(2), gym.spaces.Box(-1.0, 1.0, (2,), np.float32))
            ),
        }
    )
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length: int = 4) -> None:
        self.length, self.count = length, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.count, self.state = 0, self.observation_space.sample()
        return self.state, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(action == self.state["number"] - 1)
        self.count, self.state = self.count + 1, self.observation_space.sample()
        return self.state, reward, False, self.count >= self.length, {}


class Pictures(gym.Env[Any, Any]):
    """uint8 images, bright on one side: action 0 is right for the left one, 1 for the other."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, shape: tuple[int, ...] = (3, 36, 36)) -> None:
        self.observation_space = gym.spaces.Box(0, 255, shape, np.uint8)
        self.count = 0

    def _draw(self) -> Any:
        assert self.observation_space.shape is not None
        self.side = int(self.np_random.integers(2))
        image = np.full(self.observation_space.shape, 20, np.uint8)
        image[:, 18:] = 200
        return image if self.side else 220 - image

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return self._draw(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        reward = float(action == self.side)
        return self._draw(), reward, False, self.count >= 10, {}


def vector(make: Any, n_envs: int, mode: AutoresetMode) -> SyncVectorEnv:
    return SyncVectorEnv([make] * n_envs, autoreset_mode=mode)
