"""Analyse one call: its outputs, what it does with the batch axis, and the steps that replay it.

Each call is run on fake tensors at two minibatch sizes. Literal integers that equal a multiple
of N, and captured tensors with N rows, may or may not follow the minibatch; the second size
settles it, by trying.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from koila_rl.recording.attempts import Attempt, attempts
from koila_rl.recording.backward import backward_splits, has_own_formula, refuse_hidden_leaves
from koila_rl.recording.callinfo import (
    CallInfo,
    described,
    described_along,
    native_step,
    rows_of_view,
)
from koila_rl.recording.layouts import Layout, scaled_layout
from koila_rl.recording.propagate import CannotExplode, Propagation, Step, paths_of
from koila_rl.recording.rules import Reduction, RuleError, Use
from koila_rl.recording.sizes import BatchInt
from koila_rl.recording.steps import draws
from koila_rl.recording.template import fill, holes
from koila_rl.recording.trace import LOCK, OpRecord, Trace, copied, fake_like, quiet_fakes, trace
from koila_rl.recording.values import Meta, scaled, second_size

__all__ = ["CallInfo", "NeedsValuesError", "analyse", "describe_function"]


class NeedsValuesError(Exception):
    """The call looks at values, or fake tensors cannot run it; it must run on real ones."""


def describe_function(func: Any) -> str:
    name = getattr(func, "__name__", None) or getattr(func, "name", None) or str(func)
    if callable(name):
        name = name()
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return str(name).strip("_")


def may_write(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call may change an argument, by PyTorch's naming."""
    name = getattr(func, "__name__", "")
    if name in ("__setitem__", "__set__") or "out" in kwargs:
        return True
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    return name.endswith("_")


def analyse(
    func: Any, template: tuple[Any, Any], metas: list[Meta], consts: list[Any], n: int, batched: int
) -> CallInfo:
    """Analyse ``func`` on inputs like ``metas`` in a program of minibatch size n.

    ``batched`` counts the inputs from a minibatch of n; without any the call is global.
    Raises `NeedsValuesError` where the call must see values.
    """
    with LOCK, quiet_fakes():
        first = _trace_at(func, template, metas, consts, n, second=False)
        if hasattr(func, "opaque"):
            refuse_hidden_leaves(describe_function(func), first.trace.out, first.leaves)
        info = _describe(func, template, metas, first, n)
        if info.writes or n <= 1:
            info.steps = [native_step(info, "global", len(metas), {}, None)]
            return info
        if not batched:
            _second_shapes(info, first, template, metas, consts)
            info.steps = [native_step(info, "global", len(metas), {}, None)]
            info.steps[0].ops = _operators(first, metas)
            return info
        return _best(info, first, template, metas, consts)


def _trace_at(
    func: Any, template: Any, metas: list[Meta], consts: list[Any], n: int, second: bool
) -> _Traced:
    leaves = []
    writes = may_write(func, template[1])
    for meta in metas:
        shape, stride = (meta.shape2, meta.stride2) if second else (meta.shape, meta.stride)
        fake = fake_like(shape, stride, meta.dtype, meta.device, meta.requires_grad)
        # A recorded value is no leaf, so that it may be written in place.
        leaves.append(copied(fake) if writes and meta.requires_grad and 0 not in stride else fake)
    size = second_size(n) if second else n
    args, kwargs = fill(template, leaves, consts, size)
    try:
        result = trace(lambda: func(*args, **kwargs))
    except Exception as reason:
        raise NeedsValuesError(f"{describe_function(func)}: {reason}") from reason
    return _Traced(leaves, result)


@dataclass(slots=True)
class _Traced:
    leaves: list[Tensor]
    trace: Trace


def _result_bytes(record: OpRecord) -> int:
    """Bytes of an operator's results; fake recurrent layers leave out a workspace of many times."""
    factor = 64 if "rnn_layer" in record.func._schema.name else 1
    return factor * sum(x.nbytes for x in record.outs)


def _describe(func: Any, template: Any, metas: list[Meta], first: _Traced, n: int) -> CallInfo:
    outs = [x for x in tree_leaves(first.trace.out) if isinstance(x, Tensor)]
    paths = paths_of(first.trace.out)
    if len(paths) != len(outs):
        raise NeedsValuesError(f"{describe_function(func)} returns an unknown structure")
    storages = {leaf.untyped_storage()._cdata: k for k, leaf in enumerate(first.leaves)}
    written = set()
    for record in first.trace.records:
        for argument in record.func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for leaf in tree_leaves(_argument(record, argument.name)):
                    if isinstance(leaf, Tensor):
                        written.add(leaf.untyped_storage()._cdata)
    return CallInfo(
        func=func,
        template=template,
        name=describe_function(func),
        metas=[described(x, n) for x in outs],
        paths=paths,
        out=holes(first.trace.out, []),
        steps=[],
        results=tuple(range(len(metas), len(metas) + len(outs))),
        n=n,
        random=any(map(draws, first.trace.records)),
        traffic=sum(_result_bytes(record) for record in first.trace.records),
        aliases=[storages.get(x.untyped_storage()._cdata) for x in outs],
        same=[next((k for k, y in enumerate(first.leaves) if y is x), None) for x in outs],
        writes=tuple(k for cdata, k in storages.items() if cdata in written),
    )


