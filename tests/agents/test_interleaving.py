"""Updates between the steps of an environment: as defined, counted, repeatable, cancelled whole."""

from __future__ import annotations

import copy
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

import koila_rl
from koila_rl.agents.dqn import DQN
from koila_rl.agents.interleaving import Update, Work
from koila_rl.agents.ppo import PPO
from koila_rl.envs import VectorEnvironment
from koila_rl.errors import ConfigurationError, EnvironmentFailedError
from koila_rl.spaces import each
from tests.environments import Counting

SMALL: dict[str, Any] = {"n_steps": 8, "batch_size": 8, "n_epochs": 2, "net_arch": (8,)}
REPLAY: dict[str, Any] = {
    "learning_starts": 8, "batch_size": 12, "buffer_size": 60, "train_freq": 4,
    "gradient_steps": 2, "target_update_interval": 12, "net_arch": (8,), "report_interval": 16,
    "learning_rate": 1e-2, "exploration_fraction": 0.5,
}  # fmt: skip
PRIORITIES: dict[str, Any] = {"prioritized": True, "double": True, "n_steps": 3}


def cartpole() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1")


def ppo(update: str, **settings: Any) -> PPO:
    return PPO(cartpole, n_envs=2, seed=3, update=update, **{**SMALL, **settings})


def dqn(update: str, **settings: Any) -> DQN:
    return DQN(cartpole, n_envs=2, seed=3, update=update, **{**REPLAY, **settings})


def parameters(agent: PPO | DQN) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in agent.network.parameters()])


def ppo_by_definition(agent: PPO, total: int) -> None:
    """Collect rollout t + 1 with the weights at the start of update t; then update t at once."""
    assert agent.env is not None
    env, learning = agent.env, agent.network
    rollouts = [
        koila_rl.RolloutBuffer(agent.hyperparameters.n_steps, env.n_envs, seed=agent.seed + i)
        for i in range(2)
    ]

    def collect(rollout: koila_rl.RolloutBuffer, acting: Any) -> float:
        agent.network = acting
        agent.collect_rollout(env, rollout)
        agent.evaluate_rollout(rollout)
        agent.estimate_advantages(rollout)
        agent.network = learning
        return 1.0 - agent.num_timesteps / total

    t, progress = 0, collect(rollouts[0], learning)
    while agent.num_timesteps < total:
        following = collect(rollouts[(t + 1) % 2], copy.deepcopy(learning))
        agent.update(rollouts[t % 2], progress)
        t, progress = t + 1, following
    agent.update(rollouts[t % 2], progress)


def dqn_by_definition(agent: DQN, total: int) -> None:
    """An update learns from the replay as it was when it began, as the next steps go by."""
    assert agent.env is not None
    env, values = agent.env, agent.hyperparameters
    replay = agent.replay = agent._make_replay(env.n_envs)
    updating, progress, current = False, 1.0, env.reset(seed=agent.seed)
    steps, gradient_steps = values.train_freq, values.gradient_steps
    while agent.num_timesteps < total:
        rows = []
        before = agent.num_timesteps
        for t in range(1, steps + 1):
            observation = agent.interface.tensor(current)
            with torch.no_grad():
                action = agent.explore(observation, env.n_envs, agent.exploration_rate(total))
            step = env.step(agent.interface.to_environment(action))
            due = t * gradient_steps // steps - (t - 1) * gradient_steps // steps
            if updating and due:
                agent.update(replay, due, progress)
            following = {
                "observation": each(torch.from_numpy, step.next_observation),
                "reward": torch.from_numpy(step.reward),
                "terminated": torch.from_numpy(step.terminated),
                "truncated": torch.from_numpy(step.truncated),
            }
            rows.append({"observation": observation, "action": action, "next": following})
            current = step.observation
            agent.num_timesteps += env.n_envs
        for row in rows:
            replay.extend(row)
        if agent.num_timesteps // values.target_update_interval > (
            before // values.target_update_interval
        ):
            agent.update_target()
        progress = 1.0 - agent.num_timesteps / total
        updating = agent.num_timesteps > values.learning_starts
    agent.update(replay, gradient_steps, progress)


