"""A replay buffer as a list: slow, plain, and right by reading."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Transition:
    observation: np.ndarray
    reward: float
    following: np.ndarray
    terminated: bool
    truncated: bool
    skipped: bool

    @property
    def ended(self) -> bool:
        return self.terminated or self.truncated or self.skipped


@dataclass
class Reference:
    """Keeps every transition ever stored; the last ``capacity`` count."""

    capacity: int
    n_envs: int
    all: list[Transition] = field(default_factory=list)

    def live(self) -> list[int]:
        first = max(0, len(self.all) - self.capacity)
        return [row for row in range(first, len(self.all)) if not self.all[row].skipped]

    def n_step(self, row: int, n_steps: int, gamma: float, total: int) -> dict[str, Any]:
        at, reward, steps = row, self.all[row].reward, 1
        while steps < n_steps and not self.all[at].ended:
            following = at + self.n_envs
            if following >= total or self.all[following].skipped:
                break
            at = following
            reward += gamma**steps * self.all[at].reward
            steps += 1
        last = self.all[at]
        return {
            "reward": reward,
            "discount": gamma**steps,
            "following": last.following,
            "terminated": last.terminated,
            "truncated": last.truncated,
        }
