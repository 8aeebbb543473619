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
from torch.distributions import Categorical, Distribution

from koila_rl.envs import Episode
from koila_rl.errors import ConfigurationError
from koila_rl.spaces import ActionSpace, ObservationSpace

__all__ = ["Agent", "Interface", "Progress", "sample"]


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


@dataclass(frozen=True)
class Interface:
    """Between the arrays of an environment and the tensors of a network."""

    observation_space: ObservationSpace
    action_space: ActionSpace
    device: torch.device

    def tensor(self, observation: NDArray[Any]) -> Tensor:
        """A copy on the device: some vector environments reuse the array they return."""
        return torch.tensor(observation, device=self.device)

    def batch(self, observation: Any) -> tuple[Tensor, bool]:
        """One observation or several as a tensor ``[N, …]``, and whether it was one.

        Raises:
            ConfigurationError: The shape is not that of the space.
        """
        array = np.asarray(observation)
        shape: tuple[int, ...] = self.observation_space.shape or ()
        if array.shape == shape:
            return self.tensor(array[None]), True
        if array.shape[1:] != shape or array.ndim == 0:
            stacked = ", ".join(str(size) for size in ("n", *shape))
            raise ConfigurationError(
                f"observation has shape {array.shape}; this agent takes {shape} or ({stacked})"
            )
        return self.tensor(array), False

    def to_environment(self, action: Tensor) -> NDArray[Any]:
        """Actions as the environment counts or bounds them."""
        array = action.cpu().numpy()
        if isinstance(self.action_space, gym.spaces.Discrete):
            return np.asarray(array + self.action_space.start)
        clipped = np.clip(array, self.action_space.low, self.action_space.high)
        return np.asarray(clipped, dtype=self.action_space.dtype)


def sample(distribution: Distribution, generator: torch.Generator) -> Tensor:
    """As ``distribution.sample()``, from the agent's own random state."""
    if isinstance(distribution, Categorical):
        return torch.multinomial(distribution.probs, 1, generator=generator).squeeze(-1)
    return torch.normal(distribution.mean, distribution.stddev, generator=generator)
