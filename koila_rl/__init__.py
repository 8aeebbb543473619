"""koila_rl: reinforcement-learning updates that fit the device, whatever the minibatch size."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from koila_rl.errors import (
    BatchSizeError,
    ConfigurationError,
    EnvironmentFailedError,
    InsufficientMemoryError,
    KoilaError,
    MissingDependencyError,
    StaleValueError,
    StorageError,
    UnsplitWarning,
    UnsupportedError,
)
from koila_rl.memory.limits import limits, set_limits
from koila_rl.memory.plan import Plan
from koila_rl.recording.custom_rules import register_batch_rule
from koila_rl.recording.opaque import opaque
from koila_rl.recording.tensor import LazyTensor
from koila_rl.session import last_plan, plan
from koila_rl.slices import SlicedBackward, start_backward
from koila_rl.verification import Verification, verify
from koila_rl.wrapping import lazy, materialize

if TYPE_CHECKING:
    from koila_rl import agents, integrations
    from koila_rl.buffers import PrioritizedReplayBuffer, ReplayBuffer, RolloutBuffer, wrap
    from koila_rl.evaluation import Evaluation, evaluate
    from koila_rl.memory.simulated import SimulatedDevice
    from koila_rl.training import TrainResult, load, train

# Imported when first asked for, so that the engine alone stays quick to import.
_LATER = {
    "PrioritizedReplayBuffer": "koila_rl.buffers",
    "ReplayBuffer": "koila_rl.buffers",
    "RolloutBuffer": "koila_rl.buffers",
    "wrap": "koila_rl.buffers",
    "SimulatedDevice": "koila_rl.memory.simulated",
    "train": "koila_rl.training",
    "TrainResult": "koila_rl.training",
    "evaluate": "koila_rl.evaluation",
    "Evaluation": "koila_rl.evaluation",
    "load": "koila_rl.training",
}

__all__ = [
    "BatchSizeError",
    "ConfigurationError",
    "EnvironmentFailedError",
    "Evaluation",
    "InsufficientMemoryError",
    "KoilaError",
    "LazyTensor",
    "MissingDependencyError",
    "Plan",
    "PrioritizedReplayBuffer",
    "ReplayBuffer",
    "RolloutBuffer",
    "SimulatedDevice",
    "SlicedBackward",
    "StaleValueError",
    "StorageError",
    "TrainResult",
    "UnsplitWarning",
    "UnsupportedError",
    "Verification",
    "agents",
    "evaluate",
    "integrations",
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
]


def __getattr__(name: str) -> Any:
    if name in ("agents", "integrations"):
        return importlib.import_module(f"koila_rl.{name}")
    module = _LATER.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value
