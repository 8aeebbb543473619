"""Callbacks: what they do, when, and what they leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.vector import AutoresetMode

import koila_rl
from koila_rl.agents.dqn import DQN
from koila_rl.callbacks import Checkpoints, Evaluations, StopAtReward
from koila_rl.errors import ConfigurationError
from tests.environments import Counting, vector

QUICK: dict[str, Any] = {"n_steps": 16, "batch_size": 16, "n_epochs": 1, "progress": False}


def train(tmp_path: Path, callback: Any, steps: int = 96) -> koila_rl.TrainResult:
    return koila_rl.train(
        Counting, total_timesteps=steps, run_dir=tmp_path / "run", callbacks=[callback], **QUICK
    )


def test_checkpoints_are_saved_every_so_often_and_the_newest_kept(tmp_path: Path) -> None:
    train(tmp_path, Checkpoints(tmp_path / "kept", every=32, keep=2))
    names = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert names == ["agent_000000064.pt", "agent_000000096.pt"]
    assert koila_rl.load(tmp_path / "kept" / names[0]).num_timesteps == 64


def test_evaluations_are_in_the_metrics_and_the_best_is_kept(tmp_path: Path) -> None:
    evaluations = Evaluations(Counting, every=40, episodes=3, best=tmp_path / "best.pt")
    train(tmp_path, evaluations)
    assert [step for step, _ in evaluations.history] == [48, 96]
    assert evaluations.history[0][1].returns == (3.0, 3.0, 3.0)
    # The second is no better than the first.
    assert koila_rl.load(tmp_path / "best.pt").num_timesteps == 48
    rows = (tmp_path / "run" / "metrics.csv").read_text().split()
    assert "eval/mean_return" in rows[0]
    assert ",3.0," in rows[3]


@pytest.mark.parametrize("wrapped", [False, True])
def test_evaluations_on_the_environment_that_is_learned_on_are_refused(wrapped: bool) -> None:
    env = Counting(50)
    agent = DQN(env, learning_starts=1000, report_interval=8)
    own = gym.wrappers.TimeLimit(env, 9) if wrapped else env
    with pytest.raises(ConfigurationError, match="which the agent learns on, and cut its"):
        agent.learn(100, Evaluations(own, every=50, episodes=1))
    # At once, and not at the first evaluation.
    assert agent.num_timesteps < 50
    with pytest.raises(ConfigurationError, match="which the agent learns on"):
        agent.learn(200, Evaluations(lambda: own, every=1, episodes=1))
    agent.learn(agent.num_timesteps + 8, Evaluations(Counting(3), every=1, episodes=1))


def test_evaluations_on_a_vector_environment_that_is_learned_on_are_refused() -> None:
    env = vector(Counting, 2, AutoresetMode.NEXT_STEP)
    agent = DQN(env, learning_starts=1000, report_interval=8)
    for own in (env, env.envs[1]):
        with pytest.raises(ConfigurationError, match="which the agent learns on"):
            agent.learn(agent.num_timesteps + 100, Evaluations(own, every=8, episodes=1))


def test_evaluations_stop_at_a_return(tmp_path: Path) -> None:
    result = train(tmp_path, Evaluations(Counting, every=16, episodes=1, stop_at=3.0), 1000)
    assert result.agent.num_timesteps == 16


def test_stop_at_reward(tmp_path: Path) -> None:
    result = train(tmp_path, StopAtReward(3.0, episodes=8), 1000)
    assert result.agent.num_timesteps == 32
    result = koila_rl.train(
        Counting, total_timesteps=48, run_dir=tmp_path / "b", callbacks=[StopAtReward(3.1, 2)],
        **QUICK,
    )  # fmt: skip
    assert result.agent.num_timesteps == 48


def test_numbers_below_one_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="every is 0"):
        Checkpoints("x", every=0)
    with pytest.raises(ConfigurationError, match="episodes is 0"):
        StopAtReward(1.0, episodes=0)
