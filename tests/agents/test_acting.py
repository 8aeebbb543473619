"""What agents may be asked to act on, and actions in the environment's own terms."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from koila_rl.agents.interface import Interface
from koila_rl.agents.ppo import PPO
from koila_rl.errors import ConfigurationError, UnsupportedError
from koila_rl.spaces import check_spaces
from tests.environments import Counting, Pictures

SMALL: dict[str, Any] = {"n_steps": 8, "batch_size": 8}


def test_acts_on_a_flipped_image() -> None:
    agent = PPO(Pictures, **SMALL)
    image = np.random.default_rng(0).integers(0, 256, (3, 36, 36), dtype=np.uint8)
    flipped = image[:, :, ::-1]
    assert agent.act(flipped, True) == agent.act(np.ascontiguousarray(flipped), True)


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        ("x", "'x' is not of numbers"),
        (None, "None is not of numbers"),
        ([1j], "is not of numbers"),
        ([[1.0], [1.0, 2.0]], "cannot be read"),
        ([float("nan")], "is not finite"),
    ],
)
def test_what_is_no_observation(observation: Any, message: str) -> None:
    for env in (Counting, gym.make("FrozenLake-v1")) if observation == "x" else (Counting,):
        with pytest.raises(ConfigurationError, match=message):
            PPO(env, **SMALL).act(observation)


@pytest.mark.parametrize(
    ("space", "observation"),
    [
        (gym.spaces.Discrete(4, start=2), 1),
        (gym.spaces.Discrete(4, start=2), [3, 6]),
        (gym.spaces.Discrete(4), 1.5),
        (gym.spaces.MultiDiscrete([2, 3]), [1, 3]),
        (gym.spaces.MultiDiscrete([2, 3]), [[0, 0], [-1, 0]]),
    ],
)
def test_a_number_that_the_space_does_not_count(space: Any, observation: Any) -> None:
    interface = Interface(space, gym.spaces.Discrete(2), torch.device("cpu"))
    with pytest.raises(ConfigurationError, match=r"observation .* is not of (Multi)?Discrete"):
        interface.batch(observation)
    counted = np.stack([space.sample() for _ in range(5)])
    np.testing.assert_array_equal(interface.batch(counted)[0], counted)


def test_parts_that_are_not_stacked_alike() -> None:
    space = gym.spaces.Dict({"a": gym.spaces.Box(-1, 1, (2,)), "b": gym.spaces.Box(-1, 1, ())})
    interface = Interface(space, gym.spaces.Discrete(2), torch.device("cpu"))
    with pytest.raises(ConfigurationError, match="but there are a single one, 3 stacked"):
        interface.batch({"a": np.zeros(2), "b": np.zeros(3)})
    with pytest.raises(ConfigurationError, match="but there are 2 stacked, 3 stacked"):
        interface.batch({"a": np.zeros((2, 2)), "b": np.zeros(3)})
    assert interface.batch({"a": np.zeros((0, 2)), "b": np.zeros(0)})[1] is False
    assert interface.batch({"a": np.zeros(2), "b": 0.0})[1] is True


@pytest.mark.parametrize(
    "space",
    [gym.spaces.Dict({}), gym.spaces.Tuple([]), gym.spaces.Dict({0: gym.spaces.Discrete(2)})],
)
def test_nested_spaces_without_parts_or_names(space: Any) -> None:
    with pytest.raises(UnsupportedError, match="of at least one part, with texts for names"):
        check_spaces(space, gym.spaces.Discrete(2), "ppo")


@pytest.mark.parametrize(("low", "high"), [(-3e38, 3e38), (-1.0, 3.0)])
def test_squashed_actions_fill_their_bounds(low: float, high: float) -> None:
    space = gym.spaces.Box(low, high, (1,), np.float32)
    interface = Interface(space, space, torch.device("cpu"), squash=True)
    actions = torch.tensor([[-30.0], [-0.5], [0.0], [0.5], [30.0]])
    found = interface.to_environment(actions)[:, 0].astype(np.float64)
    share = (np.tanh(actions[:, 0].double().numpy()) + 1.0) / 2.0
    np.testing.assert_allclose(found, low + share * (high - low), rtol=1e-6, atol=high * 1e-6)
