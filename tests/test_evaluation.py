"""Whole episodes, counted without favour."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from koila_rl.errors import ConfigurationError
from koila_rl.evaluation import Evaluation, evaluate
from tests.environments import Counting


class Still:
    """Always acts 0 and remembers how often."""

    def __init__(self) -> None:
        self.calls = 0

    def act(self, observation: Any, deterministic: bool = False) -> Any:
        assert deterministic
        self.calls += 1
        return np.zeros(len(observation), dtype=np.int64)


@pytest.mark.parametrize("episodes", [1, 2, 20, 23, 45])
def test_plays_exactly_as_many_episodes_as_asked(episodes: int) -> None:
    result = evaluate(Still(), Counting, episodes)
    assert result.returns == (3.0,) * episodes
    assert result.lengths == (3,) * episodes


def test_short_episodes_are_not_preferred() -> None:
    ends = itertools.cycle([1, 9])
    # Every other environment has episodes of one step; forty on twenty is two each.
    assert evaluate(Still(), lambda: Counting(next(ends)), 40).mean == 5.0


def test_an_environment_object_is_played_and_left_open() -> None:
    env = Counting()
    assert evaluate(Still(), env, 2).returns == (3.0, 3.0)
    env.reset()
    env.step(0)


def test_same_seed_plays_the_same_episodes() -> None:
    class Balanced(Still):
        def act(self, observation: Any, deterministic: bool = False) -> Any:
            return (np.asarray(observation)[:, 2] > 0).astype(np.int64)

    first = evaluate(Balanced(), "CartPole-v1", 5, seed=3)
    assert evaluate(Balanced(), "CartPole-v1", 5, seed=3) == first
    assert evaluate(Balanced(), "CartPole-v1", 5, seed=4) != first


def test_figures_and_text() -> None:
    result = Evaluation((1.0, 2.0, 6.0), (1, 2, 6))
    assert result.mean == 3.0
    assert result.std == pytest.approx(2.1602, abs=1e-4)
    assert str(result) == "3 episodes: mean return 3.0 ± 2.2, from 1.0 to 6.0"


def test_no_episodes_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="episodes is 0"):
        evaluate(Still(), Counting, 0)
