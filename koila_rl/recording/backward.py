"""Does the backward of a user's `torch.autograd.Function` keep samples apart?

PyTorch's own formulas do where the forward does; a user's backward may divide by the size it
sees, or normalise over the minibatch. It is traced like a call: gradients of batched inputs
must come out batched, those of whole inputs as sums over the samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves

from koila_rl.errors import UnsupportedError
from koila_rl.recording.propagate import Propagation
from koila_rl.recording.steps import CannotExplode
from koila_rl.recording.template import fill
from koila_rl.recording.trace import Trace, fake_like, trace
from koila_rl.recording.values import Meta, second_size

__all__ = ["backward_splits", "has_own_formula", "refuse_hidden_leaves"]

# A sum over the samples may still be scaled or reshaped: both commute with adding up.
_LINEAR = {"mul", "div", "neg", "view", "t", "transpose", "permute", "_to_copy", "unsqueeze",
           "squeeze", "expand", "reshape", "clone", "alias", "detach", "sum"}  # fmt: skip


def backward_splits(
    func: Any, template: Any, metas: Sequence[Meta], outs: Sequence[Meta], consts: list[Any], n: int
) -> bool:
    """Whether ``func``'s backward can run on microbatches, given layouts of inputs and outputs."""
    differentiable = [meta for meta in outs if meta.requires_grad]
    if not torch.is_grad_enabled() or not differentiable:
        return True
    try:
        first = _traced(func, template, metas, differentiable, consts, n, second=False)
        second = _traced(func, template, metas, differentiable, consts, n, second=True)
        flow = Propagation(n, second_size(n), native=True)
        declared = [meta.layout for meta in (*metas, *differentiable)]
        for a, b, layout in zip(first[0], second[0], declared, strict=True):
            flow.declare(a, b, layout)
        results = [x for x in tree_leaves(first[1].out) if isinstance(x, Tensor)]
        flow.wanted = {id(x) for x in results}
        flow.run(first[1].records, second[1].records)
    except (CannotExplode, RuntimeError, ValueError, TypeError):
        return False
    return _keeps_apart(flow, metas, first[1].out)


def _traced(
    func: Any, template: Any, metas: Sequence[Meta], outs: Sequence[Meta], consts: list[Any],
    n: int, second: bool,
) -> tuple[list[Tensor], Trace]:  # fmt: skip
    def fakes(described: Sequence[Meta], grads: bool) -> list[Tensor]:
        return [
            fake_like(
                meta.shape2 if second else meta.shape, meta.stride2 if second else meta.stride,
                meta.dtype, meta.device, grads and meta.requires_grad,
            )
            for meta in described
        ]  # fmt: skip

    leaves, seeds = fakes(metas, True), fakes(outs, False)
    size = second_size(n) if second else n
    args, kwargs = fill(template, leaves, consts, size)
    wanted = [x for x in leaves if x.requires_grad]

    def both() -> Any:
        results = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
        roots = [x for x in results if x.requires_grad]
        return torch.autograd.grad(roots, wanted, seeds, allow_unused=True)

    return [*leaves, *seeds], trace(both)


def _keeps_apart(flow: Propagation, metas: Sequence[Meta], grads: Sequence[Tensor | None]) -> bool:
    if flow.blocked is not None or flow.varies:
        return False
    batched = {number for x, number in flow.values.items() if flow.layouts[x] is not None}
    sums: set[int] = set()
    for step in flow.steps:
        operands = {number for number, _ in step.operands}
        if step.kind == "global" and operands & batched:
            return False
        if step.kind == "reduce":
            if step.reduction is None or step.reduction.weight != "sum" or step.reduction.combine:
                return False
            sums.update(step.outputs)
        elif operands & sums:
            if step.kind != "global" or step.name not in _LINEAR or len(operands & sums) > 1:
                return False
            sums.update(step.outputs)
    wanted = [meta for meta in metas if meta.requires_grad]
    for meta, grad in zip(wanted, grads, strict=True):
        if grad is None:
            continue
        layout, number = flow.layouts.get(id(grad)), flow.values.get(id(grad))
        if meta.layout is not None and layout != meta.layout:
            return False
        if meta.layout is None and number not in sums:
            return False
    return True


def _graph(tree: Any) -> Iterator[Any]:
    """The nodes of PyTorch's graph behind some results."""
    stack = [x.grad_fn for x in tree_leaves(tree) if isinstance(x, Tensor) and x.grad_fn]
    seen: set[Any] = set()
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            stack += [following for following, _ in node.next_functions if following is not None]


def has_own_formula(tree: Any) -> bool:
    """Whether the results have a backward that is not one of PyTorch's formulas."""
    return any(
        isinstance(node, BackwardCFunction) or "CppNode" in node.name() for node in _graph(tree)
    )


def refuse_hidden_leaves(name: str, tree: Any, leaves: Sequence[Tensor]) -> None:
    """A call that uses parameters beside its arguments would not give them gradients.

    Raises:
        UnsupportedError: naming the call and the parameters.
    """
    known = {id(leaf) for leaf in leaves}
    hidden = [
        node.variable for node in _graph(tree)
        if hasattr(node, "variable") and id(node.variable) not in known
    ]  # fmt: skip
    if hidden:
        shapes = ", ".join(str(tuple(x.shape)) for x in hidden[:4])
        raise UnsupportedError(
            f"the opaque {name} uses tensors that require gradients ({shapes}) and are not among "
            "its arguments; pass them, or wrap the module they belong to (or a method of it)"
        )
