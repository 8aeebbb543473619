"""After a step that failed, or episodes that somebody else played on, new episodes begin."""

from __future__ import annotations

from typing import Any

import pytest

import koila_rl
from koila_rl.agents.dqn import DQN
from koila_rl.agents.ppo import PPO
from koila_rl.agents.recurrent_ppo import RecurrentPPO
from koila_rl.errors import EnvironmentFailedError
from tests.environments import Counting

ROLLOUT: dict[str, Any] = {"n_steps": 4, "batch_size": 4, "n_epochs": 1}


class Once(Counting):
    """Fails at its sixth step, the second of an episode, and only there."""

    steps = 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 6:
            raise RuntimeError("once")
        return super().step(action)


def dqn(env: Any, **settings: Any) -> DQN:
    return DQN(env, learning_starts=1000, n_steps=3, gamma=1.0, **settings)


def check_replay(agent: DQN) -> None:
    """Observations count the steps of an episode: none is left out, no window bridges two."""
    assert agent.replay is not None
    for row in agent.replay:
        steps = float(row["next", "observation"][0] - row["observation"][0])
        assert steps == float(row["next", "reward"])
        assert 1.0 <= steps <= 3.0


@pytest.mark.parametrize("update", ["blocking", "interleaved"])
def test_no_transition_bridges_a_step_that_failed(update: str) -> None:
    agent = dqn(lambda: Once(4), update=update, train_freq=1)
    with pytest.raises(EnvironmentFailedError, match="once"):
        agent.learn(100)
    agent.learn(agent.num_timesteps + 3)
    check_replay(agent)
    # The observation of step 5 was the last before the failure; then a new episode began.
    assert agent.replay is not None
    assert [float(row["observation"][0]) for row in agent.replay] == [0, 1, 2, 3, 0, 0, 1, 2]


def test_a_memory_starts_anew_after_a_step_that_failed() -> None:
    agent = RecurrentPPO(lambda: Once(4), hidden_size=4, **ROLLOUT)
    with pytest.raises(EnvironmentFailedError, match="once"):
        agent.learn(100)
    assert agent.env is not None
    rollout = agent._rollouts(1)[0]
    agent.collect_rollout(agent.env, rollout)
    assert bool(rollout.data["start"][0].all())


def test_evaluating_on_the_own_environment_begins_new_episodes() -> None:
    env = Counting(5)
    agent = dqn(env)
    agent.learn(3)
    assert koila_rl.evaluate(agent, env, 2).returns == (5.0, 5.0)
    agent.learn(8)
    check_replay(agent)


def test_evaluating_elsewhere_goes_on_with_the_episode() -> None:
    agent = PPO(lambda: Counting(6), **ROLLOUT)
    agent.learn(4)
    koila_rl.evaluate(agent, lambda: Counting(6), 2)
    assert agent.env is not None
    assert float(agent._first_observation(agent.env)[0, 0]) == 4.0
