"""PPO with a policy that remembers, for observations that do not tell the whole state.

The rollout is cut into sequences. Each is run from the memory that the acting policy had at its
start (the state of an LSTM or GRU, handed over as ``lazy(…, batch=1)``), and the memory is
emptied inside a sequence where an episode began. What a sequence holds beyond the rollout, and
rows that only reset an environment, carry no weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

import koila_rl
from koila_rl.agents import hyperparameters
from koila_rl.agents.distributions import Distribution
from koila_rl.agents.interleaving import Update
from koila_rl.agents.ppo import PPO
from koila_rl.agents.ppo_hyperparameters import Hyperparameters
from koila_rl.agents.recurrent_networks import CELLS, RecurrentActorCritic
from koila_rl.envs import Episode, Step, VectorEnvironment
from koila_rl.errors import ConfigurationError

__all__ = ["RecurrentHyperparameters", "RecurrentPPO"]

_COLUMNS = ("action", "action_log_prob", "state_value", "advantage", "value_target")


@dataclass(frozen=True)
class RecurrentHyperparameters(Hyperparameters):
    """Those of PPO, and of its memory."""

    cell: str = "lstm"
    """What remembers: "lstm" or "gru"."""
    hidden_size: int = 256
    sequence_length: int | None = None
    """Steps through which gradients go back; ``n_steps`` where not said."""

    def check(self, n_envs: int) -> None:
        """As of PPO."""
        super().check(n_envs)
        if self.update != "blocking":
            raise ConfigurationError(
                f"update is {self.update!r}, but recurrent_ppo keeps the memory of one rollout "
                'only; use update="blocking"'
            )
        hyperparameters.check_choice(self, "cell", CELLS)
        hyperparameters.check_ranges(
            self,
            hidden_size=(1, hyperparameters.FINITE),
            sequence_length=(1, self.n_steps),
        )


class RecurrentPPO(PPO):
    """PPO over sequences. ``batch_size`` counts transitions; a minibatch has whole sequences.

    The agent remembers between calls of :meth:`act`; :meth:`forget` begins another episode.
    """

    name = "recurrent_ppo"
    hyperparameters_type = RecurrentHyperparameters
    hyperparameters: RecurrentHyperparameters
    network: RecurrentActorCritic  # type: ignore[assignment]

    def _build(self, images: bool) -> None:
        values = self.hyperparameters
        self.network = RecurrentActorCritic(
            self.interface.observation_space,
            self.interface.action_space,
            net_arch=(() if images else (64, 64)) if values.net_arch is None else values.net_arch,
            share_trunk=images if values.share_trunk is None else values.share_trunk,
            cell=values.cell,
            hidden_size=values.hidden_size,
            cnn=values.features_extractor,
            **values.head_settings(),
        ).to(self.device)
        self.optimizer = self._adam(values.learning_rate, eps=1e-5)
        self._memory: Tensor | None = None
        self._start = torch.ones(0, dtype=torch.bool)
        self._at_starts: list[Tensor] = []
        self._decided = 0
        self._acting: Tensor | None = None

    @property
    def sequence_length(self) -> int:
        """Steps of a sequence."""
        return self.hyperparameters.sequence_length or self.hyperparameters.n_steps

    def collect_rollout(
        self, env: VectorEnvironment, rollout: koila_rl.RolloutBuffer, update: Update | None = None
    ) -> tuple[Episode, ...]:
        """As of PPO; the memory at the start of each sequence is kept."""
        self._at_starts, self._decided = [], 0
        if self._memory is None:
            self._memory = self.network.empty(env.n_envs)
            self._start = torch.ones(env.n_envs, dtype=torch.bool)
        return super().collect_rollout(env, rollout, update)

    def decide(self, observation: Any) -> tuple[Tensor, dict[str, Any]]:
        """As of PPO, from what is remembered."""
        assert self._memory is not None
        if self._decided % self.sequence_length == 0:
            self._at_starts.append(self._memory)
        n_envs, start = len(self._start), self._start.to(self.device)
        distribution, value, self._memory = self.network.step(observation, self._memory, start)
        action = distribution.sample(self.generator)
        row = torch.arange(n_envs) + n_envs * self._decided
        self._decided += 1
        return action, {
            "action_log_prob": distribution.log_prob(action),
            "state_value": value,
            "start": self._start,
            "row": row,
        }

    def next_value(self, next_observation: Any) -> Tensor:
        """V of what the last decision led to, remembering the decision."""
        assert self._memory is not None
        going_on = torch.zeros(len(self._start), dtype=torch.bool, device=self.device)
        return self.network.step(next_observation, self._memory, going_on)[1]

    def _restarting(self) -> None:
        self._start = torch.ones_like(self._start)

    def after_step(self, step: Step) -> None:
        """Where an episode ended the next row begins another, and so after a mere reset."""
        self._start = torch.from_numpy(step.terminated | step.truncated | step.reset)

    def evaluate_rollout(self, rollout: koila_rl.RolloutBuffer) -> None:
        """Nothing is left to do: log-probabilities and values came with the decisions."""

    @property
    def n_sequences(self) -> int:
        """Sequences of a minibatch."""
        return max(1, self.hyperparameters.batch_size // self.sequence_length)

    def minibatches_an_epoch(self, rollout: koila_rl.RolloutBuffer) -> int:
        """As of PPO; what an environment collected is cut into sequences by itself."""
        sequences = math.ceil(rollout.n_steps / self.sequence_length) * rollout.n_envs
        return math.ceil(sequences / self.n_sequences)

    def minibatches(self, rollout: koila_rl.RolloutBuffer) -> Iterator[TensorDict]:
        """Lazy minibatches ``[n_sequences, length]`` of all epochs."""
        epochs = self.hyperparameters.n_epochs
        return rollout.sequences(self.sequence_length, self.n_sequences, epochs)

    def forward(
        self, minibatch: TensorDict
    ) -> tuple[Distribution, Tensor, TensorDict, Tensor | None]:
        """As of PPO, with the sequences one after another."""
        row: Tensor = koila_rl.materialize(minibatch["row"])[:, 0]
        n_envs = len(self._start)
        sequence, env = row // n_envs // self.sequence_length, row % n_envs
        # [sequences, parts, n_envs, hidden] → [parts, n_sequences of the minibatch, hidden]
        remembered = torch.stack(self._at_starts)[sequence, :, env].transpose(0, 1).contiguous()
        memory = koila_rl.lazy(remembered, batch=1)
        distribution, value = self.network(minibatch["observation"], memory, minibatch["start"])
        weight = (minibatch["mask"] & ~minibatch["reset"]).flatten().float()
        data = {name: minibatch[name].flatten(0, 1) for name in _COLUMNS}
        return distribution, value, data, weight

    def forget(self, where: NDArray[np.bool_] | None = None) -> None:
        """Begin another episode in the environments ``where`` [N], or in all of them."""
        if where is None or self._acting is None:
            self._acting = None
        else:
            self._acting[:, torch.from_numpy(where)] = 0.0

    def _choose(self, observation: Any, deterministic: bool) -> Tensor:
        n = self.size(observation)
        if self._acting is None or self._acting.shape[1] != n:
            self._acting = self.network.empty(n)
        going_on = torch.zeros(n, dtype=torch.bool, device=self.device)
        distribution, _, self._acting = self.network.step(observation, self._acting, going_on)
        return distribution.mode if deterministic else distribution.sample(self.generator)
