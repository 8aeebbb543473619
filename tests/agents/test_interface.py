"""What callbacks may answer, and what learning asks of its arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import koila_rl
from koila_rl.agents import DQN, PPO
from koila_rl.agents.base import BaseAgent
from koila_rl.agents.interface import says_stop
from koila_rl.errors import ConfigurationError
from tests.environments import Counting

QUICK: dict[type[BaseAgent], dict[str, Any]] = {
    PPO: {"n_steps": 8, "batch_size": 8, "n_epochs": 1},
    DQN: {"learning_starts": 4, "batch_size": 4, "report_interval": 8},
}
FALSE = [False, np.False_, torch.tensor(False)]
OTHERS = [None, True, 0, 0.0, "", np.zeros(2, bool), np.int64(0), torch.zeros(2).bool()]


def test_only_false_says_stop() -> None:
    assert [says_stop(answer) for answer in FALSE] == [True, True, True]
    assert not any(says_stop(answer) for answer in OTHERS)


@pytest.mark.parametrize("kind", [PPO, DQN])
@pytest.mark.parametrize(("answer", "steps"), [(0, 32), (np.zeros(2), 32), (np.False_, 8)])
def test_learn_and_train_agree_on_what_ends_learning(
    kind: type[BaseAgent], answer: object, steps: int, tmp_path: Path
) -> None:
    def callback(state: object) -> Any:
        return answer

    agent = kind(Counting, **QUICK[kind])
    agent.learn(32, callback)
    settings = {"run_dir": tmp_path / "a", "progress": False, "callbacks": [callback]}
    result = koila_rl.train(Counting, kind.name, 32, **settings, **QUICK[kind])
    assert [agent.num_timesteps, result.agent.num_timesteps] == [steps, steps]


@pytest.mark.parametrize("kind", [PPO, DQN])
def test_learn_takes_whole_numbers(kind: type[BaseAgent]) -> None:
    agent = kind(Counting, **QUICK[kind])
    with pytest.raises(ConfigurationError, match=r"total_timesteps is '100' \(str\)"):
        agent.learn("100")  # type: ignore[arg-type]
    agent.learn(np.int64(8))  # type: ignore[arg-type]
    assert agent.num_timesteps == 8


@pytest.mark.parametrize("kind", [PPO, DQN])
def test_seeds_are_whole_numbers(kind: type[BaseAgent]) -> None:
    found = [kind(Counting, seed=seed, **QUICK[kind]) for seed in (3, np.int64(3))]  # type: ignore[arg-type]
    assert [type(agent.seed) for agent in found] == [int, int]
    first, second = (agent.network.state_dict() for agent in found)
    assert all(torch.equal(first[name], second[name]) for name in first)
    for seed in ("a", -1, None):
        with pytest.raises(ConfigurationError, match=f"seed is {seed!r}"):
            kind(Counting, seed=seed, **QUICK[kind])  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="n_envs is '2'"):
        kind(Counting, n_envs="2", **QUICK[kind])  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="episodes is '5'"):
        found[0].evaluate(Counting, episodes="5")  # type: ignore[arg-type]
