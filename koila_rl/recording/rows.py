"""What a microbatch runs where an operator reads or moves rows along the batch.

Each function takes ``rows`` first: the numbers of the rows that the microbatch makes. Some read
from a whole operand (``whole_*``); some see the microbatch's own rows and find among them those
that an index names: parts of a lookup that add up, or rows that are written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from koila_rl.recording.layouts import Layout

__all__ = ["Lookup", "Place", "View", "Write", "diagonal", "flipped", "padded", "rolled",
           "selected", "sliced", "triangle"]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """Where the batch lies in a dimension: ``outer * size * inner`` positions."""

    layout: Layout
    size: int

    def local(self, index: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Positions within a microbatch of whole positions, and which of them it holds."""
        count, inner = rows.shape[0], self.layout.inner
        total = self.size * self.layout.outer * inner
        index = torch.where(index < 0, index + total, index)
        sample = index // inner % self.size - rows[0].to(index.device)
        block = index // (self.size * inner)
        inside = (sample >= 0) & (sample < count)
        local = (block * count + sample.clamp(0, count - 1)) * inner + index % inner
        return local, inside

    def whole(self, rows: Tensor) -> Tensor:
        """Positions in the whole dimension of a microbatch's rows, in their order."""
        outer, inner = self.layout.outer, self.layout.inner
        blocks = torch.arange(outer, device=rows.device).view(-1, 1, 1) * self.size
        within = torch.arange(inner, device=rows.device)
        return ((blocks + rows.view(1, -1, 1)) * inner + within).reshape(-1)


def _shaped(mask: Tensor, like: Tensor, dim: int) -> Tensor:
    """A mask of one dimension, lying along ``dim`` of a tensor."""
    shape = [1] * like.ndim
    shape[dim] = mask.shape[0]
    return mask.view(shape)


def _kept(mask: Tensor, x: Tensor) -> Tensor:
    return torch.where(mask, x, x.new_zeros(()))


