"""Loops that read a loss and then call its backward: one forward for both, from the third time on.

Split, reading a loss keeps no graph, so the backward runs every microbatch again. Where the same
program was followed by the backward of the very value that was read, the next reading computes the
gradients along, and the backward delivers them. A loss that is only read from then on costs one
backward in vain, once.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from koila_rl.backward import run_backward
from koila_rl.engine.binding import calls_behind
from koila_rl.engine.program import Bound
from koila_rl.errors import InsufficientMemoryError
from koila_rl.gathering import Live, check_fresh
from koila_rl.recording.values import Node

__all__ = ["compute_along", "is_expected", "note_backward", "note_reading", "take"]

_LIMIT = 256


@dataclass(frozen=True, slots=True)
class _Foreseen:
    """Graphs that deliver the gradients, and what must not have changed until they do."""

    bound: Bound
    graphs: list[tuple[weakref.ref[Node], Tensor]]


class _Local(threading.local):
    def __init__(self) -> None:
        self.splits = False
        self.expected: set[Any] = set()
        self.reading: Any = None
        self.read: tuple[weakref.ref[Node], Any] | None = None
        self.foreseen: weakref.WeakKeyDictionary[Node, _Foreseen] = weakref.WeakKeyDictionary()


_local = _Local()


def _key(node: Node) -> Any:
    return (node.index, *(id(call.info) for call in calls_behind([node])))


def _is_loss(node: Node) -> bool:
    meta = node.meta
    return meta.requires_grad and meta.nbytes == meta.dtype.itemsize


def is_expected(node: Node) -> bool:
    """Whether the backward of a value that is about to be read is likely to follow."""
    _local.reading = None
    if not _local.splits or not _is_loss(node):
        return False
    # Made now: once the value is there, some of its calls are settled.
    _local.reading = _key(node)
    return _local.reading in _local.expected


def note_reading(node: Node) -> None:
    """A value was read; had it been whole, its graph would have been kept."""
    if node.attached is None and _is_loss(node):
        _local.splits = True
        if _local.reading is not None:
            _local.read = (weakref.ref(node), _local.reading)


def note_backward(node: Node) -> None:
    """The backward of a value begins: if it was the last that was read, expect that again."""
    if _local.read is not None and _local.read[0]() is node:
        if len(_local.expected) >= _LIMIT:
            _local.expected.clear()
        _local.expected.add(_local.read[1])
        _local.read = None


def compute_along(node: Node, live: Live) -> bool:
    """Compute a value, and the gradients of its backward; False where only the value fits."""
    _local.expected.discard(_local.reading)
    _local.read = (weakref.ref(node), _local.reading)
    found: list[Bound] = []
    try:
        run_backward(node, None, False, False, live, begin=lambda bound, plan: found.append(bound))
    except InsufficientMemoryError:
        return False
    roots = [root for root in found[0].roots if root.meta.requires_grad]
    graphs = [(weakref.ref(x), x.attached) for x in roots if x.attached is not None]
    for root in roots:
        # Until the backward comes, they are values like others.
        root.attached = None
    _local.foreseen[node] = _Foreseen(replace(found[0], roots=[]), graphs)
    return True


def take(node: Node, plainly: bool) -> None:
    """Put the graph in place if the gradients were computed and the backward is a plain one."""
    foreseen = _local.foreseen.pop(node, None)
    if foreseen is None or not plainly:
        return
    check_fresh(foreseen.bound)
    for ref, graph in foreseen.graphs:
        root = ref()
        if root is not None and root.attached is None:
            root.attached = graph
