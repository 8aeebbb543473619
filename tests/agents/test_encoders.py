"""Encoders: what each space becomes, and that samples stay apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

import koila_rl
from koila_rl.agents.encoders import ImpalaCNN, encoder, has_images
from koila_rl.spaces import describe, each, restore
from tests.environments import Nested

PICTURE = spaces.Box(0, 255, (3, 9, 10), np.uint8)


def batch(space: spaces.Space[object], n: int) -> object:
    space.seed(0)
    samples = [each(np.asarray, space.sample()) for _ in range(n)]
    return each(lambda *leaves: torch.from_numpy(np.stack(leaves)), *samples)


def test_multi_discrete_is_one_hot_beside_one_hot() -> None:
    module, width = encoder(spaces.MultiDiscrete([2, 3], start=[1, -1]))
    assert width == 5
    found = module(torch.tensor([[1, -1], [2, 1]]))
    assert found.tolist() == [[1, 0, 1, 0, 0], [0, 1, 0, 0, 1]]


def test_impala_on_any_size_and_either_order_of_axes() -> None:
    torch.manual_seed(0)
    first, last = ImpalaCNN((3, 9, 10)), ImpalaCNN((9, 10, 3))
    last.load_state_dict(first.state_dict())
    image = torch.randint(0, 256, (2, 3, 9, 10), dtype=torch.uint8)
    assert first(image).shape == (2, 256)
    torch.testing.assert_close(first(image), last(image.permute(0, 2, 3, 1)))
    # 15 convolutions, as in the paper.
    assert sum(isinstance(m, torch.nn.Conv2d) for m in first.modules()) == 15


@pytest.mark.parametrize(
    "space", [PICTURE, Nested.observation_space, spaces.MultiDiscrete([2, 3])], ids=str
)
def test_samples_stay_apart(space: spaces.Space[object]) -> None:
    torch.manual_seed(0)
    module, width = encoder(space, cnn="impala")
    observation = batch(space, 7)
    with torch.no_grad():
        whole = module(observation)
        with koila_rl.limits(microbatch=3):
            split = koila_rl.materialize(module(koila_rl.lazy(observation)))
            plan = koila_rl.last_plan()
    assert whole.shape == (7, width)
    assert plan is not None
    assert plan.unsplit == ()
    torch.testing.assert_close(split, whole, rtol=0, atol=1e-5)


def test_pictures_inside_are_found() -> None:
    assert has_images(Nested.observation_space)
    assert not has_images(spaces.Dict({"a": spaces.Discrete(2)}))


def test_nested_spaces_are_saved_and_come_back() -> None:
    again = restore(describe(Nested.observation_space))
    assert again == Nested.observation_space
    for space in (spaces.MultiDiscrete([2, 3], start=[1, 0]), spaces.MultiBinary([2, 2])):
        assert restore(describe(space)) == space
