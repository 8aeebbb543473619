"""PPO: what is in the rollout, the loss by hand, seeds, checkpoints and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

import koila_rl
from koila_rl.agents.interface import Progress
from koila_rl.agents.ppo import PPO
from koila_rl.agents.presets import preset
from koila_rl.errors import ConfigurationError, UnsupportedError
from koila_rl.spaces import check_spaces
from tests.environments import Counting, Identity, Pictures, vector

SMALL: dict[str, Any] = {"n_steps": 8, "batch_size": 8, "n_epochs": 2, "net_arch": (8,)}


def collected(agent: PPO) -> koila_rl.RolloutBuffer:
    assert agent.env is not None
    rollout = koila_rl.RolloutBuffer(agent.hyperparameters.n_steps, agent.env.n_envs, seed=0)
    agent.collect_rollout(agent.env, rollout)
    agent.evaluate_rollout(rollout)
    agent.estimate_advantages(rollout)
    return rollout


def parameters(agent: PPO) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in agent.network.parameters()])


def test_reset_rows_are_in_no_minibatch_and_count_as_no_step() -> None:
    env = vector(lambda: Counting(3), 2, AutoresetMode.NEXT_STEP)
    agent = PPO(env, **SMALL)
    rollout = collected(agent)
    assert rollout.data["reset"][:, 0].tolist() == [False, False, False, True] * 2
    assert agent.num_timesteps == 12
    rows = list(rollout.minibatches(5, 1, skip=rollout.data["reset"], lazy=False))
    assert sum(len(row["observation"]) for row in rows) == 12
    assert {float(x) for row in rows for x in row["observation"].flatten()} == {0.0, 1.0, 2.0}
    assert {float(x) for row in rows for x in row["next", "reward"]} == {1.0}


def test_reset_rows_are_in_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = PPO(vector(lambda: Counting(3), 2, AutoresetMode.NEXT_STEP), **SMALL)
    seen: list[int] = []
    loss = agent.loss

    def counted(minibatch: Any, progress: float) -> Any:
        seen.append(minibatch.batch_size[0])
        return loss(minibatch, progress)

    monkeypatch.setattr(agent, "loss", counted)
    agent.learn(12)
    # Two epochs over the 12 transitions among 16 rows.
    assert sum(seen) == 24


@pytest.mark.parametrize("truncate", [False, True])
def test_every_autoreset_mode_gives_the_same_targets(truncate: bool) -> None:
    targets = []
    for mode in AutoresetMode:
        agent = PPO(vector(lambda: Counting(3, truncate), 1, mode), **SMALL, gamma=0.9)
        data = collected(agent).data
        targets.append(data["value_target"][~data["reset"]][:6])
        with torch.no_grad():
            final = agent.network.value(torch.tensor([[3.0]]))
        # The last transition of an episode: 1, and the value of its final observation if cut off.
        expected = 1.0 + 0.9 * float(final) * truncate
        assert float(data["value_target"][2, 0]) == pytest.approx(expected, abs=1e-6)
    torch.testing.assert_close(targets[1], targets[0])
    torch.testing.assert_close(targets[2], targets[0])


@pytest.mark.parametrize("share_trunk", [False, True])
def test_state_values_are_the_critics(share_trunk: bool) -> None:
    agent = PPO(Counting, n_envs=2, **SMALL, share_trunk=share_trunk)
    data = collected(agent).data
    with torch.no_grad():
        expected = agent.network.value(data["observation"].flatten(0, 1)).unflatten(0, (8, 2))
    torch.testing.assert_close(data["state_value"], expected)


@pytest.mark.parametrize("clip_range_vf", [None, 0.01])
@pytest.mark.parametrize("normalize", [False, True])
def test_loss_by_hand(clip_range_vf: float | None, normalize: bool) -> None:
    agent = PPO(
        "CartPole-v1",
        n_steps=16,
        batch_size=16,
        clip_range_vf=clip_range_vf,
        normalize_advantage=normalize,
        ent_coef=0.01,
    )
    rollout = collected(agent)
    with torch.no_grad():
        # Away from the acting policy, so that ratios are clipped and values move.
        for parameter in agent.network.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.manual_seed(1)))
    batch = next(iter(rollout.minibatches(16, 1, lazy=False)))
    loss, diagnostics = agent.loss(batch, progress=1.0)

    distribution, value = agent.network(batch["observation"])
    adv = batch["advantage"]
    if normalize:
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    policy, clipped = 0.0, 0
    for i in range(16):
        log_prob = torch.log_softmax(distribution.logits[i], 0)[batch["action"][i]]
        ratio = float((log_prob - batch["action_log_prob"][i]).detach().exp())
        policy -= min(ratio * float(adv[i]), min(max(ratio, 0.8), 1.2) * float(adv[i])) / 16
        clipped += abs(ratio - 1) > 0.2
    if clip_range_vf is not None:
        old = batch["state_value"]
        value = old + (value - old).clamp(-0.01, 0.01)
    value_loss = ((value - batch["value_target"]) ** 2).mean().detach()
    probs = distribution.probs.detach()
    entropy = -(probs * probs.log()).sum(-1).mean()
    by_hand = policy + 0.5 * float(value_loss) - 0.01 * float(entropy)
    assert clipped > 0
    assert float(loss.detach()) == pytest.approx(by_hand, rel=1e-4)
    assert float(diagnostics["clip_fraction"]) == pytest.approx(clipped / 16)
    assert float(diagnostics["approx_kl"]) >= 0


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Discrete(3, start=5),
        gym.spaces.MultiDiscrete([2, 3]),
        gym.spaces.MultiBinary(3),
        gym.spaces.Box(-1.0, 1.0, (2,), np.float32),
    ],
    ids=lambda space: type(space).__name__,
)
@pytest.mark.parametrize("squash", [False, True])
def test_first_ratio_is_exactly_one(space: gym.Space[Any], squash: bool) -> None:
    agent = PPO(
        lambda: Identity(space), n_envs=4, n_steps=32, batch_size=64, n_epochs=1,
        squash_output=squash, state_dependent_std=squash, normalize_observation=False,
    )  # fmt: skip
    rollout = collected(agent)
    for minibatch in agent.minibatches(rollout):
        distribution, *_ = agent.forward(minibatch)
        log_ratio = distribution.log_prob(minibatch["action"]) - minibatch["action_log_prob"]
        assert log_ratio.exp().tolist() == [1.0] * 64


def test_a_single_sample_is_not_normalised() -> None:
    agent = PPO(Counting, n_envs=1, n_steps=3, batch_size=2, n_epochs=1)
    agent.learn(3)
    assert bool(parameters(agent).isfinite().all())


def test_target_kl_stops_before_the_step_that_goes_too_far() -> None:
    agent = PPO(
        "CartPole-v1",
        n_steps=64,
        batch_size=64,
        n_epochs=50,
        target_kl=1e-3,
        learning_rate=0.01,
        max_grad_norm=10.0,
    )
    updates: list[float] = []
    agent.learn(64, lambda state: updates.append(state.metrics["train/n_updates"]))
    assert 1 <= updates[0] < 50


def test_schedules_reach_optimizer_and_clip() -> None:
    agent = PPO(
        Counting,
        n_steps=8,
        batch_size=8,
        n_epochs=1,
        learning_rate=lambda p: 0.1 * p,
        clip_range=lambda p: p,
    )
    seen: list[Progress] = []
    agent.learn(32, seen.append)
    rates = [state.metrics["train/learning_rate"] for state in seen]
    assert rates == pytest.approx([0.075, 0.05, 0.025, 0.0])
    assert [s.metrics["train/clip_range"] for s in seen] == pytest.approx([0.75, 0.5, 0.25, 0.0])


def test_same_seed_gives_the_same_parameters_and_others_others() -> None:
    def learned(seed: int) -> torch.Tensor:
        kwargs: dict[str, Any] = {"n_steps": 32, "batch_size": 32, "n_epochs": 2}
        return parameters(PPO("CartPole-v1", n_envs=2, seed=seed, **kwargs).learn(128))

    assert torch.equal(learned(0), learned(0))
    assert not torch.equal(learned(0), learned(1))


@pytest.mark.parametrize("microbatch", [7, 64])
def test_split_or_not_an_update_gives_the_same_parameters(microbatch: int) -> None:
    def learned(size: int | None) -> torch.Tensor:
        settings = preset("ppo", "CartPole-v1")
        with koila_rl.limits(microbatch=size):
            return parameters(PPO("CartPole-v1", **settings).learn(200))

    whole, split = learned(None), learned(microbatch)
    plan = koila_rl.last_plan()
    assert plan is not None
    assert plan.microbatch_size == microbatch
    torch.testing.assert_close(split, whole, rtol=0, atol=1e-5)


def test_the_callers_random_state_is_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    PPO("CartPole-v1", n_steps=16, batch_size=16, n_epochs=1).learn(16)
    assert torch.equal(torch.get_rng_state(), before)


def test_callback_ends_learning() -> None:
    agent = PPO(Counting, **SMALL)
    agent.learn(1000, lambda state: state.num_timesteps < 16)
    assert agent.num_timesteps == 16


@pytest.mark.parametrize("shape", [(3, 36, 36), (36, 36, 3)])
def test_pictures_are_stored_as_bytes_and_learned_from(shape: tuple[int, ...]) -> None:
    agent = PPO(lambda: Pictures(shape), n_envs=2, n_steps=4, batch_size=8, n_epochs=1)
    assert agent.network.shares_trunk
    assert collected(agent).data["observation"].dtype == torch.uint8
    before = parameters(agent)
    agent.learn(16)
    assert not torch.equal(parameters(agent), before)


def test_actions_are_in_the_environments_terms() -> None:
    discrete = PPO(lambda: Identity(gym.spaces.Discrete(3, start=5)), **SMALL)
    assert {int(discrete.act(np.int64(6))) for _ in range(50)} == {5, 6, 7}
    space = gym.spaces.Box(-0.1, 0.1, (2,), np.float32)
    box = PPO(lambda: Identity(space), **SMALL)
    actions = box.act(np.stack([space.sample() for _ in range(50)]))
    assert actions.shape == (50, 2)
    assert actions.dtype == np.float32
    assert all(space.contains(action) for action in actions)
    one = space.sample()
    np.testing.assert_array_equal(box.act(one, deterministic=True), box.act(one, True))
    assert not np.array_equal(box.act(one), box.act(one))


def test_wrong_observation_shape_is_named() -> None:
    agent = PPO("CartPole-v1", n_steps=16, batch_size=16)
    with pytest.raises(ConfigurationError, match=r"\(3,\); this agent takes \(4,\) or \(n, 4\)"):
        agent.act(np.zeros(3))


def test_a_loaded_agent_acts_as_the_saved_one(tmp_path: Path) -> None:
    agent = PPO("CartPole-v1", n_envs=2, n_steps=16, batch_size=16, n_epochs=1, seed=3).learn(64)
    agent.save(tmp_path / "agent.pt")
    again = koila_rl.load(tmp_path / "agent.pt")
    observations = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    np.testing.assert_array_equal(again.act(observations), agent.act(observations))
    assert again.num_timesteps == agent.num_timesteps
    assert again.hyperparameters == agent.hyperparameters
    assert again.evaluate("CartPole-v1", 2).returns == agent.evaluate("CartPole-v1", 2).returns
    with pytest.raises(ConfigurationError, match="resume"):
        again.learn(100)


def test_unsupported_spaces_are_refused() -> None:
    text = gym.spaces.Text(5)
    with pytest.raises(UnsupportedError, match="FlattenObservation"):
        check_spaces(gym.spaces.Dict({"a": text}), gym.spaces.Discrete(2), "PPO")
    unbounded = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    with pytest.raises(UnsupportedError, match="RescaleAction"):
        PPO(lambda: Identity(unbounded))
    with pytest.raises(UnsupportedError, match="takes Discrete actions, not Box"):
        check_spaces(gym.spaces.Discrete(2), unbounded, "DQN", (gym.spaces.Discrete,))
    with pytest.raises(UnsupportedError, match="not Text"):
        check_spaces(gym.spaces.Discrete(2), text, "PPO")


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigurationError, match="device 'nonsense'"):
        PPO("CartPole-v1", device="nonsense")