@pytest.mark.parametrize("microbatch", [4, 100])
def test_ppo_is_as_defined(microbatch: int) -> None:
    # The last minibatch of an epoch is smaller than the others.
    uneven: dict[str, Any] = {"batch_size": 6, "learning_rate": lambda progress: 1e-2 * progress}
    mine, theirs = ppo("interleaved", **uneven), ppo("blocking", **uneven)
    first = parameters(mine)
    with koila_rl.limits(microbatch=microbatch):
        mine.learn(64)
        ppo_by_definition(theirs, 64)
    assert not torch.allclose(parameters(mine), first, atol=1e-3)
    torch.testing.assert_close(parameters(mine), parameters(theirs), rtol=0, atol=1e-12)


@pytest.mark.parametrize("switches", [{}, PRIORITIES], ids=["plain", "prioritized"])
@pytest.mark.parametrize("microbatch", [5, 100])
def test_dqn_is_as_defined(microbatch: int, switches: dict[str, Any]) -> None:
    mine, theirs = dqn("interleaved", **switches), dqn("blocking", **switches)
    first = parameters(mine)
    with koila_rl.limits(microbatch=microbatch):
        mine.learn(96)
        dqn_by_definition(theirs, 96)
    assert not torch.allclose(parameters(mine), first, atol=1e-3)
    torch.testing.assert_close(parameters(mine), parameters(theirs), rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [ppo, dqn])
def test_runs_repeat_bitwise_and_a_split_changes_nothing(make: Any) -> None:
    learned = []
    for microbatch in (4, 4, 100):
        agent = make("interleaved")
        with koila_rl.limits(microbatch=microbatch):
            agent.learn(64)
        learned.append(parameters(agent))
    assert torch.equal(learned[0], learned[1])
    torch.testing.assert_close(learned[2], learned[0], rtol=0, atol=1e-5)


class Failing(Counting):
    """Fails in its ninth step."""

    def __init__(self) -> None:
        super().__init__(end=5)
        self.steps = 0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.steps == 9:
            raise ArithmeticError("the simulation diverged")
        return super().step(action)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
# Forking with threads about, and gymnasium's own log of what failed.
@pytest.mark.filterwarnings("ignore")
def test_an_environment_that_fails_cancels_the_backward(vectorization: str) -> None:
    # The first update runs in 12 slices during steps 7 to 12, of which the ninth fails.
    agent = PPO(
        Failing, n_envs=2, vectorization=vectorization, update="interleaved",
        n_steps=6, batch_size=12, n_epochs=1,
    )  # fmt: skip
    first = parameters(agent)
    for p in agent.network.parameters():
        p.grad = torch.ones_like(p)
    message = r"environment [01] .*ArithmeticError: the simulation diverged"
    with koila_rl.limits(microbatch=1), pytest.raises(EnvironmentFailedError, match=message):
        agent.learn(100)
    assert all(p.grad is None for p in agent.network.parameters())
    assert torch.equal(parameters(agent), first)
    assert not any(t.name == "koila_rl backward" for t in threading.enumerate())
    assert agent.env is not None
    agent.env.close()


class Recorder(VectorEnvironment):
    """One environment, and what happened when."""

    def __init__(self) -> None:
        super().__init__(gym.vector.SyncVectorEnv([Counting], autoreset_mode="SameStep"))
        self.events: list[str] = []
        self.reset()

    def step_async(self, action: Any) -> None:
        super().step_async(action)
        self.events.append("begin")

    def step_wait(self) -> Any:
        self.events.append("end")
        return super().step_wait()


def work(events: list[str], slices: int, fails_at: int = -1) -> Work:
    def run() -> Generator[int, None, dict[str, float]]:
        for i in range(slices):
            yield slices - i
            if i == fails_at:
                raise ZeroDivisionError
            events.append("slice")
        return {"train/loss": 1.0}

    return run()


@pytest.mark.parametrize(
    ("slices", "expected"),
    [(1, [0, 0, 0, 1]), (2, [0, 1, 0, 1]), (4, [1] * 4), (6, [1, 2, 1, 2]), (9, [2, 2, 2, 3])],
)
def test_slices_are_spread_over_the_steps(slices: int, expected: list[int]) -> None:
    env = Recorder()
    update = Update(work(env.events, slices))
    for t in range(1, 5):
        assert not update.done
        update.step(env, np.zeros(1, np.int64), t, 4)
    assert update.done
    counts = [part.count("slice") for part in " ".join(env.events).split("end")][:4]
    assert counts == expected
    assert env.events[-1] == "end"
    assert update.metrics["train/loss"] == 1.0
    assert update.metrics["memory/retries"] == 0.0


