"""Environments in processes: whoever dies is named, and nobody is waited for in vain."""

from __future__ import annotations

import os
import signal
import threading
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


class Slow(Counting):
    """The second of two takes its time, so that the first has answered long before."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.seconds = 0.7 if seed % 2 else 0.0
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        time.sleep(self.seconds)
        return super().step(action)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # Forking with threads about, and gymnasium's own log of what failed.
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def interrupt() -> Iterator[threading.Timer]:
    """Ctrl-C for this process alone, as a notebook sends it, in 0.3 seconds from ``start``."""
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    yield timer
    timer.cancel()


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


def test_an_interrupted_step_is_neither_waited_for_nor_kept(interrupt: threading.Timer) -> None:
    env = make_environment(Slow, 2, vectorization="async")
    env.reset(seed=0)
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        env.step(STILL)
    began = time.monotonic()
    env.close()
    assert time.monotonic() - began < 0.3
    assert env.reset(seed=0).tolist() == [[0.0], [0.0]]
    assert env.step(STILL).observation.tolist() == [[1.0], [1.0]]
    env.close()


def test_a_step_that_nobody_waited_for_ends_with_the_episode() -> None:
    env = make_environment(Slow, 2, vectorization="async")
    env.reset(seed=0)
    env.step_async(STILL)
    with pytest.raises(ConfigurationError, match="has begun a step already"):
        env.step_async(STILL)
    assert env.reset(seed=0).tolist() == [[0.0], [0.0]]
    assert env.step(STILL).observation.tolist() == [[1.0], [1.0]]
    env.step_async(STILL)
    began = time.monotonic()
    env.close()
    assert time.monotonic() - began < 0.5


def test_learning_goes_on_after_an_interruption(interrupt: threading.Timer) -> None:
    agent = DQN(Slow, n_envs=2, vectorization="async", learning_starts=1000)
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        agent.learn(1000)
    assert agent.learn(4).num_timesteps >= 4
    assert agent.env is not None
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
