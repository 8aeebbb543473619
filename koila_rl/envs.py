"""Vector environments with one meaning, whatever their autoreset mode.

gymnasium has three ways to start the next episode. They differ in which observation a step
returns when an episode ends, and in whether a step goes by that belongs to no episode. Learning
code that mixes them up trains on transitions that never happened. :class:`VectorEnvironment`
reads the mode from ``metadata["autoreset_mode"]`` and always returns the same thing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from koila_rl.errors import ConfigurationError, EnvironmentFailedError, UnsupportedError
from koila_rl.making import EnvironmentLike, make_vector
from koila_rl.readings import Reader, where
from koila_rl.spaces import each
from koila_rl.workers import end, ended, workers_of

__all__ = [
    "EnvironmentLike",
    "Episode",
    "Step",
    "VectorEnvironment",
    "make_environment",
    "on_own_environment",
]


@dataclass(frozen=True)
class Episode:
    """A finished episode: undiscounted return and number of steps."""

    total_reward: float
    length: int


@dataclass(frozen=True)
class Step:
    """One step of every environment; arrays have a leading ``[n_envs]`` and are its own.

    Observations of Dict and Tuple spaces are nested dicts of arrays.
    """

    observation: Any
    """What to act on next: the first observation of the next episode where one ended."""
    next_observation: Any
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

    Args:
        env: Where it runs in processes (``AsyncVectorEnv``), they are ended when one of them
            fails or a step is interrupted: what they would still answer is not known.
        remake: Makes another, where such processes have ended and :meth:`reset` is called.

    Raises:
        UnsupportedError: The autoreset mode is missing or unknown.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        remake: Callable[[], VectorEnv[Any, Any, Any]] | None = None,
    ) -> None:
        mode = env.metadata.get("autoreset_mode")
        if not isinstance(mode, AutoresetMode):
            known = ", ".join(f"AutoresetMode.{known.name}" for known in AutoresetMode)
            raise UnsupportedError(
                f"{env} has metadata['autoreset_mode'] = {mode!r}; without knowing how it resets "
                f"its episodes, learning would mix them up. Set it to one of {known}"
            )
        self.env, self.remake = env, remake
        self.mode = mode
        self.n_envs: int = env.num_envs
        self.observation_space: gym.Space[Any] = env.single_observation_space
        self.action_space: gym.Space[Any] = env.single_action_space
        # Asked of the type: a wrapper would hand on the calls of what it wraps, and be left out.
        self.asynchronous = all(hasattr(type(env), name) for name in ("step_async", "step_wait"))
        """Whether environments step in processes of their own."""
        self._read = Reader(env)
        self._action: NDArray[Any] | None = None
        self._lost = False
        self._ended = np.zeros(self.n_envs, dtype=np.bool_)
        self._total_reward = np.zeros(self.n_envs, dtype=np.float64)
        self._length = np.zeros(self.n_envs, dtype=np.int64)
        self.kept: list[Episode] | None = None
        """A list, where wanted, that episodes which end are put into too, to outlive a failure."""

    def reset(self, seed: int | None = None) -> Any:
        """Start a new episode everywhere; environment i is seeded ``seed + i``.

        A step that was begun and not waited for is thrown away. Processes of environments that
        have ended, by a failure or because a step was interrupted, are started anew.

        Raises:
            EnvironmentFailedError: As of :meth:`step`, or such processes are of a vector
                environment that was handed over made.
        """
        if self._action is not None and self.asynchronous:
            with suppress(EnvironmentFailedError):
                self._named(self.env.step_wait, self._action)  # type: ignore[attr-defined]
        self._action = None
        if self._lost:
            self._start_again()
        raw, _ = self._named(lambda: self.env.reset(seed=seed), None)
        observation = self._read.observation(raw, None)
        self._ended[:] = False
        self._total_reward[:] = 0.0
        self._length[:] = 0
        return observation

    def step(self, action: NDArray[Any]) -> Step:
        """Step every environment; ``action`` is ``[n_envs, …]`` in the environment's own terms.

        Raises:
            EnvironmentFailedError: An environment raised, or returned what is not of its space
                or not finite; it is named, with its last action.
        """
        self.step_async(action)
        return self.step_wait()

    def step_async(self, action: NDArray[Any]) -> None:
        """Begin a step that :meth:`step_wait` ends; something else may run in between.

        Environments in processes of their own step meanwhile, others when waited for.

        Raises:
            ConfigurationError: One was begun before and not ended.
            EnvironmentFailedError: As of :meth:`step`.
        """
        if self._action is not None:
            raise ConfigurationError("step_async() has begun a step already; step_wait() ends it")
        self._action = action
        if self.asynchronous:
            self._named(lambda: self.env.step_async(action), action)  # type: ignore[attr-defined]

    def step_wait(self) -> Step:
        """End the step that :meth:`step_async` began.

        Raises:
            ConfigurationError: None was begun.
            EnvironmentFailedError: As of :meth:`step`.
        """
        action = self._action
        if action is None:
            raise ConfigurationError("step_wait() ends a step, but step_async() has begun none")
        call = self.env.step_wait if self.asynchronous else lambda: self.env.step(action)  # type: ignore[attr-defined]
        raw, rewards, terminations, truncations, info = self._named(call, action)
        self._action = None
        observation = self._read.observation(raw, action)
        reward = self._read.numbers("reward", rewards, np.float32, action)
        terminated = self._read.numbers("terminated", terminations, np.bool_, action)
        truncated = self._read.numbers("truncated", truncations, np.bool_, action)
        resets = self.mode is AutoresetMode.NEXT_STEP
        reset = self._ended.copy() if resets else np.zeros_like(self._ended)
        # Some environments repeat the end of an episode in the step that resets it.
        terminated &= ~reset
        truncated &= ~reset
        ended = terminated | truncated
        next_observation = observation
        if ended.any() and self.mode is AutoresetMode.SAME_STEP:
            final = _with_final(observation, ended, info)
            next_observation = self._read.observation(final, action)
        elif ended.any() and self.mode is AutoresetMode.DISABLED:
            options = {"reset_mask": ended.copy()}
            restarted, _ = self._named(lambda: self.env.reset(options=options), None)
            observation = self._read.observation(restarted, None)
        episodes = self._count(reward, reset, ended)
        self._ended = ended
        return Step(
            observation, next_observation, reward, terminated, truncated, reset, tuple(episodes)
        )

    def shares(self, other: VectorEnvironment) -> bool:
        """Whether an environment of ``other`` is one of these, below whatever wraps them."""
        return not _objects(self.env).isdisjoint(_objects(other.env))

    def _named(self, call: Callable[[], Any], action: NDArray[Any] | None) -> Any:
        """``call()``; an error of an environment says at which action it came."""
        workers = workers_of(self.env)
        try:
            return call()
        except BaseException as error:
            self._action = None
            own = isinstance(error, EnvironmentFailedError) or not isinstance(error, Exception)
            failure = None if own else self._failure(error, action)
            if workers is not None:
                # Some answers have been read and some not: which, nobody can know.
                end(workers)
                self._lost = True
            if failure is None:
                raise
            raise failure from error

    def _failure(self, error: BaseException, action: Any) -> EnvironmentFailedError:
        workers, how = workers_of(self.env), f"{type(error).__name__}: {error}"
        gone = {} if workers is None or workers.closed else ended(workers)
        for index, exit_ in gone.items():
            # A process that is gone leaves an empty EOFError; others have handed on their own.
            told = exit_ if isinstance(error, (EOFError, OSError)) else how
            return EnvironmentFailedError(
                f"environment {index} ({self.env}) failed at {where(action, index)}: {told}"
            )
        return EnvironmentFailedError(f"{self.env} failed at {where(action)}: {how}")

    def _start_again(self) -> None:
        if self.remake is None:
            raise EnvironmentFailedError(
                f"the processes of {self.env} have ended, by a failure or an interruption; to go "
                "on, make it anew, or hand over a name or a function, of which new ones are made"
            )
        self.env, self._lost = self.remake(), False
        self._read = Reader(self.env)

    def close(self) -> None:
        """Release what the environments hold; never hangs, nor hides an error on its way.

        Raises:
            EnvironmentFailedError: Closing failed, and no other error was on its way.
        """
        workers, on_its_way = workers_of(self.env), sys.exc_info()[1]
        if workers is not None and self._action is not None:
            end(workers)
        try:
            self.env.close()
        except Exception as error:
            if workers is not None:
                end(workers)
            elif on_its_way is None:
                how = f"{type(error).__name__}: {error}"
                raise EnvironmentFailedError(f"{self.env} failed at close: {how}") from error

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
        if self.kept is not None:
            self.kept += finished
        return finished


def make_environment(
    env: EnvironmentLike,
    n_envs: int | None = None,
    env_kwargs: dict[str, Any] | None = None,
    vectorization: str = "sync",
) -> VectorEnvironment:
    """A vector environment from a name, an environment, a factory or a vector environment.

    Args:
        env: A registered id (its own vectorised form is used where it has one), a
            ``gymnasium.Env``, a function that makes one, or a ``VectorEnv``.
        n_envs: How many run side by side; 1 where not said. An environment object is one
            environment and a vector environment has its own number.
        env_kwargs: Passed to the environment that an id names.
        vectorization: Of single environments: ``"sync"`` one after another in this process,
            ``"async"`` in a process each.

    Raises:
        ConfigurationError: The id is unknown (near ones are named) or the arguments disagree.
        UnsupportedError: The autoreset mode of a vector environment is missing or unknown.
        MissingDependencyError: The environment needs a package that is not installed.
    """
    make = partial(make_vector, env, n_envs, env_kwargs, vectorization)
    return VectorEnvironment(make(), None if isinstance(env, VectorEnv) else make)


def on_own_environment(agent: Any, vector: VectorEnvironment) -> bool:
    """Whether an environment of ``vector`` is one that ``agent`` learns on."""
    own = getattr(agent, "env", None)
    return isinstance(own, VectorEnvironment) and own.shares(vector)


def _objects(env: VectorEnv[Any, Any, Any]) -> set[int]:
    base = env.unwrapped
    return {id(base), *(id(getattr(one, "unwrapped", one)) for one in getattr(base, "envs", ()))}


def _with_final(observation: Any, ended: NDArray[np.bool_], info: dict[str, Any]) -> Any:
    """The observations with those of ended episodes replaced by the final ones in ``info``."""
    final = info.get("final_obs")
    if final is None:
        raise UnsupportedError(
            "an episode ended under SAME_STEP autoreset but info has no 'final_obs'; "
            "without it a truncated episode cannot be bootstrapped"
        )
    replaced = each(np.copy, observation)
    for i in np.flatnonzero(ended).tolist():
        # One array of observations, or for a Dict space a dict of arrays: gymnasium has both.
        one = each(lambda part, i=i: part[i], final)
        _put(replaced, i, each(np.asarray, one))
    return replaced


def _put(arrays: Any, i: int, one: Any) -> None:
    if isinstance(arrays, dict):
        for name, part in arrays.items():
            _put(part, i, one[name])
    elif np.shape(one) != arrays[i].shape:
        raise EnvironmentFailedError(
            f"the final observation of environment {i} has shape {np.shape(one)}, "
            f"not {arrays[i].shape}"
        )
    else:
        arrays[i] = one
