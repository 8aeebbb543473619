"""Wrapped buffers of others give what they gave, and the gradients they gave, split."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import DQN, PPO, HerReplayBuffer
from stable_baselines3.common import buffers as sb3
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.vec_env import DummyVecEnv
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    TensorDictReplayBuffer,
)
from torchrl.data import ReplayBuffer as TorchRLBuffer

import koila_rl
from koila_rl import LazyTensor
from koila_rl.buffers import ReplayBuffer
from koila_rl.errors import ConfigurationError, StaleValueError
from koila_rl.integrations.torchrl import LazyMinibatch

VECTOR = spaces.Box(-1, 1, (3,), np.float32)
DICT = spaces.Dict({"image": spaces.Box(0, 255, (2, 4, 4), np.uint8), "speed": VECTOR})


def leaves(value: Any) -> list[Tensor]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [] if value is None else [value]


def assert_same(lazy: Any, eager: Any) -> None:
    assert type(lazy) is type(eager)
    pairs = list(zip(leaves(lazy), leaves(eager), strict=True))
    for wrapped, plain in pairs:
        assert isinstance(wrapped, LazyTensor)
        assert (wrapped.shape, wrapped.dtype) == (plain.shape, plain.dtype)
    for wrapped, plain in pairs:
        assert torch.equal(koila_rl.materialize(wrapped), plain)


def observe(space: spaces.Space[Any], n_envs: int) -> Any:
    samples = [space.sample() for _ in range(n_envs)]
    if isinstance(space, spaces.Dict):
        return {key: np.stack([sample[key] for sample in samples]) for key in space.spaces}
    return np.stack(samples)


def fill_rollout(buffer: Any, n_envs: int) -> None:
    buffer.observation_space.seed(0)
    rng = np.random.default_rng(0)
    for _ in range(buffer.buffer_size):
        buffer.add(
            observe(buffer.observation_space, n_envs),
            rng.integers(0, 4, (n_envs, 1)),
            rng.standard_normal(n_envs),
            rng.random(n_envs) < 0.2,
            torch.randn(n_envs),
            torch.randn(n_envs),
        )
    buffer.compute_returns_and_advantage(torch.randn(n_envs), np.zeros(n_envs))


@pytest.mark.parametrize(
    ("kind", "space"), [(sb3.RolloutBuffer, VECTOR), (sb3.DictRolloutBuffer, DICT)]
)
def test_sb3_rollouts(kind: Any, space: spaces.Space[Any]) -> None:
    plain = kind(7, space, spaces.Discrete(4), device="cpu", n_envs=3)
    wrapped = koila_rl.wrap(plain)
    assert isinstance(wrapped, kind)
    assert koila_rl.wrap(wrapped) is wrapped
    torch.manual_seed(0)
    fill_rollout(wrapped, 3)
    np.random.seed(3)  # noqa: NPY002  (theirs draw from it)
    lazy = list(wrapped.get(4))
    np.random.seed(3)  # noqa: NPY002
    eager = list(plain.get(4))
    assert len(lazy) == len(eager) == 6
    for ours, theirs in zip(lazy, eager, strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize(
    ("kind", "space", "optimise"),
    [
        (sb3.ReplayBuffer, VECTOR, False),
        (sb3.ReplayBuffer, VECTOR, True),
        (sb3.DictReplayBuffer, DICT, False),
        (sb3.NStepReplayBuffer, VECTOR, False),
    ],
)
def test_sb3_replay(kind: Any, space: spaces.Space[Any], optimise: bool, n_envs: int) -> None:
    space.seed(0)
    settings = {"device": "cpu", "n_envs": n_envs}
    if optimise:
        settings |= {"optimize_memory_usage": True, "handle_timeout_termination": False}
    plain = kind(10 * n_envs, space, spaces.Discrete(4), **settings)
    wrapped = koila_rl.wrap(plain)
    assert isinstance(wrapped, kind)
    rng = np.random.default_rng(0)

    def add(steps: int) -> None:
        for _ in range(steps):
            wrapped.add(
                observe(space, n_envs),
                observe(space, n_envs),
                rng.integers(0, 4, n_envs),
                rng.standard_normal(n_envs),
                rng.random(n_envs) < 0.2,
                [{"TimeLimit.truncated": bool(rng.random() < 0.1)} for _ in range(n_envs)],
            )

    add(7)
    for _ in range(6):
        np.random.seed(3)  # noqa: NPY002
        lazy = wrapped.sample(9)
        np.random.seed(3)  # noqa: NPY002
        eager = plain.sample(9)
        # Rows are gathered only now, after the ring has gone on over some of them.
        add(4)
        assert_same(lazy, eager)


def test_sb3_buffers_pickle() -> None:
    wrapped = koila_rl.wrap(sb3.RolloutBuffer(4, VECTOR, spaces.Discrete(4), n_envs=2))
    fill_rollout(wrapped, 2)
    again = pickle.loads(pickle.dumps(wrapped))
    assert type(again) is type(wrapped)
    np.testing.assert_array_equal(again.advantages, wrapped.advantages)


@pytest.mark.parametrize("storage", ["tensor", "memmap"])
@pytest.mark.parametrize("kind", [TorchRLBuffer, TensorDictReplayBuffer])
def test_torchrl(kind: Any, storage: str, tmp_path: Any) -> None:
    place = (
        LazyTensorStorage(20)
        if storage == "tensor"
        else LazyMemmapStorage(20, scratch_dir=tmp_path)
    )
    plain = kind(storage=place, batch_size=8)
    plain.extend(transitions(0, 13))
    wrapped = koila_rl.wrap(plain)
    assert isinstance(wrapped, kind)
    torch.manual_seed(0)
    lazy = wrapped.sample()
    torch.manual_seed(0)
    eager = plain.sample()
    assert isinstance(lazy["next", "reward"], LazyTensor)
    assert (koila_rl.materialize(lazy) == eager).all()
    weight = torch.zeros((), requires_grad=True)
    with koila_rl.limits(microbatch=3):
        (lazy["next", "reward"] * weight.exp()).sum().backward()
    assert weight.grad is not None
    assert weight.grad == pytest.approx(eager["next", "reward"].sum().item())
    stale = wrapped.sample()
    wrapped.extend(transitions(13, 13))
    assert len(plain) == 20
    with pytest.raises(StaleValueError, match="TorchRL storage"):
        koila_rl.materialize(stale["row"])


def test_torchrl_transform_and_list_storage() -> None:
    plain = TensorDictReplayBuffer(storage=LazyTensorStorage(20), batch_size=8)
    plain.append_transform(LazyMinibatch())
    plain.extend(transitions(0, 13))
    assert isinstance(plain.sample()["row"], LazyTensor)
    listed = TorchRLBuffer(storage=ListStorage(20), batch_size=8, collate_fn=torch.stack)
    listed.extend(list(torch.arange(10.0)))
    assert isinstance(koila_rl.wrap(listed).sample(), LazyTensor)


def test_to_torchrl_and_back() -> None:
    ours = ReplayBuffer(10, seed=0)
    ours.extend(transitions(0, 13))
    theirs = ours.to_torchrl(batch_size=4)
    assert len(theirs) == 10
    assert theirs[:]["row"].tolist() == list(range(3, 13))
    theirs.extend(transitions(13, 4))
    back = ReplayBuffer.from_torchrl(theirs, seed=0)
    assert [int(row) for row in back[:]["row"]] == list(range(7, 17))
    assert (back[:]["next", "reward"] == torch.arange(7.0, 17.0)).all()


def transitions(first: int, n: int) -> TensorDict:
    row = torch.arange(first, first + n)
    return TensorDict({"row": row, "next": {"reward": row.float()}}, [n])


class Pair(NamedTuple):
    inputs: Any
    labels: Any


class Batch(dict[str, Any]):
    """As Tianshou's: attributes for items."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Sampling:
    capacity = 5

    def sample(self, size: int) -> tuple[Batch, np.ndarray[Any, Any]]:
        return Batch(obs=torch.arange(float(size)), info=Batch(t=torch.ones(size))), np.arange(size)

    def __len__(self) -> int:
        return 3