@dataclass(frozen=True, slots=True)
class Lookup:
    """The part of a lookup by a whole index that falls into a microbatch; zero elsewhere.

    ``kind`` names the form of the arguments.
    """

    kind: str
    place: Place
    dim: int

    def __call__(self, rows: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = getattr(self, self.kind)(rows, x, *args, **kwargs)
        return found

    def index_select(self, rows: Tensor, x: Tensor, _: int, index: Tensor) -> Tensor:
        local, inside = self.place.local(index.reshape(-1), rows)
        picked = x.index_select(self.dim, local)
        return _kept(_shaped(inside, picked, self.dim), picked)

    def select(self, rows: Tensor, x: Tensor, dim: int, index: int) -> Tensor:
        where = torch.tensor([index], device=x.device)
        return self.index_select(rows, x, dim, where).squeeze(self.dim)

    def slice(
        self, rows: Tensor, x: Tensor, dim: int = 0, start: Any = None, end: Any = None,
        step: int = 1,
    ) -> Tensor:  # fmt: skip
        total = self.place.size * self.place.layout.factor
        where = torch.arange(total, device=x.device)[slice(start, end, step)]
        return self.index_select(rows, x, dim, where)

    def gather(
        self, rows: Tensor, x: Tensor, _: int, index: Tensor, **__: Any
    ) -> Tensor:  # fmt: skip
        local, inside = self.place.local(index, rows)
        return _kept(inside, x.gather(self.dim, local))

    def take(self, rows: Tensor, x: Tensor, index: Tensor) -> Tensor:
        local, inside = self.place.local(index, rows)
        return _kept(inside, x.take(local))

    def index(self, rows: Tensor, x: Tensor, indices: Any) -> Tensor:
        local, inside = self.place.local(indices[self.dim], rows)
        own = [slice(None) if i is None else i for i in indices]
        own[self.dim] = local
        picked = x[tuple(own)]
        places = [d for d, i in enumerate(indices) if i is not None]
        mask = inside
        for d in places:
            mask = mask & torch.ones_like(indices[d], dtype=torch.bool)
        adjacent = places == list(range(places[0], places[0] + len(places)))
        after = picked.ndim - mask.ndim - (places[0] if adjacent else 0)
        return _kept(mask.view(*mask.shape, *[1] * after), picked)

    def embedding(
        self, rows: Tensor, weight: Tensor, indices: Tensor, padding_idx: int = -1, *_: Any
    ) -> Tensor:
        local, inside = self.place.local(indices, rows)
        picked = torch.nn.functional.embedding(local, weight)
        found = _kept(inside.unsqueeze(-1), picked)
        if padding_idx < 0:
            return found
        return torch.where((indices == padding_idx).unsqueeze(-1), found.detach(), found)

    def trace(self, rows: Tensor, x: Tensor) -> Tensor:
        own = rows.to(x.device)
        picked = x.gather(1, own.clamp(max=x.shape[1] - 1).unsqueeze(1)).squeeze(1)
        return _kept(own < x.shape[1], picked).sum()


@dataclass(frozen=True, slots=True)
class Write:
    """A write by a whole index into a batched tensor: the rows that fall into a microbatch.

    What falls elsewhere is written to one more row, which is dropped.
    """

    func: Callable[..., Tensor]
    place: Place
    dim: int

    def __call__(self, rows: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        spare = x.new_ones([1 if d == self.dim else size for d, size in enumerate(x.shape)])
        room = torch.cat([x, spare], self.dim)
        count = x.shape[self.dim]
        index = args[1] if isinstance(args[0], int) else args[0]
        lookup = index[self.dim] if isinstance(index, list | tuple) else index
        local, inside = self.place.local(lookup, rows)
        own: Any = torch.where(inside, local, count)
        if isinstance(index, list | tuple):
            own = [own if d == self.dim else i for d, i in enumerate(index)]
        new = (args[0], own, *args[2:]) if isinstance(args[0], int) else (own, *args[1:])
        return self.func(room, *new, **kwargs).narrow(self.dim, 0, count)


@dataclass(frozen=True, slots=True)
class View:
    """Rows of a view of a whole operand: nothing but those rows is copied."""

    func: Callable[..., Tensor]
    dim: int

    def __call__(self, rows: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        try:
            view = self.func(*args, **kwargs)
        except RuntimeError:
            # Put together from single rows, a whole value may lie otherwise in memory.
            dense = [x.contiguous() if isinstance(x, Tensor) else x for x in args]
            view = self.func(*dense, **kwargs)
        return view.index_select(self.dim, rows.to(view.device))


def flipped(dims: tuple[int, ...], dim: int, place: Place) -> Callable[..., Tensor]:
    """Rows of a flip along the batch, from the whole operand."""
    rest = [d for d in dims if d != dim]

    def run(rows: Tensor, x: Tensor, *_: Any) -> Tensor:
        picked = x.index_select(dim, x.shape[dim] - 1 - place.whole(rows.to(x.device)))
        return picked.flip(rest) if rest else picked

    return run


def rolled(
    shifts: tuple[int, ...], dims: tuple[int, ...], dim: int, place: Place
) -> Callable[..., Tensor]:
    """Rows of a roll along the batch, from the whole operand."""
    shift = sum(s for s, d in zip(shifts, dims, strict=True) if d == dim)
    rest = [(s, d) for s, d in zip(shifts, dims, strict=True) if d != dim]

    def run(rows: Tensor, x: Tensor, *_: Any) -> Tensor:
        picked = x.index_select(dim, (place.whole(rows.to(x.device)) - shift) % x.shape[dim])
        return picked.roll([s for s, _ in rest], [d for _, d in rest]) if rest else picked

    return run


def padded(dim: int, before: int, pad: list[int]) -> Callable[..., Tensor]:
    """Rows of a constant padding along the batch, from the whole operand."""

    def run(rows: Tensor, x: Tensor, _: Any, value: Any = 0) -> Tensor:
        own = rows.to(x.device) - before
        inside = (own >= 0) & (own < x.shape[dim])
        picked = x.index_select(dim, own.clamp(0, x.shape[dim] - 1))
        picked = torch.where(_shaped(inside, picked, dim), picked, picked.new_full((), value))
        return torch.constant_pad_nd(picked, pad, value)

    return run


def triangle(upper: bool, along: int, other: int) -> Callable[..., Tensor]:
    """``tril`` or ``triu`` of the microbatch's rows, or of its columns."""

    def run(rows: Tensor, x: Tensor, diagonal: int = 0) -> Tensor:
        own = rows.to(x.device)
        rest = torch.arange(x.shape[other], device=x.device)
        if along == x.ndim - 2:
            distance = rest - own.unsqueeze(1)
        else:
            distance = own - rest.unsqueeze(1)
        keep = distance >= diagonal if upper else distance <= diagonal
        return _kept(keep, x)

    return run


def selected(dim: int, index: int) -> Callable[..., Tensor]:
    """Rows of ``select_scatter`` along the batch."""

    def run(rows: Tensor, x: Tensor, src: Tensor, *_: Any, **__: Any) -> Tensor:
        there = _shaped(rows.to(x.device) == index, x, dim)
        return torch.where(there, src.unsqueeze(dim), x)

    return run


def sliced(dim: int, start: int, step: int) -> Callable[..., Tensor]:
    """Rows of ``slice_scatter`` along the batch."""

    def run(rows: Tensor, x: Tensor, src: Tensor, *_: Any, **__: Any) -> Tensor:
        place = rows.to(x.device) - start
        inside = (place >= 0) & (place % step == 0) & (place // step < src.shape[dim])
        if not src.shape[dim]:
            return x.clone()
        value = src.index_select(dim, (place // step).clamp(0, src.shape[dim] - 1))
        return torch.where(_shaped(inside, x, dim), value, x)

    return run


def diagonal(a: int, b: int, offset: int, dim: int) -> Callable[..., Tensor]:
    """Rows, or columns, of ``diagonal_scatter`` where one of dimensions a and b is the batch."""
    rowwise = dim == a

    def run(rows: Tensor, x: Tensor, src: Tensor, *_: Any, **__: Any) -> Tensor:
        own, matrix = rows.to(x.device), x.movedim((a, b), (-2, -1))
        partner = own + offset if rowwise else own - offset
        place = own - max(0, -offset if rowwise else offset)
        inside = (place >= 0) & (place < src.shape[-1])
        others = torch.arange(matrix.shape[-1 if rowwise else -2], device=x.device)
        value = src.index_select(-1, place.clamp(0, max(src.shape[-1] - 1, 0)))
        axis = -1 if rowwise else -2
        there = (others == partner.unsqueeze(-1)) & inside.unsqueeze(-1)
        there = there if rowwise else there.t()
        return torch.where(there, value.unsqueeze(axis), matrix).movedim((-2, -1), (a, b))

    return run
