"""Networks: an encoder for the observation, perceptrons after it, and heads for the actions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from koila_rl.errors import UnsupportedError
from koila_rl.spaces import ActionSpace, ObservationSpace

__all__ = ["ActorCritic", "NatureCNN", "encoder", "is_image", "mlp"]


class ActorCritic(nn.Module):
    """Policy and value function on one observation; they share a trunk or have one each.

    Observations are ``[N, …]`` in the environment's own shape and dtype. Initialised as in
    Andrychowicz et al. 2021 (https://arxiv.org/abs/2006.05990) and Stable-Baselines3:
    orthogonal with gain √2, 0.01 for the policy's last layer and 1 for the value's.
    """

    def __init__(
        self,
        observation_space: ObservationSpace,
        action_space: ActionSpace,
        *,
        net_arch: Sequence[int],
        share_trunk: bool,
        log_std_init: float = 0.0,
    ) -> None:
        super().__init__()
        self.shares_trunk = share_trunk
        self.policy_trunk, width = _trunk(observation_space, net_arch)
        self.value_trunk = (
            self.policy_trunk if share_trunk else _trunk(observation_space, net_arch)[0]
        )
        self.policy_head: CategoricalHead | GaussianHead
        if isinstance(action_space, gym.spaces.Discrete):
            self.policy_head = CategoricalHead(width, int(action_space.n))
        else:
            self.policy_head = GaussianHead(width, action_space.shape, log_std_init)
        self.value_head = _linear(width, 1, gain=1.0)

    def forward(self, observation: Tensor) -> tuple[Distribution, Tensor]:
        """Distribution over actions, and V ``[N]``; a shared trunk runs once."""
        features = self.policy_trunk(observation)
        other = features if self.shares_trunk else self.value_trunk(observation)
        return self.policy_head(features), self.value_head(other).squeeze(-1)

    def distribution(self, observation: Tensor) -> Distribution:
        """Distribution over actions alone."""
        distribution: Distribution = self.policy_head(self.policy_trunk(observation))
        return distribution

    def value(self, observation: Tensor) -> Tensor:
        """V alone, ``[N]``."""
        value: Tensor = self.value_head(self.value_trunk(observation))
        return value.squeeze(-1)


class CategoricalHead(nn.Module):
    """One of ``n`` actions."""

    def __init__(self, width: int, n: int) -> None:
        super().__init__()
        self.logits = _linear(width, n, gain=0.01)

    def forward(self, features: Tensor) -> Categorical:
        """Actions are int64 ``[N]``, from 0."""
        return Categorical(logits=self.logits(features), validate_args=False)


class GaussianHead(nn.Module):
    """A diagonal Gaussian over a Box of actions, its standard deviation the same in all states."""

    def __init__(self, width: int, shape: tuple[int, ...], log_std_init: float) -> None:
        super().__init__()
        self.shape = shape
        self.mean = _linear(width, math.prod(shape), gain=0.01)
        self.log_std = nn.Parameter(torch.full(shape, log_std_init))

    def forward(self, features: Tensor) -> Independent[Normal]:
        """Actions are floats ``[N, *shape]``, unbounded; whoever acts clips them to the Box."""
        mean = self.mean(features).unflatten(-1, self.shape)
        normal = Normal(mean, self.log_std.exp(), validate_args=False)
        return Independent(normal, len(self.shape), validate_args=False)


class NatureCNN(nn.Module):
    """The convolutional encoder of Mnih et al. 2015, 512 features; images ``[N, *shape]``.

    uint8 images are divided by 255 here, so that they travel as bytes. Which axis holds the
    channels is read from the shape: the smaller of the first and the last.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.channels_last = shape[-1] < shape[0]
        channels, *size = (shape[-1], *shape[:-1]) if self.channels_last else shape
        if min(size) < 36:
            raise UnsupportedError(
                f"images of {size[0]}×{size[1]} are too small for the Nature CNN, which needs "
                "36×36; flatten them with gymnasium.wrappers.FlattenObservation"
            )
        self.convolutions = nn.Sequential(
            *(_orthogonal(nn.Conv2d(channels, 32, 8, stride=4)), nn.ReLU()),
            *(_orthogonal(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU()),
            *(_orthogonal(nn.Conv2d(64, 64, 3, stride=1)), nn.ReLU()),
            nn.Flatten(),
        )
        with torch.no_grad():
            width = self.convolutions(torch.zeros(1, channels, *size)).shape[1]
        self.linear = nn.Sequential(_linear(width, 512, gain=math.sqrt(2)), nn.ReLU())

    def forward(self, observation: Tensor) -> Tensor:
        """Features ``[N, 512]``."""
        image = observation.permute(0, 3, 1, 2) if self.channels_last else observation
        features: Tensor = self.linear(self.convolutions(image.float() / 255.0))
        return features


class _Flat(nn.Module):
    """A vector or array of numbers as float features."""

    def forward(self, observation: Tensor) -> Tensor:
        return observation.float().flatten(1)


class _OneHot(nn.Module):
    """One of ``n`` observations, counted from ``start``, as a unit vector."""

    identity: Tensor

    def __init__(self, n: int, start: int) -> None:
        super().__init__()
        self.start = start
        self.register_buffer("identity", torch.eye(n), persistent=False)

    def forward(self, observation: Tensor) -> Tensor:
        return self.identity[observation.long() - self.start]


def is_image(space: gym.Space[object]) -> bool:
    """Whether observations are uint8 pictures with 1, 3 or 4 channels first or last, or stacks."""
    return (
        isinstance(space, gym.spaces.Box)
        and space.dtype == np.uint8
        and len(space.shape) == 3
        and bool((space.low == 0).all() and (space.high == 255).all())
    )


def encoder(space: ObservationSpace) -> tuple[nn.Module, int]:
    """A module from observations ``[N, …]`` to features ``[N, width]``, and the width."""
    if isinstance(space, gym.spaces.Discrete):
        return _OneHot(int(space.n), int(space.start)), int(space.n)
    if is_image(space):
        return NatureCNN(space.shape), 512
    return _Flat(), math.prod(space.shape)


def mlp(width: int, net_arch: Sequence[int]) -> nn.Sequential:
    """Linear layers of the given widths, each followed by tanh."""
    layers: list[nn.Module] = []
    for size in net_arch:
        layers += [_linear(width, size, gain=math.sqrt(2)), nn.Tanh()]
        width = size
    return nn.Sequential(*layers)


def _trunk(space: ObservationSpace, net_arch: Sequence[int]) -> tuple[nn.Module, int]:
    module, width = encoder(space)
    return nn.Sequential(module, mlp(width, net_arch)), ([width, *net_arch])[-1]


def _linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def _orthogonal(layer: nn.Conv2d) -> nn.Conv2d:
    nn.init.orthogonal_(layer.weight, math.sqrt(2))
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
