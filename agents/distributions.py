"""Distributions over the actions of each space, as small as policies need them.

All take log-probabilities and entropies over whole actions, ``[N]``, and draw from a generator of
the agent's own. Actions are in the network's terms: categories count from 0, and Box actions are
unbounded; :class:`koila_rl.agents.interface.Interface` says them in the environment's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import gymnasium as gym
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from koila_rl.agents.encoders import orthogonal
from koila_rl.spaces import ActionSpace

__all__ = ["Bits", "Categories", "Distribution", "Gaussian", "MultiCategories", "Squashed", "head"]


class Distribution(Protocol):
    """What policies and losses ask of a distribution over actions."""

    @property
    def mode(self) -> Tensor:
        """The likeliest actions ``[N, …]``."""

    def sample(self, generator: torch.Generator) -> Tensor:
        """Random actions ``[N, …]``."""

    def log_prob(self, action: Tensor) -> Tensor:
        """Log-probability or log-density of each action, ``[N]``."""

    def entropy(self) -> Tensor:
        """In nats, ``[N]``."""


class Categories:
    """One of ``n`` actions, int64 ``[N]``."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits.log_softmax(-1)

    @property
    def probs(self) -> Tensor:
        """Probability of each action, ``[N, n]``."""
        return self.logits.exp()

    @property
    def mode(self) -> Tensor:
        """The likeliest actions."""
        return self.logits.argmax(-1)

    def sample(self, generator: torch.Generator) -> Tensor:
        """Random actions."""
        return torch.multinomial(self.probs, 1, generator=generator).squeeze(-1)

    def log_prob(self, action: Tensor) -> Tensor:
        """Log-probability of each action."""
        return self.logits.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """−Σ p log p."""
        return -(self.probs * self.logits).sum(-1)


class MultiCategories:
    """Independent choices, one of ``nvec[i]`` each; int64 ``[N, len(nvec)]``."""

    def __init__(self, logits: Tensor, nvec: Sequence[int]) -> None:
        self.choices = [Categories(part) for part in logits.split(list(nvec), -1)]

    @property
    def mode(self) -> Tensor:
        """The likeliest actions."""
        return torch.stack([choice.mode for choice in self.choices], -1)

    def sample(self, generator: torch.Generator) -> Tensor:
        """Random actions."""
        return torch.stack([choice.sample(generator) for choice in self.choices], -1)

    def log_prob(self, action: Tensor) -> Tensor:
        """Sum over the choices."""
        parts = [choice.log_prob(action[..., i]) for i, choice in enumerate(self.choices)]
        return torch.stack(parts, -1).sum(-1)

    def entropy(self) -> Tensor:
        """Sum over the choices."""
        return torch.stack([choice.entropy() for choice in self.choices], -1).sum(-1)


