"""Every autoreset mode means the same; what cannot be read is refused."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from koila_rl.envs import VectorEnvironment, make_environment
from koila_rl.errors import ConfigurationError, EnvironmentFailedError, UnsupportedError
from tests.environments import Counting, Nested, vector


def transitions(env: VectorEnvironment, steps: int) -> list[tuple[float, float, bool, bool]]:
    """(from, to, terminated, truncated) of environment 0, reset rows left out."""
    observation = env.reset(seed=0)
    rows = []
    for _ in range(steps):
        step = env.step(np.zeros(env.n_envs, dtype=np.int64))
        if not step.reset[0]:
            rows.append(
                (
                    float(observation[0, 0]),
                    float(step.next_observation[0, 0]),
                    bool(step.terminated[0]),
                    bool(step.truncated[0]),
                )
            )
        observation = step.observation
    return rows


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_every_mode_gives_the_same_transitions(mode: AutoresetMode, truncate: bool) -> None:
    env = VectorEnvironment(vector(lambda: Counting(3, truncate), 2, mode))
    one = [(0.0, 1.0, False, False), (1.0, 2.0, False, False)]
    last = (2.0, 3.0, not truncate, truncate)
    # NEXT_STEP spends its fourth step on the reset, which is no transition.
    steps = 5 if mode is AutoresetMode.NEXT_STEP else 4
    assert transitions(env, steps) == [*one, last, one[0]]


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_episode_statistics(mode: AutoresetMode) -> None:
    env = VectorEnvironment(vector(lambda: Counting(3), 2, mode))
    env.reset(seed=0)
    episodes = [e for _ in range(8) for e in env.step(np.zeros(2, dtype=np.int64)).episodes]
    assert len(episodes) == 4
    assert {(e.total_reward, e.length) for e in episodes} == {(3.0, 3)}


def test_next_observation_survives_the_step_after() -> None:
    env = VectorEnvironment(vector(lambda: Counting(3), 1, AutoresetMode.SAME_STEP))
    env.reset()
    steps = [env.step(np.zeros(1, dtype=np.int64)) for _ in range(4)]
    assert [float(s.next_observation[0, 0]) for s in steps] == [1.0, 2.0, 3.0, 1.0]
    assert [float(s.observation[0, 0]) for s in steps] == [1.0, 2.0, 0.0, 1.0]


def test_unknown_autoreset_mode_is_refused() -> None:
    env = vector(Counting, 1, AutoresetMode.SAME_STEP)
    env.metadata = {"autoreset_mode": "whenever"}
    with pytest.raises(UnsupportedError, match="'whenever'"):
        VectorEnvironment(env)


def test_same_step_without_final_observation_is_refused() -> None:
    env = vector(lambda: Counting(end=1), 1, AutoresetMode.NEXT_STEP)
    env.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
    wrapped = VectorEnvironment(env)
    wrapped.reset()
    with pytest.raises(UnsupportedError, match="final_obs"):
        wrapped.step(np.zeros(1, dtype=np.int64))


def test_own_vector_form_is_used_and_others_are_asked_for_same_step() -> None:
    assert make_environment("CartPole-v1", 2).mode is AutoresetMode.NEXT_STEP
    assert make_environment("Pendulum-v1", 2).mode is AutoresetMode.SAME_STEP


def test_environment_object_factory_and_vector_environment() -> None:
    assert make_environment(Counting()).n_envs == 1
    assert make_environment(Counting, 3).n_envs == 3
    assert make_environment(vector(Counting, 2, AutoresetMode.NEXT_STEP)).n_envs == 2


@pytest.mark.parametrize(
    ("env", "n_envs", "message"),
    [
        ("CartPol-v1", 1, "unknown environment 'CartPol-v1'; did you mean CartPole-v1"),
        ("cartpole", 1, "CartPole-v1"),
        ("CartPole-v1", 0, "n_envs is 0"),
        (Counting(), 2, "pass a function that makes the environment"),
        (vector(Counting, 2, AutoresetMode.NEXT_STEP), 3, "the vector environment has 2"),
        (7, 1, "env is 7"),
    ],
)
def test_bad_arguments(env: object, n_envs: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_environment(env, n_envs)  # type: ignore[arg-type]


def test_a_function_that_makes_the_same_object_again_is_refused() -> None:
    env = Counting()
    assert make_environment(lambda: env, 1).n_envs == 1
    with pytest.raises(ConfigurationError, match=r"same object again.*make a new one in each call"):
        make_environment(lambda: env, 2)


class Unresettable(Counting):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.count:
            raise ValueError("the key is lost")
        return super().reset(seed=seed)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_reset_that_fails_is_named_in_every_mode(mode: AutoresetMode) -> None:
    env = VectorEnvironment(vector(lambda: Unresettable(1), 1, mode))
    env.reset()
    with pytest.raises(EnvironmentFailedError, match=r"failed at .*ValueError: the key is lost"):
        [env.step(np.zeros(1, np.int64)) for _ in range(2)]
    with pytest.raises(EnvironmentFailedError, match="failed at reset: ValueError: the key is lo"):
        env.reset()


def test_closing_does_not_hide_an_error_on_its_way() -> None:
    class Unclosable(Counting):
        def close(self) -> None:
            raise OSError("no")

    env = make_environment(Unclosable, 1)

    def fail() -> None:
        try:
            raise KeyError("first")
        finally:
            env.close()

    with pytest.raises(KeyError, match="first"):
        fail()
    with pytest.raises(EnvironmentFailedError, match="failed at close: OSError: no"):
        env.close()
    env.env.closed = True


def test_keywords_reach_the_environment_and_wrong_ones_are_named() -> None:
    env = make_environment("Pendulum-v1", 1, {"g": 5.0}).env
    assert env.get_attr("g") == (5.0,)  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match="gravitas"):
        make_environment("Pendulum-v1", 1, {"gravitas": 5.0})
    with pytest.raises(ConfigurationError, match="env_kwargs"):
        make_environment(Counting, 1, {"end": 2})


def test_spaces_are_those_of_one_environment() -> None:
    env = make_environment("CartPole-v1", 4)
    assert env.action_space == gym.spaces.Discrete(2)
    assert env.observation_space.shape == (4,)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_nested_observations_in_every_mode(mode: AutoresetMode) -> None:
    env = VectorEnvironment(vector(lambda: Nested(3), 2, mode))
    before = env.reset(seed=0)
    assert before["rest"].keys() == {"0", "1"}
    finals = []
    for _ in range(12):
        step = env.step(np.zeros(2, dtype=np.int64))
        if step.truncated.any():
            finals.append(step.next_observation["rest"]["1"][0].tolist())
            ended = step
        elif not step.reset.any():
            same = step.next_observation["picture"] == step.observation["picture"]
            assert bool(same.all())
    assert len(finals) >= 3
    # What the episode ended with is not what the next begins with.
    if mode is not AutoresetMode.NEXT_STEP:
        assert finals[-1] != ended.observation["rest"]["1"][0].tolist()
    assert ended.next_observation["picture"].dtype == np.uint8
    assert ended.next_observation["picture"].shape == (2, 3, 8, 8)


class Failing(Counting):
    def step(self, action: Any) -> Any:
        if self.count == 1 and action == 1:
            raise ValueError("the motor is on fire")
        return super().step(action)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_failing_environment_is_named_with_its_last_action(vectorization: str) -> None:
    with warnings.catch_warnings():
        # Forking with threads about, and gymnasium's own log of what failed.
        warnings.simplefilter("ignore")
        env = make_environment(Failing, 2, vectorization=vectorization)
        env.reset(seed=0)
        env.step(np.array([1, 1]))
        text = r"environment 1 \(.*Failing.*\) failed at action 1: ValueError: the motor is on fire"
        with pytest.raises(EnvironmentFailedError, match=text):
            env.step(np.array([0, 1]))
        env.close()


def test_async_gives_the_same_as_sync() -> None:
    found = []
    for vectorization in ("sync", "async"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            env = make_environment("Acrobot-v1", 2, vectorization=vectorization)
        env.reset(seed=3)
        found.append([env.step(np.array([0, 2])).observation for _ in range(5)])
        env.close()
    np.testing.assert_array_equal(found[0], found[1])
    with pytest.raises(ConfigurationError, match="'threads' but must be sync or async"):
        make_environment("Acrobot-v1", 2, vectorization="threads")


def test_a_vector_environment_that_fails_is_named() -> None:
    env = make_environment("CartPole-v1", 2)
    env.reset(seed=0)
    with pytest.raises(EnvironmentFailedError, match=r"CartPole.* failed at the actions \[7, 0\]"):
        env.step(np.array([7, 0]))


def test_a_step_in_two_halves() -> None:
    whole, halves = (
        VectorEnvironment(vector(Counting, 2, AutoresetMode.SAME_STEP)) for _ in range(2)
    )
    for env in (whole, halves):
        env.reset(seed=0)
    for _ in range(4):
        halves.step_async(np.zeros(2, np.int64))
        mine, theirs = halves.step_wait(), whole.step(np.zeros(2, np.int64))
        np.testing.assert_array_equal(mine.observation, theirs.observation)
        assert mine.episodes == theirs.episodes
    with pytest.raises(ConfigurationError, match="step_async"):
        halves.step_wait()
    assert not halves.asynchronous