def _argument(record: OpRecord, name: str) -> Any:
    if name in record.kwargs:
        return record.kwargs[name]
    names = [argument.name for argument in record.func._schema.arguments]
    position = names.index(name)
    return record.args[position] if position < len(record.args) else None


def _second_shapes(
    info: CallInfo, first: _Traced, template: Any, metas: list[Meta], consts: list[Any]
) -> None:
    """A global call may still have shapes that depend on N, as ``(x.T @ x).expand(N, ...)``."""
    if all(meta.shape == meta.shape2 for meta in metas) and not _sizes_in(template):
        return
    try:
        second = _trace_at(info.func, template, metas, consts, info.n, second=True)
    except NeedsValuesError:
        return
    outs = [x for x in tree_leaves(first.trace.out) if isinstance(x, Tensor)]
    others = [x for x in tree_leaves(second.trace.out) if isinstance(x, Tensor)]
    if len(outs) == len(others):
        info.metas = [
            described(x, info.n, scaled_layout(x.shape, y.shape, info.n, second_size(info.n)), y)
            for x, y in zip(outs, others, strict=True)
        ]


def _sizes_in(template: Any) -> bool:
    return any(isinstance(leaf, BatchInt) for leaf in tree_leaves(template))


def _operators(first: _Traced, metas: list[Meta]) -> tuple[Any, ...]:
    """Operators of a global call with value numbers, for the test of linearity."""
    numbers = {id(leaf): k for k, leaf in enumerate(first.leaves)}
    outs = [x for x in tree_leaves(first.trace.out) if isinstance(x, Tensor)]
    fixed = {id(x): len(metas) + k for k, x in enumerate(outs)}
    fresh = itertools.count(len(metas) + len(outs))
    ops = []
    for record in first.trace.records:
        ins = tuple(
            numbers[id(x)]
            for x in tree_leaves((record.args, record.kwargs))
            if isinstance(x, Tensor) and id(x) in numbers
        )
        results = []
        for x in record.outs:
            numbers[id(x)] = fixed.get(id(x)) or next(fresh)
            results.append(numbers[id(x)])
        ops.append((record.func._schema.name.partition("::")[2], ins, tuple(results)))
    return tuple(ops)


def _best(
    info: CallInfo, first: _Traced, template: Any, metas: list[Meta], consts: list[Any]
) -> CallInfo:
    """The first reading under which the call splits; else the best that is right."""
    fallback: CallInfo | None = None
    if getattr(info.func, "mixes", False):
        return _whole_minibatch(info, first, metas)
    wrong: RuleError | None = None
    for attempt in attempts(template, metas, info.n):
        found = None
        try:
            found = _try(info, first, attempt, consts)
        except RuleError as error:
            wrong = error
        if found is None:
            continue
        if not found.mixes:
            return found
        if fallback is None or len(fallback.steps) == 1 < len(found.steps):
            fallback = found
    if wrong is not None:
        raise wrong
    if fallback is not None and len(fallback.steps) > 1:
        return fallback
    if _is_view(info, first):
        return rows_of_view(info, metas, len(consts))
    if fallback is not None:
        return fallback
    info.steps = [native_step(info, "global", len(metas), {}, None)]
    info.mixes = True
    return info


def _is_view(info: CallInfo, first: _Traced) -> bool:
    """Whether the call does nothing but look at one input in another way."""
    views = all(
        any(a.alias_info is not None for a in record.func._schema.arguments)
        for record in first.trace.records
    )
    alone = len(info.metas) == 1 and info.paths[0] == ()
    wide = alone and any(size > 1 for size in info.metas[0].shape)
    return views and wide and info.aliases[0] is not None and info.same[0] is None


def _whole_minibatch(info: CallInfo, first: _Traced, metas: list[Meta]) -> CallInfo:
    """A call that asks to see the whole minibatch and keeps shapes as they are."""
    outs = [x for x in tree_leaves(first.trace.out) if isinstance(x, Tensor)]
    info.metas = [
        next((meta for meta in metas if meta.shape == tuple(x.shape)), old)
        for x, old in zip(outs, info.metas, strict=True)
    ]
    info.steps = [native_step(info, "global", len(metas), {}, None)]
    info.mixes = True
    return info