def test_anything_that_samples_or_iterates() -> None:
    wrapped = koila_rl.wrap(Sampling())
    batch, index = wrapped.sample(4)
    assert isinstance(batch, Batch)
    assert isinstance(batch.obs, LazyTensor)
    assert isinstance(batch.info.t, LazyTensor)
    assert isinstance(index, LazyTensor)
    assert wrapped.capacity == 5
    assert len(wrapped) == 3
    pairs = [Pair(np.ones((4, 2), dtype=np.float32), torch.zeros(4, dtype=torch.int64))] * 2
    drawn = list(koila_rl.wrap(pairs))
    assert len(drawn) == 2
    assert isinstance(drawn[0], Pair)
    assert_same(drawn[0], Pair(torch.ones(4, 2), torch.zeros(4, dtype=torch.int64)))
    with pytest.raises(ConfigurationError, match="int has no sample"):
        koila_rl.wrap(5)


def test_ours_are_returned_as_they_are() -> None:
    ours = ReplayBuffer(3)
    assert koila_rl.wrap(ours) is ours


@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")
@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_sb3_learns_the_same_split(algorithm: str) -> None:
    def learned(split: bool) -> Tensor:
        common: dict[str, Any] = {"seed": 1, "device": "cpu"}
        if algorithm == "ppo":
            model: Any = PPO(
                "MlpPolicy", "CartPole-v1", n_steps=64, batch_size=48, n_epochs=2, **common
            )
            if split:
                model.rollout_buffer = koila_rl.wrap(model.rollout_buffer)
        else:
            model = DQN(
                "MlpPolicy", "CartPole-v1", buffer_size=60, learning_starts=20, train_freq=4,
                batch_size=16, target_update_interval=20, **common,
            )  # fmt: skip
            if split:
                model.replay_buffer = koila_rl.wrap(model.replay_buffer)
        with koila_rl.limits(microbatch=7 if split else None):
            model.learn(128)
        return torch.cat([p.detach().flatten() for p in model.policy.parameters()])

    torch.testing.assert_close(learned(split=True), learned(split=False), rtol=0, atol=1e-6)
    plan = koila_rl.last_plan()
    assert plan is not None
    assert plan.batch_size == 16


