"""Plan and run recorded programs: what happens when somebody needs a value."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from koila_rl.engine.binding import bind, calls_behind
from koila_rl.engine.gradients import Execution, RowSource
from koila_rl.engine.program import Bound
from koila_rl.engine.replay import Effects, Randomness
from koila_rl.errors import (
    ConfigurationError,
    StaleValueError,
    UnsplitWarning,
    UnsupportedError,
)
from koila_rl.memory.budget import format_bytes
from koila_rl.memory.choose import choose
from koila_rl.memory.plan import Plan, Unsplit
from koila_rl.recording.clock import stepped_since
from koila_rl.recording.values import Call, Captured, Node, Source, moment

__all__ = [
    "Live",
    "last_plan",
    "neutral",
    "note_eager",
    "plan",
    "run_backward",
    "run_graph",
    "run_values",
    "run_whole",
    "source_tensor",
]

Check = tuple[Node, str]

# Values that somebody still holds are computed along, up to this size a sample.
SMALL = 64


@dataclass(frozen=True, slots=True)
class Live:
    """Recorded values that somebody holds, and validations that have not been made."""

    nodes: Sequence[Node] = ()
    checks: Sequence[Check] = ()


class _Local(threading.local):
    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.eager: list[tuple[str, int]] = []


_local = _Local()
_warned: set[tuple[str, ...]] = set()


def last_plan() -> Plan | None:
    """The plan of the last run in this thread; None before the first."""
    return _local.plan


def note_eager(name: str) -> None:
    """A call that had to see values ran on the whole minibatch, outside any program."""
    _local.eager = [*_local.eager[-63:], (name, moment())]
    _local.plan = Plan(0, (), None, 0, unsplit=(name,))
    _warn(
        (name,),
        f"{name} looks at values or draws from a seed set meanwhile, so it ran "
        "at once on the whole minibatch",
    )


def _warn(key: tuple[str, ...], message: str) -> None:
    if key not in _warned:
        _warned.add(key)
        warnings.warn(message, UnsplitWarning, stacklevel=4)


def source_tensor(node: Node) -> Tensor:
    """All rows of a wrapped minibatch."""
    source = node.call
    assert isinstance(source, Source)
    if source.data is None:
        source.data = RowSource(node).slice(0, node.meta.n)
    return source.data


def _checks(roots: Sequence[Node], open_checks: Sequence[Check]) -> list[Check]:
    """The validations that belong to the roots' program and have not been made."""
    calls = calls_behind(roots)
    candidates = [*open_checks, *(check for call in calls for check in call.checks)]
    if not candidates:
        return []
    known = _origins(roots)
    found: dict[int, Check] = {}
    for check in candidates:
        node = check[0]
        if node.value is None and id(node) not in found and known & _origins([node]):
            found[id(node)] = check
    return list(found.values())


def _origins(roots: Sequence[Node]) -> set[int]:
    """Identities of the calls and wrapped minibatches behind some values."""
    found = {id(root.call) for root in roots}
    for call in calls_behind(roots):
        found.add(id(call))
        found.update(id(x.call) for x in call.inputs if isinstance(x, Node))
    return found


def _companions(roots: Sequence[Node], live: Sequence[Node]) -> list[Node]:
    """Live values that share recorded calls with the roots."""
    chosen = {id(root) for root in roots}
    others = [node for node in live if id(node) not in chosen]
    if not others:
        return []
    # One walk for all: whether a call leads to one of the roots' calls.
    leads = {id(call): True for call in calls_behind(roots)}

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


def _small(node: Node) -> bool:
    return node.meta.nbytes <= SMALL * max(node.meta.n, 1)


