"""Append calls to the program: look up or make their analysis, and hand out lazy results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from koila_rl.recording import deferred
from koila_rl.recording.analysis import (
    CallInfo,
    NeedsValuesError,
    analyse,
    describe_function,
    may_write,
)
from koila_rl.recording.clock import optimizer_steps
from koila_rl.recording.kinds import kind_of
from koila_rl.recording.parts import parts_of
from koila_rl.recording.places import Where, caller
from koila_rl.recording.repeats import forget, remember, repeat, search
from koila_rl.recording.rescale import form_of, may_rescale, rescaled
from koila_rl.recording.template import Slots, fill, flatten, key_of, settled
from koila_rl.recording.tensor import RECORDER, LazyTensor, untouched
from koila_rl.recording.values import (
    SMALL,
    Call,
    Captured,
    Meta,
    Node,
    Source,
    intern,
    meta_of,
    seeded_since,
)
from koila_rl.recording.writes import join_view, record_write, write_at_once

__all__ = ["analyses", "forget_analyses", "record", "record_plainly", "run_eagerly"]

# Analyses by call form. Each belongs to a form, not to a program: programs may alternate.
_KNOWN: dict[Any, CallInfo | dict[Any, CallInfo]] = {}
# The same by form without the minibatch size, for analyses that hold at every size.
_FORMS: dict[Any, CallInfo] = {}
_LIMIT = 50_000
_count = 0


def analyses() -> int:
    """How many calls have been analysed so far; a repeated program adds none."""
    return _count


def forget_analyses() -> None:
    """Analyse every call anew from now on, since the rules have changed."""
    _KNOWN.clear()
    _FORMS.clear()
    forget()


def record(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record ``func(*args, **kwargs)`` and return its result as lazy tensors."""
    if not deferred.any_pending():
        result = _at_once(func, args, kwargs)
        if result is not _LATER:
            return result
    known = search(func, args, kwargs)
    if known is not None:
        return known
    if deferred.any_pending():
        like = next((x for x in tree_leaves((args, kwargs)) if isinstance(x, LazyTensor)), None)
        if like is not None:
            args = deferred.after_writes(args, like._runtime)
            kwargs = deferred.after_writes(kwargs, like._runtime)
    return record_plainly(func, args, kwargs)


_LATER: Any = object()


