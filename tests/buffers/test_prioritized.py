from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from koila_rl.buffers import PrioritizedReplayBuffer
from koila_rl.buffers.sumtree import SumTree
from koila_rl.errors import BatchSizeError, ConfigurationError, StorageError


def transitions(first: int, n: int) -> TensorDict:
    return TensorDict({"observation": torch.arange(first, first + n)}, [n])


@settings(max_examples=100, deadline=None)
@given(
    capacity=st.integers(1, 20_000),
    writes=st.lists(st.integers(0, 2**31), min_size=1, max_size=5),
    scale=st.sampled_from([1e-12, 1.0, 1e12]),
)
def test_a_tree_finds_what_a_cumulative_sum_finds(
    capacity: int, writes: list[int], scale: float
) -> None:
    weights = np.zeros(capacity)
    tree = SumTree(weights)
    plain = np.zeros(capacity)
    for seed in writes:
        rng = np.random.default_rng(seed)
        slots = rng.integers(0, capacity, rng.integers(1, 50))
        values = rng.integers(0, 4, len(slots)) * scale
        tree.set(slots, values)
        for slot, value in zip(slots, values, strict=True):
            plain[slot] = value
    assert np.array_equal(weights, plain)
    assert tree.total == pytest.approx(plain.sum(), rel=1e-12)
    if plain.sum() > 0:
        # Weights are small multiples of one scale: half-way points are far from any rounding.
        at = (np.arange(200) % int(plain.sum() / scale) + 0.5) * scale
        assert np.array_equal(tree.find(at), plain.cumsum().searchsorted(at, side="right"))
        edges = np.array([0.0, tree.total, np.nextafter(tree.total, 0)])
        assert (plain[tree.find(edges)] > 0).all()