def _check_fresh(bound: Bound) -> None:
    """Refuse to run on tensors that changed after they were recorded."""
    for call in bound.calls:
        if call.state is not None and call.state.done:
            continue
        for x in call.inputs:
            if isinstance(x, Captured):
                tensor = x.tensor
                changed = (
                    (not tensor.is_inference() and tensor._version != x.version)
                    or (x.pointer and tensor.data_ptr() != x.pointer)
                    or stepped_since(tensor, x.steps)
                )
                if changed:
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
                    "after koila_rl.lazy() took it and before the recorded program ran. Change a copy, "
                    "or run the program first."
                )


@contextmanager
def neutral() -> Iterator[None]:
    """Autocast off: every recorded call carries its own state."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    else:
        yield


def run_whole(bound: Bound) -> list[Tensor]:
    """Run the calls as they were written; results carry PyTorch's own graph."""
    inputs = []
    for item in bound.tensors:
        if isinstance(item, Captured):
            inputs.append(item.tensor)
        elif item.attached is not None:
            inputs.append(item.attached)
        else:
            inputs.append(source_tensor(item))
    n = bound.program.n
    states = [call.state for call in bound.calls]
    with torch.enable_grad(), neutral():
        results = bound.program.whole(
            n, bound.consts, Randomness(states, 0, n), Effects(states), *inputs
        )
    return list(results)


def _settle(node: Node, result: Tensor, attached: bool) -> None:
    node.value = result.detach()
    if attached or not node.meta.requires_grad:
        node.attached = result


@contextmanager
def _checks_first(checks: Sequence[Check]) -> Iterator[None]:
    """A validation that fails explains an error better than the call it was to prevent."""
    try:
        yield
    except Exception:
        for node, message in checks:
            if node.value is None:
                run_values(node, Live())
            assert node.value is not None
            if not bool(node.value.all()):
                raise ValueError(message) from None
        raise


def _verify_checks(checks: Sequence[Check]) -> None:
    for node, message in checks:
        assert node.value is not None
        if not bool(node.value.all()):
            raise ValueError(message)


def _note(plan: Plan, bound: Bound) -> None:
    if _local.eager:
        # Calls that ran at once belong to the program that was being recorded meanwhile.
        began = min(
            [call.sequence for call in bound.calls]
            + [x.call.sequence for x in bound.tensors if isinstance(x, Node)],
            default=0,
        )
        eager = [name for name, sequence in _local.eager if sequence > began]
        plan = replace(plan, unsplit=tuple(dict.fromkeys((*plan.unsplit, *eager))))
        _local.eager = []
    _local.plan = plan
    if plan.unsplit_details and plan.split:
        key = tuple(f"{detail.name}@{detail.where}" for detail in plan.unsplit_details)
        _warn(key, "; ".join(str(detail) for detail in plan.unsplit_details))


def _gather(
    roots: list[Node], pending: Live, target: Node | None, purpose: str
) -> tuple[Bound, Plan, list[Check]]:
    """Roots with their companions and validations as one program, and its plan."""
    checks = _checks(roots, pending.checks)
    along = _companions(roots, pending.nodes)
    small = [node for node in along if _small(node)]
    bound = bind(_with_checks([*roots, *small], checks), target)
    _check_fresh(bound)
    plan = choose(bound, purpose)
    if not plan.split and len(small) < len(along):
        # Whole, everything that is held would be computed in eager too.
        bound = bind(_with_checks([*roots, *along], checks), target)
    return bound, plan, checks


def _with_checks(nodes: list[Node], checks: Sequence[Check]) -> list[Node]:
    chosen = {id(node) for node in nodes}
    return nodes + [node for node, _ in checks if id(node) not in chosen]


def run_values(node: Node, live: Live) -> None:
    """Compute a value; where the whole minibatch fits, its graph is kept for a backward."""
    bound, plan, checks = _gather([node], live, None, "value")
    _note(plan, bound)
    if not plan.split:
        with _checks_first(checks):
            results = run_whole(bound)
        for root, result in zip(bound.roots, results, strict=True):
            _settle(root, result, attached=True)
    else:
        with _checks_first(checks), neutral():
            results = Execution(bound, plan.microbatch_size).run(grad=False)
        for root, result in zip(bound.roots, results, strict=True):
            _settle(root, result, attached=False)
    _verify_checks(checks)


