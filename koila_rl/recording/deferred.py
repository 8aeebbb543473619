"""Real tensors that a recorded call will write when it runs, and reads of them meanwhile.

BatchNorm in training updates its running statistics when the program runs, not when it is
recorded. What is recorded from those statistics in between must see them as eager would: the
read is made to depend on the write.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from koila_rl.recording.tensor import LazyTensor, Runtime
from koila_rl.recording.values import Call, Node

__all__ = ["WRITES", "after_writes", "announce_write", "any_pending", "pending_write", "prune"]

# By identity of the tensor: the call that will write it last. Only weakly, so that a program
# that is dropped goes away.
WRITES: dict[int, weakref.ref[Call]] = {}


def any_pending() -> bool:
    return bool(WRITES)


def announce_write(tensor: Tensor, call: Call) -> None:
    WRITES[id(tensor)] = weakref.ref(call)


def prune() -> None:
    """Forget writes that have been made, and those of programs that were dropped."""
    for key, reference in list(WRITES.items()):
        call = reference()
        if call is None or (call.state is not None and call.state.done):
            del WRITES[key]


def pending_write(tensor: Tensor, runtime: Runtime) -> LazyTensor | None:
    """A value that exists once the write to ``tensor`` has been made; None if none is pending."""
    reference = WRITES.get(id(tensor))
    if reference is None:
        return None
    call = reference()
    if call is None or (call.state is not None and call.state.done):
        del WRITES[id(tensor)]
        return None
    last = len(call.info.metas) - 1
    return LazyTensor(Node(call, last, call.info.metas[last]), runtime)


class ReadAfter:
    """The content of a tensor once a write to it has been made."""

    __name__ = "read_after"
    # The write changes the tensor after this was recorded, and is meant to.
    unchecked = True

    def __call__(self, tensor: Tensor, written: Tensor) -> Tensor:
        return tensor.clone()


READ_AFTER = ReadAfter()


def after_writes(tree: Any, runtime: Runtime) -> Any:
    """Arguments with pending tensors replaced by reads that wait for their writes."""
    if isinstance(tree, Tensor):
        if isinstance(tree, LazyTensor):
            return tree
        token = pending_write(tree, runtime)
        if token is None:
            return tree
        from koila_rl.recording.recorder import record_plainly

        return record_plainly(READ_AFTER, (tree, token), {})
    if type(tree) in (tuple, list):
        return type(tree)(after_writes(item, runtime) for item in tree)
    if type(tree) is dict:
        return {name: after_writes(item, runtime) for name, item in tree.items()}
    return tree
