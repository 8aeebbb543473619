"""train(): the run's folder, resuming, interruption, and bad input that writes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import koila_rl
from koila_rl.agents import PPO
from koila_rl.agents.interface import Progress
from koila_rl.callbacks import Evaluations
from koila_rl.errors import ConfigurationError, EnvironmentFailedError, KoilaError
from tests.environments import Counting

QUICK: dict[str, Any] = {"n_steps": 16, "batch_size": 16, "n_epochs": 1, "progress": False}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_folder_holds_everything(tmp_path: Path) -> None:
    result = koila_rl.train("CartPole-v1", total_timesteps=600, n_envs=2, **QUICK)
    assert result.run_dir.parent == Path("runs")
    names = {path.name for path in result.run_dir.iterdir()}
    assert names == {
        "agent.pt",
        "config.json",
        "episodes.csv",
        "learning_curve.png",
        "metrics.csv",
        "plan.txt",
        "tensorboard",
    }
    config = json.loads((result.run_dir / "config.json").read_text())
    assert config["env"] == "CartPole-v1"
    assert config["hyperparameters"]["n_steps"] == 16
    # The preset fills in what was not named.
    assert config["hyperparameters"]["gamma"] == 0.98
    assert len(result.returns) > 5
    assert result.plan is not None
    assert (result.run_dir / "plan.txt").read_text() == f"{result.plan}\n"
    action = koila_rl.load(result.run_dir).act(np.zeros(4, np.float32))
    assert int(action) in (0, 1)


def test_an_environment_without_a_name(tmp_path: Path) -> None:
    result = koila_rl.train(Counting, total_timesteps=32, run_dir=tmp_path / "a", **QUICK)
    assert set(result.returns) == {3.0}
    env = Counting()
    result = koila_rl.train(env, total_timesteps=32, run_dir=tmp_path / "b", **QUICK)
    env.reset()


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path) -> None:
    koila_rl.train(Counting, total_timesteps=16, run_dir=tmp_path / "a", **QUICK)
    before = (tmp_path / "a" / "metrics.csv").read_text()
    with pytest.raises(ConfigurationError, match="already holds a run"):
        koila_rl.train(Counting, total_timesteps=16, run_dir=tmp_path / "a", **QUICK)
    assert (tmp_path / "a" / "metrics.csv").read_text() == before


def test_resume_goes_on_where_the_run_was(tmp_path: Path) -> None:
    first = koila_rl.train(
        "CartPole-v1",
        total_timesteps=64,
        n_envs=2,
        run_dir="a",
        seed=3,
        memory="64MiB",
        ent_coef=0.125,
        **QUICK,
    )
    seen: list[int] = []
    again = koila_rl.train(
        "CartPole-v1",
        total_timesteps=160,
        resume="a",
        progress=False,
        callbacks=[lambda state: seen.append(state.num_timesteps)],
    )
    assert again.run_dir == first.run_dir
    assert again.agent.hyperparameters == first.agent.hyperparameters
    assert again.agent.env is not None
    assert again.agent.env.n_envs == 2
    assert again.agent.seed == 3
    config = json.loads(Path("a/config.json").read_text())
    assert (config["seed"], config["memory"]) == (3, "64MiB")
    assert seen[0] > first.agent.num_timesteps
    assert len(again.returns) >= len(first.returns)
    steps = [line.split(",")[0] for line in Path("a/metrics.csv").read_text().split()[1:]]
    assert len(steps) == len(set(steps)) > len(seen)


@pytest.mark.parametrize("agent", ["ppo", "recurrent_ppo"])
def test_resuming_twice_gives_the_same_parameters_bitwise(agent: str) -> None:
    quick = {**QUICK, "normalize_observation": True}
    koila_rl.train("CartPole-v1", agent, 32, n_envs=2, run_dir="a", **quick)
    found = []
    for run_dir in ("b", "c"):
        again = koila_rl.train(
            "CartPole-v1", agent, 96, resume="a", run_dir=run_dir, progress=False
        ).agent
        found.append(torch.cat([p.detach().flatten() for p in again.network.parameters()]))
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize(
    ("env", "arguments", "message"),
    [
        ("CartPole-v1", {"agent": "dqn"}, "a is a run of agent 'ppo', but agent is 'dqn'"),
        ("CartPole-v1", {"total_timesteps": 30}, "seen 3. transitions already .* is 30"),
        ("CartPole-v1", {"net_arch": (8,)}, "does not fit one of these hyperparameters"),
        ("Acrobot-v1", {}, r"observation_space Box\(.*4.*but here it is Box\(.*6"),
    ],
)
def test_what_does_not_go_on_is_refused_and_leaves_the_run(
    env: str, arguments: dict[str, Any], message: str
) -> None:
    koila_rl.train("CartPole-v1", total_timesteps=32, n_envs=2, run_dir="a", **QUICK)
    before = {path.name: path.read_bytes() for path in Path("a").iterdir() if path.is_file()}
    with pytest.raises(ConfigurationError, match=message):
        koila_rl.train(env, resume="a", progress=False, **{"total_timesteps": 64, **arguments})
    after = {path.name: path.read_bytes() for path in Path("a").iterdir() if path.is_file()}
    assert after == before


class Breaking(Counting):
    def step(self, action: Any) -> Any:
        if self.count == 2:
            self.steps = getattr(self, "steps", 0) + 1
            if self.steps == 12:
                raise RuntimeError("the motor is on fire")
        return super().step(action)


def test_a_run_that_breaks_is_saved(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailedError, match=r"environment 0 .* at action .*motor"):
        koila_rl.train(Breaking, total_timesteps=1000, run_dir="a", **QUICK)
    names = {path.name for path in Path("a").iterdir()}
    assert {"agent.pt", "metrics.csv", "learning_curve.png"} <= names
    assert koila_rl.load("a").num_timesteps > 16


def test_callbacks_see_progress_and_end_the_run() -> None:
    seen: list[Progress] = []

    def stop(state: Progress) -> bool:
        seen.append(state)
        return state.num_timesteps < 32

    after: list[int] = []
    koila_rl.train(
        Counting,
        total_timesteps=1000,
        run_dir="a",
        callbacks=[stop, lambda state: after.append(state.num_timesteps)],
        **QUICK,
    )
    assert [state.num_timesteps for state in seen] == after == [16, 32]
    assert seen[0].total_timesteps == 1000
    assert "train/value_loss" in seen[0].metrics
    assert len(seen[0].episodes) == 5


def test_one_callback_needs_no_list_and_numbers_may_be_of_numpy() -> None:
    seen: list[Progress] = []
    result = koila_rl.train(
        Counting,
        total_timesteps=np.int64(16),  # type: ignore[arg-type]
        seed=np.int64(3),  # type: ignore[arg-type]
        n_envs=np.int64(1),  # type: ignore[arg-type]
        callbacks=seen.append,
        run_dir="a",
        **QUICK,
    )
    config = json.loads(Path("a/config.json").read_text())
    assert [config[name] for name in ("total_timesteps", "seed", "n_envs")] == [16, 3, 1]
    assert [state.num_timesteps for state in seen] == [result.agent.num_timesteps] == [16]


@pytest.mark.parametrize(
    ("env", "arguments", "message"),
    [
        ("CartPol-v1", {}, "did you mean CartPole-v1"),
        ("CartPole-v1", {"agent": "pp"}, "unknown agent 'pp'; did you mean ppo"),
        ("CartPole-v1", {"lerning_rate": 1.0}, "did you mean learning_rate"),
        ("CartPole-v1", {"memory": "64 bananas"}, "bananas"),
        ("CartPole-v1", {"memory": -1}, "-1"),
        ("CartPole-v1", {"n_steps": 1, "n_envs": 1}, "= 1"),
        ("CartPole-v1", {"batch_size": 257}, "batch_size is 257"),
        ("CartPole-v1", {"total_timesteps": 0}, "total_timesteps is 0"),
        ("CartPole-v1", {"seed": 1.5}, r"seed is 1.5 \(float\); it must be a whole number"),
        ("CartPole-v1", {"seed": 2**32}, "seed is 4294967296; it must be 4294967295 or less"),
        ("CartPole-v1", {"n_envs": "2"}, "n_envs is '2'"),
        ("CartPole-v1", {"agent": None}, "agent is None but must be a name: ppo, recurrent_ppo"),
        ("CartPole-v1", {"agent": PPO}, "agent is <class .*PPO'> but must be a name"),
        ("CartPole-v1", {"run_dir": 3}, "run_dir is 3, but must be the path of a folder"),
        ("CartPole-v1", {"resume": 3}, "resume is 3, but must be the path of a folder"),
        ("CartPole-v1", {"callbacks": 3}, "callbacks is 3 but must be functions"),
        ("CartPole-v1", {"callbacks": ["stop"]}, r"callbacks is \['stop'\] but must be functions"),
        ("CartPole-v1", {"total_timesteps": "many"}, "total_timesteps is 'many'"),
        ("CartPole-v1", {"device": "abacus"}, "abacus"),
        ("CartPole-v1", {"resume": "nowhere"}, "no checkpoint"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    tmp_path: Path, env: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(KoilaError, match=message) as caught:
        koila_rl.train(env, progress=False, **{"total_timesteps": 64, **arguments})
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_load_refuses_what_is_not_an_agent(tmp_path: Path) -> None:
    torch.save({"weights": torch.zeros(2)}, tmp_path / "x.pt")
    with pytest.raises(ConfigurationError, match="not of an agent"):
        koila_rl.load(tmp_path / "x.pt")
    with pytest.raises(ConfigurationError, match="no checkpoint"):
        koila_rl.load(tmp_path)


def test_a_registered_environment_of_the_users_own() -> None:
    gym.register("koila-test/Counting-v0", lambda **kwargs: Counting(**kwargs))
    try:
        result = koila_rl.train(
            "koila-test/Counting-v0", total_timesteps=16, env_kwargs={"end": 2}, **QUICK
        )
    finally:
        gym.registry.pop("koila-test/Counting-v0")
    assert set(result.returns) == {2.0}


@pytest.mark.parametrize("agent", ["ppo", "recurrent_ppo", "dqn"])
def test_every_metric_is_defined_in_the_documentation(agent: str) -> None:
    settings = {"learning_starts": 8} if agent == "dqn" else QUICK
    evaluations = Evaluations(Counting, every=32, episodes=1)
    koila_rl.train(
        Counting, agent, 32, run_dir="a", callbacks=[evaluations], **{"progress": False, **settings}
    )
    page = Path(__file__).parents[1] / "docs" / ("dqn.md" if agent == "dqn" else "ppo.md")
    names = Path("a/metrics.csv").read_text().splitlines()[0].split(",")
    assert {"train/n_updates", "eval/mean_return", "rollout/mean_return"} <= set(names)
    text = page.read_text()
    assert [name for name in names if f"`{name}`" not in text] == []
