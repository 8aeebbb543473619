"""Every autoreset mode means the same; what cannot be read is refused."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from koila_rl.envs import VectorEnvironment, make_environment
from koila_rl.errors import ConfigurationError, UnsupportedError
from tests.environments import Counting, vector


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