def run_graph(
    nodes: Sequence[Node], live: Live, whole: bool = False, cuts: Sequence[Any] = ()
) -> None:
    """Compute values with graphs that reach the tensors they were made from."""
    bound, plan, checks = _gather(list(nodes), live, None, "graph")
    if plan.split and (whole or cuts):
        plan = _whole_for_double_backward(bound, plan)
    _note(plan, bound)
    if not plan.split:
        with _checks_first(checks):
            results = run_whole(bound)
        for root, result in zip(bound.roots, results, strict=True):
            _settle(root, result, attached=True)
    else:
        with _checks_first(checks), neutral(), torch.enable_grad():
            results = Execution(bound, plan.microbatch_size, strict=False).run(grad=True)
        wanted = {id(node) for node in nodes}
        for root, result in zip(bound.roots, results, strict=True):
            _settle(root, result, attached=id(root) in wanted)
    _verify_checks(checks)


def run_backward(node: Node, gradient: Tensor | None, create_graph: bool, live: Live) -> None:
    """Run the program of a loss for the backward that follows at once."""
    if gradient is None and node.meta.shape and node.meta.nbytes != node.meta.dtype.itemsize:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    bound, plan, checks = _gather([node], live, node, "backward")
    if plan.split and create_graph:
        plan = _whole_for_double_backward(bound, plan)
    _note(plan, bound)
    if not plan.split:
        with _checks_first(checks):
            results = run_whole(bound)
        for root, result in zip(bound.roots, results, strict=True):
            _settle(root, result, attached=True)
    else:
        seed = gradient
        if seed is None:
            seed = torch.ones(node.meta.shape, dtype=node.meta.dtype, device=node.meta.device)
        with _checks_first(checks), neutral(), torch.enable_grad():
            results = Execution(bound, plan.microbatch_size).run(grad=True, gradient=seed)
        # Values of the same graph get it too: it is used up by this backward, as in eager.
        shared = _differentiable_calls(node)
        same = [bool(shared & _differentiable_calls(root)) for root in bound.roots]
        for root, result, attached in zip(bound.roots, results, same, strict=True):
            _settle(root, result, attached=attached or root is node)
    _verify_checks(checks)


def _whole_for_double_backward(bound: Bound, plan: Plan) -> Plan:
    """A graph of the gradients exists only where the whole minibatch runs at once."""
    whole = choose(bound, "backward", whole=True)
    if whole.budget_bytes is not None and whole.peak_bytes > whole.budget_bytes:
        raise UnsupportedError(
            "create_graph=True needs the graph of the whole minibatch, which takes "
            f"{format_bytes(whole.peak_bytes)} of a budget of {format_bytes(whole.budget_bytes)}; "
            "take the second derivative on a smaller minibatch, or raise limits(memory=...)"
        )
    detail = Unsplit(
        "create_graph", "", "needs the graph of the whole minibatch",
        "take the second derivative on a smaller minibatch",
    )  # fmt: skip
    return replace(
        whole, unsplit=(*plan.unsplit, detail.name), unsplit_details=(*plan.unsplit_details, detail)
    )


def _differentiable_calls(node: Node) -> set[int]:
    if not node.meta.requires_grad:
        return set()
    return {id(call) for call in calls_behind([node])
            if call.grad and any(meta.requires_grad for meta in call.info.metas)}  # fmt: skip


def plan(loss: Tensor) -> Plan:
    """What a backward from ``loss`` would run, without running it; ``print`` it.

    Args:
        loss: a recorded value.
    """
    from koila_rl.recording.tensor import LazyTensor

    if not isinstance(loss, LazyTensor):
        raise ConfigurationError(
            f"plan() needs a recorded value, got {type(loss).__name__}; compute the loss on a "
            "minibatch from koila_rl.lazy()"
        )
    node = loss._node
    return choose(bind([node], node), "backward")
