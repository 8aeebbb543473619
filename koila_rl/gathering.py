"""What a run computes: the values asked for, those that somebody holds, and validations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from koila_rl.engine.gradients import RowSource
from koila_rl.engine.program import Bound
from koila_rl.errors import StaleValueError
from koila_rl.recording.clock import optimizer_steps, stepped_since
from koila_rl.recording.values import SMALL, Call, Node, Source

__all__ = [
    "Check",
    "Live",
    "check_fresh",
    "checks_of",
    "companions",
    "is_small",
    "known_values",
    "source_tensor",
    "with_checks",
]

Check = tuple[Node, str]


@dataclass(frozen=True, slots=True)
class Live:
    """Recorded values that somebody holds, and validations that have not been made."""

    nodes: Sequence[Node] = ()
    checks: Sequence[Check] = ()


def source_tensor(node: Node) -> Tensor:
    """All rows of a wrapped minibatch."""
    source = node.call
    assert isinstance(source, Source)
    if source.data is None:
        source.data = RowSource(node).slice(0, node.meta.n)
    return source.data


def checks_of(
    calls: Sequence[Call], sources: Sequence[Node], open_checks: Sequence[Check]
) -> list[Check]:
    """The validations that belong to the program of ``calls`` and have not been made."""
    carried = {id(call.checks): call.checks for call in calls if call.checks}
    candidates = [*open_checks, *(check for checks in carried.values() for check in checks)]
    if not candidates:
        return []
    known = {id(call) for call in calls}
    known.update([id(x.call) for x in sources])
    found: dict[int, Check] = {}
    for check in candidates:
        node = check[0]
        if node.value is None and id(node) not in found and _leads_to(node, known):
            found[id(node)] = check
    return list(found.values())


def _leads_to(node: Node, known: set[int]) -> bool:
    """Whether a value depends on one of the known calls or wrapped minibatches."""
    seen: set[int] = set()
    stack: list[Any] = [node.call]
    while stack:
        call = stack.pop()
        if id(call) in known:
            return True
        if id(call) in seen or isinstance(call, Source):
            continue
        seen.add(id(call))
        stack += [x.call for x in call.inputs if type(x) is Node and x.attached is None]
    return False


def companions(roots: Sequence[Node], calls: Sequence[Call], live: Sequence[Node]) -> list[Node]:
    """Live values that share recorded calls with the roots."""
    chosen = {id(root) for root in roots}
    others = [node for node in live if id(node) not in chosen]
    if not others:
        return []
    # One walk for all: whether a call leads to one of the roots' calls.
    leads = {id(call): True for call in calls}

    def follow(call: Call) -> bool:
        stack = [call]
        while stack:
            top = stack[-1]
            if id(top) in leads:
                stack.pop()
                continue
            nodes = [x for x in top.inputs if isinstance(x, Node) and x.attached is None]
            older = [x.call for x in nodes if isinstance(x.call, Call)]
            waiting = [x for x in older if id(x) not in leads]
            if waiting:
                stack.extend(waiting)
            else:
                leads[id(top)] = any(leads[id(x)] for x in older)
                stack.pop()
        return leads[id(call)]

    return [node for node in others if isinstance(node.call, Call) and follow(node.call)]


@contextmanager
def known_values(roots: Sequence[Node], differentiated: Sequence[Node]) -> Iterator[bool]:
    """Inside, values that a split run has computed stand for the calls behind them.

    So no network runs again for a value that is there. Left as they are where a gradient of
    ``differentiated`` goes through them. Yields whether there are such values.
    """
    through = _gradient_path(differentiated)
    found: list[Node] = []
    seen: set[int] = set()
    stack = [root.call for root in roots if root.attached is None]
    while stack:
        call = stack.pop()
        if isinstance(call, Source) or id(call) in seen:
            continue
        seen.add(id(call))
        for x in call.inputs:
            if not isinstance(x, Node) or x.attached is not None or isinstance(x.call, Source):
                continue
            if x.value is not None and id(x) not in through:
                x.attached = x.value
                found.append(x)
            else:
                stack.append(x.call)
    try:
        yield bool(found)
    finally:
        for x in found:
            x.attached = None


def _gradient_path(roots: Sequence[Node]) -> set[int]:
    """Identities of the values that a gradient of the roots goes through."""
    found: set[int] = set()
    stack = list(roots)
    while stack:
        x = stack.pop()
        call = x.call
        if not x.meta.requires_grad or x.attached is not None or id(x) in found:
            continue
        found.add(id(x))
        if isinstance(call, Call) and call.grad:
            stack += [y for y in call.inputs if isinstance(y, Node)]
    return found


def is_small(node: Node) -> bool:
    return node.meta.nbytes <= SMALL * max(node.meta.n, 1)


def check_fresh(bound: Bound) -> None:
    """Refuse to run on tensors that changed after they were recorded."""
    steps = optimizer_steps()
    for x, call in bound.captured:
        tensor = x.tensor
        changed = (
            (not tensor.is_inference() and tensor._version != x.version)
            or (x.pointer and tensor.data_ptr() != x.pointer)
            or (x.steps != steps and stepped_since(tensor, x.steps))
        )
        if changed and not (call.state is not None and call.state.done):
            raise StaleValueError(
                f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} changed after "
                f"{call.info.name} was recorded with it, so its value at record time can "
                "no longer be computed. Read the value before the change, or keep it alive "
                "during backward(): values of up to 64 bytes a sample that are still held "
                "are computed along."
            )
    for item in bound.tensors:
        source = item.call if isinstance(item, Node) else None
        if isinstance(source, Source) and item.attached is None:
            if source.rows is not None and source.data is None:
                source.rows.check()
            elif (
                source.data is not None
                and source.pointer
                and (
                    (not source.data.is_inference() and source.data._version != source.version)
                    or source.data.data_ptr() != source.pointer
                )
            ):
                raise StaleValueError(
                    f"the wrapped tensor of shape {tuple(source.data.shape)} changed in place "
                    "after koila_rl.lazy() took it and before the recorded program ran. Change a "
                    "copy, or run the program first."
                )


def with_checks(nodes: list[Node], checks: Sequence[Check]) -> list[Node]:
    chosen = {id(node) for node in nodes}
    return nodes + [node for node, _ in checks if id(node) not in chosen]
