"""Distributions over actions against torch.distributions and by sampling."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import distributions as reference

from koila_rl.agents.distributions import (
    Bits,
    Categories,
    Gaussian,
    MultiCategories,
    Squashed,
    head,
)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.manual_seed(0), dtype=torch.float64)


def test_categories() -> None:
    logits = normal(6, 4)
    ours, theirs = Categories(logits), reference.Categorical(logits=logits)
    action = torch.tensor([0, 1, 2, 3, 0, 1])
    torch.testing.assert_close(ours.log_prob(action), theirs.log_prob(action))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    assert torch.equal(ours.mode, theirs.mode)


def test_multi_categories() -> None:
    logits = normal(6, 5)
    ours = MultiCategories(logits, [2, 3])
    parts = [reference.Categorical(logits=part) for part in logits.split([2, 3], -1)]
    action = torch.tensor([[0, 2], [1, 1], [0, 0], [1, 2], [0, 1], [1, 0]])
    expected = sum(part.log_prob(action[:, i]) for i, part in enumerate(parts))
    torch.testing.assert_close(ours.log_prob(action), expected)
    torch.testing.assert_close(ours.entropy(), sum(part.entropy() for part in parts))
    assert torch.equal(ours.mode, torch.stack([part.mode for part in parts], -1))


def test_bits() -> None:
    logits = normal(6, 3)
    ours = Bits(logits)
    theirs = reference.Independent(reference.Bernoulli(logits=logits), 1)
    action = (normal(6, 3) > 0.3).to(torch.int8)
    torch.testing.assert_close(ours.log_prob(action), theirs.log_prob(action.double()))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    assert torch.equal(ours.mode, (logits > 0).to(torch.int8))


def test_gaussian() -> None:
    mean, log_std = normal(6, 3), normal(3)
    ours = Gaussian(mean, log_std)
    theirs = reference.Independent(reference.Normal(mean, log_std.exp()), 1)
    torch.testing.assert_close(ours.log_prob(mean + 1.0), theirs.log_prob(mean + 1.0))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())


def test_squashed_density_is_that_after_tanh() -> None:
    mean, log_std = normal(6, 3), normal(6, 3)
    before = mean + 0.5
    theirs = reference.TransformedDistribution(
        reference.Normal(mean, log_std.exp()), [reference.TanhTransform()]
    )
    expected = theirs.log_prob(before.tanh()).sum(-1)
    torch.testing.assert_close(Squashed(mean, log_std).log_prob(before), expected)
    far = Squashed(torch.zeros(1, 1), torch.zeros(1, 1)).log_prob(torch.tensor([[40.0]]))
    assert bool(far.isfinite().all())


@pytest.mark.parametrize("log_std", [-3.0, -1.0])
def test_squashed_entropy_is_right_to_first_order(log_std: float) -> None:
    ours = Squashed(torch.full((1, 1), 0.5), torch.full((1, 1), log_std))
    many = Squashed(ours.mean.expand(200_000, 1), ours.log_std.expand(200_000, 1))
    sampled = -many.log_prob(many.sample(torch.Generator().manual_seed(0))).mean()
    assert float(ours.entropy()) == pytest.approx(float(sampled), abs=math.exp(2 * log_std) + 0.003)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiBinary(3),
        spaces.Box(-1.0, 1.0, (2,)),
    ],
    ids=lambda space: type(space).__name__,
)
def test_samples_follow_the_density(space: spaces.Space[object]) -> None:
    torch.manual_seed(1)
    features = torch.randn(1, 4).expand(20_000, 4)
    module = head(space, 4)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(30.0)
        distribution = module(features)
        actions = distribution.sample(torch.Generator().manual_seed(0))
        again = module(features).sample(torch.Generator().manual_seed(0))
        # The mean of −log p over samples is the entropy.
        surprise, entropy = -distribution.log_prob(actions).mean(), distribution.entropy()[0]
    assert torch.equal(actions, again)
    assert float(surprise) == pytest.approx(float(entropy), abs=0.02)


def test_a_deviation_of_the_state_differs_between_states() -> None:
    torch.manual_seed(0)
    space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    module = head(space, 4, state_dependent_std=True, log_std_init=-1.0)
    log_std = module(torch.randn(5, 4)).log_std.detach()
    assert log_std.shape == (5, 2)
    assert float((log_std + 1.0).abs().max()) < 0.1
    assert float(log_std.std(0).min()) > 0.0
    fixed = head(space, 4, log_std_init=-1.0)(torch.randn(5, 4)).log_std
    assert fixed.detach().tolist() == [-1.0, -1.0]
