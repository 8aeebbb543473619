"""Networks: an encoder for the observation, a perceptron after it, and heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from koila_rl.agents.distributions import Distribution, head
from koila_rl.agents.encoders import encoder, orthogonal
from koila_rl.spaces import ActionSpace, ObservationSpace

__all__ = ["ActorCritic", "QNetwork", "perceptron"]


class ActorCritic(nn.Module):
    """Policy and value function on one observation; they share a trunk or have one each.

    Observations are ``[N, …]`` in the environment's own shape and dtype, or a mapping of such.
    Initialised as in Andrychowicz et al. 2021 (https://arxiv.org/abs/2006.05990) and
    Stable-Baselines3: orthogonal with gain √2, 0.01 for the policy's last layer and 1 for the
    value's.
    """

    def __init__(
        self,
        observation_space: ObservationSpace,
        action_space: ActionSpace,
        *,
        net_arch: Sequence[int],
        share_trunk: bool,
        cnn: str = "nature",
        **head_settings: Any,
    ) -> None:
        super().__init__()
        self.shares_trunk = share_trunk
        self.policy_trunk, width = _trunk(observation_space, net_arch, cnn)
        self.value_trunk = (
            self.policy_trunk if share_trunk else _trunk(observation_space, net_arch, cnn)[0]
        )
        self.policy_head = head(action_space, width, **head_settings)
        self.value_head = orthogonal(nn.Linear(width, 1), gain=1.0)

    def forward(self, observation: Any) -> tuple[Distribution, Tensor]:
        """Distribution over actions, and V ``[N]``; a shared trunk runs once."""
        features = self.policy_trunk(observation)
        other = features if self.shares_trunk else self.value_trunk(observation)
        return self.policy_head(features), self.value_head(other).squeeze(-1)

    def distribution(self, observation: Any) -> Distribution:
        """Distribution over actions alone."""
        distribution: Distribution = self.policy_head(self.policy_trunk(observation))
        return distribution

    def value(self, observation: Any) -> Tensor:
        """V alone, ``[N]``."""
        value: Tensor = self.value_head(self.value_trunk(observation))
        return value.squeeze(-1)


class QNetwork(nn.Module):
    """Q of every discrete action in a state, ``[N, n_actions]``.

    With ``dueling``, Q = V + A − mean(A) (Wang et al. 2016, https://arxiv.org/abs/1511.06581,
    equation 9), and each of the two has a perceptron of its own. Initialised as PyTorch does.
    """

    def __init__(
        self,
        observation_space: ObservationSpace,
        n_actions: int,
        *,
        net_arch: Sequence[int],
        dueling: bool = False,
        cnn: str = "nature",
    ) -> None:
        super().__init__()
        self.encoder, width = encoder(observation_space, cnn)
        last = [width, *net_arch][-1]
        self.advantage = nn.Sequential(
            _relu_perceptron(width, net_arch), nn.Linear(last, n_actions)
        )
        self.value: nn.Module | None = None
        if dueling:
            self.value = nn.Sequential(_relu_perceptron(width, net_arch), nn.Linear(last, 1))

    def forward(self, observation: Any) -> Tensor:
        """Q ``[N, n_actions]``."""
        features = self.encoder(observation)
        advantage: Tensor = self.advantage(features)
        if self.value is None:
            return advantage
        value: Tensor = self.value(features)
        return value + advantage - advantage.mean(-1, keepdim=True)


def perceptron(width: int, net_arch: Sequence[int]) -> nn.Sequential:
    """Linear layers of the given widths, orthogonal, each followed by tanh."""
    layers: list[nn.Module] = []
    for size in net_arch:
        layers += [orthogonal(nn.Linear(width, size), gain=math.sqrt(2)), nn.Tanh()]
        width = size
    return nn.Sequential(*layers)


def _relu_perceptron(width: int, net_arch: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in net_arch:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*layers)


def _trunk(space: ObservationSpace, net_arch: Sequence[int], cnn: str) -> tuple[nn.Module, int]:
    module, width = encoder(space, cnn)
    return nn.Sequential(module, perceptron(width, net_arch)), ([width, *net_arch])[-1]
