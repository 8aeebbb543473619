"""An actor and a critic with an LSTM or GRU between encoder and perceptron."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from koila_rl.agents.distributions import Distribution, head
from koila_rl.agents.encoders import encoder, orthogonal
from koila_rl.agents.networks import perceptron
from koila_rl.spaces import ActionSpace, ObservationSpace

__all__ = ["CELLS", "RecurrentActorCritic"]

CELLS: dict[str, type[nn.LSTMCell] | type[nn.GRUCell]] = {"lstm": nn.LSTMCell, "gru": nn.GRUCell}


class RecurrentActorCritic(nn.Module):
    """Policy and value function on what was observed since an episode began.

    The encoder is one; policy and value function remember for themselves unless they share a
    trunk. The memory of ``n`` environments is one tensor ``[parts, n, hidden_size]``, parts being
    the hidden and cell states.
    """

    def __init__(
        self,
        observation_space: ObservationSpace,
        action_space: ActionSpace,
        *,
        net_arch: Sequence[int],
        share_trunk: bool,
        cell: str,
        hidden_size: int,
        cnn: str = "nature",
        **head_settings: Any,
    ) -> None:
        super().__init__()
        self.encoder, width = encoder(observation_space, cnn)
        self.hidden_size, self.states = hidden_size, 2 if cell == "lstm" else 1
        n_cells = 1 if share_trunk else 2
        self.cells = nn.ModuleList(CELLS[cell](width, hidden_size) for _ in range(n_cells))
        last = [hidden_size, *net_arch][-1]
        self.policy = nn.Sequential(
            perceptron(hidden_size, net_arch), head(action_space, last, **head_settings)
        )
        self.value = nn.Sequential(
            perceptron(hidden_size, net_arch), orthogonal(nn.Linear(last, 1), gain=1.0)
        )

    def empty(self, n: int) -> Tensor:
        """The memory of ``n`` environments at the start of their episodes."""
        device = next(self.parameters()).device
        return torch.zeros(self.states * len(self.cells), n, self.hidden_size, device=device)

    def step(
        self, observation: Any, memory: Tensor, start: Tensor
    ) -> tuple[Distribution, Tensor, Tensor]:
        """One step: distribution, V ``[n]`` and the memory after it.

        ``start`` is bool ``[n]``, True where an episode begins and the memory is emptied.
        """
        keep = (~start).to(memory.dtype).unsqueeze(-1)
        parts = self._advance(self.encoder(observation), list(memory.unbind(0)), keep)
        value = self.value(parts[-self.states]).squeeze(-1)
        return self.policy(parts[0]), value, torch.stack(parts)

    def forward(
        self, observation: Any, memory: Tensor, start: Tensor
    ) -> tuple[Distribution, Tensor]:
        """Sequences: observations ``[B, L, …]``, memory ``[parts, B, hidden]``, start ``[B, L]``.

        Distribution and V of all steps, ``[B · L]``, one sequence after another.
        """
        length = start.shape[1]
        features = self.encoder(_flatten(observation)).unflatten(0, (-1, length))
        keep = (~start).to(memory.dtype).unsqueeze(-1)
        parts, policy, value = list(memory.unbind(0)), [], []
        for t in range(length):
            parts = self._advance(features[:, t], parts, keep[:, t])
            policy.append(parts[0])
            value.append(parts[-self.states])
        steps = torch.stack(policy, 1).flatten(0, 1)
        shared = len(self.cells) == 1
        others = steps if shared else torch.stack(value, 1).flatten(0, 1)
        return self.policy(steps), self.value(others).squeeze(-1)

    def _advance(self, features: Tensor, parts: list[Tensor], keep: Tensor) -> list[Tensor]:
        """Hidden and cell states after one step of every cell."""
        kept = [part * keep for part in parts]
        if self.states == 1:
            return [cell(features, part) for cell, part in zip(self.cells, kept, strict=True)]
        after: list[Tensor] = []
        for i, cell in enumerate(self.cells):
            after += cell(features, (kept[2 * i], kept[2 * i + 1]))
        return after


def _flatten(observation: Any) -> Any:
    """``[B, L, …]`` → ``[B · L, …]`` in every part of the observation."""
    if isinstance(observation, Tensor):
        return observation.flatten(0, 1)
    if isinstance(observation, Mapping) or hasattr(observation, "keys"):
        return {name: _flatten(observation[name]) for name in observation.keys()}  # noqa: SIM118
    raise TypeError(type(observation).__name__)
