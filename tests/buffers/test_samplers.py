from __future__ import annotations

import numpy as np
import pytest
import torch

from koila_rl.buffers import ReplayBuffer
from koila_rl.buffers.samplers import Sequential, Shuffled, Subset, Uniform, Weighted
from koila_rl.errors import ConfigurationError


def filled(n: int = 11, capacity: int = 8, seed: int = 0) -> ReplayBuffer:
    buffer = ReplayBuffer(capacity, seed=seed)
    buffer.extend({"row": torch.arange(n)})
    return buffer


def rows(buffer: ReplayBuffer, size: int, epochs: int, sampler: object) -> list[list[int]]:
    drawn = buffer.minibatches(size, epochs, sampler, lazy=False)  # type: ignore[arg-type]
    return [part["row"].tolist() for part in drawn]


def test_sequential() -> None:
    parts = rows(filled(), 3, 2, Sequential())
    assert parts == [[3, 4, 5], [6, 7, 8], [9, 10]] * 2


@pytest.mark.parametrize("size", [1, 3, 8, 20])
def test_shuffled_visits_each_once_an_epoch(size: int) -> None:
    parts = rows(filled(), size, 3, Shuffled())
    flat = [row for part in parts for row in part]
    assert len(flat) == 24
    for epoch in range(3):
        assert sorted(flat[8 * epoch : 8 * epoch + 8]) == list(range(3, 11))
    assert flat[:8] != flat[8:16]


def test_subset() -> None:
    parts = rows(filled(), 2, 2, Subset([0, 7, 2]))
    assert [len(part) for part in parts] == [2, 1, 2, 1]
    assert sorted(parts[0] + parts[1]) == [3, 5, 10]
    with pytest.raises(ConfigurationError, match="position 8 of 8"):
        rows(filled(), 2, 1, Subset([8]))
    with pytest.raises(ConfigurationError, match="at least one"):
        Subset([])


def test_weighted() -> None:
    drawn = filled().sample(40_000, Weighted([0, 1, 0, 3, 0, 0, 0, 0]), lazy=False)
    share = np.bincount(drawn["row"].numpy(), minlength=11) / 40_000
    np.testing.assert_allclose(share[[4, 6]], [0.25, 0.75], atol=0.01)
    assert share.sum() == pytest.approx(share[4] + share[6])
    with pytest.raises(ConfigurationError, match="3 weights were given for 8"):
        filled().sample(4, Weighted([1, 1, 1]))
    with pytest.raises(ConfigurationError, match="all weights are 0"):
        Weighted([0.0])
    with pytest.raises(ConfigurationError, match="finite"):
        Weighted([float("nan")])


def test_uniform_draws_with_replacement() -> None:
    drawn = filled().sample(40_000, Uniform(), lazy=False)
    share = np.bincount(drawn["row"].numpy(), minlength=11)[3:] / 40_000
    np.testing.assert_allclose(share, 1 / 8, atol=0.01)


def test_seeds_reproduce() -> None:
    def draw(seed: int) -> list[int]:
        buffer = filled(seed=seed)
        return buffer.sample(9, lazy=False)["row"].tolist() + rows(buffer, 3, 1, Shuffled())[0]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
