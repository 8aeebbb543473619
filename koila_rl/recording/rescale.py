"""Carry an analysis over to another minibatch size.

An analysis holds at two sizes; where it bakes no number in, it holds at every size of which
the shapes are the same function. A last minibatch of an odd size then costs no fake tensors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from koila_rl.recording.analysis import CallInfo
from koila_rl.recording.values import Meta, intern, second_size

__all__ = ["form_of", "may_rescale", "rescaled"]


def _affine(size: int, size2: int, n: int) -> tuple[int, int] | None:
    """(a, b) of the size ``a + b * n``; None if it is no such function."""
    b, rest = divmod(size2 - size, second_size(n) - n)
    return None if rest else (size - b * n, b)


def form_of(meta: Meta) -> Any:
    """A description of a value that is the same at every minibatch size."""
    if meta.n <= 1 or meta.shape == meta.shape2:
        # A size that only happens to be the same at both may still follow the minibatch.
        return (meta.shape, meta.stride, meta.dtype, meta.device, meta.requires_grad,
                meta.layout, meta.row_index)  # fmt: skip
    pairs = zip((*meta.shape, *meta.stride), (*meta.shape2, *meta.stride2), strict=True)
    affine = tuple(_affine(a, b, meta.n) for a, b in pairs)
    if None in affine:
        return None
    return (affine, meta.dtype, meta.device, meta.requires_grad, meta.layout, meta.row_index)


def may_rescale(info: CallInfo) -> bool:
    """Whether the call runs as it was written, so that nothing of its size is in its steps."""
    return (
        not (info.exploded or info.writes or info.mixes or info.combines)
        and len(info.steps) == 1
        and info.steps[0].n in (None, info.n)
        and not any(step.ops for step in info.steps if step.kind != "global")
        and all(form_of(meta) is not None for meta in info.metas)
    )


def rescaled(info: CallInfo, n: int) -> CallInfo:
    """The analysis for minibatches of n samples."""
    metas = [_at(meta, n) for meta in info.metas]
    step = replace(
        info.steps[0],
        metas=tuple((meta.shape, meta.dtype, meta.device) for meta in metas),
        n=None if info.steps[0].n is None else n,
    )
    traffic = info.traffic * max(1, -(-n // info.n))
    return replace(info, metas=metas, steps=[step], n=n, traffic=traffic, met=0)


def _at(meta: Meta, n: int) -> Meta:
    if meta.n <= 1:
        return meta
    if meta.shape == meta.shape2:
        return intern(replace(meta, n=n))

    def scale(sizes: tuple[int, ...], sizes2: tuple[int, ...], at: int) -> tuple[int, ...]:
        found = []
        for a, b in zip(sizes, sizes2, strict=True):
            affine = _affine(a, b, meta.n)
            assert affine is not None
            found.append(affine[0] + affine[1] * at)
        return tuple(found)

    n2 = second_size(n)
    return intern(
        replace(
            meta, n=n,
            shape=scale(meta.shape, meta.shape2, n), stride=scale(meta.stride, meta.stride2, n),
            shape2=scale(meta.shape, meta.shape2, n2), stride2=scale(meta.stride, meta.stride2, n2),
        )
    )  # fmt: skip
