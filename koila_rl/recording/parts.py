"""Calls that take a minibatch apart along the batch, as one call a part.

``split``, ``chunk``, ``unbind`` and their like return as many parts as the size asks for, so they
cannot be tried at another size. Each part is a ``narrow`` or a ``select`` that can.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from koila_rl.recording.tensor import HANDLERS, LazyTensor, untouched

__all__ = ["parts_of"]

# More parts than this are taken from the whole value at once.
_MOST = 64

_SPLITS = {
    torch.functional.split, torch.split, Tensor.split, torch.chunk, Tensor.chunk,
    torch.unsafe_split, Tensor.unsafe_split, torch.unsafe_chunk, Tensor.unsafe_chunk,
    torch.split_with_sizes, Tensor.split_with_sizes, torch.unsafe_split_with_sizes,
    Tensor.unsafe_split_with_sizes, torch.tensor_split, Tensor.tensor_split,
    torch.hsplit, Tensor.hsplit, torch.vsplit, Tensor.vsplit, torch.dsplit, Tensor.dsplit,
    torch.split_with_sizes_copy, torch.split_copy,
}  # fmt: skip
_UNBINDS = {torch.unbind, Tensor.unbind, torch.unbind_copy}
_COPIES = {torch.split_with_sizes_copy, torch.split_copy, torch.unbind_copy}


def parts_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The parts, each recorded by itself; None where the call is another or has too many."""
    from koila_rl.recording.recorder import record

    unbinds = func in _UNBINDS
    if not unbinds and func not in _SPLITS:
        return None
    x = args[0] if args else kwargs.get("input", kwargs.get("self"))
    if not isinstance(x, LazyTensor) or x._node.meta.layout is None:
        return None
    meta, layout = x._node.meta, x._node.meta.layout
    assert layout is not None
    dim, size = layout.dim, meta.shape[layout.dim]
    numbers = torch.arange(size).view([size if d == dim else 1 for d in range(len(meta.shape))])
    numbers = numbers.expand(meta.shape)
    rest = (args[1:], kwargs) if args else ((), {k: v for k, v in kwargs.items() if k != "input"})
    if any(isinstance(leaf, LazyTensor) for leaf in (*rest[0], *rest[1].values())):
        return None
    with untouched():
        pieces = func(numbers, *rest[0], **rest[1])
    if len(pieces) > _MOST or any(not piece.numel() for piece in pieces):
        return None
    found = []
    for piece in pieces:
        first = int(piece.reshape(-1)[0])
        if unbinds:
            if bool((piece != first).any()):
                return None
            part = record(torch.select, (x, dim, first), {})
        else:
            others = [(a, b) for d, (a, b) in enumerate(zip(piece.shape, meta.shape, strict=True))
                      if d != dim]  # fmt: skip
            if any(a != b for a, b in others):
                return None
            part = record(torch.narrow, (x, dim, first, piece.shape[dim]), {})
        found.append(record(torch.clone, (part,), {}) if func in _COPIES else part)
    return type(pieces)(found)


def _narrow(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A start given as a tensor is a number by the time of the call."""
    from koila_rl.recording.recorder import record

    if len(args) > 2 and isinstance(args[2], Tensor):
        args = (*args[:2], int(args[2]), *args[3:])
    elif isinstance(kwargs.get("start"), Tensor):
        kwargs = {**kwargs, "start": int(kwargs["start"])}
    return record(torch.narrow, args, kwargs)


def _tensor_split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Bounds given as a tensor are numbers by the time of the call."""
    from koila_rl.recording.recorder import record

    def plain(value: Any) -> Any:
        known = isinstance(value, Tensor) and not isinstance(value, LazyTensor)
        return value.tolist() if known else value

    args = (*args[:1], *map(plain, args[1:]))
    return record(torch.tensor_split, args, {name: plain(x) if name != "input" else x
                                             for name, x in kwargs.items()})  # fmt: skip


HANDLERS[torch.tensor_split] = HANDLERS[Tensor.tensor_split] = _tensor_split
HANDLERS[torch.narrow] = HANDLERS[Tensor.narrow] = _narrow
