"""Plan and run recorded programs: what happens when somebody needs a value."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from koila_rl.engine.binding import bind, calls_behind
from koila_rl.engine.compiled import compiled_body, is_compiled
from koila_rl.engine.gradients import Execution, RowSource, real_inputs
from koila_rl.engine.program import Bound
from koila_rl.engine.recognition import recognise, recognise_calls, remember_calls, sources_of
from koila_rl.engine.replay import Effects, Randomness
from koila_rl.errors import (
    ConfigurationError,
    UnsplitWarning,
    UnsupportedError,
)
from koila_rl.gathering import (
    Check,
    Live,
    check_fresh,
    checks_of,
    companions,
    is_small,
    known_values,
    source_tensor,
    with_checks,
)
from koila_rl.memory.budget import format_bytes
from koila_rl.memory.choose import choose
from koila_rl.memory.limits import current_limits
from koila_rl.memory.plan import Plan, Unsplit
from koila_rl.recording import deferred
from koila_rl.recording.repeats import restart
from koila_rl.recording.values import Call, Node, moment
from koila_rl.recovery import remember_failure, run_smaller, size_to_try

__all__ = [
    "Live",
    "checks_first",
    "drop_compiled",
    "gather",
    "holds",
    "last_plan",
    "neutral",
    "note_eager",
    "note_plan",
    "plan",
    "resized",
    "run",
    "run_graph",
    "run_values",
    "run_whole",
    "source_tensor",
    "verify_checks",
    "whole_for_double_backward",
    "whole_inputs",
]

T = TypeVar("T")


class _Local(threading.local):
    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.eager: list[tuple[str, int]] = []


_local = _Local()
_warned: set[tuple[str, ...]] = set()


def last_plan() -> Plan | None:
    """The plan of the last run in this thread; None before the first."""
    return _local.plan


def note_plan(plan: Plan) -> None:
    """What ran on behalf of this thread in another."""
    _local.plan = plan


def note_eager(name: str) -> None:
    """A call that had to see values ran on the whole minibatch, outside any program."""
    _local.eager = [*_local.eager[-63:], (name, moment())]
    _local.plan = Plan(0, (), None, unsplit=(name,))
    _warn(
        (name,),
        f"{name} looks at values or draws from a seed set meanwhile, so it ran "
        "at once on the whole minibatch",
    )


def _warn(key: tuple[str, ...], message: str) -> None:
    if key not in _warned:
        _warned.add(key)
        warnings.warn(message, UnsplitWarning, stacklevel=4)


def whole_inputs(bound: Bound) -> list[Any]:
    return [
        source_tensor(item) if isinstance(x, RowSource) else x
        for item, x in zip(bound.tensors, real_inputs(bound), strict=True)
    ]


@contextmanager
def neutral() -> Iterator[None]:
    """Autocast off: every recorded call carries its own state."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    else:
        yield


def run_whole(
    bound: Bound, inputs: Sequence[Any] | None = None, compiled: bool = False
) -> list[Tensor]:
    """Run the calls as they were written; results carry PyTorch's own graph."""
    if inputs is None:
        inputs = whole_inputs(bound)
    n, body = bound.program.n, bound.program.whole
    states = [call.state for call in bound.calls]
    with torch.enable_grad(), neutral():
        if compiled:
            body = compiled_body(bound.program, body, "whole", n)
        results = body(n, bound.consts, Randomness(states, 0, n), Effects(states), *inputs)
    return list(results)


def drop_compiled(nodes: Iterable[Node]) -> None:
    """Let values be computed again whose graph cannot be differentiated twice."""
    for node in nodes:
        if is_compiled(node.attached):
            node.attached = None


def _settle(node: Node, result: Tensor, attached: bool) -> None:
    node.value = result.detach()
    if attached or not node.meta.requires_grad:
        node.attached = result


@contextmanager
def checks_first(checks: Sequence[Check]) -> Iterator[None]:
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


def verify_checks(bound: Bound, results: Sequence[Tensor], checks: Sequence[Check]) -> None:
    """Before any value is kept, so that whoever goes on after an error meets it again."""
    messages = {id(node): message for node, message in checks}
    for root, result in zip(bound.roots, results, strict=True):
        if id(root) in messages and not holds(result):
            raise ValueError(messages[id(root)])


def holds(check: Tensor) -> bool:
    return bool(check if check.numel() == 1 else check.all())


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


Gathered = tuple[Bound, Plan, list[Check]]


@contextmanager
def gather(
    roots: list[Node], pending: Live, target: Node | None, purpose: str, differentiated: bool
) -> Iterator[tuple[Bound, Plan, list[Check], bool]]:
    """Roots with their companions and validations as one program, and its plan.

    Also whether values that are known stand for calls.
    """
    # Who reads a loss under inference mode may go through it backward later.
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        yield _gathered(roots, pending, target, purpose, differentiated)


