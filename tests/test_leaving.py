"""What a run that fails leaves behind, and which error is raised when saving fails as well."""

from __future__ import annotations

import csv
import traceback
from pathlib import Path
from typing import Any

import pytest

import koila_rl
from koila_rl.agents.base import BaseAgent
from koila_rl.agents.interface import Progress
from koila_rl.cli import main
from koila_rl.errors import EnvironmentFailedError
from koila_rl.metrics import read_episodes
from tests.environments import Counting

LONG: dict[str, dict[str, Any]] = {
    "ppo": {"n_steps": 200, "batch_size": 20, "n_epochs": 1},
    "recurrent_ppo": {"n_steps": 200, "batch_size": 20, "n_epochs": 1, "hidden_size": 4},
    "dqn": {"learning_starts": 10, "report_interval": 1000},
}
QUICK: dict[str, Any] = {"n_steps": 8, "batch_size": 8, "n_epochs": 1, "progress": False}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Breaking(Counting):
    """Fails at step ``last`` of all its episodes together."""

    def __init__(self, last: int = 100) -> None:
        super().__init__()
        self.last, self.steps = last, 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == self.last:
            raise RuntimeError("the motor is on fire")
        return super().step(action)


@pytest.mark.parametrize("agent", list(LONG))
def test_episodes_that_were_not_reported_yet_are_written(agent: str) -> None:
    with pytest.raises(EnvironmentFailedError, match="motor"):
        koila_rl.train(Breaking, agent, 4000, run_dir="a", progress=False, **LONG[agent])
    assert [value for _, value in read_episodes(Path("a"))] == [3.0] * 33
    assert {step for step, _ in read_episodes(Path("a"))} == {99}


@pytest.mark.parametrize("update", ["blocking", "interleaved"])
def test_every_episode_is_written_once(update: str) -> None:
    settings = {**QUICK, "update": update, "run_dir": "a"}
    result = koila_rl.train(Counting, total_timesteps=48, **settings)
    assert result.returns == (3.0,) * 16
    assert result.agent.env is not None
    assert result.agent.env.kept is None
    with pytest.raises(EnvironmentFailedError):
        koila_rl.train(lambda: Breaking(30), total_timesteps=48, **{**settings, "run_dir": "b"})
    assert len(read_episodes(Path("b"))) == 9


def test_what_a_callback_that_fails_was_told_of_is_written() -> None:
    def failing(state: Progress) -> None:
        state.metrics["mine"] = 7.0
        raise RuntimeError("out of ideas")

    with pytest.raises(RuntimeError, match="out of ideas"):
        koila_rl.train(Counting, total_timesteps=48, run_dir="a", callbacks=failing, **QUICK)
    with Path("a/metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["num_timesteps"], row["mine"]) for row in rows] == [("8", "7.0")]
    assert read_episodes(Path("a")) == [(8, 3.0)] * 2


def full(agent: BaseAgent, path: Path) -> None:
    raise OSError("no space left on device")


def test_an_error_while_saving_does_not_hide_why_the_run_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BaseAgent, "save", full)
    with pytest.raises(EnvironmentFailedError, match="motor") as caught:
        koila_rl.train(lambda: Breaking(5), total_timesteps=48, run_dir="a", **QUICK)
    text = "".join(traceback.format_exception(caught.value))
    assert "OSError: no space left on device" in text
    assert "RuntimeError: the motor is on fire" in text
    # The rest is left as far as it can be.
    assert {"episodes.csv", "learning_curve.png"} <= {path.name for path in Path("a").iterdir()}
    assert len(read_episodes(Path("a"))) == 1


def test_saving_that_fails_at_the_end_is_an_error_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BaseAgent, "save_memory", full)
    with pytest.raises(OSError, match="no space left"):
        koila_rl.train(Counting, total_timesteps=8, run_dir="a", **QUICK)


def test_an_interrupted_run_that_could_not_be_saved_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("koila_rl.agents.ppo.PPO.learn", interrupted)
    line = "train CartPole-v1 --total-timesteps 300 --no-progress --run-dir"
    assert main([*line.split(), "a"]) == 130
    assert "interrupted; what was learned so far is saved" in capsys.readouterr().err
    monkeypatch.setattr(BaseAgent, "save", full)
    assert main([*line.split(), "b"]) == 130
    assert "interrupted; saving failed: OSError: no space left" in capsys.readouterr().err
