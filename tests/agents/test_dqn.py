"""DQN: its targets by hand for each switch, what is stored, schedules, seeds and checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict

import koila_rl
from koila_rl.agents.dqn import DQN
from koila_rl.agents.networks import QNetwork
from koila_rl.agents.ppo import PPO
from koila_rl.errors import ConfigurationError, UnsupportedError
from tests.environments import Counting, Nested, Pictures, vector

SMALL: dict[str, Any] = {
    "learning_starts": 8, "batch_size": 16, "buffer_size": 200, "train_freq": 4,
    "gradient_steps": 2, "target_update_interval": 16, "net_arch": (8,),
    "report_interval": 16,
}  # fmt: skip
ALL: dict[str, Any] = {"double": True, "dueling": True, "prioritized": True, "n_steps": 3}


def parameters(agent: DQN) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in agent.network.parameters()])


class Table(torch.nn.Module):
    """Q of two actions in state s, from a table."""

    def __init__(self, *rows: tuple[float, float]) -> None:
        super().__init__()
        self.rows = torch.nn.Parameter(torch.tensor(rows))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.rows[observation[:, 0].long()]


def with_tables(**settings: Any) -> DQN:
    """An agent whose online Q prefers action 0 in state 1, where the target network prefers 1."""
    agent = DQN(Counting, gamma=0.9, **{**SMALL, **settings})
    agent.network = Table((1.0, 2.0), (5.0, 3.0))  # type: ignore[assignment]
    agent.target = Table((0.0, 0.0), (10.0, 20.0))  # type: ignore[assignment]
    return agent


def minibatch(**extra: Any) -> TensorDict:
    """From state 0 by action 1 to state 1 for a reward of 1: going on, cut off, and over."""
    following = {
        "observation": torch.ones(3, 1),
        "reward": torch.ones(3),
        "terminated": torch.tensor([False, False, True]),
        "truncated": torch.tensor([False, True, False]),
        **extra.pop("next", {}),
    }
    columns = {"observation": torch.zeros(3, 1), "action": torch.ones(3).long(), "next": following}
    return TensorDict({**columns, **extra}, [3])


def test_target_by_hand() -> None:
    agent = with_tables()
    assert agent.td_target(minibatch()).tolist() == pytest.approx([19.0, 19.0, 1.0])
    loss, td_error, q = agent.loss(minibatch())
    assert q.tolist() == [2.0, 2.0, 2.0]
    assert td_error.tolist() == pytest.approx([17.0, 17.0, -1.0])
    # Huber: |error| − 1/2 from 1 on, error² / 2 below.
    assert float(loss.detach()) == pytest.approx((16.5 + 16.5 + 0.5) / 3)
    loss.backward()
    assert agent.target.rows.grad is None  # type: ignore[union-attr]


def test_double_lets_the_online_network_choose() -> None:
    target = with_tables(double=True).td_target(minibatch())
    assert target.tolist() == pytest.approx([10.0, 10.0, 1.0])


def test_n_step_discounts_by_the_steps_taken() -> None:
    agent = with_tables(n_steps=3)
    steps = torch.tensor([3.0, 2.0, 1.0])
    batch = minibatch(next={"discount": 0.9**steps})
    expected = [1 + 0.9**3 * 20, 1 + 0.9**2 * 20, 1.0]
    assert agent.td_target(batch).tolist() == pytest.approx(expected)


def test_prioritized_weighs_each_transition() -> None:
    agent = with_tables(prioritized=True)
    loss, td_error, _ = agent.loss(minibatch(weight=torch.tensor([1.0, 0.5, 0.25])))
    assert float(loss.detach()) == pytest.approx((16.5 + 8.25 + 0.125) / 3)
    assert td_error.tolist() == pytest.approx([17.0, 17.0, -1.0])


def test_dueling_by_hand() -> None:
    torch.manual_seed(0)
    space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
    network = QNetwork(space, 4, net_arch=(8,), dueling=True)
    observation = torch.randn(5, 3)
    assert network.value is not None
    value, advantage = network.value(observation), network.advantage(observation)
    q = network(observation)
    torch.testing.assert_close(q.mean(1), value.squeeze(1))
    torch.testing.assert_close(
        q[:, 0] - q[:, 3], advantage[:, 0] - advantage[:, 3], rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("truncate", [False, True])
def test_what_is_stored(mode: AutoresetMode, truncate: bool) -> None:
    agent = DQN(
        vector(lambda: Counting(3, truncate), 2, mode), **{**SMALL, "learning_starts": 1000}
    )
    agent.learn(40)
    assert agent.replay is not None
    rows = [agent.replay[i] for i in range(len(agent.replay))]
    pairs = {(float(r["observation"]), float(r["next", "observation"])) for r in rows}
    # The step that only resets, 3 → 0, is no transition.
    assert pairs == {(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)}
    assert len(rows) == agent.num_timesteps
    ends = {float(r["observation"]) for r in rows if r["next", "terminated"]}
    cuts = {float(r["observation"]) for r in rows if r["next", "truncated"]}
    assert (ends, cuts) == ((set(), {2.0}) if truncate else ({2.0}, set()))


def test_exploration_falls_and_stays() -> None:
    agent = DQN(
        Counting, **SMALL, exploration_fraction=0.5, exploration_initial_eps=0.9,
        exploration_final_eps=0.1,
    )  # fmt: skip
    found = []
    for agent.num_timesteps in (0, 8, 25, 50, 100):
        found.append(agent.exploration_rate(100))
    assert found == pytest.approx([1.0, 0.9 - 0.16 * 0.8, 0.5, 0.1, 0.1])


def test_exploring_is_random_and_else_greedy() -> None:
    agent = with_tables()
    observation = torch.ones(1000, 1)
    before = agent.generator.get_state()
    assert set(agent.explore(observation, 1000, 0.0).tolist()) == {0}
    assert torch.equal(agent.generator.get_state(), before)
    random = agent.explore(observation, 1000, 1.0).float().mean()
    assert float(random) == pytest.approx(0.5, abs=0.06)
    some = agent.explore(observation, 1000, 0.2).float().mean()
    assert float(some) == pytest.approx(0.1, abs=0.04)


@pytest.mark.parametrize(("tau", "expected"), [(1.0, 5.0), (0.25, 8.75)])
def test_target_network_moves(tau: float, expected: float) -> None:
    agent = with_tables(tau=tau)
    agent.update_target()
    assert float(agent.target.rows[1, 0].detach()) == expected  # type: ignore[index, arg-type]


def test_target_network_moves_every_interval() -> None:
    agent = DQN(Counting, n_envs=2, **SMALL)
    moved: list[int] = []
    agent.update_target = lambda: moved.append(agent.num_timesteps)  # type: ignore[method-assign]
    agent.learn(64)
    assert moved == [16, 32, 48, 64]


@pytest.mark.parametrize(("gradient_steps", "expected"), [(2, 2), (-1, 8)])
def test_gradient_steps(gradient_steps: int, expected: int) -> None:
    agent = DQN(Counting, n_envs=2, **{**SMALL, "gradient_steps": gradient_steps})
    agent.learn(8)
    assert agent.n_updates == 0
    agent.learn(16)
    assert agent.n_updates == expected


def test_callback_reports_and_ends_learning() -> None:
    agent = DQN(Counting, **SMALL)
    seen: list[Any] = []

    def stop(state: Any) -> bool:
        seen.append(state)
        return state.num_timesteps < 32

    agent.learn(1000, stop)
    assert [state.num_timesteps for state in seen] == [16, 32]
    assert len(seen[0].episodes) == 5
    assert seen[1].metrics.keys() >= {
        "train/loss", "train/td_error", "train/q", "train/learning_rate", "train/n_updates",
        "rollout/exploration_rate", "time/update_seconds", "time/hidden_update_share",
        "memory/retries",
    }  # fmt: skip


@pytest.mark.parametrize("switches", [{}, ALL], ids=["plain", "all"])
def test_same_seed_gives_the_same_parameters_and_others_others(switches: dict[str, Any]) -> None:
    def learned(seed: int) -> torch.Tensor:
        return parameters(DQN("CartPole-v1", n_envs=2, seed=seed, **SMALL, **switches).learn(64))

    assert torch.equal(learned(0), learned(0))
    assert not torch.equal(learned(0), learned(1))


@pytest.mark.parametrize("switches", [{}, ALL], ids=["plain", "all"])
def test_split_or_not_an_update_gives_the_same_parameters(switches: dict[str, Any]) -> None:
    def learned(size: int | None) -> torch.Tensor:
        settings = {**SMALL, "gradient_steps": 8, **switches}
        with koila_rl.limits(microbatch=size):
            return parameters(DQN("CartPole-v1", **settings).learn(16))

    whole, split = learned(None), learned(5)
    plan = koila_rl.last_plan()
    assert plan is not None
    assert plan.microbatch_size == 5
    torch.testing.assert_close(split, whole, rtol=0, atol=1e-5)


def test_priorities_follow_the_errors() -> None:
    agent = DQN(Counting, **{**SMALL, "prioritized": True, "gradient_steps": 1}).learn(64)
    assert isinstance(agent.replay, koila_rl.PrioritizedReplayBuffer)
    weights = agent.replay.sample(64)["weight"]
    assert float(weights.max()) == 1.0
    assert len(set(weights.tolist())) > 3
    assert agent.replay.beta == pytest.approx(1.0)


@pytest.mark.parametrize(("shape", "dim"), [((4, 36, 36), 0), ((36, 36, 4), -1)])
def test_stacked_frames_are_stored_once(shape: tuple[int, ...], dim: int) -> None:
    def make() -> gym.Env[Any, Any]:
        env = gym.wrappers.FrameStackObservation(Pictures((36, 36)), 4)
        space = gym.spaces.Box(0, 255, shape, np.uint8)
        return gym.wrappers.TransformObservation(env, lambda x: np.moveaxis(x, 0, dim), space)

    settings = {**SMALL, "frame_stack": 4, "net_arch": (), "gradient_steps": 1}
    agent = DQN(make, n_envs=2, **settings).learn(40)
    assert agent.replay is not None
    assert agent.replay.sample(4)["observation"].shape == (4, *shape)
    # Room for the stacks as they are would be eight times as much.
    assert agent.replay.nbytes < 1.2 * agent.replay.capacity * 36 * 36


def test_nested_observations() -> None:
    settings = {**SMALL, "features_extractor": "impala", "gradient_steps": 1, "n_steps": 2}
    agent = DQN(Nested, n_envs=2, **settings).learn(32)
    before = parameters(agent)
    assert not torch.equal(parameters(agent.learn(48)), before)
    assert agent.replay is not None
    assert agent.replay.sample(3)["observation", "rest", "1"].shape == (3, 2)


def test_a_loaded_agent_acts_as_the_saved_one(tmp_path: Path) -> None:
    agent = DQN("CartPole-v1", **SMALL, **ALL).learn(64)
    agent.save(tmp_path / "agent.pt")
    again = koila_rl.load(tmp_path / "agent.pt")
    observations = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    np.testing.assert_array_equal(again.act(observations), agent.act(observations))
    assert isinstance(again, DQN)
    assert again.hyperparameters == agent.hyperparameters
    assert (again.num_timesteps, again.n_updates) == (agent.num_timesteps, agent.n_updates)
    for own, other in zip(again.target.parameters(), agent.target.parameters(), strict=True):
        assert torch.equal(own, other)
    with pytest.raises(ConfigurationError, match="is of agent 'dqn', not 'ppo'"):
        PPO.load(tmp_path / "agent.pt")


def test_resume_takes_the_replay_up(tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"agent": "dqn", "progress": False}
    koila_rl.train(Counting, total_timesteps=60, run_dir=tmp_path / "a", **kwargs, **SMALL)

    def resumed() -> DQN:
        result = koila_rl.train(
            Counting, total_timesteps=100, resume=tmp_path / "a", run_dir=tmp_path / name, **kwargs
        )
        assert isinstance(result.agent, DQN)
        return result.agent

    name = "b"
    first = resumed()
    name = "c"
    second = resumed()
    assert first.replay is not None
    assert len(first.replay) == 100
    assert torch.equal(parameters(first), parameters(second))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"n_steps": 1}, "n_steps was 3, is 1"),
        ({"gamma": 0.5}, "gamma was 0.99, is 0.5"),
        ({"n_envs": 1}, "n_envs was 2, is 1"),
        ({"buffer_size": 50}, "buffer_size was .*, is 50"),
        ({"prioritized_alpha": 0.3}, "prioritized_alpha was 0.6, is 0.3"),
    ],
)
def test_a_replay_of_another_meaning_is_refused(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    kwargs: dict[str, Any] = {"agent": "dqn", "progress": False}
    settings = {**SMALL, "prioritized": True, "n_steps": 3}
    koila_rl.train(Counting, total_timesteps=60, n_envs=2, run_dir=tmp_path, **kwargs, **settings)
    with pytest.raises(ConfigurationError, match=message):
        koila_rl.train(Counting, total_timesteps=99, resume=tmp_path, **kwargs, **changed)


def test_a_run_whose_replay_is_gone_collects_one_before_it_learns(tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"agent": "dqn", "progress": False}
    settings = {**SMALL, "learning_starts": 30}
    koila_rl.train(Counting, total_timesteps=60, run_dir=tmp_path, **kwargs, **settings)
    shutil.rmtree(tmp_path / "replay")
    before = koila_rl.load(tmp_path)
    assert isinstance(before, DQN)
    after = koila_rl.train(Counting, total_timesteps=88, resume=tmp_path, **kwargs).agent
    assert isinstance(after, DQN)
    assert after.n_updates == before.n_updates
    after = koila_rl.train(Counting, total_timesteps=120, resume=tmp_path, **kwargs).agent
    assert isinstance(after, DQN)
    assert after.n_updates > before.n_updates


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gradient_steps": -2}, "gradient_steps is -2"),
        ({"train_freq": 0}, "train_freq is 0"),
        ({"exploration_fraction": 2.0}, "exploration_fraction is 2"),
        ({"buffer_size": 2, "n_steps": 3}, "buffer_size is 2 but"),
        ({"features_extractor": "resnet"}, "'resnet' but must be nature or impala"),
    ],
)
def test_values_that_cannot_be_used(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DQN(Counting, **given)


def test_continuous_actions_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="DQN takes Discrete actions, not Box"):
        DQN("Pendulum-v1")
