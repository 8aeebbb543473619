"""Recurrent PPO: sequences run as they were decided; what is no transition has no weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

import koila_rl
from koila_rl.agents.recurrent_ppo import RecurrentPPO
from koila_rl.errors import ConfigurationError
from tests.environments import Counting, Nested, vector

SMALL: dict[str, Any] = {
    "n_steps": 12, "sequence_length": 5, "batch_size": 20, "n_epochs": 2, "net_arch": (8,),
    "hidden_size": 6,
}  # fmt: skip


def parameters(agent: RecurrentPPO) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in agent.network.parameters()])


def collected(agent: RecurrentPPO) -> koila_rl.RolloutBuffer:
    assert agent.env is not None
    rollout = koila_rl.RolloutBuffer(agent.hyperparameters.n_steps, agent.env.n_envs, seed=0)
    agent.collect_rollout(agent.env, rollout)
    agent.evaluate_rollout(rollout)
    agent.estimate_advantages(rollout)
    return rollout


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("share_trunk", [False, True])
def test_the_first_ratio_is_one(cell: str, share_trunk: bool, mode: AutoresetMode) -> None:
    env = vector(lambda: Counting(4), 3, mode)
    agent = RecurrentPPO(env, cell=cell, share_trunk=share_trunk, **SMALL)
    collected(agent)
    rollout = collected(agent)
    weights = 0.0
    for minibatch in agent.minibatches(rollout):
        with torch.no_grad():
            distribution, value, data, weight = agent.forward(minibatch)
            assert weight is not None
            ratio = (distribution.log_prob(data["action"]) - data["action_log_prob"]).exp()
            apart = (value - data["state_value"]).abs()
        assert float(((ratio - 1.0).abs() * weight).max()) < 1e-6
        assert float((apart * weight).max()) < 1e-6
        weights += float(weight.sum())
    transitions = int((~rollout.data["reset"]).sum())
    assert weights == agent.hyperparameters.n_epochs * transitions


@pytest.mark.parametrize(
    ("n_steps", "length", "batch_size", "minibatches"),
    [(12, 5, 20, 3), (12, 5, 5, 9), (16, 8, 12, 6), (12, None, 25, 2)],
)
def test_an_update_goes_through_all_minibatches(
    n_steps: int, length: int | None, batch_size: int, minibatches: int
) -> None:
    settings = {**SMALL, "n_steps": n_steps, "sequence_length": length, "batch_size": batch_size}
    agent = RecurrentPPO(lambda: Counting(4), n_envs=3, **settings)
    rollout = collected(agent)
    assert agent.minibatches_an_epoch(rollout) == minibatches
    assert len(list(agent.minibatches(rollout))) == 2 * minibatches
    assert agent.update(rollout)["train/n_updates"] == 2 * minibatches


def test_memory_is_emptied_where_an_episode_begins() -> None:
    agent = RecurrentPPO(vector(lambda: Counting(4), 2, AutoresetMode.SAME_STEP), **SMALL)
    data = collected(agent).data
    assert data["start"][:, 0].tolist() == ([True] + 3 * [False]) * 3
    # Episodes are all alike, and so is what is thought of them.
    torch.testing.assert_close(data["state_value"][:4], data["state_value"][4:8])
    assert not torch.equal(data["state_value"][0], data["state_value"][1])


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_split_or_not_an_update_gives_the_same_parameters(cell: str) -> None:
    def learned(size: int | None) -> torch.Tensor:
        with koila_rl.limits(microbatch=size):
            return parameters(RecurrentPPO("CartPole-v1", n_envs=3, cell=cell, **SMALL).learn(36))

    whole, split = learned(None), learned(2)
    plan = koila_rl.last_plan()
    assert plan is not None
    assert plan.passes[0].microbatch_size == 2 or plan.batch_size == 1
    torch.testing.assert_close(split, whole, rtol=0, atol=1e-5)


def test_same_seed_gives_the_same_parameters() -> None:
    first, second = (RecurrentPPO("CartPole-v1", n_envs=2, **SMALL).learn(48) for _ in range(2))
    assert torch.equal(parameters(first), parameters(second))


def test_acting_remembers_until_told_to_forget() -> None:
    agent = RecurrentPPO(lambda: gym.make("Pendulum-v1"), n_envs=2, **SMALL)
    observation = np.ones((2, 3), np.float32)
    first = agent.act(observation, deterministic=True)
    second = agent.act(observation, deterministic=True)
    assert not np.array_equal(first, second)
    agent.forget(np.array([True, False]))
    third = agent.act(observation, deterministic=True)
    np.testing.assert_array_equal(third[0], first[0])
    assert not np.array_equal(third[1], first[1])
    agent.forget()
    np.testing.assert_array_equal(agent.act(observation, deterministic=True), first)


def test_a_loaded_agent_acts_as_the_saved_one(tmp_path: Path) -> None:
    agent = RecurrentPPO("CartPole-v1", n_envs=2, **SMALL).learn(24)
    agent.save(tmp_path / "agent.pt")
    again = koila_rl.load(tmp_path / "agent.pt")
    for observation in np.random.default_rng(0).normal(size=(5, 3, 4)).astype(np.float32):
        np.testing.assert_array_equal(again.act(observation), agent.act(observation))
    assert again.hyperparameters == agent.hyperparameters


def test_nested_observations() -> None:
    agent = RecurrentPPO(Nested, n_envs=2, features_extractor="impala", **SMALL)
    before = parameters(agent)
    agent.learn(24)
    assert not torch.equal(parameters(agent), before)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cell": "rnn"}, "'rnn' but must be lstm or gru"),
        ({"sequence_length": 13}, "sequence_length is 13 but must be from 1 to 12"),
    ],
)
def test_values_that_cannot_be_used(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        RecurrentPPO(Counting, n_envs=3, **{**SMALL, **given})
