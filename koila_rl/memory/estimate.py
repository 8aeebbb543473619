"""Predict the peak of an update: the engine's own schedule, run on fake tensors.

Nothing is modelled: the same code that will run the program runs it on fake tensors under a
tracker of live storages. Microbatches of one size are alike, so the first two and the last
of a stage stand for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from koila_rl.engine.gradients import Execution, RowSource, microbatches
from koila_rl.engine.program import Bound, Program
from koila_rl.memory.results import RealResults
from koila_rl.memory.tracking import LiveCall, StorageTracker
from koila_rl.recording.layouts import Layout
from koila_rl.recording.trace import LOCK, fakes, quiet_fakes
from koila_rl.recording.values import Captured, Meta, Node, Source

__all__ = ["Estimate", "InputForm", "estimate", "input_forms"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Peak of live tensors in bytes, and the calls whose results were live then."""

    peak_bytes: int
    calls: tuple[LiveCall, ...]


@dataclass(frozen=True, slots=True)
class InputForm:
    """What the estimate must know of one input."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    # A leaf whose gradient exists takes no new memory for it.
    has_grad: bool
    # Rows are read on demand along this dimension; None: the tensor is resident.
    rows: int | None
    # Bytes of a row before it is transformed, 0 where it is not.
    raw_bytes: int = 0
    # Whether the rows of the next microbatch are read while one computes.
    early: bool = False


def input_forms(bound: Bound) -> tuple[InputForm, ...]:
    return tuple(_form(item) for item in bound.tensors)


def _form(item: Any) -> InputForm:
    if isinstance(item, Captured):
        return _tensor_form(item.as_recorded())
    assert isinstance(item, Node)
    if item.attached is not None:
        return _tensor_form(item.attached)
    source = item.call
    assert isinstance(source, Source)
    if source.data is not None:
        return _tensor_form(source.data)
    meta: Meta = item.meta
    rows = source.rows
    assert rows is not None
    return InputForm(
        meta.shape, meta.stride, meta.dtype, meta.device, False, False, rows.dim, rows.raw_bytes,
        rows.prefetch is not None,
    )  # fmt: skip


def _tensor_form(x: Tensor) -> InputForm:
    has_grad = x.is_leaf and x.requires_grad and x.grad is not None
    return InputForm(
        tuple(x.shape), tuple(x.stride()), x.dtype, x.device, x.requires_grad, has_grad, None
    )


class _FakeRows(RowSource):
    """Rows that are made when a microbatch runs, as reading them would."""

    def __init__(self, form: InputForm) -> None:
        self.form = form
        assert form.rows is not None
        self.dim = form.rows
        self.n = form.shape[form.rows]
        self.layout = Layout(self.dim) if self.n > 1 else None
        self.prefetch = self.fetch if form.early else None
        self.ahead: tuple[int, Tensor] | None = None

    def slice(self, start: int, stop: int) -> Tensor:
        (count, raw), self.ahead = self.ahead or (0, None), None
        if raw is None or count != stop - start:
            raw = None
            raw = self._raw(stop - start)
        return self._rows(stop - start) if self.form.raw_bytes else raw

    def fetch(self, start: int, stop: int) -> None:
        self.ahead = (stop - start, self._raw(stop - start))

    def drop(self) -> None:
        self.ahead = None

    def _raw(self, count: int) -> Tensor:
        nbytes = self.form.raw_bytes * count
        return (
            torch.empty(nbytes, dtype=torch.uint8, device=self.form.device)
            if nbytes
            else self._rows(count)
        )

    def _rows(self, count: int) -> Tensor:
        shape = list(self.form.shape)
        shape[self.dim] = count
        return torch.empty(shape, dtype=self.form.dtype, device=self.form.device)


class _DryExecution(Execution):
    """The engine on fake tensors: no random state, no effects, three microbatches a stage."""

    dry = True

    def __init__(self, program: Program, tensors: Sequence[Any], size: int, consts: list[Any]):
        self.strict = True
        self.program = program
        self.consts = consts
        self.states = []
        self.size = size
        self.effects = DRY
        self.env = {x.number: item for x, item in zip(program.inputs, tensors, strict=True)}

    def places(self, n: int) -> list[tuple[int, int]]:
        every = microbatches(n, self.size)
        return every if len(every) <= 3 else [*every[:2], every[-1]]


class _Dry:
    """Stands for random state and effects."""

    def run(self, call: int, *rest: Any) -> Any:
        if len(rest) == 4 and isinstance(rest[0], int):
            _, function, args, kwargs = rest
            return function(*args, **kwargs)
        function, *args = rest
        return function(*args, first=False)


DRY: Any = _Dry()


def estimate(
    program: Program, forms: Sequence[InputForm], consts: list[Any], size: int, purpose: str,
    target: int, delivered: bool = False,
) -> Estimate:  # fmt: skip
    """The peak of a run in microbatches of ``size``; N or more is the whole minibatch.

    ``purpose`` is "backward" from root ``target``, or "value" or "graph" of all roots, with the
    backward that may follow. ``delivered``: gradients are computed in full before any is
    handed over, which a split always does and devices that can run out of memory need.
    """
    with LOCK, quiet_fakes(), fakes(), torch.enable_grad():
        tensors = [_fake(form) for form in forms]
        tracker = StorageTracker()
        tracker.register([x for x in tensors if isinstance(x, Tensor)])
        # The tracker sees results first: it must not count the fakes that they replace.
        with RealResults(), tracker:
            seed = None
            if purpose == "backward":
                shape, dtype, device = program.root_metas[target]
                seed = torch.ones(shape, dtype=dtype, device=device)
            if size >= program.n:
                roots = _run_whole(program, tensors, consts)
            else:
                run = _DryExecution(program, tensors, size, consts)
                roots = run.run(grad=purpose != "value", gradient=seed)
                del run
            leaves = [x for x in tensors if isinstance(x, Tensor) and x.requires_grad]
            _differentiate(roots, leaves, seed, target, delivered or size < program.n)
        return Estimate(tracker.peak_bytes, tracker.peak_calls()[:8])


def _fake(form: InputForm) -> Any:
    if form.rows is not None:
        return _FakeRows(form)
    x = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=form.device)
    if form.requires_grad:
        x.requires_grad_()
        if form.has_grad:
            x.grad = torch.empty_like(x)
    return x


def _run_whole(program: Program, tensors: list[Any], consts: list[Any]) -> list[Tensor]:
    inputs = [x.slice(0, x.n) if isinstance(x, RowSource) else x for x in tensors]
    return list(program.whole(program.n, consts, DRY, DRY, *inputs))


def _differentiate(
    roots: list[Tensor], leaves: list[Tensor], seed: Tensor | None, target: int, delivered: bool
) -> None:
    """The backward that follows, as the session does it."""
    if seed is None:
        wanted = [root for root in roots if root.requires_grad]
        if wanted:
            torch.autograd.backward(wanted, [torch.ones_like(root) for root in wanted])
    elif roots[target].requires_grad and delivered:
        # All gradients first, then their delivery.
        _ = torch.autograd.grad(roots[target], leaves, seed, allow_unused=True)
    elif roots[target].requires_grad:
        torch.autograd.backward(roots[target], seed)
