"""How well an agent plays: whole episodes, without learning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from koila_rl.arguments import whole
from koila_rl.envs import (
    EnvironmentLike,
    Episode,
    VectorEnvironment,
    make_environment,
    on_own_environment,
)
from koila_rl.video import check_film, record

__all__ = ["Evaluation", "evaluate", "play", "playing"]

_SIDE_BY_SIDE = 20


class Actor(Protocol):
    """Whoever can act."""

    def act(self, observation: Any, deterministic: bool = False) -> NDArray[Any]:
        """Actions for several observations stacked."""


@dataclass(frozen=True)
class Evaluation:
    """Returns and lengths of the episodes played, one entry an episode."""

    returns: tuple[float, ...]
    lengths: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(np.mean(self.returns))

    @property
    def std(self) -> float:
        """Standard deviation of the returns over the episodes."""
        return float(np.std(self.returns))

    def __str__(self) -> str:
        """One line: mean ± deviation and the range."""
        low, high = min(self.returns), max(self.returns)
        return (
            f"{len(self.returns)} episodes: mean return {self.mean:.1f} ± {self.std:.1f}, "
            f"from {low:.1f} to {high:.1f}"
        )


def evaluate(
    agent: Actor,
    env: EnvironmentLike,
    episodes: int = 20,
    seed: int = 0,
    *,
    deterministic: bool = True,
    env_kwargs: dict[str, Any] | None = None,
    video: str | Path | None = None,
) -> Evaluation:
    """Play ``episodes`` whole episodes of ``env``, up to 20 side by side.

    ``video`` is a file, ``.gif`` or ``.mp4``, into which one more episode is filmed.

    Each environment plays a number of episodes fixed beforehand. Taking the first ones to finish
    instead would prefer short episodes. An agent that is evaluated on the environment that it
    learns on begins new episodes when it learns on.

    Raises:
        ConfigurationError: ``episodes`` is below 1, or the environment cannot be made or filmed.
        MissingDependencyError: The environment or the film needs a package that is not installed.
    """
    episodes, seed = whole("episodes", episodes), whole("seed", seed, 0)
    if video is not None:
        # Nothing that was played is lost for want of a library that draws.
        check_film(env, video, env_kwargs)
    with playing(env, episodes, env_kwargs) as vector:
        if on_own_environment(agent, vector):
            # What was under way there ends here; learning goes on with new episodes.
            agent.restart()  # type: ignore[attr-defined]
        result = play(agent, vector, episodes, seed, deterministic=deterministic)
    if video is not None:
        record(agent, env, video, seed=seed, deterministic=deterministic, env_kwargs=env_kwargs)
    return result


def play(
    agent: Actor, vector: VectorEnvironment, episodes: int, seed: int, *, deterministic: bool
) -> Evaluation:
    """As :func:`evaluate`, on ``vector``."""
    quota = np.full(vector.n_envs, episodes // vector.n_envs)
    quota[: episodes % vector.n_envs] += 1
    played: list[Episode] = []
    observation = vector.reset(seed=seed)
    # An agent with a memory is told where an episode begins.
    forget = getattr(agent, "forget", lambda where=None: None)
    forget()
    while quota.any():
        step = vector.step(agent.act(observation, deterministic=deterministic))
        observation = step.observation
        forget(step.terminated | step.truncated | step.reset)
        ended = np.flatnonzero(step.terminated | step.truncated)
        for i, episode in zip(ended, step.episodes, strict=True):
            if quota[i] > 0:
                quota[i] -= 1
                played.append(episode)
    return Evaluation(
        tuple(episode.total_reward for episode in played),
        tuple(episode.length for episode in played),
    )


@contextmanager
def playing(
    env: EnvironmentLike, episodes: int, env_kwargs: dict[str, Any] | None
) -> Iterator[VectorEnvironment]:
    """What to play on. One of our own is closed afterwards; the caller's is left open."""
    if isinstance(env, str) or callable(env):
        ours = make_environment(env, min(episodes, _SIDE_BY_SIDE), env_kwargs)
        try:
            yield ours
        finally:
            ours.close()
    else:
        yield make_environment(env, None, env_kwargs)
