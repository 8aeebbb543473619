"""What environments hand over: copied once, and refused where nothing could be learned from it."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import DTypeLike, NDArray

from koila_rl.errors import EnvironmentFailedError
from koila_rl.spaces import each, owned, parts, uncounted

__all__ = ["Reader", "where"]


def where(action: Any, index: int | None = None) -> str:
    """At which action something happened, in environment ``index`` or all; None is a reset."""
    if action is None:
        return "reset"
    if index is None:
        return f"the actions {np.asarray(action).tolist()}"
    return f"action {np.asarray(action)[index].tolist()}"


class Reader:
    """Takes over the arrays of a vector environment, which may write the next ones into them.

    Every method raises :class:`EnvironmentFailedError`, naming the environment, its last action
    and what is wrong, where shapes are not as announced or numbers are not finite.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        self._env, self._space, self._n_envs = env, env.single_observation_space, env.num_envs

    def observation(self, raw: Any, action: Any) -> Any:
        """Copies of observations ``[n_envs, …]``; Dict and Tuple spaces become nested dicts."""
        return self._observation(self._space, "observation", raw, action)

    def numbers(self, name: str, raw: Any, dtype: DTypeLike, action: Any) -> NDArray[Any]:
        """A copy of ``raw``, one number an environment."""
        try:
            array = np.array(raw, dtype=dtype)
        except (TypeError, ValueError) as error:
            raise self._refused(f"{name} {raw!r}, which is no number: {error}", action) from error
        self._check(name, array, (), action)
        return array

    def _observation(self, space: gym.Space[Any], name: str, raw: Any, action: Any) -> Any:
        if isinstance(space, (gym.spaces.Dict, gym.spaces.Tuple)):
            if isinstance(raw, tuple):
                raw = {str(i): part for i, part in enumerate(raw)}
            named = parts(space)
            if not isinstance(raw, dict) or not named.keys() <= raw.keys():
                found = list(raw) if isinstance(raw, dict) else type(raw).__name__
                raise self._refused(f"{name} of {found}; its space is {space}", action)
            return {
                key: self._observation(part, f"{name}[{key!r}]", raw[key], action)
                for key, part in named.items()
            }
        if space.shape is None:
            # Texts and the like, which agents refuse but somebody else may act on.
            return each(np.array, raw)
        array = owned(raw)
        self._check(name, array, space.shape, action)
        for index in uncounted(space, array).tolist():
            raise self._refused(f"{name} {array[index].tolist()}, not of {space}", action, index)
        return array

    def _check(self, name: str, array: NDArray[Any], shape: tuple[int, ...], action: Any) -> None:
        if array.shape != (self._n_envs, *shape):
            expected = (self._n_envs, *shape)
            raise self._refused(f"{name} of shape {array.shape}, not {expected}", action)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            finite = np.isfinite(array).reshape(self._n_envs, -1).all(-1)
            index = int(np.flatnonzero(~finite)[0])
            raise self._refused(
                f"{name} {array[index].tolist()}, which is not finite and would spoil all weights "
                "that learn from it",
                action,
                index,
            )

    def _refused(self, what: str, action: Any, index: int | None = None) -> EnvironmentFailedError:
        who = self._env if index is None else f"environment {index} ({self._env})"
        return EnvironmentFailedError(f"{who} returned at {where(action, index)} {what}")
