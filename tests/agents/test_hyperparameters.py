"""Hyperparameters, schedules and presets: read, refused, written and restored."""

from __future__ import annotations

import json
import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from koila_rl.agents import DQN, PPO, dqn_hyperparameters, hyperparameters
from koila_rl.agents.ppo_hyperparameters import Hyperparameters
from koila_rl.agents.presets import PRESETS, preset
from koila_rl.agents.recurrent_ppo import RecurrentHyperparameters
from koila_rl.agents.schedules import Linear, at
from koila_rl.errors import ConfigurationError
from koila_rl.training import AGENTS
from tests.environments import Counting, Identity


def test_defaults_are_those_of_stable_baselines3() -> None:
    values = Hyperparameters()
    assert (values.learning_rate, values.n_steps, values.batch_size) == (3e-4, 2048, 64)
    assert (values.n_epochs, values.gamma, values.gae_lambda) == (10, 0.99, 0.95)
    assert (values.clip_range, values.clip_range_vf, values.target_kl) == (0.2, None, None)
    assert (values.ent_coef, values.vf_coef, values.max_grad_norm) == (0.0, 0.5, 0.5)
    assert values.normalize_advantage


def test_unknown_name_is_refused_with_near_ones() -> None:
    with pytest.raises(ConfigurationError, match="'lerning_rate'; did you mean learning_rate"):
        hyperparameters.read(Hyperparameters, {"lerning_rate": 1e-3}, "ppo")
    with pytest.raises(ConfigurationError, match="'zzz'; known: learning_rate, n_steps"):
        hyperparameters.read(Hyperparameters, {"zzz": 1}, "ppo")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n_steps": 1.5}, "n_steps is 1.5 but must be a whole number"),
        ({"n_epochs": True}, "n_epochs is True but must be a whole number"),
        ({"n_steps": None}, "n_steps is None but must be a whole number"),
        ({"sequence_length": "4"}, "sequence_length is '4' but must be a whole number or None"),
        ({"sequence_length": 2.5}, "sequence_length is 2.5 but must be a whole number or None"),
        ({"normalize_advantage": 1}, "normalize_advantage is 1 but must be True or False"),
        ({"share_trunk": "no"}, "share_trunk is 'no' but must be True or False or None"),
        ({"gamma": "0.9"}, "gamma is '0.9' but must be a number"),
        ({"gamma": lambda progress: 0.9}, "gamma is <function .* but must be a number"),
        ({"gamma": None}, "gamma is None but must be a number"),
        ({"vf_coef": True}, "vf_coef is True but must be a number"),
        ({"target_kl": "0.1"}, "target_kl is '0.1' but must be a number or None"),
        ({"clip_range": "wide"}, "'wide' but must be a number or a function of the remaining"),
        ({"features_extractor": [1]}, r"features_extractor is \[1\] but must be a string"),
        ({"cell": ["lstm"]}, r"cell is \['lstm'\] but must be a string"),
        ({"net_arch": "64"}, "net_arch is '64' but must be a tuple of whole numbers or None"),
        ({"net_arch": 64}, "net_arch is 64 but must be a tuple"),
        ({"net_arch": (64, 1.5)}, r"net_arch is \(64, 1.5\) but must be a tuple"),
        ({"net_arch": (True,)}, r"net_arch is \(True,\) but must be a tuple"),
    ],
)
def test_wrong_type_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        hyperparameters.read(RecurrentHyperparameters, given, "recurrent_ppo")


def test_numbers_become_those_that_the_annotation_asks_for() -> None:
    given = {
        "n_steps": np.int64(64),
        "gamma": np.float32(0.5),
        "clip_range": 1,
        "log_std_init": -2,
        "normalize_reward": np.True_,
        "net_arch": [np.int32(8), 4],
    }
    values = hyperparameters.read(Hyperparameters, given, "ppo")
    assert json.loads(json.dumps(hyperparameters.describe(values)))["gamma"] == 0.5
    found = {name: getattr(values, name) for name in given}
    assert found == {**given, "net_arch": (8, 4)}
    assert [type(value) for value in found.values()] == [int, float, float, float, bool, tuple]
    assert type(found["net_arch"][0]) is int


