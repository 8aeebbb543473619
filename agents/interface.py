"""What every agent shares with its environment and with whoever watches it learn."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from koila_rl.envs import Episode
from koila_rl.errors import ConfigurationError
from koila_rl.spaces import ActionSpace, ObservationSpace, each, owned, parts, uncounted

__all__ = ["Agent", "Interface", "Progress", "says_stop"]


class Agent(Protocol):
    """What evaluation, training and the command line ask of an agent."""

    name: str
    num_timesteps: int

    def act(self, observation: Any, deterministic: bool = False) -> NDArray[Any]:
        """Actions for one observation or several stacked."""

    def save(self, path: str | Path) -> None:
        """Write the agent into one file."""


@dataclass(frozen=True)
class Progress:
    """Where learning stands after an update; what callbacks are handed."""

    agent: Agent
    num_timesteps: int
    total_timesteps: int
    metrics: dict[str, float]
    episodes: tuple[Episode, ...]
    """Episodes that ended since the update before."""


def says_stop(answer: object) -> bool:
    """Whether what a callback returned ends learning: False, numpy's and torch's included.

    Nothing else does: a callback may return whatever its last expression came to.
    """
    if isinstance(answer, Tensor):
        return answer.dtype == torch.bool and answer.ndim == 0 and not answer.item()
    return answer is False or (isinstance(answer, np.bool_) and not answer)


@dataclass(frozen=True)
class Interface:
    """Between the arrays of an environment and the tensors of a network."""

    observation_space: ObservationSpace
    action_space: ActionSpace
    device: torch.device
    squash: bool = False
    """Whether Box actions go through tanh and are scaled to the bounds, instead of clipped."""

    def tensor(self, observation: Any) -> Any:
        """On the device; where that is the CPU, the memory of the arrays itself."""
        return each(lambda array: torch.as_tensor(array, device=self.device), observation)

    def batch(self, observation: Any) -> tuple[Any, bool]:
        """One observation or several as arrays ``[N, …]``, and whether it was one.

        Raises:
            ConfigurationError: The shape or the structure is not that of the space.
        """
        try:
            batched, stacks = _batch(self.observation_space, observation)
        except (KeyError, TypeError) as error:
            raise ConfigurationError(
                f"the observation is {type(observation).__name__} of another structure than the "
                f"space that this agent learned on, {self.observation_space}"
            ) from error
        if len(stacks) != 1:
            found = ["a single one" if n < 0 else f"{n} stacked" for n in sorted(stacks)]
            raise ConfigurationError(
                f"the parts of the observation belong together, but there are {', '.join(found)}"
            )
        return batched, stacks.pop() < 0

    def to_environment(self, action: Tensor) -> NDArray[Any]:
        """Actions ``[N, …]`` as the environment counts, shapes and bounds them."""
        array, space = action.cpu().numpy(), self.action_space
        if isinstance(space, gym.spaces.Discrete):
            return np.asarray(array + space.start, dtype=space.dtype)
        array = array.reshape(len(array), *space.shape)
        if isinstance(space, gym.spaces.MultiDiscrete):
            return np.asarray(array + space.start, dtype=space.dtype)
        if isinstance(space, gym.spaces.Box):
            if self.squash:
                # In halves: high − low may be more than the largest number there is.
                low, high = space.low / 2.0, space.high / 2.0
                array = 2.0 * (low + (np.tanh(array) + 1.0) / 2.0 * (high - low))
            array = np.clip(array, space.low, space.high)
        return np.asarray(array, dtype=space.dtype)


def _batch(space: gym.Space[Any], observation: Any) -> tuple[Any, set[int]]:
    """Arrays ``[N, …]``, and of how many each part was a stack, −1 for a single one."""
    if isinstance(space, (gym.spaces.Dict, gym.spaces.Tuple)):
        if isinstance(observation, tuple):
            observation = {str(i): part for i, part in enumerate(observation)}
        batched, stacks = {}, set[int]()
        for name, part in parts(space).items():
            batched[name], stacked = _batch(part, observation[name])
            stacks |= stacked
        return batched, stacks
    try:
        array = owned(observation)
    except ValueError as error:
        raise ConfigurationError(f"the observation cannot be read: {error}") from error
    if array.dtype.kind not in "biuf":
        raise ConfigurationError(
            f"the observation {observation!r} is not of numbers; this agent learned on {space}"
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ConfigurationError(f"the observation {observation!r} is not finite")
    shape: tuple[int, ...] = space.shape or ()
    single = array.shape == shape
    if not single and (array.shape[1:] != shape or array.ndim == 0):
        several = ", ".join(str(size) for size in ("n", *shape))
        raise ConfigurationError(
            f"observation has shape {array.shape}; this agent takes {shape} or ({several})"
        )
    array = array[None] if single else array
    for i in uncounted(space, array).tolist():
        raise ConfigurationError(f"observation {array[i].tolist()} is not of {space}")
    return array, {-1 if single else len(array)}
