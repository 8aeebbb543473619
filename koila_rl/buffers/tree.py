"""Nested transitions as flat columns and back.

A buffer stores one tensor a leaf. Dict observations are nested names; a Tuple observation
becomes the names ``"0"``, ``"1"``, …, since a TensorDict holds names only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from koila_rl.errors import StorageError

__all__ = ["Columns", "Key", "flatten", "following", "name", "nest"]

Key: TypeAlias = tuple[str, ...]
Columns: TypeAlias = dict[Key, Tensor]


def name(key: Key) -> str:
    """``("next", "reward")`` as a person writes it: ``next.reward``."""
    return ".".join(key)


def following(key: Key) -> Key:
    """Where the leaf is in the state that the transition led to."""
    return ("next", *key)


def flatten(values: TensorDictBase | Mapping[Any, Any]) -> Columns:
    """The leaves of nested TensorDicts, mappings and tuples by their path.

    NumPy arrays and Python numbers become tensors; float64 arrays keep their type. Raises
    :class:`StorageError` for a leaf that is not numeric.
    """
    if not isinstance(values, (TensorDictBase, Mapping)):
        raise StorageError(
            f"transitions are a {type(values).__name__}; they must be a TensorDict or a mapping "
            "from names to tensors"
        )
    found: Columns = {}
    _collect(values, (), found)
    return found


def _collect(values: TensorDictBase | Mapping[Any, Any], path: Key, found: Columns) -> None:
    for key, value in values.items():
        # TorchRL writes ("next", "reward"); both spellings name the same leaf.
        here = (*path, *key) if isinstance(key, tuple) else (*path, str(key))
        if isinstance(value, Tensor):
            found[here] = value
        elif isinstance(value, (TensorDictBase, Mapping)):
            _collect(value, here, found)
        elif isinstance(value, (tuple, list)) and any(not np.isscalar(item) for item in value):
            _collect({str(position): item for position, item in enumerate(value)}, here, found)
        else:
            found[here] = _tensor(value, here)


def _tensor(value: Any, path: Key) -> Tensor:
    try:
        if isinstance(value, (bool, int, float)):
            return torch.tensor(value)
        array = np.asarray(value)
    except (ValueError, OverflowError, RuntimeError) as error:
        raise StorageError(f"{name(path)!r} is no array of numbers: {error}") from None
    if array.dtype.kind not in "biufc":
        raise StorageError(
            f"{name(path)!r} holds {type(value).__name__} of dtype {array.dtype}: a buffer stores "
            "numbers; encode it as a tensor or leave it out"
        )
    return torch.as_tensor(array if array.flags.writeable else array.copy())


# The public constructor walks every leaf again (28 µs for six columns against 4), which
# would cost more than gathering a small minibatch.
_unchecked: Any = getattr(TensorDict, "_new_unsafe", None)


def nest(columns: Mapping[Key, Any], batch_size: torch.Size) -> TensorDict:
    """A nested TensorDict of the columns, every leaf of which begins with ``batch_size``."""
    tree: dict[str, Any] = {}
    for key, value in columns.items():
        node = tree
        for part in key[:-1]:
            node = node.setdefault(part, {})
        node[key[-1]] = value
    return _build(tree, batch_size)


def _build(tree: dict[str, Any], batch_size: torch.Size) -> TensorDict:
    for key, value in tree.items():
        if type(value) is dict:
            tree[key] = _build(value, batch_size)
    if _unchecked is None:
        return TensorDict(tree, batch_size)
    built: TensorDict = _unchecked(tree, batch_size=batch_size)
    return built
