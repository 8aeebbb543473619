"""Gradients of a recorded loss: computed in microbatches, and handed to PyTorch's backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from koila_rl.engine.delivery import aliases_of, deliver, spent
from koila_rl.engine.gradients import Execution, real_inputs
from koila_rl.engine.program import Bound
from koila_rl.gathering import Check, Live
from koila_rl.memory.budget import active_device
from koila_rl.memory.limits import current_limits
from koila_rl.memory.plan import Plan
from koila_rl.memory.tuner import Tuner, candidates, signature
from koila_rl.recording.values import Call, Node
from koila_rl.session import (
    checks_first,
    gather,
    neutral,
    resized,
    run,
    run_whole,
    verify_checks,
    whole_for_double_backward,
    whole_inputs,
)

__all__ = ["run_backward"]


def run_backward(
    node: Node, gradient: Tensor | None, create_graph: bool, keep: bool, live: Live,
    begin: Callable[[Bound, Plan], None] = lambda bound, plan: None,
) -> Tensor:  # fmt: skip
    """Run the program of a loss for the backward that follows at once; returns its gradient.

    Unless its graph is to be kept, all gradients are computed here, on aliases, and the
    backward only delivers them. ``begin`` is called when the plan is known.
    """
    if gradient is None and node.meta.shape and node.meta.nbytes != node.meta.dtype.itemsize:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    with gather([node], live, node, "backward", True) as (bound, plan, checks, _):
        if plan.split and create_graph:
            plan = whole_for_double_backward(bound, plan)
        keep = keep or bound.program.outer
        tuner = None if keep or create_graph else tuner_of(bound, plan)
        if tuner is not None:
            plan = resized(plan, tuner.size)
        begin(bound, plan)
        seed = gradient
        if seed is None:
            # After the plan, which counts it.
            seed = torch.ones(node.meta.shape, dtype=node.meta.dtype, device=node.meta.device)
        _run_backward(bound, plan, checks, seed, create_graph, keep, tuner)
    return seed


def _run_backward(
    bound: Bound, plan: Plan, checks: list[Check], seed: Tensor, create_graph: bool, keep: bool,
    tuner: Tuner | None,
) -> None:  # fmt: skip
    node = bound.roots[0]
    tuning = tuner is not None and not tuner.done
    compiled = current_limits().compile and not create_graph

    def attempt(size: int, parts: int) -> list[Outcome]:
        with checks_first(checks), neutral(), torch.enable_grad():
            whole = size >= bound.program.n and parts == 1
            if whole and (keep or create_graph or not (tuning or _may_fail(bound))):
                results = run_whole(bound, compiled=compiled)
                return _outcomes(bound, results, checks, lambda root: True)
            same = _same_graph(node)
            if keep:
                split = Execution(bound, size, parts=parts, compiled=compiled)
                results = split.run(grad=True, gradient=seed)
                return _outcomes(bound, results, checks, same)
            inputs = whole_inputs(bound) if whole else real_inputs(bound)
            inputs, leaves, originals = aliases_of(inputs)
            if whole:
                results = run_whole(bound, inputs, compiled)
            else:
                split = Execution(bound, size, inputs=inputs, parts=parts, compiled=compiled)
                results = split.run(grad=True, gradient=seed)
                del split
            grads: list[Tensor | None] = []
            if results[0].requires_grad:
                grads += torch.autograd.grad(results[0], leaves, seed, allow_unused=True)
            outcomes = _outcomes(bound, [x.detach() for x in results], checks, lambda root: False)
            if not grads:
                return outcomes
            # Values of the same graph are used up with it, as in eager.
            used = [x if not same(root) else (x[0], spent(x[0], originals))
                    for root, x in zip(bound.roots, outcomes, strict=True)]  # fmt: skip
            return [(outcomes[0][0], deliver(outcomes[0][0], grads, originals)), *used[1:]]

    def update() -> list[Outcome]:
        return run(bound, plan, attempt, True)

    if tuner is not None and tuning:
        outcomes = tuner.timed(plan.microbatch_size, node.meta.device, update)
        if bound.program.failure is not None:
            tuner.failed(bound.program.failure.size)
    else:
        outcomes = update()
    for root, (value, attached) in zip(bound.roots, outcomes, strict=True):
        root.value = value
        if attached is not None:
            root.attached = attached


# A value without a graph, and the same with one where it may be gone through backward.
Outcome = tuple[Tensor, "Tensor | None"]


def _outcomes(
    bound: Bound, results: Sequence[Tensor], checks: Sequence[Check], graph: Callable[[Node], bool]
) -> list[Outcome]:
    """Values and graphs, after the validations among them have been made."""
    verify_checks(bound, results, checks)
    return [
        (x.detach(), x if graph(root) or not root.meta.requires_grad else None)
        for root, x in zip(bound.roots, results, strict=True)
    ]


def _same_graph(node: Node) -> Callable[[Node], bool]:
    """Whether a value shares differentiable calls with ``node``."""
    shared = _differentiable_calls(node)
    return lambda root: root is node or bool(shared & _differentiable_calls(root))


def tuner_of(bound: Bound, plan: Plan) -> Tuner | None:
    """What times the sizes of this program, where the limits in force ask for it."""
    limits = current_limits()
    if not limits.tune or limits.microbatch is not None or plan.parts != 1 or plan.batch_size <= 1:
        return None
    tuner: Tuner | None = bound.program.tuners.get(limits.memory)
    fit = plan.fit if plan.split else plan.batch_size
    if tuner is None or max(tuner.seconds) > fit:
        # Memory that has gone since makes the larger sizes impossible.
        sizes = candidates(fit, plan.batch_size)
        name = signature(bound.program)
        tuner = bound.program.tuners[limits.memory] = Tuner(sizes, name)
    return tuner


def _may_fail(bound: Bound) -> bool:
    """Whether allocations on the program's device can fail with an error."""
    device = next((root.meta.device for root in bound.roots), torch.device("cpu"))
    return device.type != "cpu" or active_device.get() is not None


def _differentiable_calls(node: Node) -> set[int]:
    """Identities of the calls that a gradient of ``node`` goes through."""
    found: set[int] = set()
    stack = [node]
    while stack:
        top = stack.pop()
        call = top.call
        if not top.meta.requires_grad or top.attached is not None or not isinstance(call, Call):
            continue
        if call.grad and id(call) not in found:
            found.add(id(call))
            stack += [x for x in call.inputs if isinstance(x, Node)]
    return found
