"""Losses of the distributional, continuous and token-level agents."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import (
    Categorical,
    Independent,
    Normal,
    TanhTransform,
    TransformedDistribution,
)

from tests.engine.networks import integers, normal, padded_tokens

ATOMS, QUANTILES = 11, 8


def transitions(n: int) -> tuple[Tensor, ...]:
    """Observation, action, reward, not terminated, next observation."""
    return (
        normal(n, 8),
        integers(3, n),
        normal(n, 1),
        (normal(n, 1) > -1).float(),
        normal(n, 9)[:, :8],
    )


class Categorical51(nn.Module):
    """A distribution over atoms for each of three actions."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3 * ATOMS))
        self.register_buffer("support", torch.linspace(-2, 2, ATOMS))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).view(-1, 3, ATOMS).log_softmax(-1)


def c51(module: Any, *batch: Tensor) -> Tensor:
    observation, action, reward, going_on, following = batch
    step = 4 / (ATOMS - 1)
    with torch.no_grad():
        probabilities = module(following).exp()
        best = (probabilities * module.support).sum(-1).argmax(-1)
        chosen = probabilities.gather(1, best.view(-1, 1, 1).expand(-1, 1, ATOMS)).squeeze(1)
        landed = (reward + 0.9 * going_on * module.support).clamp(-2, 2)
        place = (landed + 2) / step
        low = place.floor().clamp(0, ATOMS - 1)
        high = (low + 1).clamp(max=ATOMS - 1)
        projected = torch.zeros_like(chosen)
        projected.scatter_add_(1, low.long(), chosen * (1 - (place - low)))
        projected.scatter_add_(1, high.long(), chosen * (place - low))
    predicted = module(observation)[torch.arange(observation.shape[0]), action]
    return -(projected * predicted).sum(-1).mean()


class Quantiles(nn.Module):
    """Quantiles of the return for each of three actions."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3 * QUANTILES))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).view(-1, QUANTILES, 3)


def quantile_huber(current: Tensor, target: Tensor, taus: Tensor) -> Tensor:
    """Huber's loss of each pair of quantiles; ``current`` and ``target`` are [N, quantiles]."""
    error = target.unsqueeze(1) - current.unsqueeze(2)
    huber = torch.where(error.abs() <= 1, 0.5 * error**2, error.abs() - 0.5)
    return ((taus.unsqueeze(-1) - (error.detach() < 0).to(huber.dtype)).abs() * huber).sum(1).mean()


def qr_dqn(module: Any, *batch: Tensor) -> Tensor:
    observation, action, reward, going_on, following = batch
    with torch.no_grad():
        future = module(following)
        best = future.mean(1, keepdim=True).argmax(-1, keepdim=True).expand(-1, QUANTILES, 1)
        target = reward + 0.9 * going_on * future.gather(2, best).squeeze(2)
    index = action.view(-1, 1, 1).expand(-1, QUANTILES, 1)
    current = module(observation).gather(2, index).squeeze(2)
    taus = (torch.arange(QUANTILES, dtype=current.dtype) + 0.5) / QUANTILES
    return quantile_huber(current, target, taus.unsqueeze(0))


class ImplicitQuantiles(nn.Module):
    """Quantiles at fractions that the caller gives, by a cosine embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 32)
        self.cosine = nn.Linear(16, 32)
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor, taus: Tensor) -> Tensor:
        size, count = taus.shape
        steps = torch.arange(1, 17, dtype=taus.dtype) * math.pi
        embedded = F.relu(self.cosine(torch.cos(taus.reshape(size * count, 1) * steps)))
        features = F.relu(self.trunk(x)).repeat_interleave(count, dim=0)
        answers: Tensor = self.head(features * embedded)
        return answers.view(size, count, 3)


def iqn_batch(n: int) -> tuple[Tensor, ...]:
    return *transitions(n), normal(n, QUANTILES).sigmoid(), normal(n, QUANTILES + 1).sigmoid()


def iqn(module: Any, *batch: Tensor) -> Tensor:
    observation, action, reward, going_on, following, taus, other_taus = batch
    with torch.no_grad():
        future = module(following, other_taus)
        best = future.mean(1).argmax(-1).view(-1, 1, 1).expand(-1, other_taus.shape[1], 1)
        target = reward + 0.9 * going_on * future.gather(2, best).squeeze(2)
    index = action.view(-1, 1, 1).expand(-1, QUANTILES, 1)
    current = module(observation, taus).gather(2, index).squeeze(2)
    return quantile_huber(current, target, taus)


class Gaussian(nn.Module):
    """Mean and standard deviation of two actions, and a critic of them."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
        self.critic = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.actor(x).chunk(2, dim=-1)
        return mean, log_std.clamp(-5, 2).exp()


def squashed_gaussian(module: Any, observation: Tensor, noise: Tensor) -> Tensor:
    mean, std = module(observation)
    raw = mean + std * noise
    action = torch.tanh(raw)
    log_prob = Normal(mean, std).log_prob(raw) - torch.log(1 - action.pow(2) + 1e-6)
    value = module.critic(torch.cat([observation, action], dim=-1))
    return (0.2 * log_prob.sum(-1, keepdim=True) - value).mean()


def transformed_gaussian(module: Any, observation: Tensor, noise: Tensor) -> Tensor:
    mean, std = module(observation)
    distribution = TransformedDistribution(Independent(Normal(mean, std), 1), [TanhTransform()])
    return -distribution.log_prob(torch.tanh(noise)).mean()


def multi_discrete_batch(n: int) -> tuple[Tensor, ...]:
    actions = torch.stack([integers(3, n), integers(4, n), integers(2, n)], dim=1)
    return normal(n, 8), actions, normal(n)


def multi_discrete(module: Any, observation: Tensor, action: Tensor, advantage: Tensor) -> Tensor:
    heads = [
        Categorical(logits=part) for part in torch.split(module(observation), [3, 4, 2], dim=1)
    ]
    chosen = torch.unbind(action, dim=1)
    pairs = zip(heads, chosen, strict=True)
    log_prob = torch.stack([head.log_prob(a) for head, a in pairs], dim=1).sum(dim=1)
    entropy = torch.stack([head.entropy() for head in heads], dim=1).sum(dim=1)
    return -(log_prob * advantage).mean() - 0.01 * entropy.mean()


def completions(n: int) -> tuple[Tensor, ...]:
    """Tokens of prompt and completion, the completion's mask, advantages, old log-probabilities."""
    tokens = integers(16, n, 10)
    lengths = 5 + integers(5, n)
    places = torch.arange(10)
    mask = (places >= 4) & (places < lengths.unsqueeze(1))
    return tokens, mask[:, 1:].float(), normal(n), -2.5 + 0.2 * normal(n, 9)


def token_policy_gradient(module: Any, *batch: Tensor) -> Tensor:
    tokens, mask, advantage, old = batch
    following = tokens[:, 1:].unsqueeze(-1)

    def log_probs(model: nn.Module) -> Tensor:
        return model(tokens[:, :-1]).log_softmax(-1).gather(-1, following).squeeze(-1)

    current = log_probs(module.policy)
    with torch.no_grad():
        reference = log_probs(module.reference)
    ratio = (current - old).exp()
    gain = torch.min(ratio * advantage[:, None], ratio.clamp(0.8, 1.2) * advantage[:, None])
    kl = (reference - current).exp() - (reference - current) - 1
    return -((gain - 0.1 * kl) * mask).sum() / mask.sum()


def tokens_and_target(n: int) -> tuple[Tensor, ...]:
    return padded_tokens(n), normal(n, 4)
