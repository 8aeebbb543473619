"""Films of one episode."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from PIL import Image

import koila_rl
from koila_rl.agents.dqn import DQN
from koila_rl.cli import main
from koila_rl.errors import ConfigurationError, MissingDependencyError
from koila_rl.evaluation import evaluate
from koila_rl.video import record
from tests.environments import Counting


class Shown(Counting):
    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    render_mode = "rgb_array"

    def render(self) -> Any:
        return np.full((8, 8, 3), 40 * self.count, np.uint8)


class Still:
    def act(self, observation: Any, deterministic: bool = False) -> Any:
        return np.zeros(len(observation), dtype=np.int64)


def test_a_frame_for_every_state_but_the_next_episodes(tmp_path: Path) -> None:
    assert record(Still(), Shown, tmp_path / "a.gif") == 3
    with Image.open(tmp_path / "a.gif") as film:
        assert film.n_frames == 3  # type: ignore[attr-defined]


def test_evaluate_films_one_more_episode(tmp_path: Path) -> None:
    assert evaluate(Still(), Shown, 2, video=tmp_path / "b.gif").returns == (3.0, 3.0)
    assert (tmp_path / "b.gif").stat().st_size > 0


@pytest.mark.parametrize(
    ("env", "name", "message"),
    [(Shown, "a.png", "end in .gif or .mp4"), (Counting, "a.gif", "rgb_array"), (7, "a.gif", "7")],
)
def test_what_cannot_be_filmed(tmp_path: Path, env: Any, name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        record(Still(), env, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_learning_goes_on_with_new_episodes_after_filming_there(tmp_path: Path) -> None:
    env = Shown(end=5)
    agent = DQN(env, learning_starts=1000)
    agent.learn(3)
    record(agent, env, tmp_path / "a.gif")
    agent.learn(8)
    assert agent.replay is not None
    assert [float(row["observation"][0]) for row in agent.replay] == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.fixture
def without_pygame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pygame", None)


@pytest.mark.usefixtures("without_pygame")
def test_what_cannot_be_drawn_is_said_before_anything_is_played(tmp_path: Path) -> None:
    class Unasked:
        def act(self, observation: Any, deterministic: bool = False) -> Any:
            raise AssertionError("played")

    text = r"pygame is not installed: pip install 'koila-rl\[classic-control\]'"
    with pytest.raises(MissingDependencyError, match=text):
        evaluate(Unasked(), "CartPole-v1", 2, video=tmp_path / "a.gif")
    with pytest.raises(ConfigurationError, match=r"\.gif or \.mp4"):
        evaluate(Unasked(), Shown, 2, video=tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("without_pygame")
def test_the_command_says_it_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {"n_steps": 8, "batch_size": 8, "n_epochs": 1, "progress": False}
    koila_rl.train("CartPole-v1", "ppo", 8, n_envs=1, run_dir=tmp_path / "run", **settings)
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), "--video", str(tmp_path / "a.gif")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_what_an_environment_needs_to_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*_: Any, **__: Any) -> Any:
        raise gym.error.DependencyNotInstalled('run `pip install "gymnasium[mujoco]"`')

    monkeypatch.setattr(gym, "make", make)
    with pytest.raises(MissingDependencyError, match=r"'CartPole-v1' cannot be made: run .*mujoco"):
        record(Still(), "CartPole-v1", "a.gif")
