"""Environments in processes: whoever dies is named, and nobody is waited for in vain."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from koila_rl.agents.dqn import DQN
from koila_rl.agents.ppo import PPO
from koila_rl.envs import VectorEnvironment, make_environment
from koila_rl.errors import ConfigurationError, EnvironmentFailedError
from tests.environments import Counting

STILL = np.zeros(2, np.int64)


class Mortal(Counting):
    """Action 1 ends its process, as a crash of a simulator or a lack of memory does."""

    def step(self, action: Any) -> Any:
        if action == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class Stuck(Counting):
    """Action 1 takes longer than a test may."""

    def step(self, action: Any) -> Any:
        if action == 1:
            time.sleep(3600)
        return super().step(action)


class Interrupted:
    """A pipe at whose ``number``-th answer somebody presses Ctrl-C."""

    def __init__(self, pipe: Any, number: int) -> None:
        self.pipe, self.left = pipe, number

    def recv(self) -> Any:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return self.pipe.recv()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pipe, name)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # Forking with threads about, and gymnasium's own log of what failed.
        warnings.simplefilter("ignore")
        yield


def interrupt(env: VectorEnvironment, answer: int) -> None:
    """Ctrl-C while the ``answer``-th answer of the second environment is waited for.

    The first has answered by then. A signal would come at any moment, also at one that hides it.
    """
    assert isinstance(env.env, AsyncVectorEnv)
    first, second = env.env.parent_pipes
    env.env.parent_pipes = [first, Interrupted(second, answer)]


def processes(env: VectorEnvironment) -> list[Any]:
    assert isinstance(env.env, AsyncVectorEnv)
    return list(env.env.processes)


def test_a_process_that_dies_is_named_with_its_last_action() -> None:
    env = make_environment(Mortal, 2, vectorization="async")
    env.reset(seed=0)
    text = r"environment 1 \(AsyncVectorEnv.*\) failed at action 1: its process .* by SIGKILL"
    with pytest.raises(EnvironmentFailedError, match=text):
        env.step(np.array([0, 1]))
    # What stopped learning is what its caller sees.
    env.close()
    assert not any(process.is_alive() for process in processes(env))


def test_new_processes_are_started_after_a_failure() -> None:
    env = make_environment(Mortal, 2, vectorization="async")
    env.reset(seed=0)
    with pytest.raises(EnvironmentFailedError):
        env.step(np.array([1, 0]))
    assert env.reset(seed=1).tolist() == [[0.0], [0.0]]
    assert env.step(STILL).observation.tolist() == [[1.0], [1.0]]
    env.close()


def test_processes_of_a_vector_environment_handed_over_are_not() -> None:
    given = AsyncVectorEnv([Mortal, Mortal], autoreset_mode=AutoresetMode.SAME_STEP)
    env = VectorEnvironment(given)
    env.reset(seed=0)
    with pytest.raises(EnvironmentFailedError):
        env.step(np.array([1, 0]))
    with pytest.raises(EnvironmentFailedError, match="make it anew, or hand over a name"):
        env.reset()
    env.close()


@pytest.mark.timeout(60)
def test_an_interrupted_step_is_neither_waited_for_nor_kept() -> None:
    env = make_environment(Stuck, 2, vectorization="async")
    env.reset(seed=0)
    interrupt(env, answer=1)
    with pytest.raises(KeyboardInterrupt):
        env.step(np.array([0, 1]))
    env.close()
    assert not any(process.is_alive() for process in processes(env))
    assert env.reset(seed=0).tolist() == [[0.0], [0.0]]
    assert env.step(STILL).observation.tolist() == [[1.0], [1.0]]
    env.close()


@pytest.mark.timeout(60)
def test_a_step_that_nobody_waited_for_ends_with_the_episode() -> None:
    env = make_environment(Stuck, 2, vectorization="async")
    env.reset(seed=0)
    env.step_async(STILL)
    with pytest.raises(ConfigurationError, match="has begun a step already"):
        env.step_async(STILL)
    assert env.reset(seed=0).tolist() == [[0.0], [0.0]]
    assert env.step(STILL).observation.tolist() == [[1.0], [1.0]]
    env.step_async(np.array([0, 1]))
    env.close()
    assert not any(process.is_alive() for process in processes(env))


def test_learning_goes_on_after_an_interruption() -> None:
    agent = DQN(Counting, n_envs=2, vectorization="async", learning_starts=1000)
    assert agent.env is not None
    # The answer to the reset, then one to each step.
    interrupt(agent.env, answer=5)
    with pytest.raises(KeyboardInterrupt):
        agent.learn(1000)
    # Three whole steps of two environments.
    assert agent.num_timesteps == 6
    assert agent.learn(16).num_timesteps >= 16
    agent.env.close()


def test_an_agent_learns_on_after_a_process_has_died() -> None:
    settings: dict[str, Any] = {"n_steps": 8, "batch_size": 8, "n_epochs": 1}
    agent = PPO(Mortal, n_envs=2, vectorization="async", **settings)
    with pytest.raises(EnvironmentFailedError, match="SIGKILL"):
        agent.learn(100)
    assert agent.num_timesteps < 100
    with pytest.raises(EnvironmentFailedError, match="SIGKILL"):
        agent.learn(100)
    assert agent.env is not None
    agent.env.close()
