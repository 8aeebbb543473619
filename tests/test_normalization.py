"""Running statistics against those of everything seen, in every autoreset mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import koila_rl
from koila_rl.agents.ppo import PPO
from koila_rl.envs import VectorEnvironment
from koila_rl.errors import UnsupportedError
from koila_rl.normalization import NormalizedEnvironment, Normalizer
from tests.environments import Counting, Nested, vector


class InDict(Counting):
    """Its observations under a name, beside a picture."""

    observation_space = gym.spaces.Dict(  # type: ignore[assignment]
        {
            "count": Counting.observation_space,
            "picture": gym.spaces.Box(0, 255, (3, 8, 8), np.uint8),
        }
    )

    def _named(self, count: Any) -> Any:
        return {"count": count, "picture": np.zeros((3, 8, 8), np.uint8)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        count, info = super().reset(seed=seed)
        return self._named(count), info

    def step(self, action: Any) -> Any:
        count, *rest = super().step(action)
        return self._named(count), *rest


BOX = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)


def test_observations_have_mean_zero_and_deviation_one() -> None:
    normalizer = Normalizer(BOX, observations=True, rewards=False, gamma=0.99)
    rows = np.random.default_rng(0).normal([5.0, -1.0, 0.0], [2.0, 0.1, 30.0], (50, 40, 3))
    for row in rows:
        normalizer.see(row)
    scaled = normalizer.observation(rows.reshape(-1, 3))
    assert scaled.dtype == np.float32
    np.testing.assert_allclose(scaled.mean(0), 0.0, atol=1e-3)
    np.testing.assert_allclose(scaled.std(0), 1.0, atol=1e-3)
    assert normalizer.observation(np.full((1, 3), 1e9)).max() == 10.0


def test_rewards_are_divided_by_the_deviation_of_returns() -> None:
    normalizer = Normalizer(BOX, observations=False, rewards=True, gamma=0.5)
    running, returns = np.zeros(2), [np.zeros(2)]
    rewards = np.random.default_rng(0).normal(3.0, 2.0, (200, 2)).astype(np.float32)
    for reward in rewards:
        scaled = normalizer.reward(reward, running, np.ones(2, bool))
        returns.append(0.5 * returns[-1] + reward)
    deviation = np.concatenate(returns[1:]).std()
    np.testing.assert_allclose(scaled, rewards[-1] / deviation, rtol=1e-3)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_every_mode_gives_the_same_transitions(mode: AutoresetMode) -> None:
    normalizer = Normalizer(Counting.observation_space, observations=True, rewards=True, gamma=0.9)
    env = NormalizedEnvironment(VectorEnvironment(vector(Counting, 2, mode)), normalizer)
    env.reset(seed=0)
    episodes, lasts = [], []
    for _ in range(60):
        step = env.step(np.zeros(2, np.int64))
        episodes += step.episodes
        if step.terminated.any():
            lasts.append(step.next_observation[0, 0])
            # The last observation of an episode is larger than any first one.
            assert step.next_observation[0, 0] > 1.0
    assert {(e.total_reward, e.length) for e in episodes} == {(3.0, 3)}


def seen(mode: AutoresetMode, make: Any = Counting) -> list[tuple[float, float, float]]:
    """Means, variances and counts after three whole episodes of ``mode``."""
    normalizer = Normalizer(make().observation_space, observations=True, rewards=True, gamma=0.9)
    env = NormalizedEnvironment(VectorEnvironment(vector(make, 1, mode)), normalizer)
    env.reset(seed=0)
    ends = 0
    while ends < 3:
        ends += len(env.step(np.zeros(1, np.int64)).episodes)
    if mode is AutoresetMode.NEXT_STEP:
        # The others have seen the first observation of the fourth episode.
        env.step(np.zeros(1, np.int64))
    return [tuple(float(np.mean(x)) for x in s) for s in normalizer.state()["statistics"]]


@pytest.mark.parametrize("make", [Counting, lambda: InDict()], ids=["Box", "Dict"])
def test_statistics_are_the_same_in_every_mode(make: Any) -> None:
    observations, returns = seen(AutoresetMode.NEXT_STEP, make)
    # 0, 1, 2, 3 of three episodes, and the 0 of the fourth.
    assert observations == pytest.approx((18 / 13, 42 / 13 - (18 / 13) ** 2, 13), rel=1e-3)
    assert returns == pytest.approx((1.87, 0.4878, 9), rel=1e-3)
    for mode in (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED):
        np.testing.assert_allclose(seen(mode, make), [observations, returns], rtol=1e-6)


def test_statistics_are_saved_with_the_agent_and_kept_while_acting(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"n_steps": 16, "batch_size": 16, "n_epochs": 1}
    agent = PPO("CartPole-v1", normalize_observation=True, normalize_reward=True, **settings)
    agent.learn(64)
    observations = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    first = agent.network.distribution(
        agent.interface.tensor(agent.normalizer.observation(observations))  # type: ignore[union-attr]
    )
    agent.save(tmp_path / "agent.pt")
    again = koila_rl.load(tmp_path / "agent.pt")
    assert again.normalizer is not None
    assert agent.normalizer is not None
    np.testing.assert_array_equal(
        again.act(observations, deterministic=True), first.mode.cpu().numpy()
    )
    before, after = agent.normalizer.state(), again.normalizer.state()
    np.testing.assert_equal(after, before)


def test_parts_of_nested_observations() -> None:
    normalizer = Normalizer(Nested.observation_space, observations=True, rewards=False, gamma=0.99)
    space = Nested.observation_space
    space.seed(0)
    stacked = gym.vector.utils.concatenate(
        space, [space.sample() for _ in range(50)], gym.vector.utils.create_empty_array(space, 50)
    )
    normalizer.see(stacked)
    found = normalizer.observation(stacked)
    assert found["picture"].dtype == np.uint8
    np.testing.assert_array_equal(found["number"], stacked["number"])
    np.testing.assert_allclose(found["rest"]["1"].mean(0), 0.0, atol=1e-3)


def test_nothing_to_normalise_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no Box of numbers in Discrete"):
        Normalizer(gym.spaces.Discrete(3), observations=True, rewards=False, gamma=0.9)