def test_an_update_longer_than_it_said_is_run_to_its_end() -> None:
    def longer() -> Generator[int, None, dict[str, float]]:
        yield from (2, 1, 0, -1, -2)
        return {"train/loss": 1.0}

    assert Update(longer()).finish()["train/loss"] == 1.0
    env, update = Recorder(), Update(longer())
    update.step(env, np.zeros(1, np.int64), 1, 2)
    assert not update.done
    update.step(env, np.zeros(1, np.int64), 2, 2)
    assert update.metrics["train/loss"] == 1.0


def test_an_error_of_the_update_ends_the_step_that_has_begun() -> None:
    env = Recorder()
    update = Update(work(env.events, 4, fails_at=1))
    update.step(env, np.zeros(1, np.int64), 1, 4)
    with pytest.raises(ZeroDivisionError), update:
        update.step(env, np.zeros(1, np.int64), 2, 4)
    assert env.events == ["begin", "slice", "end", "begin", "end"]
    assert update.done
    env.step(np.zeros(1, np.int64))


def test_only_environments_of_their_own_processes_hide_an_update() -> None:
    env = Recorder()
    with Update(work(env.events, 4)) as update:
        update.step(env, np.zeros(1, np.int64), 1, 4)
    assert update.metrics["time/hidden_update_share"] == 0.0
    assert update.metrics["time/update_seconds"] > 0.0
    assert Update().finish() == {}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_cartpole_in_processes_of_its_own_hides_all_updates_but_the_last() -> None:
    agent = PPO(
        cartpole, n_envs=2, vectorization="async", update="interleaved", **SMALL
    )  # fmt: skip
    shares: list[float] = []
    agent.learn(48, lambda state: shares.append(state.metrics["time/hidden_update_share"]))
    assert shares == [1.0, 1.0, 0.0]
    assert agent.env is not None
    agent.env.close()


def test_progress_is_told_as_of_blocking_updates() -> None:
    seen = {}
    for update in ("blocking", "interleaved"):
        rows: list[tuple[int, bool]] = []
        ppo(update).learn(48, lambda s, rows=rows: rows.append((s.num_timesteps, bool(s.metrics))))
        seen[update] = rows
    assert seen["interleaved"] == seen["blocking"] == [(16, True), (32, True), (48, True)]


def test_learning_ends_where_the_callback_says_so() -> None:
    agent = ppo("interleaved")
    agent.learn(1000, lambda state: state.num_timesteps < 32)
    # The rollout after the last update told of was collected meanwhile.
    assert agent.num_timesteps == 48
    assert agent.acting is agent.network


def test_target_kl_ends_an_update_before_the_step_that_goes_too_far() -> None:
    learned = []
    for update in ("blocking", "interleaved"):
        rows: list[Any] = []
        agent = ppo(update, target_kl=1e-4, learning_rate=5e-2)
        agent.learn(16, rows.append)
        assert 1 <= rows[0].metrics["train/n_updates"] < 4
        learned.append(parameters(agent))
    torch.testing.assert_close(learned[0], learned[1], rtol=0, atol=1e-7)


@pytest.mark.parametrize("agent", ["ppo", "dqn"])
def test_train_resumes(agent: str, tmp_path: Path) -> None:
    settings = {**(SMALL if agent == "ppo" else REPLAY), "update": "interleaved"}
    koila_rl.train(cartpole, agent, 64, n_envs=2, run_dir=tmp_path, progress=False, **settings)
    result = koila_rl.train(cartpole, agent, 128, resume=tmp_path, progress=False)
    assert result.agent.hyperparameters.update == "interleaved"  # type: ignore[attr-defined]
    assert result.agent.num_timesteps == 128
    assert "time/hidden_update_share" in (tmp_path / "metrics.csv").read_text()


def test_refusals() -> None:
    with pytest.raises(ConfigurationError, match="update is 'later' but must be blocking or inter"):
        ppo("later")
    with pytest.raises(ConfigurationError, match="recurrent_ppo keeps the memory of one rollout"):
        koila_rl.agents.RecurrentPPO("CartPole-v1", update="interleaved")


def test_the_network_that_acts_is_the_callers_own_and_takes_no_gradient() -> None:
    agent = ppo("interleaved")
    seen: list[nn.Module] = []
    agent.decide = lambda observation: (seen.append(agent.acting), PPO.decide(agent, observation))[
        1
    ]  # type: ignore[method-assign]
    agent.learn(32)
    assert seen[0] is agent.network
    assert seen[-1] is not agent.network
    assert all(not p.requires_grad and p.grad is None for p in seen[-1].parameters())
