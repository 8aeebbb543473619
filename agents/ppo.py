"""Proximal Policy Optimization (Schulman et al. 2017, https://arxiv.org/abs/1707.06347).

Read :meth:`PPO.learn` first: it is the paper's Algorithm 1, and the methods it calls follow it
in that order. Minibatches are lazy: ``loss.backward()`` in :meth:`PPO.update` runs in as many
microbatches as the memory limits ask for, and nothing here needs to know how many.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor, nn

import koila_rl
from koila_rl.agents.averages import mean, normalized
from koila_rl.agents.base import BaseAgent
from koila_rl.agents.distributions import Distribution
from koila_rl.agents.interface import Progress, says_stop
from koila_rl.agents.interleaving import Update, Work, backward
from koila_rl.agents.networks import ActorCritic
from koila_rl.agents.ppo_hyperparameters import Hyperparameters
from koila_rl.agents.schedules import at
from koila_rl.arguments import whole
from koila_rl.envs import Episode, Step, VectorEnvironment
from koila_rl.returns import bootstrap_rows, generalized_advantage

__all__ = ["PPO"]


class PPO(BaseAgent):
    """An actor and a critic that learn from fresh rollouts of vector environments."""

    name = "ppo"
    hyperparameters_type = Hyperparameters
    action_spaces = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box)
    hyperparameters: Hyperparameters
    network: ActorCritic
    _behind: ActorCritic | None = None

    def _build(self, images: bool) -> None:
        values = self.hyperparameters
        self.network = ActorCritic(
            self.interface.observation_space,
            self.interface.action_space,
            net_arch=(() if images else (64, 64)) if values.net_arch is None else values.net_arch,
            share_trunk=images if values.share_trunk is None else values.share_trunk,
            cnn=values.features_extractor,
            **values.head_settings(),
        ).to(self.device)
        self.optimizer = self._adam(values.learning_rate, eps=1e-5)

    def learn(
        self,
        total_timesteps: int,
        callback: Callable[[Progress], bool | None] | None = None,
    ) -> PPO:
        """Alternate rollouts and updates until ``total_timesteps`` transitions were seen.

        With ``update="interleaved"`` an update runs while the next rollout is collected, with the
        weights as they were before the update. ``callback`` is called after each update with the
        transitions it was made from; learning ends early where it returns False.
        """
        whole("total_timesteps", total_timesteps, least=None)
        env, self._behind = self._environment(), None
        rollouts = itertools.cycle(self._rollouts(env.n_envs))
        update, waiting = Update(), None

        def report(num_timesteps: int, episodes: tuple[Episode, ...]) -> bool:
            state = Progress(self, num_timesteps, total_timesteps, update.metrics, episodes)
            return callback is None or not says_stop(callback(state))

        while self.num_timesteps < total_timesteps:
            rollout = next(rollouts)
            with update:
                episodes = self.collect_rollout(env, rollout, update)
            if waiting is not None and not report(*waiting):
                break
            self.evaluate_rollout(rollout)
            self.estimate_advantages(rollout)
            progress = max(0.0, 1.0 - self.num_timesteps / total_timesteps)
            update, waiting = self._begin(rollout, progress), (self.num_timesteps, episodes)
            if self._behind is None or self.num_timesteps >= total_timesteps:
                update.finish()
                if not report(*waiting):
                    break
                waiting = None
        self._behind = None
        return self

    def _rollouts(self, n_envs: int) -> list[koila_rl.RolloutBuffer]:
        """One buffer, or two where one is filled while the other is learned from."""
        # Where learning goes on from a checkpoint, minibatches are shuffled in another order.
        seed = self.seed + self.num_timesteps
        return [
            koila_rl.RolloutBuffer(
                self.hyperparameters.n_steps, n_envs, seed=seed + i, device=self.device
            )
            for i in range(1 + (self.hyperparameters.update == "interleaved"))
        ]

    def _begin(self, rollout: koila_rl.RolloutBuffer, progress: float) -> Update:
        """An update of which nothing has run yet; acting goes on with the weights of now."""
        if self.hyperparameters.update == "interleaved":
            if self._behind is None:
                self._behind = copy.deepcopy(self.network).requires_grad_(False)
            self._behind.load_state_dict(self.network.state_dict())
        return Update(self.updating(rollout, progress))

    @property
    def acting(self) -> ActorCritic:
        """The network that acts: one behind the network that learns, where updates interleave."""
        return self.network if self._behind is None else self._behind

    @torch.no_grad()
    def collect_rollout(
        self, env: VectorEnvironment, rollout: koila_rl.RolloutBuffer, update: Update | None = None
    ) -> tuple[Episode, ...]:
        """Act for ``n_steps`` steps and fill ``rollout``; ``update`` runs between the steps."""
        update = update or Update()
        rollout.clear()
        episodes: list[Episode] = []
        for t in range(rollout.n_steps):
            observation = self.interface.tensor(self._first_observation(env))
            action, acted = self.decide(observation)
            step = update.step(env, self.interface.to_environment(action), t + 1, rollout.n_steps)
            next_value = torch.zeros(env.n_envs, device=self.device)
            if step.truncated.any() or t == rollout.n_steps - 1:
                # The row that follows does not start from the state that this step led to.
                next_value = self.next_value(self.interface.tensor(step.next_observation))
            rollout.add(
                {
                    "observation": observation,
                    "action": action,
                    **acted,
                    "reset": torch.from_numpy(step.reset),
                    "next": {
                        "state_value": next_value,
                        "reward": torch.from_numpy(step.reward),
                        "terminated": torch.from_numpy(step.terminated),
                        "truncated": torch.from_numpy(step.truncated),
                    },
                }
            )
            self.after_step(step)
            self._observation = step.observation
            self.num_timesteps += int((~step.reset).sum())
            episodes += step.episodes
        return tuple(episodes)

    def decide(self, observation: Any) -> tuple[Tensor, dict[str, Any]]:
        """Actions ``[n_envs, …]``, and what else of the decision belongs in the rollout."""
        return self.acting.distribution(observation).sample(self.generator), {}

    def next_value(self, next_observation: Any) -> Tensor:
        """V ``[n_envs]`` of what the last decision led to."""
        return self.acting.value(next_observation)

    def after_step(self, step: Step) -> None:
        """What else must know of a step."""

    @torch.no_grad()
    def evaluate_rollout(self, rollout: koila_rl.RolloutBuffer) -> None:
        """Put ``action_log_prob`` and ``state_value`` into ``rollout``, by the acting weights.

        One lazy forward over the whole rollout, a few large microbatches instead of ``n_steps``
        small ones; as large matrices round alike, the first ratio of an update is 1 exactly
        (to rounding in minibatches of a few samples, which other kernels compute).
        """
        data = rollout.data
        samples = data.select("observation", "action").flatten(0, 1)
        lazy = koila_rl.lazy(samples, device=self.device)
        distribution, value = self.acting(lazy["observation"])
        log_prob = distribution.log_prob(lazy["action"])
        for name, column in (("action_log_prob", log_prob), ("state_value", value)):
            real: Tensor = koila_rl.materialize(column)
            data[name] = real.unflatten(0, data.batch_size).to(data["reset"].device)

    def estimate_advantages(self, rollout: koila_rl.RolloutBuffer) -> None:
        """Put ``advantage`` and ``value_target`` into ``rollout`` (GAE)."""
        data, values = rollout.data, self.hyperparameters
        value, reward = data["state_value"], data["next", "reward"]
        terminated, truncated = data["next", "terminated"], data["next", "truncated"]
        follows = torch.cat([value[1:], torch.zeros_like(value[:1])])
        next_value = torch.where(
            bootstrap_rows(terminated, truncated), data["next", "state_value"], follows
        )
        data["advantage"], data["value_target"] = generalized_advantage(
            reward,
            value,
            next_value,
            terminated,
            truncated,
            gamma=values.gamma,
            gae_lambda=values.gae_lambda,
        )

    def update(self, rollout: koila_rl.RolloutBuffer, progress: float = 1.0) -> dict[str, float]:
        """``n_epochs`` passes over ``rollout``; the metrics are defined in ``docs/ppo.md``."""
        return Update(self.updating(rollout, progress)).finish()

    def updating(self, rollout: koila_rl.RolloutBuffer, progress: float) -> Work:
        """:meth:`update` in slices."""
        values = self.hyperparameters
        learning_rate = self._set_learning_rate(values.learning_rate, progress)
        if rollout.data["reset"].all():
            return {}
        history: list[dict[str, float]] = []
        left = values.n_epochs * self.minibatches_an_epoch(rollout)
        for minibatch in self.minibatches(rollout):
            loss, diagnostics = self.loss(minibatch, progress)
            self.optimizer.zero_grad()
            left -= 1
            yield from backward(loss, left, sliced=values.update == "interleaved")
            # Read before the weights change: the run of backward has computed them.
            read = {name: float(value) for name, value in diagnostics.items()}
            # The step that would go too far is not taken.
            if values.target_kl and read["approx_kl"] > 1.5 * values.target_kl:
                break
            history.append(read)
            nn.utils.clip_grad_norm_(self.network.parameters(), values.max_grad_norm)
            self.optimizer.step()
        names = history[0] if history else ()
        return {
            **{f"train/{name}": sum(row[name] for row in history) / len(history) for name in names},
            "train/explained_variance": _explained_variance(rollout.data),
            "train/learning_rate": learning_rate,
            "train/clip_range": at(values.clip_range, progress),
            "train/n_updates": float(len(history)),
        }

    def minibatches_an_epoch(self, rollout: koila_rl.RolloutBuffer) -> int:
        """How many :meth:`minibatches` hands out in an epoch."""
        return math.ceil(int((~rollout.data["reset"]).sum()) / self.hyperparameters.batch_size)

    def minibatches(self, rollout: koila_rl.RolloutBuffer) -> Iterator[TensorDict]:
        """Lazy minibatches of all epochs, without the rows that only reset an environment."""
        values = self.hyperparameters
        return rollout.minibatches(values.batch_size, values.n_epochs, skip=rollout.data["reset"])

    def loss(self, minibatch: TensorDict, progress: float) -> tuple[Tensor, dict[str, Tensor]]:
        """The clipped surrogate, the value loss and the entropy bonus (equation 9), whole."""
        values = self.hyperparameters
        clip_range = at(values.clip_range, progress)
        distribution, value, data, weight = self.forward(minibatch)

        log_ratio = distribution.log_prob(data["action"]) - data["action_log_prob"]
        ratio = log_ratio.exp()
        advantage = data["advantage"]
        if values.normalize_advantage and data["advantage"].shape[0] > 1:
            advantage = normalized(advantage, weight)
        clipped = ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
        policy_loss = -mean(torch.min(advantage * ratio, advantage * clipped), weight)

        if values.clip_range_vf is not None:
            old, limit = data["state_value"], at(values.clip_range_vf, progress)
            value = old + (value - old).clamp(-limit, limit)
        value_loss = mean((value - data["value_target"]).square(), weight)
        entropy = mean(distribution.entropy(), weight)
        loss = policy_loss + values.vf_coef * value_loss - values.ent_coef * entropy

        with torch.no_grad():
            diagnostics = {
                "policy_gradient_loss": policy_loss.detach(),
                "value_loss": value_loss.detach(),
                "entropy": entropy.detach(),
                # Schulman's estimator: unbiased and never negative, http://joschu.net/blog/kl-approx.html
                "approx_kl": mean((ratio - 1.0) - log_ratio, weight),
                "clip_fraction": mean(((ratio - 1.0).abs() > clip_range).float(), weight),
            }
        return loss, diagnostics

    def forward(
        self, minibatch: TensorDict
    ) -> tuple[Distribution, Tensor, TensorDict, Tensor | None]:
        """Distribution and V ``[N]`` of the minibatch's states; its columns ``[N]``; which count.

        The last is None where all do, else ``[N]`` of zeros and ones.
        """
        distribution, value = self.network(minibatch["observation"])
        return distribution, value, minibatch, None

    def _choose(self, observation: Any, deterministic: bool) -> Tensor:
        distribution = self.network.distribution(observation)
        return distribution.mode if deterministic else distribution.sample(self.generator)


def _explained_variance(data: TensorDict) -> float:
    keep = ~data["reset"]
    error = (data["value_target"] - data["state_value"])[keep].var(correction=0)
    return float(1.0 - error / data["value_target"][keep].var(correction=0))
