"""Deep Q-learning (Mnih et al. 2015, https://doi.org/10.1038/nature14236) and what became of it.

Read :meth:`DQN.learn` first: it is the paper's Algorithm 1. Each later idea is one switch: double
(van Hasselt et al. 2016, https://arxiv.org/abs/1509.06461), dueling networks (Wang et al. 2016),
n-step returns and prioritised replay (Schaul et al. 2016). Minibatches are lazy:
``loss.backward()`` runs in as many microbatches as the memory limits ask for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor, nn

import koila_rl
from koila_rl.agents.base import BaseAgent
from koila_rl.agents.dqn_hyperparameters import Hyperparameters
from koila_rl.agents.encoders import channels_last
from koila_rl.agents.interface import Progress, says_stop
from koila_rl.agents.interleaving import Update, Work, backward
from koila_rl.agents.networks import QNetwork
from koila_rl.agents.schedules import at
from koila_rl.arguments import whole
from koila_rl.envs import Episode, VectorEnvironment
from koila_rl.errors import ConfigurationError
from koila_rl.spaces import each

__all__ = ["DQN"]


class DQN(BaseAgent):
    """Q of discrete actions, learned from replayed transitions of vector environments."""

    name = "dqn"
    hyperparameters_type = Hyperparameters
    action_spaces = (spaces.Discrete,)
    hyperparameters: Hyperparameters
    network: QNetwork

    def _build(self, images: bool) -> None:
        values, action_space = self.hyperparameters, self.interface.action_space
        assert isinstance(action_space, spaces.Discrete)
        self.n_actions = int(action_space.n)
        self.network = QNetwork(
            self.interface.observation_space,
            self.n_actions,
            net_arch=(() if images else (64, 64)) if values.net_arch is None else values.net_arch,
            dueling=values.dueling,
            cnn=values.features_extractor,
        ).to(self.device)
        self.target = copy.deepcopy(self.network).requires_grad_(False)
        self.optimizer = self._adam(values.learning_rate, eps=1e-8)
        self.replay: koila_rl.ReplayBuffer | None = None
        self._empty_at = self.n_updates = 0

    def learn(
        self,
        total_timesteps: int,
        callback: Callable[[Progress], bool | None] | None = None,
    ) -> DQN:
        """Alternate steps and updates until ``total_timesteps`` transitions were seen.

        ``callback`` is called after the update at which ``report_interval`` transitions have
        passed since it was called last; learning ends early where it returns False. With
        ``update="interleaved"`` an update runs during the steps that follow it and learns from
        the replay as it was before them.
        """
        whole("total_timesteps", total_timesteps, least=None)
        env, values = self._environment(), self.hyperparameters
        if self.replay is None:
            # Where learning goes on without what it had stored, some is collected first.
            self.replay, self._empty_at = self._make_replay(env.n_envs), self.num_timesteps
        replay = self.replay
        episodes: list[Episode] = []
        update, reported = Update(), self.num_timesteps
        while self.num_timesteps < total_timesteps:
            before = self.num_timesteps
            with update:
                episodes += self.collect(env, replay, total_timesteps, update)
            metrics = update.metrics
            progress = max(0.0, 1.0 - self.num_timesteps / total_timesteps)
            if self.num_timesteps - self._empty_at > values.learning_starts:
                steps = values.gradient_steps
                steps = self.num_timesteps - before if steps < 0 else steps
                update = Update(self.updating(replay, steps, progress))
                if values.update == "blocking" or self.num_timesteps >= total_timesteps:
                    metrics = update.finish()
            metrics["rollout/exploration_rate"] = self.exploration_rate(total_timesteps)
            due = self.num_timesteps - reported >= values.report_interval
            if due or self.num_timesteps >= total_timesteps:
                state = Progress(
                    self, self.num_timesteps, total_timesteps, dict(metrics), tuple(episodes)
                )
                episodes, reported = [], self.num_timesteps
                if callback is not None and says_stop(callback(state)):
                    break
        return self

    @torch.no_grad()
    def collect(
        self,
        env: VectorEnvironment,
        replay: koila_rl.ReplayBuffer,
        total_timesteps: int,
        update: Update,
    ) -> list[Episode]:
        """Act ε-greedily for ``train_freq`` steps of every environment and store them.

        ``update`` runs between the steps; replay and target network change when it has ended.
        """
        episodes: list[Episode] = []
        rows: list[tuple[dict[str, Any], Tensor]] = []
        moves, n_steps = 0, self.hyperparameters.train_freq
        for t in range(n_steps):
            observation = self.interface.tensor(self._first_observation(env))
            action = self.explore(observation, env.n_envs, self.exploration_rate(total_timesteps))
            step = update.step(env, self.interface.to_environment(action), t + 1, n_steps)
            row = {
                "observation": observation,
                "action": action,
                "next": {
                    "observation": each(torch.from_numpy, step.next_observation),
                    "reward": torch.from_numpy(step.reward),
                    "terminated": torch.from_numpy(step.terminated),
                    "truncated": torch.from_numpy(step.truncated),
                },
            }
            rows.append((row, torch.from_numpy(step.reset)))
            self._observation = step.observation
            before = self.num_timesteps
            self.num_timesteps += int((~step.reset).sum())
            interval = self.hyperparameters.target_update_interval
            moves += self.num_timesteps // interval > before // interval
            episodes += step.episodes
            if update.done:
                for row, reset in rows:
                    replay.extend(row, skip=reset)
                for _ in range(moves):
                    self.update_target()
                rows, moves = [], 0
        return episodes

    def _restarting(self) -> None:
        if self.replay is not None:
            self.replay.end_episodes()

    def exploration_rate(self, total_timesteps: int) -> float:
        """ε: falls in a straight line over ``exploration_fraction`` of the steps, then stays."""
        values = self.hyperparameters
        if self.num_timesteps < values.learning_starts:
            return 1.0
        span = values.exploration_fraction * total_timesteps
        passed = min(1.0, self.num_timesteps / span) if span else 1.0
        first, last = values.exploration_initial_eps, values.exploration_final_eps
        return first + passed * (last - first)

    def explore(self, observation: Any, n: int, rate: float) -> Tensor:
        """Greedy actions ``[n]``, each replaced by a random one with probability ``rate``."""
        if rate == 0.0:
            # Nothing is drawn: an evaluation on the way leaves learning as it would have been.
            greedy: Tensor = self.network(observation).argmax(-1)
            return greedy
        shape, device = (n,), self.device
        random = torch.randint(self.n_actions, shape, generator=self.generator, device=device)
        chance = torch.rand(shape, generator=self.generator, device=device) < rate
        if chance.all():
            return random
        return torch.where(chance, random, self.network(observation).argmax(-1))

    @torch.no_grad()
    def update_target(self) -> None:
        """θ⁻ ← θ⁻ + τ (θ − θ⁻); τ = 1 copies."""
        pairs = zip(self.target.parameters(), self.network.parameters(), strict=True)
        for own, other in pairs:
            own.lerp_(other, self.hyperparameters.tau)

    def update(
        self, replay: koila_rl.ReplayBuffer, gradient_steps: int, progress: float = 1.0
    ) -> dict[str, float]:
        """Optimizer steps on minibatches of ``replay``; metrics are of the last of them."""
        return Update(self.updating(replay, gradient_steps, progress)).finish()

    def updating(self, replay: koila_rl.ReplayBuffer, gradient_steps: int, progress: float) -> Work:
        """:meth:`update` in slices."""
        values = self.hyperparameters
        learning_rate = self._set_learning_rate(values.learning_rate, progress)
        diagnostics: dict[str, float] = {}
        if isinstance(replay, koila_rl.PrioritizedReplayBuffer):
            replay.beta = at(values.prioritized_beta, progress)
        for step in range(gradient_steps):
            minibatch = replay.sample(values.batch_size)
            loss, td_error, q = self.loss(minibatch)
            self.optimizer.zero_grad()
            left, sliced = gradient_steps - 1 - step, values.update == "interleaved"
            yield from backward(loss, left, sliced)
            # Read before the weights change: the run of backward has computed them.
            if isinstance(replay, koila_rl.PrioritizedReplayBuffer):
                replay.update_priorities(minibatch, td_error)
            if step == gradient_steps - 1:
                diagnostics = {
                    "train/loss": float(loss),
                    "train/td_error": float(td_error.abs().mean()),
                    "train/q": float(q.mean()),
                }
            nn.utils.clip_grad_norm_(self.network.parameters(), values.max_grad_norm)
            self.optimizer.step()
        self.n_updates += gradient_steps
        return {
            **diagnostics,
            "train/learning_rate": learning_rate,
            "train/n_updates": float(self.n_updates),
        }

    def loss(self, minibatch: TensorDict) -> tuple[Tensor, Tensor, Tensor]:
        """Huber loss of the TD errors, whole; the errors and Q of the actions taken, ``[N]``."""
        action = minibatch["action"].unsqueeze(-1)
        q = self.network(minibatch["observation"]).gather(-1, action).squeeze(-1)
        target = self.td_target(minibatch)
        loss = nn.functional.smooth_l1_loss(q, target, reduction="none")
        if self.hyperparameters.prioritized:
            loss = minibatch["weight"] * loss
        return loss.mean(), (target - q).detach(), q.detach()

    @torch.no_grad()
    def td_target(self, minibatch: TensorDict) -> Tensor:
        """R + γ^n (1 − terminated) Q⁻(s', a'), a' the best of Q⁻, or of Q with ``double``; [N]."""
        values, following = self.hyperparameters, minibatch["next"]
        q = self.target(following["observation"])
        if values.double:
            action = self.network(following["observation"]).argmax(-1, keepdim=True)
            value = q.gather(-1, action).squeeze(-1)
        else:
            value = q.amax(-1)
        discount = following["discount"] if values.n_steps > 1 else values.gamma
        target: Tensor = following["reward"] + discount * ~following["terminated"] * value
        return target

    def _choose(self, observation: Any, deterministic: bool) -> Tensor:
        rate = 0.0 if deterministic else self.hyperparameters.exploration_final_eps
        return self.explore(observation, self.size(observation), rate)

    def _make_replay(self, n_envs: int) -> koila_rl.ReplayBuffer:
        values = self.hyperparameters
        settings: dict[str, Any] = {
            "n_steps": values.n_steps,
            "gamma": values.gamma,
            "frame_stack": values.frame_stack,
            "frame_dim": -1 if channels_last(self.interface.observation_space) else 0,
            "device": self.device,
            "seed": self.seed + self.num_timesteps,
            "n_envs": n_envs,
        }
        if values.prioritized:
            return koila_rl.PrioritizedReplayBuffer(
                values.buffer_size, alpha=values.prioritized_alpha, **settings
            )
        return koila_rl.ReplayBuffer(values.buffer_size, **settings)

    def state(self) -> dict[str, Any]:
        """As of every agent, with the target network; the replay is saved by `save_memory`."""
        return {**super().state(), "target": self.target.state_dict(), "n_updates": self.n_updates}

    def restore(self, state: dict[str, Any]) -> None:
        """As of every agent."""
        super().restore(state)
        self.target.load_state_dict(state["target"])
        self.n_updates = state["n_updates"]

    def save_memory(self, folder: Path) -> None:
        """Write the replay into ``folder/replay``."""
        if self.replay is not None and len(self.replay):
            self.replay.save(folder / "replay")

    def load_memory(self, folder: Path) -> None:
        """Take up a replay that :meth:`save_memory` wrote.

        Raises:
            ConfigurationError: It was filled under hyperparameters that mean something else.
        """
        if not (folder / "replay").is_dir():
            return
        wanted = self._make_replay(self._environment().n_envs)
        found = type(wanted).load(folder / "replay", device=self.device)
        differ = {
            name: (was, now)
            for name, was in _meaning(found).items()
            if (now := _meaning(wanted).get(name)) != was
        }
        if differ:
            listed = ", ".join(f"{name} was {was}, is {now}" for name, (was, now) in differ.items())
            raise ConfigurationError(
                f"{folder / 'replay'} was filled under other hyperparameters: {listed}; go on with "
                "those, or take the folder away to begin with an empty replay"
            )
        self.replay = found


def _meaning(replay: koila_rl.ReplayBuffer) -> dict[str, Any]:
    """What decides what a stored transition means, named as the hyperparameters are."""
    options = replay.options
    meaning = {
        "buffer_size": options.capacity,
        "n_envs": options.n_envs,
        "n_steps": options.n_steps,
        "frame_stack": options.frame_stack,
        "gamma": options.gamma if options.n_steps > 1 else None,
    }
    if isinstance(replay, koila_rl.PrioritizedReplayBuffer):
        meaning["prioritized_alpha"] = replay.alpha
    return meaning
