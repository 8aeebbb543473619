"""Tianshou in one line: ``attach(algorithm)``, then the trainer as ever.

An attached algorithm computes its gradients on lazy minibatches. Sampling, returns, advantages and
priorities are Tianshou's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from koila_rl.errors import ConfigurationError
from koila_rl.integrations.attachment import (
    Attachment,
    attached_class,
    check_version,
    missing,
    plain_class,
    refuse,
)
from koila_rl.wrapping import lazy

try:
    from tianshou.algorithm.algorithm_base import Algorithm
    from tianshou.data import Batch
except ImportError as error:
    raise missing("Tianshou", "tianshou") from error

__all__ = ["SUPPORTED", "attach", "detach"]

SUPPORTED = ("PPO", "A2C", "DQN")
"""The algorithms of Tianshou that ``attach`` takes."""

TESTED = ("2.0", "2.1")


def attach(
    algorithm: Any, memory: int | float | str | None = "auto", microbatch: int | None = None
) -> Any:
    """Let an algorithm of Tianshou update within memory, exactly as it would without.

    Args:
        algorithm: of a class in :data:`SUPPORTED`.
        memory: as in :func:`koila_rl.limits`; ``"auto"`` goes by the limits around the training.
        microbatch: samples that run at once; left out, the planner chooses.

    Returns:
        The same algorithm. Attached again, it takes the new limits.

    Raises:
        UnsupportedError: another algorithm; the message names those that are supported.
        ConfigurationError: ``algorithm`` is none of Tianshou's, or a limit does not parse.
    """
    if not isinstance(algorithm, Algorithm):
        raise ConfigurationError(
            f"attach() takes an algorithm of Tianshou, got {type(algorithm).__name__}; of a "
            "policy, attach the algorithm that trains it"
        )
    attachment = Attachment(memory, microbatch)
    kind = plain_class(type(algorithm))
    if kind.__name__ not in SUPPORTED or not kind.__module__.startswith("tianshou."):
        raise refuse("Tianshou", kind, SUPPORTED)
    check_version("tianshou", TESTED)

    def update(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        minibatch = _LazyBatch(batch) if args or kwargs else _lazily(batch)
        with attachment.limits():
            stats = kind._update_with_batch(self, minibatch, *args, **kwargs)
        if "weight" in minibatch.get_keys():
            # TD errors, for a prioritized buffer.
            batch.weight = minibatch.weight
        return stats

    algorithm.__class__ = attached_class(kind, attachment, _restored, _update_with_batch=update)
    return algorithm


def detach(algorithm: Any) -> Any:
    """The same algorithm as it was before :func:`attach`."""
    if (kind := plain_class(type(algorithm))) is not type(algorithm):
        algorithm.__class__ = kind
    return algorithm


def _restored(kind: type[Any], state: dict[str, Any], attachment: Attachment) -> Any:
    algorithm = object.__new__(kind)
    algorithm.__dict__.update(state)
    return attach(algorithm, attachment.memory, attachment.microbatch)


class _LazyBatch(Batch):
    """A rollout that is split into lazy minibatches."""

    def split(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Minibatches as of ``Batch.split``, lazy."""
        return (_lazily(minibatch) for minibatch in super().split(*args, **kwargs))


def _lazily(batch: Any) -> Any:
    """A copy whose numbers are lazy; what is no array of numbers stays."""
    return Batch({key: _lazy_value(value) for key, value in batch.items()})


def _lazy_value(value: Any) -> Any:
    if isinstance(value, Batch):
        return _lazily(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.ndim:
        return lazy(torch.from_numpy(np.ascontiguousarray(value)))
    return lazy(value) if isinstance(value, Tensor) and value.ndim else value
