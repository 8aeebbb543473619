"""Tianshou's algorithms with one line more: the same parameters."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor

import koila_rl
from koila_rl.errors import ConfigurationError, UnsupportedError

pytest.importorskip("tianshou")

from tianshou.algorithm import A2C, DQN, PPO, Reinforce
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import (
    Collector,
    PrioritizedVectorReplayBuffer,
    VectorReplayBuffer,
)
from tianshou.env import DummyVectorEnv
from tianshou.utils.net.common import Net
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic
from tianshou.utils.torch_utils import policy_within_training_step

from koila_rl.integrations import tianshou as ours

SPACE = gym.make("CartPole-v1")


def algorithm(kind: Any) -> Any:
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    shape, actions = SPACE.observation_space.shape, SPACE.action_space
    actions.seed(0)
    optim = AdamOptimizerFactory(lr=1e-3)
    if kind is DQN:
        net = Net(state_shape=shape, action_shape=actions.n, hidden_sizes=[8])
        return DQN(
            policy=DiscreteQLearningPolicy(model=net, action_space=actions), optim=optim,
            target_update_freq=2, n_step_return_horizon=3,
        )  # fmt: skip
    trunk = [Net(state_shape=shape, hidden_sizes=[8]) for _ in range(2)]
    actor = DiscreteActor(preprocess_net=trunk[0], action_shape=actions.n)
    policy = DiscreteActorPolicy(actor=actor, action_space=actions)
    if kind is Reinforce:
        return Reinforce(policy=policy, optim=optim)
    return kind(policy=policy, critic=DiscreteCritic(preprocess_net=trunk[1]), optim=optim)


def learned(
    kind: Any, attach: bool, microbatch: int | None = None, prioritized: bool = False
) -> tuple[Tensor, Any]:
    made = algorithm(kind)
    if attach:
        ours.attach(made, microbatch=microbatch)
    envs = DummyVectorEnv([lambda: gym.make("CartPole-v1") for _ in range(2)])
    envs.seed(0)
    buffer: Any = VectorReplayBuffer(200, 2)
    if prioritized:
        buffer = PrioritizedVectorReplayBuffer(200, 2, alpha=0.6, beta=0.4)
    collector = Collector(made, envs, buffer)
    collector.reset()
    for _ in range(3):
        with policy_within_training_step(made.policy):
            collector.collect(n_step=24)
            if kind is DQN:
                made.update(buffer=buffer, sample_size=12)
            else:
                made.update(buffer=buffer, batch_size=10, repeat=2)
                buffer.reset()
    return torch.cat([p.detach().flatten() for p in made.parameters()]), buffer


@pytest.mark.parametrize("kind", [PPO, pytest.param(A2C, marks=pytest.mark.slow), DQN])
def test_updates_give_the_same_parameters(kind: Any) -> None:
    plain, _ = learned(kind, attach=False)
    for microbatch in (None, 3):
        found, _ = learned(kind, True, microbatch)
        torch.testing.assert_close(found, plain, rtol=0, atol=1e-5)
    plan = koila_rl.last_plan()
    assert plan is not None
    assert plan.microbatch_size == 3
    assert plan.unsplit == ()


def test_priorities_are_the_same() -> None:
    plain, theirs = learned(DQN, attach=False, prioritized=True)
    found, buffer = learned(DQN, True, 5, prioritized=True)
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-5)
    assert len(buffer) == len(theirs)
    at = np.arange(24)
    np.testing.assert_allclose(buffer.get_weight(at), theirs.get_weight(at), rtol=1e-5)


def test_attach_and_detach() -> None:
    made = algorithm(PPO)
    assert ours.attach(ours.attach(made)) is made
    assert isinstance(copy.deepcopy(made), PPO)
    assert type(ours.detach(ours.detach(made))) is PPO


def test_wrong_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="Reinforce of Tianshou is not supported"):
        ours.attach(algorithm(Reinforce))
    with pytest.raises(ConfigurationError, match="attach the algorithm that trains it"):
        ours.attach(algorithm(PPO).policy)
    monkeypatch.setattr(ours, "TESTED", ("0.1", "0.2"))
    with pytest.warns(UserWarning, match=r"tianshou 2\..* is installed"):
        ours.attach(algorithm(PPO))