@pytest.mark.parametrize("n_envs", [1, 2])
def test_sb3_hindsight_replay(n_envs: int) -> None:
    """Goals are relabelled as Stable-Baselines3 does, also after the ring has gone round."""

    def learned(split: bool) -> tuple[Tensor, Any]:
        env = DummyVecEnv([lambda: BitFlippingEnv(n_bits=4, continuous=False)] * n_envs)
        model = DQN(
            "MultiInputPolicy", env, replay_buffer_class=HerReplayBuffer, buffer_size=60,
            learning_starts=40, train_freq=8, batch_size=16, seed=1, device="cpu",
        )  # fmt: skip
        if split:
            model.replay_buffer = koila_rl.wrap(model.replay_buffer)
        with koila_rl.limits(microbatch=5 if split else None):
            model.learn(120)
        parameters = torch.cat([p.detach().flatten() for p in model.policy.parameters()])
        return parameters, model.replay_buffer

    (ours, wrapped), (theirs, _) = learned(split=True), learned(split=False)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert isinstance(wrapped, HerReplayBuffer)
    np.random.seed(3)  # noqa: NPY002
    lazy = wrapped.sample(9)
    np.random.seed(3)  # noqa: NPY002
    plain = object.__new__(HerReplayBuffer)
    plain.__dict__ = wrapped.__dict__
    assert_same(lazy, plain.sample(9))
