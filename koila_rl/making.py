"""From whatever names or makes an environment to gymnasium's vector environments."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from koila_rl.errors import ConfigurationError, EnvironmentFailedError, MissingDependencyError

__all__ = ["EnvironmentLike", "make_rendering", "make_vector", "missing"]

EnvironmentLike: TypeAlias = (
    "str | gym.Env[Any, Any] | Callable[[], gym.Env[Any, Any]] | VectorEnv[Any, Any, Any]"
)

_VECTORIZATIONS = ("sync", "async")
_EXTRAS = ("atari", "box2d", "classic-control")
_MAKING = (gym.error.Error, ImportError, TypeError)


def make_vector(
    env: EnvironmentLike,
    n_envs: int | None,
    env_kwargs: dict[str, Any] | None,
    vectorization: str,
) -> VectorEnv[Any, Any, Any]:
    """As :func:`koila_rl.envs.make_environment`, without reading the autoreset mode."""
    if n_envs is not None and n_envs < 1:
        raise ConfigurationError(f"n_envs is {n_envs} but must be at least 1")
    if vectorization not in _VECTORIZATIONS:
        raise ConfigurationError(
            f"vectorization is {vectorization!r} but must be {' or '.join(_VECTORIZATIONS)}"
        )
    if env_kwargs and not isinstance(env, str):
        raise ConfigurationError("env_kwargs apply only where env is the name of an environment")
    if isinstance(env, str):
        return _make_registered(env, n_envs or 1, env_kwargs or {}, vectorization)
    if isinstance(env, VectorEnv):
        if n_envs not in (None, env.num_envs):
            raise ConfigurationError(
                f"n_envs is {n_envs} but the vector environment has {env.num_envs}"
            )
        return env
    if isinstance(env, gym.Env):
        if n_envs not in (None, 1):
            raise ConfigurationError(
                f"n_envs is {n_envs} but one environment object was given; "
                "pass a function that makes the environment"
            )
        return _vector([partial(_same, env)], "sync")
    if callable(env):
        return _vector([env] * (n_envs or 1), vectorization)
    raise ConfigurationError(
        f"env is {env!r}, which is neither a name, an environment, a function that makes one, "
        "nor a vector environment"
    )


def make_rendering(env: EnvironmentLike, env_kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
    """One environment that renders pictures: named, given, or from a factory.

    Raises:
        ConfigurationError: A vector environment was given, or the name is unknown.
        MissingDependencyError: The environment needs a package that is not installed.
    """
    if isinstance(env, str):
        if env.startswith("ALE/"):
            raise ConfigurationError(
                f"{env} is learned in vectorised form, which does not render; hand over a factory"
            )
        _spec(env)
        try:
            return gym.make(env, render_mode="rgb_array", **env_kwargs)
        except _MAKING as error:
            raise _cannot_be_made(env, error) from error
    if isinstance(env, gym.Env):
        return env
    if isinstance(env, VectorEnv) or not callable(env):
        raise ConfigurationError(f"{env!r} cannot be filmed; name the environment or a factory")
    return env()


class _Named(gym.Wrapper[Any, Any, Any, Any]):
    """Says which environment failed, and at which action."""

    def __init__(self, env: gym.Env[Any, Any], index: int) -> None:
        super().__init__(env)
        self._index = index

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        try:
            observation, info = super().reset(seed=seed, options=options)
            _check_shape(self.observation_space, observation)
            return observation, info
        except Exception as error:
            raise self._failed("reset", error) from error

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        try:
            observation, *rest = super().step(action)
            _check_shape(self.observation_space, observation)
            return observation, *rest
        except Exception as error:
            raise self._failed(f"action {np.asarray(action).tolist()}", error) from error

    def _failed(self, where: str, error: Exception) -> EnvironmentFailedError:
        # One string alone, since it is all that a worker process hands back of an error.
        return EnvironmentFailedError(
            f"environment {self._index} ({self.env}) failed at {where}: "
            f"{type(error).__name__}: {error}"
        )


def _check_shape(space: gym.Space[Any], observation: Any) -> None:
    # Vector environments stretch some to the shape of the space and do not name others.
    if isinstance(space, (gym.spaces.Dict, gym.spaces.Tuple)):
        for key, part in enumerate(space) if isinstance(space, gym.spaces.Tuple) else space.items():
            _check_shape(part, observation[key])
    elif space.shape is not None and np.shape(observation) != space.shape:
        raise ValueError(f"observation of shape {np.shape(observation)}, not {space.shape}")


def _same(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    return env


def _named(make: Callable[[], gym.Env[Any, Any]], index: int) -> gym.Env[Any, Any]:
    return _Named(make(), index)


def _vector(
    makers: list[Callable[[], gym.Env[Any, Any]]], vectorization: str
) -> VectorEnv[Any, Any, Any]:
    named = [partial(_named, make, i) for i, make in enumerate(makers)]
    if vectorization == "async":
        return AsyncVectorEnv(named, autoreset_mode=AutoresetMode.SAME_STEP)
    made = SyncVectorEnv(named, autoreset_mode=AutoresetMode.SAME_STEP)
    if len({id(one.unwrapped) for one in made.envs}) < len(makers):
        raise ConfigurationError(
            f"{len(makers)} environments were asked for and the function that makes them handed "
            f"out the same object again, {made.envs[0].unwrapped}; make a new one in each call"
        )
    return made


def _make_registered(
    name: str, n_envs: int, env_kwargs: dict[str, Any], vectorization: str
) -> VectorEnv[Any, Any, Any]:
    spec = _spec(name)
    try:
        if spec.vector_entry_point is not None and not spec.additional_wrappers:
            return gym.make_vec(name, n_envs, vectorization_mode="vector_entry_point", **env_kwargs)
        return _vector([partial(gym.make, name, **env_kwargs)] * n_envs, vectorization)
    except _MAKING as error:
        raise _cannot_be_made(name, error) from error


def missing(what: str, error: gym.error.DependencyNotInstalled) -> MissingDependencyError:
    """As gymnasium says it, by the name of the extra where it is one of ours."""
    named = re.search(r"gymnasium\[([\w-]+)\]", str(error))
    extra = named.group(1).replace("_", "-") if named else ""
    if extra in _EXTRAS:
        package = str(error).partition(",")[0]
        return MissingDependencyError(f"{what}: {package}: pip install 'koila-rl[{extra}]'")
    return MissingDependencyError(f"{what}: {error}")


def _cannot_be_made(name: str, error: Exception) -> ConfigurationError | MissingDependencyError:
    what = f"environment {name!r} cannot be made"
    if isinstance(error, gym.error.DependencyNotInstalled):
        return missing(what, error)
    return ConfigurationError(f"{what}: {error}")


def _spec(name: str) -> EnvSpec:
    if name.startswith("ALE/"):
        _register_atari(name)
    try:
        return gym.spec(name)
    except gym.error.Error as error:
        raise ConfigurationError(_unknown_environment(name)) from error


def _register_atari(name: str) -> None:
    try:
        import ale_py
    except ImportError as error:
        raise MissingDependencyError(
            f"{name} needs ale-py: pip install 'koila-rl[atari]'"
        ) from error
    gym.register_envs(ale_py)


def _unknown_environment(name: str) -> str:
    near = difflib.get_close_matches(name, list(gym.registry), n=3, cutoff=0.5)
    if not near:
        lower = {known.lower(): known for known in gym.registry}
        near = [lower[key] for key in difflib.get_close_matches(name.lower(), lower, n=3)]
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"unknown environment {name!r}{hint}"
