"""Vector environments with one meaning, whatever their autoreset mode.

gymnasium has three ways to start the next episode. They differ in which observation a step
returns when an episode ends, and in whether a step goes by that belongs to no episode. Learning
code that mixes them up trains on transitions that never happened. :class:`VectorEnvironment`
reads the mode from ``metadata["autoreset_mode"]`` and always returns the same thing.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from numpy.typing import NDArray

from koila_rl.errors import ConfigurationError, UnsupportedError

__all__ = ["EnvironmentLike", "Episode", "Step", "VectorEnvironment", "make_environment"]

EnvironmentLike: TypeAlias = (
    "str | gym.Env[Any, Any] | Callable[[], gym.Env[Any, Any]] | VectorEnv[Any, Any, Any]"
)


@dataclass(frozen=True)
class Episode:
    """A finished episode: undiscounted return and number of steps."""

    total_reward: float
    length: int


@dataclass(frozen=True)
class Step:
    """One step of every environment; arrays have a leading ``[n_envs]``."""

    observation: NDArray[Any]
    """What to act on next: the first observation of the next episode where one ended."""
    next_observation: NDArray[Any]
    """What the transition led to: the final observation where an episode ended."""
    reward: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    reset: NDArray[np.bool_]
    """True where the environment only reset itself: no transition, belongs in no loss."""
    episodes: tuple[Episode, ...]
    """Episodes that ended in this step, in the order of the environments."""


class VectorEnvironment:
    """A gymnasium vector environment, read the same way in each autoreset mode.

    Raises:
        UnsupportedError: The autoreset mode is missing or unknown.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        mode = env.metadata.get("autoreset_mode")
        if not isinstance(mode, AutoresetMode):
            known = ", ".join(f"AutoresetMode.{known.name}" for known in AutoresetMode)
            raise UnsupportedError(
                f"{env} has metadata['autoreset_mode'] = {mode!r}; without knowing how it resets "
                f"its episodes, learning would mix them up. Set it to one of {known}"
            )
        self.env = env
        self.mode = mode
        self.n_envs: int = env.num_envs
        self.observation_space: gym.Space[Any] = env.single_observation_space
        self.action_space: gym.Space[Any] = env.single_action_space
        self._ended = np.zeros(self.n_envs, dtype=np.bool_)
        self._total_reward = np.zeros(self.n_envs, dtype=np.float64)
        self._length = np.zeros(self.n_envs, dtype=np.int64)

    def reset(self, seed: int | None = None) -> NDArray[Any]:
        """Start a new episode everywhere; environment i is seeded ``seed + i``."""
        observation, _ = self.env.reset(seed=seed)
        self._ended[:] = False
        self._total_reward[:] = 0.0
        self._length[:] = 0
        return np.asarray(observation)

    def step(self, action: NDArray[Any]) -> Step:
        """Step every environment; ``action`` is ``[n_envs, …]`` in the environment's own terms."""
        raw, reward, terminated, truncated, info = self.env.step(action)
        observation = np.asarray(raw)
        reward = np.asarray(reward, dtype=np.float32)
        terminated = np.array(terminated, dtype=np.bool_)
        truncated = np.array(truncated, dtype=np.bool_)
        resets = self.mode is AutoresetMode.NEXT_STEP
        reset = self._ended.copy() if resets else np.zeros_like(self._ended)
        # Some environments repeat the end of an episode in the step that resets it.
        terminated &= ~reset
        truncated &= ~reset
        ended = terminated | truncated
        next_observation = observation
        if ended.any() and self.mode is AutoresetMode.SAME_STEP:
            next_observation = _with_final(observation, ended, info)
        elif ended.any() and self.mode is AutoresetMode.DISABLED:
            restarted, _ = self.env.reset(options={"reset_mask": ended.copy()})
            next_observation = observation.copy()
            observation = np.asarray(restarted)
        episodes = self._count(reward, reset, ended)
        self._ended = ended
        return Step(
            observation, next_observation, reward, terminated, truncated, reset, tuple(episodes)
        )

    def close(self) -> None:
        """Release what the environments hold."""
        self.env.close()

    def _count(
        self, reward: NDArray[np.float32], reset: NDArray[np.bool_], ended: NDArray[np.bool_]
    ) -> list[Episode]:
        self._total_reward += np.where(reset, 0.0, reward)
        self._length += ~reset
        finished = [
            Episode(float(self._total_reward[i]), int(self._length[i]))
            for i in np.flatnonzero(ended)
        ]
        self._total_reward[ended] = 0.0
        self._length[ended] = 0
        return finished


