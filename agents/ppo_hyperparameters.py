"""What PPO can be told, and what of it cannot be used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from koila_rl.agents import hyperparameters
from koila_rl.agents.encoders import CNNS
from koila_rl.agents.interleaving import UPDATES
from koila_rl.agents.schedules import Schedule
from koila_rl.errors import ConfigurationError

__all__ = ["Hyperparameters"]

_ANY = (0.0, hyperparameters.FINITE)
_SCHEDULES = {"learning_rate": _ANY, "clip_range": _ANY, "clip_range_vf": _ANY}


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
    features_extractor: str = "nature"
    """What images go through: "nature" or "impala"."""
    log_std_init: float = 0.0
    state_dependent_std: bool = False
    """Whether the standard deviation of Box actions is a function of the state."""
    squash_output: bool = False
    """Whether Box actions go through tanh and are scaled to the bounds, instead of clipped."""
    normalize_observation: bool = False
    normalize_reward: bool = False
    update: str = "blocking"
    """When updates run: "blocking", after each rollout, or "interleaved", during the next."""

    def head_settings(self) -> dict[str, Any]:
        """Those that the distribution over actions takes."""
        return {
            "log_std_init": self.log_std_init,
            "state_dependent_std": self.state_dependent_std,
            "squash": self.squash_output,
        }

    def check_schedules(self, progress: float) -> None:
        """Raise :class:`ConfigurationError` where a schedule at ``progress`` is unusable."""
        hyperparameters.check_at(self, progress, **_SCHEDULES)

    def check(self, n_envs: int) -> None:
        """Raise :class:`ConfigurationError` where a value, or a pair of them, cannot be used."""
        most = hyperparameters.FINITE
        hyperparameters.check_ranges(
            self,
            **_SCHEDULES,
            n_steps=(1, most),
            batch_size=(1, most),
            n_epochs=(1, most),
            gamma=(0.0, 1.0),
            gae_lambda=(0.0, 1.0),
            max_grad_norm=(0.0, float("inf")),
            ent_coef=(-most, most),
            vf_coef=(0.0, most),
            log_std_init=(-most, most),
        )
        hyperparameters.check_positive(self, "clip_range", "clip_range_vf", "target_kl")
        hyperparameters.check_choice(self, "features_extractor", CNNS)
        hyperparameters.check_choice(self, "update", UPDATES)
        hyperparameters.check_widths(self, "net_arch")
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
