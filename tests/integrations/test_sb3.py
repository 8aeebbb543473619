"""Stable-Baselines3 with one line more: the same parameters, within memory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from sb3_contrib import TRPO, RecurrentPPO
from stable_baselines3 import A2C, DQN, PPO, SAC, TD3
from torch import Tensor

import koila_rl
from koila_rl.errors import ConfigurationError, UnsupportedError
from koila_rl.integrations import sb3
from tests.helpers import ForwardCounter, LiveStorages, allow_unsplit
from tests.integrations.sb3_models import OFF_POLICY, ON_POLICY, SPACES, model, parameters, steps

# One algorithm of each kind on vectors, one on images; the rest is slow.
QUICK = [(kind, "MlpPolicy") for kind in (PPO, RecurrentPPO, DQN, SAC)]
QUICK += [(PPO, "CnnPolicy")]
CASES = [
    pytest.param(kind, policy, marks=[] if (kind, policy) in QUICK else [pytest.mark.slow])
    for kind in (*ON_POLICY, *OFF_POLICY)
    for policy in SPACES
]

pytestmark = pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")


@pytest.mark.parametrize(("algorithm", "policy"), CASES)
def test_learn_gives_the_same_parameters(algorithm: Any, policy: str) -> None:
    def learned(attach: bool, microbatch: int | None = None) -> Tensor:
        # Made and used one after the other: each sets the seed of all.
        made = model(algorithm, policy)
        if attach:
            sb3.attach(made, microbatch=microbatch)
        with allow_unsplit():
            made.learn(steps(algorithm))
        return parameters(made)

    plain = learned(attach=False)
    torch.testing.assert_close(learned(attach=True), plain, rtol=0, atol=1e-5)
    torch.testing.assert_close(learned(attach=True, microbatch=3), plain, rtol=0, atol=1e-5)
    if algorithm is not RecurrentPPO:
        plan = koila_rl.last_plan()
        assert plan is not None
        assert (plan.batch_size, plan.microbatch_size) == (8, 3)
        assert plan.unsplit == ()


def test_learn_completes_where_the_plain_model_runs_out_of_memory() -> None:
    def learned(attached: bool, capacity: str = "1GiB") -> Any:
        made = model(PPO, width=64, n_envs=16, n_steps=64, batch_size=1024)
        if attached:
            sb3.attach(made)
        with koila_rl.SimulatedDevice(capacity) as device:
            device.register(made.policy)
            made.learn(1024)
        return parameters(made)

    plain = learned(attached=False)
    with pytest.raises(torch.OutOfMemoryError):
        learned(attached=False, capacity="800KiB")
    torch.testing.assert_close(learned(True, "800KiB"), plain, rtol=0, atol=1e-5)
    plan = koila_rl.last_plan()
    assert plan is not None
    assert plan.split


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [DQN, SAC, TD3, A2C])
def test_every_kind_of_algorithm_learns_on_a_device_that_is_too_small_for_it(
    algorithm: Any,
) -> None:
    replay = {"batch_size": 4096, "learning_starts": 4200, "buffer_size": 5000}
    settings: Any = {"n_steps": 1024, "n_envs": 4} if algorithm is A2C else replay

    def learned(attached: bool, capacity: float | str) -> tuple[Any, int]:
        made = model(algorithm, width=64, **settings)
        if attached:
            sb3.attach(made)
        with koila_rl.SimulatedDevice(capacity) as device:
            device.register(made.policy)
            made.learn(4208)
        return parameters(made), device.peak_bytes

    plain, peak = learned(attached=False, capacity="1GiB")
    small = int(0.6 * peak)
    with pytest.raises(torch.OutOfMemoryError):
        learned(attached=False, capacity=small)
    mine, used = learned(attached=True, capacity=small)
    assert used <= small
    torch.testing.assert_close(mine, plain, rtol=0, atol=1e-5)
    plan = koila_rl.last_plan()
    assert plan is not None
    assert plan.split


def test_the_peak_does_not_grow_with_the_minibatch() -> None:
    def peak(minibatch: int, microbatch: int | None) -> int:
        made = model(PPO, width=64, n_envs=8, n_steps=minibatch // 8, batch_size=minibatch)
        if microbatch:
            sb3.attach(made, microbatch=microbatch)
        made.learn(minibatch)
        with LiveStorages() as live:
            made.train()
        return live.peak

    small, large = (peak(size, 32) for size in (64, 256))
    # What is one number a sample stays: losses, log-probabilities, advantages.
    assert large - small <= 64 * (256 - 64)
    assert peak(256, None) - peak(64, None) > 1000 * (256 - 64)


@pytest.mark.parametrize(("microbatch", "most"), [(None, 1), (3, 2)])
def test_forwards_of_ppo(microbatch: int | None, most: int) -> None:
    made = sb3.attach(model(PPO, n_epochs=2), microbatch=microbatch)
    made.learn(24)
    with ForwardCounter(made.policy.mlp_extractor.policy_net[0]) as counter:
        made.train()
    assert counter.rows == most * 2 * 24


@pytest.mark.parametrize("microbatch", [None, 3])
def test_forwards_of_dqn(microbatch: int | None) -> None:
    made = sb3.attach(model(DQN), microbatch=microbatch)
    made.learn(20)
    made.train(gradient_steps=3, batch_size=8)
    with (
        ForwardCounter(made.q_net.q_net[0]) as online,
        ForwardCounter(made.q_net_target.q_net[0]) as target,
    ):
        made.train(gradient_steps=3, batch_size=8)
    assert (online.rows, target.rows) == (24, 24)


def test_save_and_load_as_before(tmp_path: Path) -> None:
    made = sb3.attach(model(SAC), microbatch=3)
    made.learn(20)
    made.save(tmp_path / "model")
    made.save_replay_buffer(tmp_path / "buffer")
    assert b"koila" not in (tmp_path / "buffer.pkl").read_bytes()
    loaded = SAC.load(tmp_path / "model", env=made.get_env())
    assert type(loaded) is SAC
    torch.testing.assert_close(parameters(loaded), parameters(made))
    loaded.load_replay_buffer(tmp_path / "buffer")
    assert loaded.replay_buffer.size() == made.replay_buffer.size()
    sb3.attach(loaded, microbatch=3).learn(8)
    made.load_replay_buffer(tmp_path / "buffer")
    made.learn(8)


def test_detach_restores_and_attaching_twice_is_harmless() -> None:
    made = model(A2C)
    before = dict(vars(made))
    assert sb3.attach(sb3.attach(made, microbatch=2), microbatch=3) is made
    assert isinstance(made, A2C)
    assert vars(made) == before
    made.learn(8)
    plan = koila_rl.last_plan()
    assert plan is not None
    assert plan.microbatch_size == 3
    assert sb3.detach(sb3.detach(made)) is made
    assert type(made) is A2C
    made.learn(8)
    assert koila_rl.last_plan() is plan


def test_copies_stay_attached() -> None:
    made = sb3.attach(model(A2C), microbatch=3)
    twin = copy.deepcopy(made)
    assert twin.policy is not made.policy
    twin.learn(8)
    plan = koila_rl.last_plan()
    assert plan is not None
    assert plan.microbatch_size == 3


def test_limits_around_learn_hold_where_attach_gave_none() -> None:
    made = sb3.attach(model(PPO))
    with koila_rl.limits(microbatch=5):
        made.learn(24)
    plan = koila_rl.last_plan()
    assert plan is not None
    assert plan.microbatch_size == 5


def test_wrong_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UnsupportedError, match=r"TRPO of Stable-Baselines3 is not supported.*PPO, "
    ):
        sb3.attach(TRPO("MlpPolicy", "CartPole-v1", device="cpu"))
    with pytest.raises(ConfigurationError, match="got str"):
        sb3.attach("PPO")
    made = model(PPO)
    with pytest.raises(ConfigurationError, match="microbatch"):
        sb3.attach(made, microbatch=0)
    with pytest.raises(ConfigurationError):
        sb3.attach(made, memory="much")
    assert type(made) is PPO
    monkeypatch.setitem(sb3.TESTED, "stable-baselines3", ("1.0", "2.0"))
    with pytest.warns(UserWarning, match=r"stable-baselines3 2\.\d+.* is installed.*1\.0 to below"):
        sb3.attach(made)