def _at_once(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result on values that have been computed, with graphs, without a look at containers.

    Losses that read a value go on like this for many calls. `_LATER` where it is not so simple.
    """
    real, computed = [], False
    for x in args:
        kind = type(x)
        if kind is LazyTensor:
            x = x._node.attached
            if x is None:
                return _LATER
            computed = True
        elif kind is tuple or kind is list or kind is dict:
            return _LATER
        real.append(x)
    for x in kwargs.values():
        if type(x) in (LazyTensor, tuple, list, dict):
            return _LATER
    if not computed or may_write(func, kwargs):
        return _LATER
    return func(*real, **kwargs)


def record_plainly(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`record` where no argument waits for a write."""
    slots = Slots([], [])
    template = (flatten(args, slots, {}), flatten(kwargs, slots, {}))
    lazies = [x for x in slots.tensors if isinstance(x, LazyTensor)]
    if not lazies:
        with untouched():
            return func(*args, **kwargs)
    if _is_settled(func, slots.tensors, lazies) and not may_write(func, kwargs):
        real = [
            x._runtime.attached(x._node) if isinstance(x, LazyTensor) else x for x in slots.tensors
        ]
        args, kwargs = fill(template, real, slots.consts, _minibatch(lazies))
        return func(*args, **kwargs)
    n = _minibatch(lazies)
    if any(base not in (0, n) for base in slots.bases):
        template = settled(template, n)
    metas = [_meta_in(x, n) for x in slots.tensors]
    try:
        info = _analysis(func, template, metas, slots.consts, n)
    except NeedsValuesError as reason:
        target = kwargs.get("out", args[0] if args else None)
        if may_write(func, kwargs) and isinstance(target, LazyTensor):
            hole = next(k for k, x in enumerate(slots.tensors) if x is target)
            return write_at_once(func, template, slots, (hole,), n)
        return run_eagerly(func, template, slots, lazies[0], str(reason))
    if info.random and seeded_since():
        # Numbers of a seed set meanwhile are those that the call draws now, whole.
        return run_eagerly(func, template, slots, lazies[0], "draws from a seed set meanwhile")
    if info.writes:
        if any(not isinstance(slots.tensors[k], LazyTensor) for k in info.writes):
            return run_eagerly(func, template, slots, lazies[0], "")
        if any(same is None for same in info.same):
            # It writes beside its result, as an embedding does that limits norms.
            return write_at_once(func, template, slots, info.writes, n)
        return record_write(func, template, slots, info)
    if info.mixes and (parts := parts_of(func, args, kwargs)) is not None:
        return parts
    info.met += 1
    if info.met == 2 and info.metas and not (slots.consts and (info.exploded or info.combines)):
        # Where constants do not change the course of the call.
        remember(info, args, kwargs, metas, append)
    return append(info, slots.tensors, slots.consts, caller())


# Calls whose result is no larger than arguments of one shape, by name.
_ELEMENTWISE = frozenset(
    {"add", "sub", "mul", "div", "rsub", "true_divide", "min", "max", "minimum", "maximum", "where",
     "lt", "le", "gt", "ge", "eq", "ne", "pow", "__eq__", "__ne__", "__rsub__", "__rtruediv__",
     "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "logical_and", "__and__", "__or__"}
)  # fmt: skip


def _is_settled(func: Any, tensors: list[Any], lazies: list[LazyTensor]) -> bool:
    """Whether a call on these has nothing to wait for: its values have been computed, with graphs.

    Columns of the minibatch count as computed beside them, as losses read them after the networks
    have run: all of one shape and of few bytes a sample, in calls whose result is small as well.
    """
    if all(x._node.attached is not None for x in lazies):
        return True
    if getattr(func, "__name__", "") not in _ELEMENTWISE:
        return False
    shape, computed = lazies[0]._node.meta.shape, False
    for x in tensors:
        if not isinstance(x, LazyTensor):
            if x.ndim and x.shape != shape:
                return False
            computed |= x.grad_fn is not None
            continue
        source, meta = x._node.call, x._node.meta
        if meta.shape != shape or meta.nbytes > SMALL * max(meta.n, 1):
            return False
        computed |= x._node.attached is not None
        if x._node.attached is None and not (isinstance(source, Source) and source.is_here()):
            return False
    return computed


def append(info: CallInfo, tensors: list[Any], consts: Sequence[Any], where: Where) -> Any:
    """The call node, and lazy tensors for its results."""
    inputs: list[Node | Captured] = [
        x._node if isinstance(x, LazyTensor) else Captured(x, optimizer_steps()) for x in tensors
    ]
    if not info.metas:
        return info.out
    like = next(x for x in tensors if isinstance(x, LazyTensor))
    runtime = like._runtime
    call = Call(info, inputs, consts, torch.is_grad_enabled(), runtime.checks(), where)
    if info.lone:
        # One new tensor, the common case. Its ``__init__`` does nothing.
        tensor = LazyTensor.__new__(LazyTensor, Node(call, 0, info.metas[0]), runtime)
        runtime.track(tensor)
        return tensor
    outs: list[Any] = []
    for index, meta in enumerate(info.metas):
        same = info.same[index]
        if same is not None and isinstance(tensors[same], LazyTensor):
            outs.append(tensors[same])
            continue
        tensor = LazyTensor(Node(call, index, meta), runtime)
        runtime.track(tensor)
        alias = info.aliases[index]
        if alias is not None and isinstance(tensors[alias], LazyTensor):
            others = [None if k == alias else x for k, x in enumerate(tensors)]
            join_view(tensors[alias], tensor, info, others, consts, alias, index)
        outs.append(tensor)
    return fill(info.out, outs, (), 0)


def _minibatch(lazies: list[LazyTensor]) -> int:
    """The minibatch size of the call: the largest among its batched inputs."""
    n = 0
    for x in lazies:
        meta = x._node.meta
        if meta.layout is not None and meta.n > n:
            n = meta.n
    return n or max(x._node.meta.n for x in lazies)


def _meta_in(x: Tensor, n: int) -> Meta:
    if not isinstance(x, LazyTensor):
        meta = meta_of(x)
        if not x.is_floating_point() and n in meta.shape and _is_row_index(x, n):
            return intern(replace(meta, row_index=True))
        return meta
    meta = x._node.meta
    if meta.n == n:
        return meta
    # A value of another minibatch size is whole here.
    return intern(
        replace(meta, layout=None, n=n, shape2=meta.shape, stride2=meta.stride, row_index=False)
    )


def _is_row_index(x: Tensor, n: int) -> bool:
    """Whether x is ``arange(N)``, possibly with further dimensions of size 1."""
    if n <= 1 or x.dtype not in (torch.int64, torch.int32) or x.numel() != n:
        return False
    with untouched(), torch.no_grad():
        return bool(torch.equal(x.reshape(-1).long(), torch.arange(n, device=x.device)))


def _analysis(func: Any, template: Any, metas: list[Meta], consts: list[Any], n: int) -> CallInfo:
    global _count
    autocast = _autocast_state()
    # Division of whole numbers gives the default type.
    kinds = (torch.get_default_dtype(), *(kind_of(x) for x in consts if isinstance(x, float)))
    key = (
        func, key_of(template), tuple(map(id, metas)), n, torch.is_grad_enabled(), autocast, kinds,
    )  # fmt: skip
    try:
        known = _KNOWN.get(key)
    except TypeError:
        key, known = (id(func), *key[1:]), None
    fixed = tuple(x if isinstance(x, float) else id(x) for x in consts)
    if isinstance(known, dict):
        known = known.get(fixed)
    if known is not None:
        return known
    general = _general_key(func, template, metas, n, autocast, kinds)
    alike = _FORMS.get(general) if general is not None and not any(
        not isinstance(x, float) for x in consts
    ) else None  # fmt: skip
    if alike is not None:
        info = rescaled(alike, n)
    else:
        batched = sum(meta.layout is not None for meta in metas)
        _count += 1
        info = analyse(func, template, metas, consts, n, batched)
        info.autocast = autocast
        if not any(meta.dtype.is_floating_point or meta.dtype.is_complex for meta in metas) and any(
            meta.dtype.is_floating_point for meta in info.metas
        ):
            info.default = torch.get_default_dtype()
        if general is not None and may_rescale(info):
            _FORMS[general] = info
    if len(_KNOWN) > _LIMIT:
        forget_analyses()
    objects = any(not isinstance(x, float) for x in consts)
    if not consts or not (info.exploded or objects or info.writes or info.combines):
        _KNOWN[key] = info
    else:
        # Replayed operator by operator, the constants are written into the steps; the way to
        # combine partial results may depend on them too, as the order of a norm.
        variants = _KNOWN.setdefault(key, {})
        if isinstance(variants, dict):
            if len(variants) > 64:
                variants.clear()
            variants[fixed] = info
    # Keys hold ids: keep what they name alive as long as the entry.
    info.keep = (metas, consts, func)
    return info


def _general_key(
    func: Any, template: Any, metas: list[Meta], n: int, autocast: Any, kinds: Any
) -> Any:
    """The key without the minibatch size; None where the call is bound to its size."""
    forms = tuple(form_of(meta) for meta in metas)
    if n <= 1 or None in forms:
        return None
    key = (func, key_of(template), forms, torch.is_grad_enabled(), autocast, kinds)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _autocast_state() -> Any:
    if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
        return None
    return (
        torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"),
    )  # fmt: skip


def run_eagerly(func: Any, template: Any, slots: Slots, like: LazyTensor, reason: str) -> Any:
    """Run the call now, on real tensors that carry their graphs."""
    real = [x._runtime.attached(x._node) if isinstance(x, LazyTensor) else x for x in slots.tensors]
    if reason:
        like._runtime.eager(describe_function(func))
    args, kwargs = fill(template, real, slots.consts, _minibatch([like]))
    return func(*args, **kwargs)


RECORDER.repeat = repeat
RECORDER.record = record
