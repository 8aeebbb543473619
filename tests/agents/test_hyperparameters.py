"""Hyperparameters, schedules and presets: read, refused, written and restored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from koila_rl.agents import dqn_hyperparameters, hyperparameters
from koila_rl.agents.ppo_hyperparameters import Hyperparameters
from koila_rl.agents.presets import PRESETS, preset
from koila_rl.agents.schedules import Linear, at
from koila_rl.errors import ConfigurationError
from koila_rl.training import AGENTS


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
        ({"n_steps": 1.5}, "n_steps is 1.5 but must be of type int"),
        ({"n_epochs": True}, "n_epochs is True but must be of type int"),
        ({"normalize_advantage": 1}, "normalize_advantage is 1 but must be of type bool"),
    ],
)
def test_wrong_type_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        hyperparameters.read(Hyperparameters, given, "ppo")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gamma": 1.5}, "gamma is 1.5 but must be from 0 to 1"),
        ({"learning_rate": Linear(-1.0)}, "learning_rate is -1"),
        ({"clip_range": "wide"}, "clip_range is 'wide', which is not a number"),
        ({"n_epochs": 0}, "n_epochs is 0"),
        ({"n_steps": 1}, r"n_steps \* n_envs is 1 \* 1 = 1"),
        ({"n_steps": 32}, "batch_size is 64 but a rollout has"),
    ],
)
def test_values_that_cannot_be_used(given: dict[str, object], message: str) -> None:
    values = hyperparameters.read(Hyperparameters, given, "ppo")
    with pytest.raises(ConfigurationError, match=message):
        values.check(n_envs=1)


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
@pytest.mark.parametrize("widths", ["64", (0,), (64, 1.5), 64, (True,)])
def test_widths_of_layers_are_checked(kind: Any, widths: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"net_arch is .* must be widths of layers"):
        kind(net_arch=widths).check(1)
    kind(net_arch=[32, 16]).check(1)
