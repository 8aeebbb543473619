"""What DQN can be told, and what of it cannot be used."""

from __future__ import annotations

from dataclasses import dataclass

from koila_rl.agents import hyperparameters
from koila_rl.agents.encoders import CNNS
from koila_rl.agents.interleaving import UPDATES
from koila_rl.agents.schedules import Linear, Schedule
from koila_rl.errors import ConfigurationError

__all__ = ["Hyperparameters"]

_BETA = Linear(0.4, 1.0)
_ANY = (0.0, hyperparameters.FINITE)
_SCHEDULES = {"learning_rate": _ANY, "prioritized_beta": _ANY}


@dataclass(frozen=True)
class Hyperparameters:
    """Names and defaults of Stable-Baselines3, where it has them."""

    learning_rate: Schedule = 1e-4
    buffer_size: int = 1_000_000
    learning_starts: int = 100
    """Transitions collected by random actions before the first update."""
    batch_size: int = 32
    tau: float = 1.0
    """How far the target network moves at once; 1 copies."""
    gamma: float = 0.99
    train_freq: int = 4
    """Steps of every environment between updates."""
    gradient_steps: int = 1
    """Optimizer steps an update; −1 for as many as transitions were collected since the last."""
    target_update_interval: int = 10_000
    """Transitions between moves of the target network."""
    exploration_fraction: float = 0.1
    exploration_initial_eps: float = 1.0
    exploration_final_eps: float = 0.05
    max_grad_norm: float = 10.0
    n_steps: int = 1
    """Steps of the return."""
    double: bool = False
    dueling: bool = False
    prioritized: bool = False
    prioritized_alpha: float = 0.6
    prioritized_beta: Schedule = _BETA
    net_arch: tuple[int, ...] | None = None
    """Widths after the encoder; (64, 64) where not said, none after a CNN."""
    features_extractor: str = "nature"
    """What images go through: "nature" or "impala"."""
    frame_stack: int = 1
    """Frames that the environment stacks in an observation; above 1 each is stored once."""
    report_interval: int = 1_000
    """Transitions between two calls of the callback."""
    update: str = "blocking"
    """When updates run: "blocking" after ``train_freq`` steps, "interleaved" during the next."""

    def check_schedules(self, progress: float) -> None:
        """Raise :class:`ConfigurationError` where a schedule at ``progress`` is unusable."""
        hyperparameters.check_at(self, progress, **_SCHEDULES)

    def check(self, n_envs: int) -> None:
        """Raise :class:`ConfigurationError` where a value, or a pair of them, cannot be used."""
        most = hyperparameters.FINITE
        hyperparameters.check_ranges(
            self,
            **_SCHEDULES,
            buffer_size=(1, most),
            learning_starts=(0, most),
            batch_size=(1, most),
            tau=(0.0, 1.0),
            gamma=(0.0, 1.0),
            train_freq=(1, most),
            gradient_steps=(-1, most),
            target_update_interval=(1, most),
            exploration_fraction=(0.0, 1.0),
            exploration_initial_eps=(0.0, 1.0),
            exploration_final_eps=(0.0, 1.0),
            max_grad_norm=(0.0, float("inf")),
            n_steps=(1, most),
            prioritized_alpha=(0.0, most),
            frame_stack=(1, most),
            report_interval=(1, most),
        )
        hyperparameters.check_choice(self, "features_extractor", CNNS)
        hyperparameters.check_choice(self, "update", UPDATES)
        hyperparameters.check_widths(self, "net_arch")
        if self.buffer_size < n_envs * self.n_steps:
            raise ConfigurationError(
                f"buffer_size is {self.buffer_size} but n_envs * n_steps = {n_envs} * "
                f"{self.n_steps} transitions must fit"
            )