@pytest.mark.parametrize("capacity", [1, 63, 64, 5000, 300_000])
def test_slots_of_weight_zero_are_never_found(capacity: int) -> None:
    rng = np.random.default_rng(0)
    weights = np.zeros(capacity)
    tree = SumTree(weights)
    slots = rng.integers(0, capacity, max(1, capacity // 10))
    tree.set(slots, rng.random(len(slots)) * 10.0 ** rng.integers(-200, 3, len(slots)) + 1e-250)
    assert (weights[tree.find(rng.random(100_000) * tree.total)] > 0).all()


def test_draws_follow_the_priorities() -> None:
    buffer = PrioritizedReplayBuffer(100, alpha=0.5, beta=1.0, eps=0.0, seed=0)
    buffer.extend(transitions(0, 4))
    sample = buffer.sample(4, lazy=False)
    sample["index"] = torch.arange(4)
    buffer.update_priorities(sample, torch.tensor([-1.0, 4.0, 9.0, 16.0])[:, None])
    drawn = buffer.sample(100_000, lazy=False)
    share = np.bincount(drawn["observation"].numpy(), minlength=4) / 100_000
    np.testing.assert_allclose(share, np.array([1, 2, 3, 4]) / 10, atol=0.01)
    weight = torch.tensor([4.0, 2.0, 4 / 3, 1.0]) / 4
    torch.testing.assert_close(drawn["weight"], weight[drawn["observation"]])


def test_weights_are_normalised_over_the_whole_minibatch() -> None:
    buffer = PrioritizedReplayBuffer(1000, seed=0)
    buffer.extend(transitions(0, 1000))
    sample = buffer.sample(1000, lazy=False)
    buffer.update_priorities(sample, torch.rand(1000))
    assert buffer.sample(500, lazy=False)["weight"].max() == 1.0


def test_new_transitions_get_the_largest_priority() -> None:
    buffer = PrioritizedReplayBuffer(8, alpha=1.0, eps=0.0, seed=0)
    buffer.extend(transitions(0, 4))
    sample = buffer.sample(1, lazy=False)
    buffer.update_priorities(sample, torch.tensor([1e6]))
    buffer.extend(transitions(4, 1))
    drawn = set(buffer.sample(50, lazy=False)["observation"].tolist())
    assert drawn == {int(sample["observation"]), 4}


def test_replaced_transitions_keep_the_priority_of_their_successors() -> None:
    buffer = PrioritizedReplayBuffer(4, alpha=1.0, eps=0.0, seed=0)
    buffer.extend(transitions(0, 4))
    sample = buffer.sample(1, lazy=False)
    sample["index"] = torch.tensor([0])
    buffer.extend(transitions(4, 1))
    buffer.update_priorities(sample, torch.tensor([1e9]))
    share = (buffer.sample(10_000, lazy=False)["observation"] == 4).float().mean()
    assert share == pytest.approx(0.25, abs=0.03)


@settings(max_examples=50, deadline=None)
@given(
    capacity=st.integers(1, 30),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=10),
    seed=st.integers(0, 1000),
)
def test_never_a_slot_that_is_empty_skipped_or_replaced(
    capacity: int, sizes: list[int], seed: int
) -> None:
    buffer = PrioritizedReplayBuffer(capacity, seed=seed)
    rng = np.random.default_rng(seed)
    total, skipped = 0, []
    for size in sizes:
        skip = torch.from_numpy(rng.random(size) < 0.2)
        buffer.extend(transitions(total, size), skip=skip)
        skipped += skip.tolist()
        total += size
        live = {row for row in range(max(0, total - capacity), total) if not skipped[row]}
        assert len(buffer) == len(live)
        if live:
            sample = buffer.sample(20, lazy=False)
            assert set(sample["observation"].tolist()) <= live
            assert sample["index"].min() >= 0
            buffer.update_priorities(sample, torch.from_numpy(rng.normal(size=20)))


@settings(max_examples=50, deadline=None)
@given(
    capacity=st.integers(1, 30),
    alpha=st.sampled_from([0.0, 0.5, 1.0]),
    beta=st.sampled_from([0.0, 0.4, 1.0]),
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=12),
    seed=st.integers(0, 1000),
)
def test_priorities_are_those_of_a_list(
    capacity: int, alpha: float, beta: float, sizes: list[int], seed: int
) -> None:
    buffer = PrioritizedReplayBuffer(capacity, alpha=alpha, beta=beta, eps=0.25, seed=seed)
    rng = np.random.default_rng(seed)
    priorities: list[float] = []  # of every transition ever stored
    largest = 1.0
    kept = None
    for size in (min(size, capacity) for size in sizes):
        if size:
            skip = rng.random(size) < 0.2
            buffer.extend(transitions(len(priorities), size), skip=torch.from_numpy(skip))
            priorities += [0.0 if skipped else largest for skipped in skip]
        first = max(0, len(priorities) - capacity)
        live = {row: p**alpha for row, p in enumerate(priorities) if row >= first and p > 0}
        if not live:
            continue
        sample = buffer.sample(9, lazy=False)
        rows = sample["index"].tolist()
        assert sample["observation"].tolist() == rows
        assert set(rows) <= set(live)
        share = np.array([live[row] for row in rows]) / sum(live.values())
        weight = (len(live) * share) ** -beta
        np.testing.assert_allclose(sample["weight"], weight / weight.max(), rtol=1e-6)
        # Some errors come late, when their transitions may have been replaced.
        late, kept = kept, sample if kept is None else None
        chosen = sample if late is None else late
        errors = rng.normal(size=9)
        buffer.update_priorities(chosen, torch.from_numpy(errors))
        for row, error in zip(chosen["index"].tolist(), errors, strict=True):
            if row >= first:
                priorities[row] = abs(error) + 0.25
                largest = max(largest, priorities[row])


def test_mistakes_change_nothing(tmp_path: Path) -> None:
    buffer = PrioritizedReplayBuffer(4, seed=0)
    with pytest.raises(StorageError, match="no transitions"):
        buffer.sample(1)
    buffer.extend(transitions(0, 4))
    sample = buffer.sample(3, lazy=False)
    with pytest.raises(BatchSizeError, match="minibatch of 3"):
        buffer.update_priorities(sample, torch.ones(4))
    with pytest.raises(ConfigurationError, match="1 of 3 td errors"):
        buffer.update_priorities(sample, torch.tensor([5.0, float("nan"), 5.0]))
    share = np.bincount(buffer.sample(10_000, lazy=False)["observation"].numpy()) / 10_000
    np.testing.assert_allclose(share, 0.25, atol=0.03)
    with pytest.raises(ConfigurationError, match="alpha is -1"):
        PrioritizedReplayBuffer(4, alpha=-1)


def test_saved_and_loaded_priorities_draw_the_same(tmp_path: Path) -> None:
    buffer = PrioritizedReplayBuffer(100, alpha=0.7, beta=0.5, n_steps=1, seed=3)
    buffer.extend(transitions(0, 130))
    buffer.update_priorities(buffer.sample(64, lazy=False), torch.rand(64) * 10)
    buffer.save(tmp_path)
    loaded = PrioritizedReplayBuffer.load(tmp_path)
    assert (loaded.sample(50, lazy=False) == buffer.sample(50, lazy=False)).all()
    loaded.extend(transitions(130, 5))
    buffer.extend(transitions(130, 5))
    assert (loaded.sample(50, lazy=False) == buffer.sample(50, lazy=False)).all()
