"""Means and normalisation over what counts, against the same over a selection."""

from __future__ import annotations

import torch

import koila_rl
from koila_rl.agents.averages import mean, normalized


def test_what_does_not_count_changes_nothing() -> None:
    values = torch.randn(7, generator=torch.manual_seed(0), dtype=torch.float64)
    weight = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    counted = values[weight > 0]
    torch.testing.assert_close(mean(values, weight), counted.mean())
    expected = (counted - counted.mean()) / (counted.std() + 1e-8)
    torch.testing.assert_close(normalized(values, weight)[weight > 0], expected)
    ones = torch.ones(7, dtype=torch.float64)
    torch.testing.assert_close(normalized(values, ones), normalized(values))


def test_split_or_not() -> None:
    values = torch.randn(7, generator=torch.manual_seed(0), dtype=torch.float64)
    weight = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    with koila_rl.limits(microbatch=2):
        lazy = normalized(*koila_rl.lazy(values, weight))
        found = koila_rl.materialize(lazy)
    torch.testing.assert_close(found, normalized(values, weight), rtol=0, atol=1e-12)


def test_nothing_or_one_that_counts_is_finite() -> None:
    values, nothing = torch.tensor([3.0, 4.0]), torch.zeros(2)
    assert float(mean(values, nothing)) == 0.0
    one = torch.tensor([1.0, 0.0])
    assert normalized(values, one).tolist()[0] == 0.0
    assert bool(normalized(values, nothing).isfinite().all())