def test_a_whole_number_is_a_first_deviation() -> None:
    env = Identity(gym.spaces.Box(-1.0, 1.0, (2,)))
    agent = PPO(env, n_steps=8, batch_size=8, log_std_init=-2)
    assert agent.learn(8).num_timesteps == 8


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gamma": 1.5}, "gamma is 1.5 but must be from 0 to 1"),
        ({"ent_coef": math.nan}, "ent_coef is nan but must be finite"),
        ({"learning_rate": math.inf}, "learning_rate is inf but must be finite"),
        ({"learning_rate": Linear(-1.0)}, "learning_rate is -1 at progress 1 but must be"),
        ({"learning_rate": lambda p: 2 * p - 1}, "learning_rate is -1 at progress 0 but must be"),
        ({"learning_rate": lambda p: None}, "learning_rate is <function .* no number at"),
        ({"clip_range": lambda p: p - 0.9}, "clip_range is -0.9 at progress 0 but must be"),
        ({"clip_range_vf": 0.0}, "clip_range_vf is 0 but must be above 0; None switches it off"),
        ({"target_kl": 0.0}, "target_kl is 0 but must be above 0; None switches it off"),
        ({"n_epochs": 0}, "n_epochs is 0 but must be at least 1"),
        ({"n_steps": 1}, r"n_steps \* n_envs is 1 \* 1 = 1"),
        ({"n_steps": 32}, "batch_size is 64 but a rollout has"),
    ],
)
def test_values_that_cannot_be_used(given: dict[str, object], message: str) -> None:
    values = hyperparameters.read(Hyperparameters, given, "ppo")
    with pytest.raises(ConfigurationError, match=message):
        values.check(n_envs=1)


def test_what_switches_off_or_falls_to_nothing_can_be_used() -> None:
    falling = {"learning_rate": Linear(1e-3), "clip_range": Linear(0.2)}
    given = {**falling, "max_grad_norm": math.inf, "target_kl": None}
    hyperparameters.read(Hyperparameters, given, "ppo").check(n_envs=1)


@pytest.mark.parametrize(
    ("name", "schedule", "message"),
    [
        ("learning_rate", lambda p: 0.1 if p in (0, 1) else math.nan, "is nan at progress 0.5"),
        ("clip_range", lambda p: 0.1 if p in (0, 1) else -0.5, "is -0.5 at progress 0.5"),
        ("clip_range_vf", lambda p: 0.1 if p in (0, 1) else -0.5, "is -0.5 at progress 0.5"),
    ],
)
def test_a_schedule_that_leaves_its_range_ends_learning_before_the_update(
    name: str, schedule: Any, message: str
) -> None:
    agent = PPO(Counting, n_steps=8, batch_size=8, **{name: schedule})
    before = [parameter.clone() for parameter in agent.network.parameters()]
    with pytest.raises(ConfigurationError, match=f"{name} {message}"):
        agent.learn(16)
    assert all(map(torch.equal, before, agent.network.parameters()))


def test_a_schedule_of_dqn_that_leaves_its_range_ends_learning() -> None:
    def sinking(progress: float) -> float:
        return 0.5 if progress in (0.0, 1.0) else -1.0

    agent = DQN(Counting, learning_starts=4, batch_size=4, prioritized_beta=sinking)
    with pytest.raises(ConfigurationError, match=r"prioritized_beta is -1 at progress 0.5"):
        agent.learn(16)


def test_schedules_take_the_remaining_progress() -> None:
    assert [at(Linear(1e-3), progress) for progress in (1.0, 0.5, 0.0)] == [1e-3, 5e-4, 0.0]
    assert Linear(1.0, 0.1)(0.0) == pytest.approx(0.1)
    assert at(0.3, 0.7) == 0.3
    assert at(lambda progress: progress**2, 0.5) == 0.25


def test_what_is_written_is_json_and_reads_back() -> None:
    values = Hyperparameters(learning_rate=Linear(1e-3), net_arch=(32, 16), target_kl=None)
    written = json.loads(json.dumps(hyperparameters.describe(values)))
    again = hyperparameters.read(Hyperparameters, hyperparameters.restore(written), "ppo")
    assert again == values


def test_a_function_is_written_by_name_and_left_out_when_read() -> None:
    def falling(progress: float) -> float:
        return progress

    written = hyperparameters.describe(Hyperparameters(learning_rate=falling))
    assert "falling" in written["learning_rate"]["function"]
    assert "learning_rate" not in hyperparameters.restore(written)
    assert list(hyperparameters.lost(written)) == ["learning_rate"]


def test_presets_hold_known_names_and_are_copied() -> None:
    for agent, env in PRESETS:
        values = preset(agent, env)
        n_envs = values.pop("n_envs", 1)
        values.pop("env_kwargs", None)
        hyperparameters.read(AGENTS[agent].hyperparameters_type, values, agent).check(n_envs)
    preset("ppo", "CartPole-v1").clear()
    assert preset("ppo", "CartPole-v1")["n_envs"] == 8
    assert preset("ppo", object()) == {}
    assert preset("dqn", "ALE/Pong-v5")["frame_stack"] == 4


@pytest.mark.parametrize("kind", [Hyperparameters, dqn_hyperparameters.Hyperparameters])
def test_widths_of_layers_are_checked(kind: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"net_arch is \(8, 0\) but must be widths of lay"):
        hyperparameters.read(kind, {"net_arch": (8, 0)}, "x").check(1)
    hyperparameters.read(kind, {"net_arch": [32, 16]}, "x").check(1)