def _try(info: CallInfo, first: _Traced, attempt: Attempt, consts: list[Any]) -> CallInfo | None:
    try:
        second = _trace_at(info.func, attempt.template, attempt.metas, consts, info.n, second=True)
    except NeedsValuesError:
        return None
    outs = [x for x in tree_leaves(first.trace.out) if isinstance(x, Tensor)]
    others = [x for x in tree_leaves(second.trace.out) if isinstance(x, Tensor)]
    if len(outs) != len(others):
        return None
    own_backward = getattr(info.func, "backward_too", False) or has_own_formula(outs)
    native = own_backward or hasattr(info.func, "opaque")
    flow = Propagation(info.n, second_size(info.n), native)
    for meta, a, b in zip(attempt.metas, first.leaves, second.leaves, strict=True):
        flow.declare(a, b, meta.layout, meta.row_index)
    flow.wanted = {id(x) for x in outs}
    try:
        flow.run(first.trace.records, second.trace.records)
        blocked = flow.blocked
    except CannotExplode as reason:
        blocked, flow.plain = str(reason), False
    layouts = [flow.layouts.get(id(x)) for x in outs]
    known = all(id(x) in flow.values for x in outs)
    new = _copy(info, attempt.template)
    if flow.plain and known and _plain_fits(new, flow, outs, others, layouts, consts, attempt):
        kind = "reduce" if flow.reduction is not None else "split"
        if all(layout is None for layout in layouts) and kind == "split":
            kind = "global"
        # An input that no operator touches is handed through, row by row.
        uses = {k: Use(meta.layout) for k, meta in enumerate(attempt.metas)} | flow.input_uses
        new.steps = [native_step(new, kind, len(attempt.metas), uses, flow.reduction)]
        if not own_backward or (_adds_up(kind, flow) and backward_splits(
            info.func, attempt.template, attempt.metas, new.metas, consts, info.n
        )):  # fmt: skip
            return new
    if blocked is None and known and not native:
        new.metas = [described(x, info.n, layout, y) if id(x) not in flow.axes
                     else described_along(x, flow.axes[id(x)][0], layout)
                     for x, y, layout in zip(outs, others, layouts, strict=True)]  # fmt: skip
        new.steps = flow.steps
        new.results = tuple(flow.values[id(x)] for x in outs)
        new.exploded = True
        new.mixes = any(_mixes(step, flow) for step in flow.steps)
        return new
    return _mixing(new, outs, others, len(attempt.metas))


def _adds_up(kind: str, flow: Propagation) -> bool:
    """Whether microbatches of a call give rows of its results, or parts of a sum."""
    plain_sum = flow.reduction == Reduction("sum")
    return kind == "split" or (kind == "reduce" and plain_sum)


def _mixes(step: Step, flow: Propagation) -> bool:
    if step.kind != "global":
        return False
    batched = {number for x, number in flow.values.items() if flow.layouts[x] is not None}
    return any(number in batched for number, _ in step.operands)


def _mixing(info: CallInfo, outs: list[Tensor], others: list[Tensor], inputs: int) -> CallInfo:
    """Run the call once on the whole minibatch; its result is batched again where it has rows."""
    n2 = second_size(info.n)
    info.metas = [
        described(x, info.n, scaled_layout(x.shape, y.shape, info.n, n2), y)
        for x, y in zip(outs, others, strict=True)
    ]
    info.steps = [native_step(info, "global", inputs, {}, None)]
    info.mixes = True
    return info


def _copy(info: CallInfo, template: Any) -> CallInfo:
    return replace(info, template=template, metas=list(info.metas), steps=[])


def _plain_fits(
    info: CallInfo,
    flow: Propagation,
    outs: list[Tensor],
    others: list[Tensor],
    layouts: list[Layout | None],
    consts: list[Any],
    attempt: Attempt,
) -> bool:
    """Set the output descriptions; try the call on one sample too, where shapes may collapse."""
    info.metas = [described(x, info.n, layout, y)
                  for x, y, layout in zip(outs, others, layouts, strict=True)]  # fmt: skip
    leaves = []
    for k, meta in enumerate(attempt.metas):
        use = flow.input_uses.get(k, Use(meta.layout))
        shape, stride = meta.shape, meta.stride
        if use.layout is not None:
            shape, stride = scaled(shape, stride, use.layout.dim, use.layout.factor)
        leaves.append(fake_like(shape, stride, meta.dtype, meta.device, meta.requires_grad))
    args, kwargs = fill(attempt.template, leaves, consts, 1)
    try:
        single = trace(lambda: info.func(*args, **kwargs))
    except Exception:
        return False
    ones = [x for x in tree_leaves(single.out) if isinstance(x, Tensor)]
    if len(ones) != len(outs):
        return False
    for x, y, layout in zip(outs, ones, layouts, strict=True):
        expected = list(x.shape)
        if layout is not None:
            expected[layout.dim] = layout.factor
        if list(y.shape) != expected:
            return False
    return True
