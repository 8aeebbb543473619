"""What may be done after an update while an agent learns: evaluate, keep, stop.

Hand them to ``koila_rl.train(callbacks=[…])``, or one of them to ``agent.learn(callback=…)``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from koila_rl.agents.interface import Agent, Progress
from koila_rl.envs import EnvironmentLike, VectorEnvironment, make_environment, on_own_environment
from koila_rl.errors import ConfigurationError
from koila_rl.evaluation import Evaluation, play, playing

__all__ = ["Checkpoints", "Evaluations", "StopAtReward"]


@dataclass
class Checkpoints:
    """Saves the agent into ``folder`` every ``every`` time steps, one file each.

    Files are named by time step, ``agent_000012800.pt``; the newest ``keep`` stay, all if None.
    """

    folder: str | Path
    every: int
    keep: int | None = None
    _next: int = field(default=0, init=False)
    _written: list[Path] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        """Refuse numbers below 1, and be due ``every`` steps after the start."""
        _at_least_one(every=self.every, keep=1 if self.keep is None else self.keep)

    def __call__(self, state: Progress) -> None:
        """Save, if it is time."""
        if state.num_timesteps < self._next + self.every:
            return
        self._next = state.num_timesteps
        path = Path(self.folder) / f"agent_{state.num_timesteps:09d}.pt"
        state.agent.save(path)
        self._written.append(path)
        while self.keep is not None and len(self._written) > self.keep:
            self._written.pop(0).unlink(missing_ok=True)


@dataclass
class Evaluations:
    """Plays ``episodes`` whole episodes every ``every`` time steps, on environments of their own.

    Those that the agent learns on are refused: its episodes would be cut off by each evaluation.

    The mean return and its deviation are added to the metrics of the update. The best agent so
    far is saved to ``best``, where a path is given. A score of that agent must come from
    episodes of another seed: the best of many noisy means is too good.
    """

    env: EnvironmentLike
    every: int
    episodes: int = 20
    seed: int = 1_000_000
    best: str | Path | None = None
    stop_at: float | None = None
    """Mean return at which learning ends."""
    env_kwargs: dict[str, Any] | None = None
    history: list[tuple[int, Evaluation]] = field(default_factory=list, init=False)
    _checked: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        """Refuse numbers below 1."""
        _at_least_one(every=self.every, episodes=self.episodes)

    def __call__(self, state: Progress) -> bool:
        """Evaluate, if it is time; False once ``stop_at`` is reached."""
        if not self._checked and not isinstance(self.env, str) and not callable(self.env):
            # Refused at once, and not at the first evaluation.
            self._check(state.agent, make_environment(self.env))
            self._checked = True
        last = self.history[-1][0] if self.history else 0
        if state.num_timesteps < min(last + self.every, state.total_timesteps):
            return True
        with playing(self.env, self.episodes, self.env_kwargs) as vector:
            self._check(state.agent, vector)
            result = play(state.agent, vector, self.episodes, self.seed, deterministic=True)
        better = all(result.mean > before.mean for _, before in self.history)
        self.history.append((state.num_timesteps, result))
        state.metrics["eval/mean_return"] = result.mean
        state.metrics["eval/std_return"] = result.std
        if self.best is not None and better:
            state.agent.save(self.best)
        return self.stop_at is None or result.mean < self.stop_at

    def _check(self, agent: Agent, vector: VectorEnvironment) -> None:
        if on_own_environment(agent, vector):
            raise ConfigurationError(
                f"Evaluations would play on {self.env}, which the agent learns on, and cut its "
                "episodes off; hand over another object, or a name or a function that makes one"
            )


@dataclass
class StopAtReward:
    """Ends learning once the mean return of the last ``episodes`` training episodes is enough."""

    reward: float
    episodes: int = 100
    _recent: list[float] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        """Refuse numbers below 1."""
        _at_least_one(episodes=self.episodes)

    def __call__(self, state: Progress) -> bool:
        """False once the mean over at least ``episodes`` episodes reaches ``reward``."""
        self._recent += [episode.total_reward for episode in state.episodes]
        del self._recent[: -self.episodes]
        enough = len(self._recent) == self.episodes
        return not enough or sum(self._recent) / self.episodes < self.reward


def _at_least_one(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise ConfigurationError(f"{name} is {value} but must be at least 1")
