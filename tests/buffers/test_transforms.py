from __future__ import annotations

import pytest
import torch

import koila_rl
from koila_rl.buffers import ReplayBuffer
from koila_rl.buffers.transforms import Cast, Compose, RunningNormalisation, to_tensor
from koila_rl.errors import ConfigurationError


def test_to_tensor_is_torchvisions() -> None:
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 1, 1, 3).expand(2, 4, 5, 3)
    made = to_tensor(images)
    assert made.shape == (2, 3, 4, 5)
    assert made.dtype == torch.float32
    assert made[0, :, 0, 0].tolist() == pytest.approx([0.0, 0.2, 1.0])
    assert to_tensor(torch.zeros(2, 4, 5)).shape == (2, 1, 4, 5)
    assert to_tensor(torch.full((1, 2, 2, 1), 300.0)).max() == 300.0
    with pytest.raises(ConfigurationError, match=r"\[n, H, W, C\]"):
        to_tensor(torch.zeros(2))


def test_transforms_reach_the_leaves_they_are_named_for() -> None:
    images = torch.arange(6, dtype=torch.uint8)[:, None, None, None].expand(6, 4, 5, 3)
    speed = torch.arange(6)
    buffer = ReplayBuffer(
        6,
        seed=0,
        transforms={("observation", "image"): to_tensor, "speed": Cast(torch.float64)},
    )
    observation = {"image": images, "other": speed}
    buffer.extend(
        {"observation": observation, "speed": speed, "next": {"observation": observation}}
    )
    sample = buffer.sample(8)
    assert sample["observation", "image"].shape == (8, 3, 4, 5)
    assert sample["next", "observation", "image"].dtype == torch.float32
    assert sample["observation", "other"].dtype == torch.int64
    real = koila_rl.materialize(sample)
    assert real["speed"].dtype == torch.float64
    assert torch.equal(real["observation", "image"][:, 0, 0, 0] * 255, real["speed"].float())


def test_running_moments_are_those_of_all_rows() -> None:
    rows = torch.randn(37, 3, dtype=torch.float64) * 5 + 2
    moments = RunningNormalisation((3,), eps=0.0, clip=100.0)
    for part in torch.split(rows, 10):
        moments.update(part)
    torch.testing.assert_close(moments.mean, rows.mean(0))
    torch.testing.assert_close(moments.variance, rows.var(0, correction=0))
    expected = (rows - rows.mean(0)) / rows.std(0, correction=0)
    torch.testing.assert_close(moments(rows), expected)
    with pytest.raises(ConfigurationError, match="rows of"):
        moments.update(torch.zeros(2, 4))


def test_a_minibatch_sees_the_moments_of_its_draw() -> None:
    moments = RunningNormalisation((1,), clip=1e9)
    moments.update(torch.tensor([[0.0], [2.0]]))
    change = Compose(Cast(torch.float64), moments)
    buffer = ReplayBuffer(4, seed=0, transforms={"observation": change})
    buffer.extend({"observation": torch.arange(4.0)[:, None]})
    sample = buffer.sample(6)
    expected = buffer.sample(6, lazy=False)
    total = sample["observation"].sum()
    moments.update(torch.full((100, 1), 50.0))
    again = ReplayBuffer(4, seed=0)
    again.extend({"observation": torch.arange(4.0)[:, None]})
    with koila_rl.limits(microbatch=2):
        assert total.item() == pytest.approx((again.sample(6, lazy=False)["observation"] - 1).sum())
    assert expected["observation"].dtype == torch.float64
