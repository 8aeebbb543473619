"""The key of a call without containers, made in one pass over its arguments.

Most calls of a training loop are of this kind, and most are repeats: this is the hot path of
recording.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from koila_rl.recording.template import Slots
from koila_rl.recording.tensor import LazyTensor

__all__ = ["flat_key", "kind_of"]

_PLAIN = frozenset({int, str, type(None), torch.dtype, torch.device, torch.memory_format})
_autocast: Any = torch._C._is_any_autocast_enabled


def kind_of(x: float) -> Any:
    """What about a number may change the course of a call: dropout at 0, a norm at 2 or inf."""
    if x in (0.0, 1.0, 2.0) or x - x != 0:
        return repr(x)
    return x < 0


def flat_key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], slots: Slots) -> Any:
    """The key, filling ``slots``; None where the general way is needed.

    That is for containers, sizes of the minibatch, values that are known already, minibatches
    of two sizes, whole numbers of N rows (which may be row numbers), and under autocast.
    """
    if _autocast():
        return None
    parts: list[Any] = [func, torch.is_grad_enabled(), torch.get_default_dtype()]
    n = 0
    for x in args:
        part, n = _part(x, slots, n)
        if part is None:
            return None
        parts.append(part)
    for name, x in kwargs.items():
        part, n = _part(x, slots, n)
        if part is None:
            return None
        parts += (name, part)
    if not n:
        return None
    key = tuple(parts)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _part(x: Any, slots: Slots, n: int) -> tuple[Any, int]:
    kind = type(x)
    if kind is LazyTensor:
        node = x._node
        meta = node.meta
        if node.attached is not None or (n and meta.n != n):
            return None, n
        return (_hole(x, slots), id(meta)), meta.n
    if kind is float:
        slots.consts.append(x)
        return (kind, kind_of(x)), n
    if kind in _PLAIN:
        return (x,), n
    if kind is bool:
        return (kind, x), n
    if isinstance(x, Tensor) and x.is_floating_point():
        return (_hole(x, slots), x.shape, x.stride(), x.dtype, x.device, x.requires_grad), n
    return None, n


def _hole(x: Tensor, slots: Slots) -> int:
    for k, known in enumerate(slots.tensors):
        if known is x:
            return k
    slots.tensors.append(x)
    return len(slots.tensors) - 1