class Bits:
    """Independent bits, 0 or 1; int8 ``[N, n]``."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    @property
    def mode(self) -> Tensor:
        """The likeliest actions."""
        return (self.logits > 0).to(torch.int8)

    def sample(self, generator: torch.Generator) -> Tensor:
        """Random actions."""
        return torch.bernoulli(self.logits.sigmoid(), generator=generator).to(torch.int8)

    def log_prob(self, action: Tensor) -> Tensor:
        """Σ of log σ(logit) where the bit is 1 and log σ(−logit) where it is 0."""
        return (action.to(self.logits.dtype) * self.logits - softplus(self.logits)).sum(-1)

    def entropy(self) -> Tensor:
        """Sum over the bits."""
        return (softplus(self.logits) - self.logits.sigmoid() * self.logits).sum(-1)


@dataclass(frozen=True)
class Gaussian:
    """A diagonal Gaussian; floats ``[N, n]``, unbounded: whoever acts clips them to the Box."""

    mean: Tensor
    log_std: Tensor

    @property
    def mode(self) -> Tensor:
        """The mean."""
        return self.mean

    def sample(self, generator: torch.Generator) -> Tensor:
        """Random actions."""
        noise = torch.randn(
            self.mean.shape, generator=generator, device=self.mean.device, dtype=self.mean.dtype
        )
        return self.mean + self.log_std.exp() * noise

    def log_prob(self, action: Tensor) -> Tensor:
        """Log-density, summed over the dimensions."""
        z = (action - self.mean) * (-self.log_std).exp()
        return (-0.5 * z.square() - self.log_std - 0.5 * math.log(2 * math.pi)).sum(-1)

    def entropy(self) -> Tensor:
        """Differential entropy, summed over the dimensions."""
        log_std = self.log_std.expand_as(self.mean)
        return (0.5 + 0.5 * math.log(2 * math.pi) + log_std).sum(-1)


class Squashed(Gaussian):
    """tanh of a diagonal Gaussian, from −1 to 1; actions are kept as they were *before* tanh.

    So nothing is lost to rounding near the bounds. The density is that of tanh(action)
    (Haarnoja et al. 2018, https://arxiv.org/abs/1801.01290, appendix C).
    """

    def log_prob(self, action: Tensor) -> Tensor:
        """Log-density of ``tanh(action)``."""
        return super().log_prob(action) - _log_slope(action).sum(-1)

    def entropy(self) -> Tensor:
        """To first order: of the Gaussian, and the logarithm of tanh's slope at the mean."""
        return super().entropy() + _log_slope(self.mean).sum(-1)


def _log_slope(u: Tensor) -> Tensor:
    """log(1 − tanh(u)²) without overflow."""
    return 2.0 * (math.log(2.0) - u - softplus(-2.0 * u))


class _CategoriesHead(nn.Module):
    def __init__(self, width: int, n: int) -> None:
        super().__init__()
        self.logits = orthogonal(nn.Linear(width, n), gain=0.01)

    def forward(self, features: Tensor) -> Categories:
        return Categories(self.logits(features))


class _MultiCategoriesHead(nn.Module):
    def __init__(self, width: int, nvec: list[int]) -> None:
        super().__init__()
        self.nvec = nvec
        self.logits = orthogonal(nn.Linear(width, sum(nvec)), gain=0.01)

    def forward(self, features: Tensor) -> MultiCategories:
        return MultiCategories(self.logits(features), self.nvec)


class _BitsHead(nn.Module):
    def __init__(self, width: int, n: int) -> None:
        super().__init__()
        self.logits = orthogonal(nn.Linear(width, n), gain=0.01)

    def forward(self, features: Tensor) -> Bits:
        return Bits(self.logits(features))


class _GaussianHead(nn.Module):
    """A Gaussian whose standard deviation is one parameter, or a function of the state."""

    def __init__(self, width: int, n: int, log_std_init: float, by_state: bool, squash: bool):
        super().__init__()
        self.squash = squash
        self.mean = orthogonal(nn.Linear(width, n), gain=0.01)
        self.log_std: nn.Module | nn.Parameter
        if by_state:
            self.log_std = orthogonal(nn.Linear(width, n), gain=0.01)
            assert isinstance(self.log_std, nn.Linear)
            nn.init.constant_(self.log_std.bias, log_std_init)
        else:
            self.log_std = nn.Parameter(torch.full((n,), log_std_init))

    def forward(self, features: Tensor) -> Gaussian:
        mean = self.mean(features)
        if isinstance(self.log_std, nn.Module):
            log_std = self.log_std(features).clamp(-20.0, 2.0)
        else:
            log_std = self.log_std
        return Squashed(mean, log_std) if self.squash else Gaussian(mean, log_std)


def head(
    space: ActionSpace,
    width: int,
    *,
    log_std_init: float = 0.0,
    state_dependent_std: bool = False,
    squash: bool = False,
) -> nn.Module:
    """A module from features ``[N, width]`` to the distribution of the space's actions.

    Actions of several dimensions are flat, ``[N, n]``. The last layer starts with gain 0.01.
    """
    if isinstance(space, gym.spaces.Discrete):
        return _CategoriesHead(width, int(space.n))
    if isinstance(space, gym.spaces.MultiDiscrete):
        return _MultiCategoriesHead(width, space.nvec.reshape(-1).tolist())
    n = math.prod(space.shape)
    if isinstance(space, gym.spaces.MultiBinary):
        return _BitsHead(width, n)
    return _GaussianHead(width, n, log_std_init, state_dependent_std, squash)
