"""Observation and action spaces: which ones agents take, and how a checkpoint writes them down.

Observations of Dict and Tuple spaces are handled as nested dicts of arrays; the parts of a tuple
are named "0", "1", and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from koila_rl.errors import UnsupportedError

__all__ = [
    "ActionSpace",
    "ObservationSpace",
    "check_spaces",
    "describe",
    "each",
    "is_image",
    "owned",
    "parts",
    "restore",
    "uncounted",
]

ObservationSpace: TypeAlias = "gym.Space[Any]"
ActionSpace: TypeAlias = "spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary"

_SIMPLE = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_NESTED = (spaces.Dict, spaces.Tuple)


def check_spaces(
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any],
    agent: str,
    actions: tuple[type[gym.Space[Any]], ...] = _SIMPLE,
) -> tuple[ObservationSpace, ActionSpace]:
    """The same two spaces, known to be among those that agents take; ``actions`` narrows it.

    Raises:
        UnsupportedError: A space is of another kind, or a Box of actions is not finite or not
            of floating-point numbers.
    """
    _check_observations(observation_space, agent)
    if not isinstance(action_space, actions) or not isinstance(action_space, _SIMPLE):
        names = [kind.__name__ for kind in actions]
        listed = f"{', '.join(names[:-1])} and {names[-1]}" if names[1:] else names[0]
        raise UnsupportedError(f"{agent} takes {listed} actions, not {action_space}")
    if isinstance(action_space, spaces.Box):
        if not np.issubdtype(action_space.dtype, np.floating):
            raise UnsupportedError(f"{agent} takes Box actions of floats, not {action_space}")
        if not action_space.is_bounded():
            raise UnsupportedError(
                f"{agent} needs finite action bounds, not {action_space}; "
                "rescale with gymnasium.wrappers.RescaleAction"
            )
    return observation_space, action_space


def _check_observations(space: gym.Space[Any], agent: str) -> None:
    if isinstance(space, _NESTED):
        named = parts(space)
        if not named or not all(isinstance(name, str) for name in named):
            raise UnsupportedError(
                f"{agent} takes Dict and Tuple observations of at least one part, with texts for "
                f"names, not {space}"
            )
        for part in named.values():
            _check_observations(part, agent)
    elif not isinstance(space, _SIMPLE):
        raise UnsupportedError(
            f"{agent} takes Box, Discrete, MultiDiscrete and MultiBinary observations, and Dict "
            f"and Tuple of these, not {space}; flatten others with "
            "gymnasium.wrappers.FlattenObservation"
        )


def uncounted(space: gym.Space[Any], array: NDArray[Any]) -> NDArray[np.intp]:
    """Indices of the rows of ``array`` that hold a number which ``space`` does not count.

    There are none but for Discrete and MultiDiscrete.
    """
    if isinstance(space, spaces.Discrete):
        first, n = space.start, space.n
    elif isinstance(space, spaces.MultiDiscrete):
        first, n = space.start, space.nvec
    else:
        return np.zeros(0, np.intp)
    wrong = (array < first) | (array >= first + n) | (array != np.floor(array))
    return np.flatnonzero(wrong.reshape(len(array), -1).any(-1))


def is_image(space: gym.Space[Any]) -> bool:
    """Whether observations are uint8 pictures with 1, 3 or 4 channels first or last, or stacks."""
    return (
        isinstance(space, spaces.Box)
        and space.dtype == np.uint8
        and len(space.shape) == 3
        and bool((space.low == 0).all() and (space.high == 255).all())
    )


def parts(space: gym.Space[Any]) -> dict[str, gym.Space[Any]]:
    """The spaces in a Dict or Tuple, by name."""
    if isinstance(space, spaces.Dict):
        return dict(space.spaces)
    assert isinstance(space, spaces.Tuple)
    return {str(i): part for i, part in enumerate(space.spaces)}


def each(function: Callable[..., Any], *observations: Any) -> Any:
    """``function`` of the leaves of observations of one structure; tuples become dicts."""
    first = observations[0]
    if isinstance(first, tuple):
        keyed = ({str(i): part for i, part in enumerate(nest)} for nest in observations)
        return each(function, *keyed)
    if isinstance(first, Mapping):
        return {key: each(function, *(nest[key] for nest in observations)) for key in first}
    return function(*observations)


def owned(array: Any) -> NDArray[Any]:
    """A copy of ``array`` that :func:`torch.as_tensor` shares, whatever its strides were.

    It lies in torch's memory, since results of networks depend in their last bits on how an array
    is aligned: numpy's memory is aligned by chance.
    """
    array = np.asarray(array)
    if array.dtype.kind not in "biuf":
        return np.array(array)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    # What torch cannot look at as it is, flipped or read-only, is copied for it.
    shown = np.require(array, requirements=("C", "W"))
    own: NDArray[Any] = torch.from_numpy(shown).clone().numpy()
    return own


def describe(space: gym.Space[Any]) -> dict[str, Any]:
    """Numbers and tensors from which :func:`restore` makes an equal space."""
    if isinstance(space, _NESTED):
        described = {name: describe(part) for name, part in parts(space).items()}
        return {"kind": type(space).__name__, "parts": described}
    if isinstance(space, spaces.Discrete):
        return {"kind": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {
            "kind": "MultiDiscrete",
            "nvec": torch.from_numpy(space.nvec.copy()),
            "start": torch.from_numpy(space.start.copy()),
        }
    if isinstance(space, spaces.MultiBinary):
        # gymnasium tells MultiBinary(2) and MultiBinary([2]) apart.
        n = int(space.n) if isinstance(space.n, (int, np.integer)) else list(space.shape)
        return {"kind": "MultiBinary", "n": n}
    if isinstance(space, spaces.Box):
        return {
            "kind": "Box",
            "low": torch.from_numpy(space.low.copy()),
            "high": torch.from_numpy(space.high.copy()),
            "dtype": np.dtype(space.dtype).name,
        }
    raise UnsupportedError(f"space {space} cannot be saved")


def restore(description: dict[str, Any]) -> gym.Space[Any]:
    """The space that :func:`describe` was given."""
    kind = description["kind"]
    if kind in ("Dict", "Tuple"):
        restored = {name: restore(part) for name, part in description["parts"].items()}
        return spaces.Dict(restored) if kind == "Dict" else spaces.Tuple(list(restored.values()))
    if kind == "Discrete":
        return spaces.Discrete(description["n"], start=description["start"])
    if kind == "MultiDiscrete":
        nvec, start = description["nvec"].numpy(), description["start"].numpy()
        return spaces.MultiDiscrete(nvec, start=start)
    if kind == "MultiBinary":
        return spaces.MultiBinary(description["n"])
    if kind == "Box":
        low, high = description["low"].numpy(), description["high"].numpy()
        return spaces.Box(low, high, dtype=np.dtype(description["dtype"]).type)
    raise UnsupportedError(f"space of kind {kind!r} is not known")
