"""Readings of a call: which literals and which dimensions of its inputs follow the minibatch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from koila_rl.recording.layouts import Layout
from koila_rl.recording.sizes import BatchInt
from koila_rl.recording.template import integers, replace_integers
from koila_rl.recording.values import Meta, scaled, second_size

__all__ = ["Attempt", "attempts"]


@dataclass(slots=True)
class Attempt:
    """One reading of the call: which literals and captured dimensions follow the minibatch."""

    template: tuple[Any, Any]
    metas: list[Meta]


def attempts(template: Any, metas: list[Meta], n: int) -> Iterator[Attempt]:
    """Readings in order of likelihood: inputs as they came, then fewer or more that follow.

    A literal or a captured tensor may follow the minibatch; a batched input may be taken whole,
    where its rows meet another dimension that happens to be N.
    """
    literals = [k for k, x in enumerate(integers(template)) if x > 1 and x % n == 0]
    literal_choices: list[tuple[int, ...]] = [()]
    for count in range(1, min(len(literals), 3) + 1):
        literal_choices += list(itertools.combinations(literals, count))
    dim_choices = _dimension_choices(metas, n)
    pairs = sorted(itertools.product(range(len(literal_choices)), range(len(dim_choices))), key=sum)
    for which, dims in pairs[:48]:
        yield _reading(template, metas, literal_choices[which], dim_choices[dims], n)


Dims = dict[int, tuple[int, ...]]


def _dimension_choices(metas: list[Meta], n: int) -> list[Dims]:
    """For some inputs, the dimensions that follow the minibatch; () holds a batched one whole."""
    batched = [k for k, meta in enumerate(metas) if meta.layout is not None]
    foreign = [
        (k, dim)
        for k, meta in enumerate(metas)
        if meta.shape == meta.shape2
        for dim, size in enumerate(meta.shape)
        if size and size % n == 0
    ]
    choices: list[Dims] = [{}]
    firsts: Dims = {}
    every: Dims = {}
    for k, dim in foreign:
        firsts.setdefault(k, (dim,))
        every[k] = (*every.get(k, ()), dim)
    if len(firsts) > 1:
        choices.append(firsts)
    choices += [{k: (dim,)} for k, dim in foreign]
    choices += [{k: dims} for k, dims in every.items() if len(dims) > 1]
    if len(batched) > 1:
        choices += [{k: ()} for k in reversed(batched)]
    if len(batched) > 2:
        choices += [{k: () for k in batched if k != kept} for kept in batched]
    singles = [choice for choice in choices if len(choice) == 1]
    for one, two in itertools.combinations(singles, 2):
        if one.keys() != two.keys() and len(choices) < 48:
            choices.append(one | two)
    return [choice for choice in choices
            if not batched or any(choice.get(k, True) for k in batched)]  # fmt: skip


def _reading(
    template: Any, metas: list[Meta], literals: tuple[int, ...], dims: Dims, n: int
) -> Attempt:
    counter = itertools.count()

    def change(x: int) -> int:
        if next(counter) not in literals:
            return x
        c = x // n
        return BatchInt(x, lambda size: c * size, f"({c}*n)")

    changed = replace_integers(template, change) if literals else template
    scaled_metas = list(metas)
    for k, following in dims.items():
        meta = metas[k]
        shape2, stride2 = meta.shape, meta.stride
        for dim in following:
            size = meta.shape[dim] // n * second_size(n)
            shape2, stride2 = scaled(shape2, stride2, dim, size)
        layout = None
        if following:
            layout = Layout(following[0], 1, meta.shape[following[0]] // n)
        scaled_metas[k] = Meta(
            meta.shape, meta.stride, meta.dtype, meta.device, meta.requires_grad, layout,
            meta.n, shape2, stride2, meta.row_index,
        )  # fmt: skip
    return Attempt(changed, scaled_metas)
