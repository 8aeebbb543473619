"""The names that users rely on; adding or removing one is a decision, made here."""

from __future__ import annotations

import importlib
import inspect

import pytest

import koila_rl

FUNCTIONS = {
    "evaluate",
    "last_plan",
    "lazy",
    "limits",
    "load",
    "materialize",
    "opaque",
    "plan",
    "register_batch_rule",
    "set_limits",
    "start_backward",
    "train",
    "verify",
    "wrap",
}
CLASSES = {
    "Evaluation",
    "LazyTensor",
    "Plan",
    "PrioritizedReplayBuffer",
    "ReplayBuffer",
    "RolloutBuffer",
    "SimulatedDevice",
    "SlicedBackward",
    "TrainResult",
    "Verification",
}
ERRORS = {
    "BatchSizeError",
    "ConfigurationError",
    "EnvironmentFailedError",
    "InsufficientMemoryError",
    "KoilaError",
    "MissingDependencyError",
    "StaleValueError",
    "StorageError",
    "UnsupportedError",
}


def test_names_are_these() -> None:
    expected = FUNCTIONS | CLASSES | ERRORS | {"UnsplitWarning", "agents", "integrations"}
    assert set(koila_rl.__all__) == expected
    assert sorted(koila_rl.__all__) == koila_rl.__all__


@pytest.mark.parametrize("name", sorted(FUNCTIONS | CLASSES | ERRORS | {"UnsplitWarning"}))
def test_each_is_there_documented_and_of_its_kind(name: str) -> None:
    thing = getattr(koila_rl, name)
    assert inspect.getdoc(thing)
    assert inspect.isclass(thing) == (name not in FUNCTIONS)
    if name in ERRORS:
        assert issubclass(thing, koila_rl.KoilaError)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'laezy'"):
        koila_rl.laezy  # noqa: B018


def test_agents() -> None:
    agents = importlib.import_module("koila_rl.agents")
    assert agents is koila_rl.agents
    assert set(agents.__all__) == {"DQN", "PPO", "Linear", "RecurrentPPO"}
    assert (agents.PPO.name, agents.DQN.name) == ("ppo", "dqn")


def test_errors_are_also_what_a_caller_would_catch() -> None:
    assert issubclass(koila_rl.InsufficientMemoryError, MemoryError)
    assert issubclass(koila_rl.BatchSizeError, ValueError)
    assert issubclass(koila_rl.ConfigurationError, ValueError)
    assert issubclass(koila_rl.UnsupportedError, NotImplementedError)
    assert issubclass(koila_rl.MissingDependencyError, ImportError)
