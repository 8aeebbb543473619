"""Proximal Policy Optimization (Schulman et al. 2017, https://arxiv.org/abs/1707.06347).

Read :meth:`PPO.learn` first: it is the paper's Algorithm 1, and the methods it calls follow it
in that order. Minibatches are lazy: ``loss.backward()`` in :meth:`PPO.update` runs in as many
microbatches as the memory limits ask for, and nothing here needs to know how many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor, nn

import koila_rl
from koila_rl.agents import hyperparameters
from koila_rl.agents.devices import choose_device
from koila_rl.agents.interface import Interface, Progress, sample
from koila_rl.agents.networks import ActorCritic, is_image
from koila_rl.agents.schedules import Schedule, at
from koila_rl.checkpoint import load_state, save_state
from koila_rl.envs import EnvironmentLike, Episode, VectorEnvironment, make_environment
from koila_rl.errors import ConfigurationError
from koila_rl.returns import bootstrap_rows, generalized_advantage
from koila_rl.spaces import ActionSpace, ObservationSpace, check_spaces, describe, restore

__all__ = ["PPO", "Hyperparameters"]


@dataclass(frozen=True)
class Hyperparameters:
    """Names and defaults of Stable-Baselines3; a schedule takes the remaining progress 1 → 0."""

    learning_rate: Schedule = 3e-4
    n_steps: int = 2048
    batch_size: int = 64
    n_epochs: int = 10
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_range: Schedule = 0.2
    clip_range_vf: Schedule | None = None
    normalize_advantage: bool = True
    ent_coef: float = 0.0
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    target_kl: float | None = None
    net_arch: tuple[int, ...] | None = None
    """Widths after the encoder; (64, 64) where not said, none after a CNN."""
    share_trunk: bool | None = None
    """Whether policy and value function share all but their heads; with a CNN where not said."""
    log_std_init: float = 0.0

    def check(self, n_envs: int) -> None:
        """Raise :class:`ConfigurationError` where a value, or a pair of them, cannot be used."""
        infinity = float("inf")
        hyperparameters.check_ranges(
            self,
            learning_rate=(0.0, infinity),
            n_steps=(1, infinity),
            batch_size=(1, infinity),
            n_epochs=(1, infinity),
            gamma=(0.0, 1.0),
            gae_lambda=(0.0, 1.0),
            clip_range=(0.0, infinity),
            clip_range_vf=(0.0, infinity),
            max_grad_norm=(0.0, infinity),
            target_kl=(0.0, infinity),
        )
        samples = self.n_steps * n_envs
        if samples == 1:
            raise ConfigurationError(
                f"n_steps * n_envs is {self.n_steps} * {n_envs} = 1, and one sample has no "
                "advantage to normalise; raise n_steps or n_envs"
            )
        if self.batch_size > samples:
            raise ConfigurationError(
                f"batch_size is {self.batch_size} but a rollout has n_steps * n_envs = "
                f"{self.n_steps} * {n_envs} = {samples} samples; lower batch_size or raise n_steps"
            )


class PPO:
    """An actor and a critic that learn from fresh rollouts of vector environments.

    Args:
        env: A name, an environment, a function that makes one, or a vector environment.
        n_envs: Environments side by side.
        env_kwargs: For the environment, where it is a name.
        seed: Of the weights, the actions, the minibatches and the environments.
        device: Where the network lives; ``"auto"`` keeps small perceptrons on the CPU.
        hyperparameters: See :class:`Hyperparameters`.

    Raises:
        ConfigurationError: An argument or a hyperparameter cannot be used.
        UnsupportedError: A space, or the environment's autoreset mode, is not supported.
    """

    name = "ppo"

    def __init__(
        self,
        env: EnvironmentLike,
        *,
        n_envs: int | None = None,
        env_kwargs: dict[str, Any] | None = None,
        seed: int = 0,
        device: torch.device | str = "auto",
        **hyperparameters: Any,
    ) -> None:
        values = _read(hyperparameters)
        self.env: VectorEnvironment | None = make_environment(env, n_envs, env_kwargs)
        try:
            spaces = self.env.observation_space, self.env.action_space
            values.check(self.env.n_envs)
            self._build(*check_spaces(*spaces, "PPO"), values, seed, device)
        except BaseException:
            self.env.close()
            raise

    def _build(
        self,
        observation_space: ObservationSpace,
        action_space: ActionSpace,
        values: Hyperparameters,
        seed: int,
        device: torch.device | str,
    ) -> None:
        self.hyperparameters, self.seed, self.num_timesteps = values, seed, 0
        image = is_image(observation_space)
        self.device, self.device_reason = choose_device(device, convolutional=image)
        self.interface = Interface(observation_space, action_space, self.device)
        default_arch: tuple[int, ...] = () if image else (64, 64)
        # The weights come from the seed alone, and the caller's random state is left as it was.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = ActorCritic(
                observation_space,
                action_space,
                net_arch=default_arch if values.net_arch is None else values.net_arch,
                share_trunk=image if values.share_trunk is None else values.share_trunk,
                log_std_init=values.log_std_init,
            ).to(self.device)
        self.optimizer = torch.optim.Adam(
            self.network.parameters(), lr=at(values.learning_rate, 1.0), eps=1e-5
        )
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self._observation: NDArray[Any] | None = None

    def learn(
        self,
        total_timesteps: int,
        callback: Callable[[Progress], bool | None] | None = None,
    ) -> PPO:
        """Alternate rollouts and updates until ``total_timesteps`` transitions were seen.

        ``callback`` is called after each update; learning ends early where it returns False.
        """
        env, values = self._environment(), self.hyperparameters
        rollout = koila_rl.RolloutBuffer(
            values.n_steps, env.n_envs, seed=self.seed, device=self.device
        )
        while self.num_timesteps < total_timesteps:
            episodes = self.collect_rollout(env, rollout)
            self.estimate_advantages(rollout)
            progress = max(0.0, 1.0 - self.num_timesteps / total_timesteps)
            metrics = self.update(rollout, progress)
            state = Progress(self, self.num_timesteps, total_timesteps, metrics, episodes)
            if callback is not None and callback(state) is False:
                break
        return self

    @torch.no_grad()
    def collect_rollout(
        self, env: VectorEnvironment, rollout: koila_rl.RolloutBuffer
    ) -> tuple[Episode, ...]:
        """Act for ``n_steps`` steps with the current policy and fill ``rollout``."""
        rollout.clear()
        episodes: list[Episode] = []
        if self._observation is None:
            # Another start than at the first time, where learning goes on from a checkpoint.
            self._observation = env.reset(seed=self.seed + self.num_timesteps)
        for t in range(rollout.n_steps):
            observation = self.interface.tensor(self._observation)
            if self.network.shares_trunk:
                distribution, value = self.network(observation)
            else:
                distribution, value = self.network.distribution(observation), None
            action = sample(distribution, self.generator)
            step = env.step(self.interface.to_environment(action))
            next_value = torch.zeros(env.n_envs, device=self.device)
            if step.truncated.any() or t == rollout.n_steps - 1:
                # The row that follows does not start from the state that this step led to.
                next_value = self.network.value(self.interface.tensor(step.next_observation))
            transition: dict[str, Any] = {
                "observation": observation,
                "action": action,
                "action_log_prob": distribution.log_prob(action),
                "reset": torch.from_numpy(step.reset),
                "next": {
                    "state_value": next_value,
                    "reward": torch.from_numpy(step.reward),
                    "terminated": torch.from_numpy(step.terminated),
                    "truncated": torch.from_numpy(step.truncated),
                },
            }
            if value is not None:
                transition["state_value"] = value
            rollout.add(transition)
            self._observation = step.observation
            self.num_timesteps += int((~step.reset).sum())
            episodes += step.episodes
        return tuple(episodes)

    @torch.no_grad()
    def estimate_advantages(self, rollout: koila_rl.RolloutBuffer) -> None:
        """Put ``state_value``, ``advantage`` and ``value_target`` into ``rollout``."""
        data, values = rollout.data, self.hyperparameters
        if not self.network.shares_trunk:
            # One lazy forward over the rollout: a few large microbatches, not n_steps small ones.
            samples = koila_rl.lazy(data["observation"].flatten(0, 1), device=self.device)
            value = koila_rl.materialize(self.network.value(samples))
            data["state_value"] = value.unflatten(0, data.batch_size).to(data["reset"].device)
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
        values, data = self.hyperparameters, rollout.data
        learning_rate = at(values.learning_rate, progress)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        skip = data["reset"]
        if skip.all():
            return {}
        history: list[dict[str, float]] = []
        for minibatch in rollout.minibatches(values.batch_size, values.n_epochs, skip=skip):
            loss, diagnostics = self.loss(minibatch, progress)
            # Read before the gradient: the step that would go too far is not taken.
            if values.target_kl and float(diagnostics["approx_kl"]) > 1.5 * values.target_kl:
                break
            self.optimizer.zero_grad()
            loss.backward()
            # Read before the weights change: the run of backward has computed them.
            history.append({name: float(value) for name, value in diagnostics.items()})
            nn.utils.clip_grad_norm_(self.network.parameters(), values.max_grad_norm)
            self.optimizer.step()
        keep = ~skip
        error = (data["value_target"] - data["state_value"])[keep].var(correction=0)
        variance = data["value_target"][keep].var(correction=0)
        return {
            **{f"train/{name}": _mean(history, name) for name in (history[0] if history else ())},
            "train/explained_variance": float(1.0 - error / variance),
            "train/learning_rate": learning_rate,
            "train/clip_range": at(values.clip_range, progress),
            "train/n_updates": float(len(history)),
        }

    def loss(self, minibatch: TensorDict, progress: float) -> tuple[Tensor, dict[str, Tensor]]:
        """The clipped surrogate, the value loss and the entropy bonus (equation 9), whole."""
        values = self.hyperparameters
        clip_range = at(values.clip_range, progress)
        distribution, value = self.network(minibatch["observation"])

        log_ratio = distribution.log_prob(minibatch["action"]) - minibatch["action_log_prob"]
        ratio = log_ratio.exp()
        advantage = minibatch["advantage"]
        if values.normalize_advantage and minibatch.batch_size[0] > 1:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        clipped = ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
        policy_loss = -torch.min(advantage * ratio, advantage * clipped).mean()

        if values.clip_range_vf is not None:
            old, limit = minibatch["state_value"], at(values.clip_range_vf, progress)
            value = old + (value - old).clamp(-limit, limit)
        value_loss = nn.functional.mse_loss(value, minibatch["value_target"])
        entropy = distribution.entropy().mean()
        loss = policy_loss + values.vf_coef * value_loss - values.ent_coef * entropy

        with torch.no_grad():
            diagnostics = {
                "policy_gradient_loss": policy_loss.detach(),
                "value_loss": value_loss.detach(),
                "entropy": entropy.detach(),
                # Schulman's estimator: unbiased and never negative, http://joschu.net/blog/kl-approx.html
                "approx_kl": ((ratio - 1.0) - log_ratio).mean(),
                "clip_fraction": ((ratio - 1.0).abs() > clip_range).float().mean(),
            }
        return loss, diagnostics

    @torch.no_grad()
    def act(self, observation: Any, deterministic: bool = False) -> NDArray[Any]:
        """Actions for one observation or for several stacked, in the environment's own terms.

        Raises:
            ConfigurationError: The observation does not have the shape the agent learned on.
        """
        batch, single = self.interface.batch(observation)
        distribution = self.network.distribution(batch)
        action = distribution.mode if deterministic else sample(distribution, self.generator)
        actions = self.interface.to_environment(action)
        return np.asarray(actions[0]) if single else actions

    def save(self, path: str | Path) -> None:
        """Write everything :func:`koila_rl.load` needs into one file, atomically."""
        save_state(
            path,
            {
                "format": 1,
                "agent": self.name,
                "hyperparameters": hyperparameters.describe(self.hyperparameters),
                "observation_space": describe(self.interface.observation_space),
                "action_space": describe(self.interface.action_space),
                "seed": self.seed,
                "num_timesteps": self.num_timesteps,
                "network": self.network.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "generator": self.generator.get_state(),
                "device": self.device.type,
            },
        )

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "auto") -> PPO:
        """An agent that acts as the saved one did; it has no environment to learn on."""
        return cls.from_state(load_state(path), device)

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device | str = "auto") -> PPO:
        """As :meth:`load`, from what the file holds."""
        agent = cls.__new__(cls)
        agent.env = None
        values = _read(hyperparameters.restore(state["hyperparameters"]))
        spaces = restore(state["observation_space"]), restore(state["action_space"])
        agent._build(*check_spaces(*spaces, "PPO"), values, state["seed"], device)
        agent.restore(state)
        return agent

    def restore(self, state: dict[str, Any]) -> None:
        """Take weights, optimizer, random state and progress from a loaded checkpoint."""
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        # Devices have random states of their own kinds; an agent moved to another starts anew.
        if self.device.type == state["device"]:
            self.generator.set_state(state["generator"])
        self.num_timesteps = state["num_timesteps"]

    def _environment(self) -> VectorEnvironment:
        if self.env is None:
            raise ConfigurationError(
                "this agent was loaded to act and has no environment; to go on learning, "
                "use koila_rl.train(env, resume=run_dir)"
            )
        return self.env


def _read(given: dict[str, Any]) -> Hyperparameters:
    return hyperparameters.read(Hyperparameters, given, "ppo")


def _mean(history: list[dict[str, float]], name: str) -> float:
    return sum(row[name] for row in history) / len(history)
