"""What agents have in common: how they are made, act, are saved and come back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import koila_rl
from koila_rl.agents import hyperparameters
from koila_rl.agents.devices import choose_device
from koila_rl.agents.encoders import has_images
from koila_rl.agents.interface import Interface, Progress
from koila_rl.agents.schedules import Schedule, at
from koila_rl.arguments import whole
from koila_rl.checkpoint import load_state, save_state
from koila_rl.envs import EnvironmentLike, VectorEnvironment, make_environment
from koila_rl.errors import ConfigurationError
from koila_rl.normalization import NormalizedEnvironment, Normalizer
from koila_rl.spaces import ActionSpace, ObservationSpace, check_spaces, describe, restore

__all__ = ["BaseAgent", "read_agent"]

_FORMAT = 2
_SEEDS = 2**63 - 1


def read_agent(path: str | Path) -> dict[str, Any]:
    """What :meth:`BaseAgent.save` wrote; no pickled code is run.

    Raises:
        ConfigurationError: There is no such file, it is not of an agent, or of another format.
    """
    state = load_state(path)
    if "agent" not in state:
        raise ConfigurationError(f"{path} is a checkpoint but not of an agent")
    if state["format"] != _FORMAT:
        raise ConfigurationError(
            f"{path} is of format {state['format']!r}; this version of koila_rl reads {_FORMAT}"
        )
    return state


class BaseAgent(ABC):
    """An agent with a network, an optimizer and random state of its own.

    Args:
        env: A name, an environment, a function that makes one, or a vector environment.
        n_envs: Environments side by side.
        env_kwargs: For the environment, where it is a name.
        vectorization: ``"sync"``, or ``"async"`` for a process an environment.
        seed: Of the weights, the actions, the minibatches and the environments.
        device: Where the network lives; ``"auto"`` keeps small perceptrons on the CPU.
        hyperparameters: See the ``Hyperparameters`` of the agent's module.

    Raises:
        ConfigurationError: An argument or a hyperparameter cannot be used.
        UnsupportedError: A space, or the environment's autoreset mode, is not supported.
    """

    name: str
    hyperparameters_type: ClassVar[type[Any]]
    action_spaces: ClassVar[tuple[type[Any], ...]]
    network: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        env: EnvironmentLike,
        *,
        n_envs: int | None = None,
        env_kwargs: dict[str, Any] | None = None,
        vectorization: str = "sync",
        seed: int = 0,
        device: torch.device | str = "auto",
        **hyperparameters: Any,
    ) -> None:
        values, seed = self._read(hyperparameters), whole("seed", seed, 0, _SEEDS)
        n_envs = None if n_envs is None else whole("n_envs", n_envs)
        self.env: VectorEnvironment | None = make_environment(
            env, n_envs, env_kwargs, vectorization
        )
        try:
            values.check(self.env.n_envs)
            spaces = self.env.observation_space, self.env.action_space
            self._prepare(
                *check_spaces(*spaces, type(self).__name__, self.action_spaces),
                values,
                seed,
                device,
            )
            if self.normalizer is not None:
                self.env = NormalizedEnvironment(self.env, self.normalizer)
        except BaseException:
            self.env.close()
            raise

    def _prepare(
        self,
        observation_space: ObservationSpace,
        action_space: ActionSpace,
        values: Any,
        seed: int,
        device: torch.device | str,
    ) -> None:
        self.hyperparameters, self.seed, self.num_timesteps = values, seed, 0
        images = has_images(observation_space)
        self.device, self.device_reason = choose_device(device, convolutional=images)
        self.interface = Interface(
            observation_space, action_space, self.device, getattr(values, "squash_output", False)
        )
        self.normalizer: Normalizer | None = None
        if getattr(values, "normalize_observation", False) or getattr(
            values, "normalize_reward", False
        ):
            self.normalizer = Normalizer(
                observation_space,
                observations=values.normalize_observation,
                rewards=values.normalize_reward,
                gamma=values.gamma,
            )
        # The weights come from the seed alone, and the caller's random state is left as it was.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._build(images)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self._observation: Any = None

    @abstractmethod
    def learn(
        self,
        total_timesteps: int,
        callback: Callable[[Progress], bool | None] | None = None,
    ) -> Any:
        """Learn until ``total_timesteps`` transitions were seen, or ``callback`` says False."""

    @abstractmethod
    def _build(self, images: bool) -> None:
        """Make the network and the optimizer on the device."""

    def forget(self, where: NDArray[np.bool_] | None = None) -> None:
        """Begin another episode of acting in the environments ``where`` [N], or in all.

        Only agents with a memory have something to forget.
        """
        return

    @staticmethod
    def size(observation: Any) -> int:
        """How many observations are stacked."""
        while isinstance(observation, dict):
            observation = next(iter(observation.values()))
        return len(observation)

    @abstractmethod
    def _choose(self, observation: Any, deterministic: bool) -> Tensor:
        """Actions ``[N, …]`` in the network's terms for observations ``[N, …]``."""

    @torch.no_grad()
    def act(self, observation: Any, deterministic: bool = False) -> NDArray[Any]:
        """Actions for one observation or for several stacked, in the environment's own terms.

        Raises:
            ConfigurationError: The observation does not have the shape the agent learned on.
        """
        arrays, single = self.interface.batch(observation)
        if self.normalizer is not None:
            arrays = self.normalizer.observation(arrays)
        action = self._choose(self.interface.tensor(arrays), deterministic)
        actions = self.interface.to_environment(action)
        return np.asarray(actions[0]) if single else actions

    def evaluate(self, env: EnvironmentLike, episodes: int = 20, seed: int = 0) -> Any:
        """As :func:`koila_rl.evaluate`: whole episodes of ``env``, without learning."""
        return koila_rl.evaluate(self, env, episodes, seed)

    def save(self, path: str | Path) -> None:
        """Write everything :func:`koila_rl.load` needs into one file, atomically."""
        save_state(path, self.state())

    def state(self) -> dict[str, Any]:
        """What :meth:`restore` brings back, and what says of which kind the agent is."""
        return {
            "format": _FORMAT,
            "agent": self.name,
            "hyperparameters": hyperparameters.describe(self.hyperparameters),
            "observation_space": describe(self.interface.observation_space),
            "action_space": describe(self.interface.action_space),
            "seed": self.seed,
            "num_timesteps": self.num_timesteps,
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "normalizer": None if self.normalizer is None else self.normalizer.state(),
            "generator": self.generator.get_state(),
            "device": self.device.type,
        }

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "auto") -> Any:
        """An agent that acts as the saved one did; it has no environment to learn on."""
        return cls.from_state(read_agent(path), device)

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device | str = "auto") -> Any:
        """As :meth:`load`, from what the file holds."""
        if state["agent"] != cls.name:
            raise ConfigurationError(
                f"the checkpoint is of agent {state['agent']!r}, not {cls.name!r}; "
                "koila_rl.load takes any"
            )
        agent = cls.__new__(cls)
        agent.env = None
        values = cls._read(hyperparameters.restore(state["hyperparameters"]))
        spaces = restore(state["observation_space"]), restore(state["action_space"])
        checked = check_spaces(*spaces, cls.__name__, cls.action_spaces)
        agent._prepare(*checked, values, state["seed"], device)
        agent.restore(state)
        return agent

    def restore(self, state: dict[str, Any]) -> None:
        """Take weights, optimizer, random state and progress from a loaded checkpoint.

        Raises:
            ConfigurationError: It learned on other spaces, normalised otherwise, or its network
                has other shapes; the message says both.
        """
        self._check_fits(state)
        try:
            self.network.load_state_dict(state["network"])
        except RuntimeError as error:
            raise ConfigurationError(
                "the checkpoint's network does not fit one of these hyperparameters for "
                f"{self.interface.observation_space}: {error}"
            ) from error
        self.optimizer.load_state_dict(state["optimizer"])
        if self.normalizer is not None:
            self.normalizer.restore(state["normalizer"])
        # Devices have random states of their own kinds; an agent moved to another starts anew.
        if self.device.type == state["device"]:
            self.generator.set_state(state["generator"])
        self.num_timesteps = state["num_timesteps"]

    def _check_fits(self, state: dict[str, Any]) -> None:
        # Actions are scaled and clipped to their bounds, observations are not.
        for name, bounds in (("observation_space", False), ("action_space", True)):
            learned, own = state[name], getattr(self.interface, name)
            if not _alike(learned, describe(own), bounds):
                raise ConfigurationError(
                    f"the checkpoint learned with {name} {restore(learned)}, but here it is {own}"
                )
        for name in ("normalize_observation", "normalize_reward"):
            learned = state["hyperparameters"].get(name, False)
            own = getattr(self.hyperparameters, name, False)
            if learned != own:
                raise ConfigurationError(
                    f"{name} is {own}, but the checkpoint learned with {learned}; leave it out to "
                    "go on as before"
                )

    def save_memory(self, folder: Path) -> None:
        """Write what only learning on needs and :meth:`save` leaves out: a replay buffer."""
        return

    def load_memory(self, folder: Path) -> None:
        """Take up what :meth:`save_memory` wrote, where there is something."""
        return

    def _environment(self) -> VectorEnvironment:
        if self.env is None:
            raise ConfigurationError(
                "this agent was loaded to act and has no environment; to go on learning, "
                "use koila_rl.train(env, resume=run_dir)"
            )
        return self.env

    def restart(self) -> None:
        """Begin new episodes everywhere at the next step, since the old ones cannot go on."""
        self._observation = None

    def _restarting(self) -> None:
        """What else must know that the next step begins new episodes."""
        return

    def _first_observation(self, env: VectorEnvironment) -> Any:
        """What to act on; whoever acts puts the next one back. If the step fails, nobody does."""
        if self._observation is None:
            self._restarting()
            # Another start than at the first time, where learning goes on from a checkpoint.
            self._observation = env.reset(seed=self.seed + self.num_timesteps)
        observation = self._observation
        self.restart()
        return observation

    def _adam(self, schedule: Schedule, eps: float) -> torch.optim.Adam:
        # Fused, since with small networks the loop over parameters takes as long as the network.
        return torch.optim.Adam(
            self.network.parameters(), lr=at(schedule, 1.0), eps=eps, fused=True
        )

    def _set_learning_rate(self, schedule: Schedule, progress: float) -> float:
        # Every update begins here: no schedule is used where it has left its range.
        self.hyperparameters.check_schedules(progress)
        learning_rate = at(schedule, progress)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        return learning_rate

    @classmethod
    def _read(cls, given: dict[str, Any]) -> Any:
        return hyperparameters.read(cls.hyperparameters_type, given, cls.name)


def _alike(learned: Any, own: Any, bounds: bool, name: str = "") -> bool:
    """Whether two descriptions of spaces say the same, where ``bounds`` those of Boxes too."""
    if isinstance(learned, dict):
        return (
            isinstance(own, dict)
            and learned.keys() == own.keys()
            and all(_alike(learned[key], own[key], bounds, key) for key in learned)
        )
    if isinstance(learned, Tensor):
        same_shape = isinstance(own, Tensor) and learned.shape == own.shape
        free = not bounds and name in ("low", "high")
        return same_shape and (free or torch.equal(learned, own))
    return bool(learned == own)
