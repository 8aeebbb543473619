"""Every error that koila_rl raises on purpose, in one tree.

Each also derives from the built-in that a caller would expect to catch, so that
``except ValueError`` or ``except MemoryError`` keeps working.
"""

from __future__ import annotations

__all__ = [
    "BatchSizeError",
    "ConfigurationError",
    "EnvironmentFailedError",
    "InsufficientMemoryError",
    "KoilaError",
    "MissingDependencyError",
    "StaleValueError",
    "StorageError",
    "UnsplitWarning",
    "UnsupportedError",
]


class KoilaError(Exception):
    """Base of every error that koila_rl raises."""


class InsufficientMemoryError(KoilaError, MemoryError):
    """The update does not fit the budget, whatever the microbatch size."""


class BatchSizeError(KoilaError, ValueError):
    """Values that should share a batch dimension have different sizes along it."""


class StaleValueError(KoilaError, RuntimeError):
    """A tensor that a recorded value depends on has changed since it was recorded."""


class UnsupportedError(KoilaError, NotImplementedError):
    """Something that cannot be kept exact when a minibatch is split; refused by name."""


class ConfigurationError(KoilaError, ValueError):
    """A setting, hyperparameter or environment that cannot be used; nothing has changed."""


class EnvironmentFailedError(KoilaError, RuntimeError):
    """An environment raised an error of its own; the message names it and its last action."""


class StorageError(KoilaError, RuntimeError):
    """A replay or rollout buffer was asked for something that it does not hold."""


class MissingDependencyError(KoilaError, ImportError):
    """An optional dependency is not installed; the message names the extra."""


class UnsplitWarning(UserWarning):
    """Some calls of a program run on the whole minibatch."""
