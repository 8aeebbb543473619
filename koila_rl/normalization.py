"""Observations of mean 0 and deviation 1, rewards of returns of deviation 1, as learning goes.

The statistics are gymnasium's ``RunningMeanStd``. Its own vector wrappers take one autoreset mode
only and count observations of ended episodes as first ones of the next; here they belong to the
agent, which is saved with them and takes raw observations when it acts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers.utils import RunningMeanStd
from numpy.typing import NDArray

from koila_rl.envs import Step, VectorEnvironment
from koila_rl.errors import UnsupportedError
from koila_rl.spaces import each, is_image, owned, parts

__all__ = ["NormalizedEnvironment", "Normalizer"]

_LIMIT, _EPSILON = 10.0, 1e-8


class Normalizer:
    """Running statistics of observations and of discounted returns.

    Args:
        space: Of observations. Boxes of numbers are normalised, parts of a Dict or Tuple too;
            images and discrete numbers stay as they are.
        observations: Whether observations are normalised, and clipped to ±10.
        rewards: Whether rewards are divided by the deviation of the discounted return so far
            (Engstrom et al. 2020, https://arxiv.org/abs/2005.12729), and clipped to ±10.
        gamma: Discount of that return.

    Raises:
        UnsupportedError: ``observations`` is asked for and nothing in ``space`` is a number.
    """

    def __init__(
        self, space: gym.Space[Any], *, observations: bool, rewards: bool, gamma: float
    ) -> None:
        self._statistics = _statistics(space) if observations else None
        if observations and not list(_leaves(self._statistics)):
            raise UnsupportedError(f"normalize_observation finds no Box of numbers in {space}")
        self._rewards, self._gamma = rewards, gamma
        self._returns = RunningMeanStd(shape=())

    def observation(self, observation: Any) -> Any:
        """Observations ``[N, …]``, normalised as float32 by the statistics so far."""
        if self._statistics is None:
            return observation
        return _apply(_normalize, self._statistics, observation)

    def see(self, observation: Any) -> None:
        """Count observations ``[N, …]`` into the statistics."""
        if self._statistics is not None:
            _apply(_update, self._statistics, observation)

    def reward(
        self, reward: NDArray[np.float32], running: NDArray[np.float64], counted: NDArray[np.bool_]
    ) -> NDArray[np.float32]:
        """Rewards ``[N]``, scaled; ``running`` are the discounted returns up to them, changed."""
        if not self._rewards:
            return reward
        running[counted] = running[counted] * self._gamma + reward[counted]
        if counted.any():
            self._returns.update(running[counted])
        scaled = reward / np.sqrt(self._returns.var + _EPSILON)
        return np.clip(scaled, -_LIMIT, _LIMIT).astype(np.float32)

    def state(self) -> dict[str, Any]:
        """Numbers and arrays that :meth:`restore` takes."""
        leaves = [*_leaves(self._statistics), self._returns]
        return {
            "statistics": [[np.asarray(s.mean), np.asarray(s.var), float(s.count)] for s in leaves]
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take up saved statistics."""
        leaves = [*_leaves(self._statistics), self._returns]
        for statistics, (mean, var, count) in zip(leaves, state["statistics"], strict=True):
            statistics.mean, statistics.var, statistics.count = mean, var, count


class NormalizedEnvironment(VectorEnvironment):
    """A vector environment seen through a :class:`Normalizer`; episodes count raw rewards."""

    def __init__(self, environment: VectorEnvironment, normalizer: Normalizer) -> None:
        super().__init__(environment.env, environment.remake)
        self._normalizer = normalizer
        self._running = np.zeros(self.n_envs, dtype=np.float64)

    def reset(self, seed: int | None = None) -> Any:
        """As of the environment, normalised."""
        observation = super().reset(seed)
        self._running[:] = 0.0
        self._normalizer.see(observation)
        return self._normalizer.observation(observation)

    def step_wait(self) -> Step:
        """As of the environment, normalised; where an episode ended its last observation too."""
        step = super().step_wait()
        same = step.next_observation is step.observation
        if not same:
            # Under NEXT_STEP the last observation of an episode is acted on, and seen below.
            ended = step.terminated | step.truncated
            self._normalizer.see(each(lambda array: array[ended], step.next_observation))
        self._normalizer.see(step.observation)
        reward = self._normalizer.reward(step.reward, self._running, ~step.reset)
        self._running[step.terminated | step.truncated] = 0.0
        observation = self._normalizer.observation(step.observation)
        following = observation if same else self._normalizer.observation(step.next_observation)
        return replace(step, observation=observation, next_observation=following, reward=reward)


def _statistics(space: gym.Space[Any]) -> Any:
    if isinstance(space, (gym.spaces.Dict, gym.spaces.Tuple)):
        return {name: _statistics(part) for name, part in parts(space).items()}
    if isinstance(space, gym.spaces.Box) and not is_image(space):
        return RunningMeanStd(shape=space.shape)
    return None


def _leaves(statistics: Any) -> list[RunningMeanStd]:
    if isinstance(statistics, dict):
        return [leaf for part in statistics.values() for leaf in _leaves(part)]
    return [] if statistics is None else [statistics]


def _apply(function: Any, statistics: Any, observation: Any) -> Any:
    # RunningMeanStd is no mapping, so it counts as a leaf beside the array it belongs to.
    arrays = each(np.asarray, observation)
    return each(lambda array, known: function(known, array), arrays, statistics)


def _normalize(statistics: RunningMeanStd | None, array: NDArray[Any]) -> NDArray[Any]:
    if statistics is None:
        return array
    scaled = (array - statistics.mean) / np.sqrt(statistics.var + _EPSILON)
    return owned(np.clip(scaled, -_LIMIT, _LIMIT).astype(np.float32))


def _update(statistics: RunningMeanStd | None, array: NDArray[Any]) -> None:
    if statistics is not None:
        statistics.update(array)