def make_environment(
    env: EnvironmentLike, n_envs: int | None = None, env_kwargs: dict[str, Any] | None = None
) -> VectorEnvironment:
    """A vector environment from a name, an environment, a factory or a vector environment.

    Args:
        env: A registered id (its own vectorised form is used where it has one), a
            ``gymnasium.Env``, a function that makes one, or a ``VectorEnv``.
        n_envs: How many run side by side; 1 where not said. An environment object is one
            environment and a vector environment has its own number.
        env_kwargs: Passed to the environment that an id names.

    Raises:
        ConfigurationError: The id is unknown (near ones are named) or the arguments disagree.
        UnsupportedError: The autoreset mode of a vector environment is missing or unknown.
    """
    if n_envs is not None and n_envs < 1:
        raise ConfigurationError(f"n_envs is {n_envs} but must be at least 1")
    if env_kwargs and not isinstance(env, str):
        raise ConfigurationError("env_kwargs apply only where env is the name of an environment")
    if isinstance(env, str):
        return VectorEnvironment(_make_registered(env, n_envs or 1, env_kwargs or {}))
    if isinstance(env, VectorEnv):
        if n_envs not in (None, env.num_envs):
            raise ConfigurationError(
                f"n_envs is {n_envs} but the vector environment has {env.num_envs}"
            )
        return VectorEnvironment(env)
    if isinstance(env, gym.Env):
        if n_envs not in (None, 1):
            raise ConfigurationError(
                f"n_envs is {n_envs} but one environment object was given; "
                "pass a function that makes the environment"
            )
        single = env
        return VectorEnvironment(_same_step([lambda: single]))
    if callable(env):
        return VectorEnvironment(_same_step([env] * (n_envs or 1)))
    raise ConfigurationError(
        f"env is {env!r}, which is neither a name, an environment, a function that makes one, "
        "nor a vector environment"
    )


def _same_step(factories: list[Callable[[], gym.Env[Any, Any]]]) -> VectorEnv[Any, Any, Any]:
    return SyncVectorEnv(factories, autoreset_mode=AutoresetMode.SAME_STEP)


def _make_registered(
    name: str, n_envs: int, env_kwargs: dict[str, Any]
) -> VectorEnv[Any, Any, Any]:
    try:
        spec = gym.spec(name)
    except gym.error.Error as error:
        raise ConfigurationError(_unknown_environment(name)) from error
    try:
        if spec.vector_entry_point is not None and not spec.additional_wrappers:
            return gym.make_vec(name, n_envs, vectorization_mode="vector_entry_point", **env_kwargs)
        return gym.make_vec(
            name,
            n_envs,
            vectorization_mode="sync",
            vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
            **env_kwargs,
        )
    except (gym.error.Error, ImportError, TypeError) as error:
        raise ConfigurationError(f"environment {name!r} cannot be made: {error}") from error


def _unknown_environment(name: str) -> str:
    near = difflib.get_close_matches(name, list(gym.registry), n=3, cutoff=0.5)
    if not near:
        lower = {known.lower(): known for known in gym.registry}
        near = [lower[key] for key in difflib.get_close_matches(name.lower(), lower, n=3)]
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"unknown environment {name!r}{hint}"


def _with_final(
    observation: NDArray[Any], ended: NDArray[np.bool_], info: dict[str, Any]
) -> NDArray[Any]:
    """The observations with those of ended episodes replaced by the final ones in ``info``."""
    final = info.get("final_obs")
    if final is None:
        raise UnsupportedError(
            "an episode ended under SAME_STEP autoreset but info has no 'final_obs'; "
            "without it a truncated episode cannot be bootstrapped"
        )
    replaced: NDArray[Any] = observation.copy()
    for i in np.flatnonzero(ended):
        replaced[i] = final[i]
    return replaced
