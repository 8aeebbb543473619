"""Going on with a run: what has to be said again, and what does not fit it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import koila_rl
from koila_rl.agents import DQN, PPO
from koila_rl.agents.base import BaseAgent
from koila_rl.checkpoint import load_state, save_state
from koila_rl.errors import ConfigurationError
from tests.environments import Identity

QUICK: dict[str, Any] = {"n_steps": 8, "batch_size": 8, "n_epochs": 1, "progress": False}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Moving(gym.Env[Any, Any]):
    """Spaces as they are given; every step is alike."""

    closed = 0

    def __init__(self, observations: gym.Space[Any], actions: gym.Space[Any]) -> None:
        self.observation_space, self.action_space = observations, actions

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(0)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation_space.sample(), 1.0, False, False, {}

    def close(self) -> None:
        Moving.closed += 1


def contents(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


def test_a_function_has_to_be_handed_over_again() -> None:
    def rate(progress: float) -> float:
        return 1e-2 * progress

    env = Identity(gym.spaces.Discrete(2))
    functions: dict[str, Any] = {"learning_rate": rate, "clip_range": lambda progress: 0.1}
    koila_rl.train(env, total_timesteps=8, run_dir="a", **QUICK, **functions)
    before = contents("a")
    for given, name in (({}, "learning_rate"), ({"learning_rate": rate}, "clip_range")):
        with pytest.raises(ConfigurationError, match=f"a {name} that was .*hand over {name} again"):
            koila_rl.train(env, total_timesteps=16, resume="a", progress=False, **given)
    assert contents("a") == before
    assert koila_rl.load("a").act(np.int64(1)) in (0, 1)
    again = koila_rl.train(env, total_timesteps=16, resume="a", progress=False, **functions).agent
    assert isinstance(again, PPO)
    assert again.hyperparameters.learning_rate is rate
    assert again.hyperparameters.clip_range is functions["clip_range"]


NUMBERS = gym.spaces.Box(-1.0, 1.0, (3,))
TWO = gym.spaces.Discrete(2)
ARM = gym.spaces.Box(-1.0, 1.0, (2,))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            (NUMBERS, TWO),
            (NUMBERS, gym.spaces.Discrete(2, start=4)),
            r"action_space Discrete\(2\), but here it is Discrete\(2, start=4\)",
        ),
        (
            (NUMBERS, ARM),
            (NUMBERS, gym.spaces.Box(-2.0, 1.0, (2,))),
            r"action_space Box\(-1.0, .* but here it is Box\(-2.0, 1.0",
        ),
        (
            (NUMBERS, gym.spaces.MultiDiscrete([2, 3])),
            (NUMBERS, gym.spaces.MultiDiscrete([3, 2])),
            r"action_space MultiDiscrete\(\[2 3\]\), but here it is MultiDiscrete\(\[3 2\]\)",
        ),
        (
            (NUMBERS, TWO),
            (gym.spaces.Box(-1.0, 1.0, (3,), np.float64), TWO),
            "observation_space .*float32.*, but here it is .*float64",
        ),
        (
            (gym.spaces.Discrete(3), TWO),
            (NUMBERS, TWO),
            r"observation_space Discrete\(3\), but here it is Box",
        ),
        (
            (gym.spaces.Dict(low=NUMBERS), TWO),
            (gym.spaces.Dict(high=NUMBERS), TWO),
            "observation_space Dict.'low'.*, but here it is Dict.'high'",
        ),
    ],
)
def test_another_environment_is_refused(before: Any, after: Any, message: str) -> None:
    koila_rl.train(lambda: Moving(*before), total_timesteps=8, run_dir="a", **QUICK)
    left, closed = contents("a"), Moving.closed
    with pytest.raises(ConfigurationError, match=f"learned with {message}"):
        koila_rl.train(lambda: Moving(*after), total_timesteps=16, resume="a", progress=False)
    assert contents("a") == left
    assert Moving.closed == closed + 1


def test_observations_may_have_other_bounds() -> None:
    koila_rl.train(lambda: Moving(NUMBERS, TWO), total_timesteps=8, run_dir="a", **QUICK)
    wider = gym.spaces.Box(-2.0, 2.0, (3,))
    again = koila_rl.train(
        lambda: Moving(wider, TWO), total_timesteps=16, resume="a", progress=False
    )
    assert again.agent.num_timesteps == 16


@pytest.mark.parametrize("name", ["normalize_observation", "normalize_reward"])
@pytest.mark.parametrize("learned", [False, True])
def test_normalisation_stays_as_it_was(name: str, learned: bool) -> None:
    env = Moving(NUMBERS, TWO)
    koila_rl.train(env, total_timesteps=8, run_dir="a", **QUICK, **{name: learned})
    with pytest.raises(ConfigurationError, match=f"{name} is {not learned}, but .* {learned}"):
        koila_rl.train(env, total_timesteps=16, resume="a", progress=False, **{name: not learned})
    koila_rl.train(env, total_timesteps=16, resume="a", progress=False, **{name: learned})


@pytest.mark.parametrize("kind", [PPO, DQN])
def test_a_file_that_lacks_a_part_names_it(kind: type[BaseAgent]) -> None:
    env = Moving(NUMBERS, TWO)
    settings = QUICK if kind is PPO else {"learning_starts": 4, "progress": False}
    koila_rl.train(env, kind.name, 8, run_dir="a", **settings)
    whole = dict(load_state("a/agent.pt"))
    # The seed of a run that goes on is in its config.json, and there is nothing normalised.
    for name in whole.keys() - {"agent", "seed", "normalizer"}:
        save_state("a/agent.pt", {key: value for key, value in whole.items() if key != name})
        with pytest.raises(ConfigurationError, match=rf"agent\.pt lacks '{name}'"):
            koila_rl.load("a")
        with pytest.raises(ConfigurationError, match=rf"agent\.pt lacks '{name}'"):
            koila_rl.train(env, kind.name, 16, resume="a", progress=False)
    save_state("a/agent.pt", {**whole, "format": 99})
    for read in (koila_rl.load, kind.load):
        with pytest.raises(ConfigurationError, match=r"is of format 99; .* reads 2"):
            read("a/agent.pt")
    with pytest.raises(ConfigurationError, match=r"is of format 99; .* reads 2"):
        koila_rl.train(env, kind.name, 16, resume="a", progress=False)