def _gathered(
    roots: list[Node], pending: Live, target: Node | None, purpose: str, differentiated: bool
) -> tuple[Bound, Plan, list[Check], bool]:
    bound, known = None, recognise_calls(roots)
    if known is not None:
        # None of their values is known.
        wanted, checks, along = _wanted(roots, *known, pending)
        bound = recognise(wanted, target)
    if bound is not None:
        return *_planned(bound, roots, along, checks, target, purpose), False
    found = [*roots, *pending.nodes]
    with known_values(found, found if differentiated else ()) as some_known:
        behind = calls_behind(roots)
        wanted, checks, along = _wanted(roots, behind, sources_of(behind), pending)
        bound = bind(wanted, target)
        if known is None and bound.program.recognised and not some_known:
            remember_calls(roots, behind)
        bound, plan, checks = _planned(bound, roots, along, checks, target, purpose)
        if some_known:
            # A run may pause: elsewhere, what is known must keep its calls, or their gradients
            # would be lost.
            bound.tensors[:] = [_standing_in(x) for x in bound.tensors]
        return bound, plan, checks, some_known


def _standing_in(x: Any) -> Any:
    """The same input of a program, whatever becomes of the recorded value."""
    if not isinstance(x, Node) or x.attached is None:
        return x
    same = Node(x.call, x.index, x.meta)
    same.value, same.attached = x.value, x.attached
    return same


def _wanted(
    roots: list[Node], calls: Sequence[Call], sources: Sequence[Node], pending: Live
) -> tuple[list[Node], list[Check], list[Node]]:
    """Roots with small companions and validations; the validations; all companions."""
    checks = checks_of(calls, sources, pending.checks)
    along = companions(roots, calls, pending.nodes)
    small = [node for node in along if is_small(node)]
    return with_checks([*roots, *small], checks), checks, along


def _planned(
    bound: Bound, roots: list[Node], along: list[Node], checks: list[Check],
    target: Node | None, purpose: str,
) -> Gathered:  # fmt: skip
    check_fresh(bound)
    plan = choose(bound, purpose)
    if not plan.split and not all(map(is_small, along)):
        # Whole, everything that is held would be computed in eager too.
        bound = bind(with_checks([*roots, *along], checks), target)
    return bound, plan, checks


def run_values(node: Node, live: Live) -> None:
    """Compute a value; where the whole minibatch fits, its graph is kept for a backward."""
    compiled = current_limits().compile
    with gather([node], live, None, "value", False) as (bound, plan, checks, some_known):

        def attempt(size: int, parts: int) -> tuple[list[Tensor], bool]:
            with checks_first(checks), neutral():
                if size >= bound.program.n:
                    return run_whole(bound, compiled=compiled), not some_known
                return Execution(bound, size, compiled=compiled).run(grad=False), False

        results, graph = run(bound, plan, attempt, False)
        verify_checks(bound, results, checks)
        for root, result in zip(bound.roots, results, strict=True):
            _settle(root, result, attached=graph)


def run_graph(
    nodes: Sequence[Node], live: Live, whole: bool = False, cuts: Sequence[Any] = ()
) -> None:
    """Compute values with graphs that reach the tensors they were made from."""
    with gather(list(nodes), live, None, "graph", True) as (bound, plan, checks, _):
        if plan.split and (whole or cuts):
            plan = whole_for_double_backward(bound, plan)

        def attempt(size: int, parts: int) -> tuple[list[Tensor], bool]:
            with checks_first(checks), neutral(), torch.enable_grad():
                if size >= bound.program.n and parts == 1:
                    return run_whole(bound), True
                return Execution(bound, size, strict=False, parts=parts).run(grad=True), False

        results, every = run(bound, plan, attempt, True)
        verify_checks(bound, results, checks)
        wanted = {id(node) for node in nodes}
        for root, result in zip(bound.roots, results, strict=True):
            _settle(root, result, attached=every or id(root) in wanted)


def whole_for_double_backward(bound: Bound, plan: Plan) -> Plan:
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


def run(bound: Bound, plan: Plan, attempt: Callable[[int, int], T], differentiated: bool) -> T:
    """Run at the planned size, or smaller where the device runs out of memory all the same."""
    planned = plan.microbatch_size if plan.split else max(bound.program.n, 1)
    size, parts = size_to_try(bound, planned, plan.parts)
    result, used, in_parts, failures = run_smaller(bound, size, parts, attempt, differentiated)
    restart()
    if deferred.any_pending():
        deferred.prune()
    if failures:
        remember_failure(bound, plan, planned, used, in_parts)
    if (used, in_parts) != (planned, plan.parts):
        plan = replace(resized(plan, used), parts=in_parts, retries=failures)
    _note(plan, bound)
    return result


def resized(plan: Plan, size: int) -> Plan:
    """The plan at another microbatch size."""
    count = -(-plan.batch_size // size)
    passes = tuple(replace(item, microbatch_size=size, count=count) for item in plan.passes)
    return replace(plan, passes=passes)


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
