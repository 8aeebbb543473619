"""What environments hand over outlives them, and what cannot be learned from is named."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from koila_rl.agents.dqn import DQN
from koila_rl.agents.ppo import PPO
from koila_rl.envs import VectorEnvironment, make_environment
from koila_rl.errors import EnvironmentFailedError
from koila_rl.spaces import owned
from tests.environments import Counting, Identity, Nested

NAN, INFINITY = float("nan"), float("inf")
STILL = np.zeros(2, np.int64)
DQN_SETTINGS: dict[str, Any] = {"learning_starts": 4, "batch_size": 4, "buffer_size": 100}
PPO_SETTINGS: dict[str, Any] = {"n_steps": 8, "batch_size": 8, "n_epochs": 1}


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_step_survives_where_arrays_are_used_again(mode: AutoresetMode) -> None:
    env = VectorEnvironment(
        SyncVectorEnv([lambda: Counting(3, True)] * 2, autoreset_mode=mode, copy=False)
    )
    first = env.reset()
    steps = [env.step(STILL) for _ in range(3)]
    assert float(first[0, 0]) == 0.0
    assert [float(step.next_observation[0, 0]) for step in steps] == [1.0, 2.0, 3.0]
    restarted = 3.0 if mode is AutoresetMode.NEXT_STEP else 0.0
    assert [float(step.observation[0, 0]) for step in steps] == [1.0, 2.0, restarted]


class Reusing(VectorEnv[Any, Any, Any]):
    """Two environments that count on, in arrays of their own that they hand out every time."""

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012
    num_envs = 2
    single_observation_space = gym.spaces.Box(-1e6, 1e6, (3,), np.float32)
    single_action_space = gym.spaces.Discrete(2)
    observation_space = gym.vector.utils.batch_space(single_observation_space, 2)
    action_space = gym.vector.utils.batch_space(single_action_space, 2)
    shape: tuple[int, ...] = (2, 3)
    reward_shape: tuple[int, ...] = (2,)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.observation = np.zeros(self.shape, np.float32)
        self.reward = np.zeros(self.reward_shape, np.float32)
        self.ends = np.zeros(2, bool), np.zeros(2, bool)
        return self.observation, {}

    def step(self, actions: Any) -> Any:
        self.observation += 1.0
        self.reward += 1.0
        return self.observation, self.reward, *self.ends, {}


def test_rewards_survive_too() -> None:
    env = VectorEnvironment(Reusing())
    env.reset()
    steps = [env.step(STILL) for _ in range(3)]
    assert [step.reward.tolist() for step in steps] == [[1.0] * 2, [2.0] * 2, [3.0] * 2]


def test_what_is_owned_is_shared_with_torch_and_aligned() -> None:
    for given in (
        np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::-1],
        np.arange(3, dtype=">i4"),
        np.float64(3.0),
        np.frombuffer(b"abcd", np.uint8),
    ):
        own = owned(given)
        np.testing.assert_array_equal(own, given)
        assert own.shape == np.shape(given)
        shared = torch.as_tensor(own)
        assert shared.data_ptr() == own.ctypes.data
        assert shared.data_ptr() % 64 == 0
    assert owned(np.array(["a"])).tolist() == ["a"]


def test_observations_are_copied_once() -> None:
    agent = PPO(Reusing(), **PPO_SETTINGS)
    assert agent.env is not None
    observation = agent.env.reset()
    assert agent.interface.tensor(observation).data_ptr() == observation.ctypes.data


class Spoilt(Counting):
    """The fifth step and later ones return another observation or reward."""

    steps = 0

    def __init__(self, observation: Any = 1.0, reward: Any = 1.0, end: int = 3) -> None:
        super().__init__(end)
        self.spoilt, self.reward = observation, reward

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        self.steps += 1
        if self.steps < 5:
            return observation, reward, *rest
        return np.full(1, self.spoilt, np.float32), self.reward, *rest


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"observation": NAN}, r"observation \[nan\], which is not finite"),
        ({"observation": INFINITY}, r"observation \[inf\], which is not finite"),
        # The fifth step is the last one of an episode: the final observation.
        ({"observation": NAN, "end": 5}, r"observation \[nan\], which is not finite"),
        ({"reward": NAN}, "reward nan, which is not finite"),
        ({"reward": -INFINITY}, "reward -inf, which is not finite"),
        ({"reward": None}, "reward nan, which is not finite"),
    ],
)
@pytest.mark.parametrize("kind", [PPO, DQN])
def test_nothing_is_learned_from_what_is_not_finite(
    kind: type[PPO | DQN], settings: dict[str, Any], message: str
) -> None:
    agent = kind(lambda: Spoilt(**settings), **(PPO_SETTINGS if kind is PPO else DQN_SETTINGS))
    with pytest.raises(
        EnvironmentFailedError, match=f"environment 0 .*returned at action.*{message}"
    ):
        agent.learn(100)
    assert all(bool(p.isfinite().all()) for p in agent.network.parameters())


def test_a_number_that_the_space_does_not_count_is_named() -> None:
    class Outside(Identity):
        def step(self, action: Any) -> Any:
            _, *rest = super().step(action)
            return 7, *rest

    env = make_environment(lambda: Outside(gym.spaces.Discrete(3, start=2)), 2)
    env.reset()
    with pytest.raises(EnvironmentFailedError, match=r"0 .*observation 7, not of Discrete\(3, st"):
        env.step(np.array([2, 2]))


def test_the_environment_and_the_part_that_are_not_finite_are_named() -> None:
    class Broken(Nested):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            state, info = super().reset(seed=seed)
            rest = state["rest"][0], np.array([0.0, NAN], np.float32)
            return {**state, "rest": rest if seed == 4 else state["rest"]}, info

    env = make_environment(Broken, 2)
    text = (
        r"environment 1 .* at reset observation\['rest'\]\['1'\] \[0.0, nan\], which is not finite"
    )
    with pytest.raises(EnvironmentFailedError, match=text):
        env.reset(seed=3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shape": (2, 5)}, r"at reset observation of shape \(2, 5\), not \(2, 3\)"),
        ({"reward_shape": (2, 1)}, r"at the actions \[0, 0\] reward of shape \(2, 1\), not \(2,\)"),
        ({"single_observation_space": Nested.observation_space}, "observation of ndarray; its"),
    ],
)
def test_other_shapes_than_announced_are_named(settings: dict[str, Any], message: str) -> None:
    env = Reusing()
    vars(env).update(settings)

    def play() -> None:
        wrapped = VectorEnvironment(env)
        wrapped.reset()
        wrapped.step(STILL)

    with pytest.raises(EnvironmentFailedError, match=message):
        play()


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_one_environment_of_another_shape_is_named(vectorization: str) -> None:
    class Other(Nested):
        def step(self, action: Any) -> Any:
            state, *rest = super().step(action)
            one = state["rest"][0], state["rest"][1][:1]
            return {**state, "rest": one if action else state["rest"]}, *rest

    with warnings.catch_warnings():
        # Forking with threads about, and gymnasium's own log of what failed.
        warnings.simplefilter("ignore")
        env = make_environment(Other, 2, vectorization=vectorization)
        env.reset()
        text = r"environment 1 .* at action 1: ValueError: observation of shape \(1,\), not \(2,\)"
        with pytest.raises(EnvironmentFailedError, match=text):
            env.step(np.array([0, 1]))
        env.close()
