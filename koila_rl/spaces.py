"""Observation and action spaces: which ones agents take, and how a checkpoint writes them down."""

from __future__ import annotations

from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch

from koila_rl.errors import UnsupportedError

__all__ = ["ActionSpace", "ObservationSpace", "check_spaces", "describe", "restore"]

ObservationSpace: TypeAlias = "gym.spaces.Box | gym.spaces.Discrete"
ActionSpace: TypeAlias = "gym.spaces.Box | gym.spaces.Discrete"


def check_spaces(
    observation_space: gym.Space[Any], action_space: gym.Space[Any], agent: str
) -> tuple[ObservationSpace, ActionSpace]:
    """The same two spaces, known to be among those that agents take.

    Raises:
        UnsupportedError: A space is of another kind, or a Box of actions is not finite or not
            of floating-point numbers.
    """
    supported = (gym.spaces.Box, gym.spaces.Discrete)
    if not isinstance(observation_space, supported):
        raise UnsupportedError(
            f"{agent} takes Box and Discrete observations, not {observation_space}; "
            "flatten others with gymnasium.wrappers.FlattenObservation"
        )
    if not isinstance(action_space, supported):
        raise UnsupportedError(f"{agent} takes Discrete and Box actions, not {action_space}")
    if isinstance(action_space, gym.spaces.Box):
        if not np.issubdtype(action_space.dtype, np.floating):
            raise UnsupportedError(f"{agent} takes Box actions of floats, not {action_space}")
        if not action_space.is_bounded():
            raise UnsupportedError(
                f"{agent} needs finite action bounds, not {action_space}; "
                "rescale with gymnasium.wrappers.RescaleAction"
            )
    return observation_space, action_space


def describe(space: gym.Space[Any]) -> dict[str, Any]:
    """Numbers and tensors from which :func:`restore` makes an equal space."""
    if isinstance(space, gym.spaces.Discrete):
        return {"kind": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, gym.spaces.Box):
        return {
            "kind": "Box",
            "low": torch.from_numpy(space.low.copy()),
            "high": torch.from_numpy(space.high.copy()),
            "dtype": np.dtype(space.dtype).name,
        }
    raise UnsupportedError(f"space {space} cannot be saved")


def restore(description: dict[str, Any]) -> gym.Space[Any]:
    """The space that :func:`describe` was given."""
    if description["kind"] == "Discrete":
        return gym.spaces.Discrete(description["n"], start=description["start"])
    if description["kind"] == "Box":
        low, high = description["low"].numpy(), description["high"].numpy()
        return gym.spaces.Box(low, high, dtype=np.dtype(description["dtype"]).type)
    raise UnsupportedError(f"space of kind {description['kind']!r} is not known")
