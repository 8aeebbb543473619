"""The whole product in seconds: run this first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import koila_rl


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def test_a_split_loss_has_the_gradient_of_the_whole() -> None:
    x, y = torch.randn(11, 4).double(), torch.randn(11, 2).double()
    whole, split = _network(), _network()
    expected = (whole(x) - y).pow(2).mean()
    expected.backward()

    with koila_rl.limits(microbatch=3):
        observation, target = koila_rl.lazy(x, y)
        loss = (split(observation) - target).pow(2).mean()
        loss.backward()

    plan = koila_rl.last_plan()
    assert plan is not None
    assert plan.batch_size == 11
    assert plan.unsplit == ()
    assert sum(p.count * p.microbatch_size for p in plan.passes) >= 11
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for mine, theirs in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-14)


def test_a_lazy_tensor_passes_for_a_tensor() -> None:
    x = koila_rl.lazy(torch.arange(6.0).reshape(3, 2))
    assert isinstance(x, torch.Tensor)
    assert x.shape == (3, 2)
    assert (x + 1).sum().item() == 21
    assert torch.equal(koila_rl.materialize(x * 2), torch.arange(6.0).reshape(3, 2) * 2)


def test_a_tensordict_of_lazy_tensors() -> None:
    data = TensorDict({"observation": torch.randn(6, 4), "action": torch.zeros(6)}, [6])
    batch = koila_rl.lazy(data)
    assert isinstance(batch, TensorDict)
    with koila_rl.limits(microbatch=2):
        total = (batch["observation"].sum(-1) + batch["action"]).mean()
        assert total.item() == pytest.approx(data["observation"].sum(-1).mean().item())


def test_a_plan_explains_itself() -> None:
    x = koila_rl.lazy(torch.randn(12, 4).double())
    with koila_rl.limits(microbatch=4):
        plan = koila_rl.plan(_network()(x).pow(2).mean())
    assert plan.batch_size == 12
    assert "12" in str(plan)
    assert "3 × 4" in str(plan)


def test_one_sample_that_does_not_fit_is_refused() -> None:
    network = _network()
    x = koila_rl.lazy(torch.randn(12, 4).double())
    with koila_rl.limits(memory=16), pytest.raises(koila_rl.InsufficientMemoryError):
        network(x).pow(2).mean().backward()
    assert all(p.grad is None for p in network.parameters())


def test_a_replay_buffer_hands_out_lazy_minibatches() -> None:
    buffer = koila_rl.ReplayBuffer(32, seed=0)
    buffer.extend(
        TensorDict(
            {
                "observation": torch.randn(8, 4),
                "action": torch.zeros(8, dtype=torch.int64),
                "next": TensorDict(
                    {
                        "observation": torch.randn(8, 4),
                        "reward": torch.ones(8),
                        "terminated": torch.zeros(8, dtype=torch.bool),
                        "truncated": torch.zeros(8, dtype=torch.bool),
                    },
                    [8],
                ),
            },
            [8],
        )
    )
    batch = buffer.sample(5)
    assert batch["observation"].shape == (5, 4)
    assert batch["next", "reward"].sum().item() == 5


def test_training_leaves_a_run_that_loads_and_plays(tmp_path: Path) -> None:
    result = koila_rl.train(
        "CartPole-v1",
        total_timesteps=256,
        n_envs=2,
        n_steps=64,
        batch_size=64,
        n_epochs=1,
        seed=0,
        run_dir=tmp_path / "run",
        progress=False,
    )
    assert result.run_dir == tmp_path / "run"
    assert result.plan is not None
    agent = koila_rl.load(result.run_dir)
    evaluation = koila_rl.evaluate(agent, "CartPole-v1", episodes=2, seed=0)
    assert len(evaluation.returns) == 2
    assert evaluation.mean > 0
