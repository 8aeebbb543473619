"""Predict the peak of an update: the engine's own schedule, run on fake tensors.

Nothing is modelled: the same code that will run the program runs it on fake tensors under a
tracker of live storages. Microbatches of one size are alike, so the first two and the last
of a stage stand for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from koila_rl.engine.gradients import Execution, RowSource, microbatches
from koila_rl.engine.program import Program
from koila_rl.memory.forms import NO_WRITES, InputForm, Writes
from koila_rl.memory.live import LiveCall, Moment
from koila_rl.memory.results import real_results
from koila_rl.memory.scratch import KernelScratch
from koila_rl.memory.storages import round_to_block
from koila_rl.memory.tracking import StorageTracker
from koila_rl.recording.layouts import Layout
from koila_rl.recording.trace import LOCK, fakes, quiet_fakes

__all__ = ["Estimate", "estimate"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Peak of an update in bytes, the calls whose results were live then, and how it came."""

    peak_bytes: int = 0
    """Of live tensors."""
    allocator_bytes: int = 0
    """With the scratch memory of kernels; the same where that is not counted."""
    calls: tuple[LiveCall, ...] = ()
    timeline: tuple[Moment, ...] = ()
    """Phases are three times the number of a pass, plus that of a microbatch, or ``OUTSIDE``."""
    forward: int = 0
    """How many moments of the timeline belong to the forward."""

    @property
    def workspace_bytes(self) -> int:
        return self.allocator_bytes - self.peak_bytes

    def part_bytes(self, part: str) -> int:
        """Peak of "forward", of "backward" after it, or of "earlier stages" than the last."""
        moments = self.timeline[: self.forward]
        if part == "backward":
            moments = self.timeline[self.forward :]
        elif part == "earlier stages":
            last = max((x.phase // 3 for x in moments), default=0)
            ends = next((k for k, x in enumerate(moments) if x.phase // 3 == last), 0)
            moments = moments[:ends]
        return max((x.live_bytes + x.scratch_bytes for x in moments), default=0)


OUTSIDE = -1


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

    def __init__(
        self, program: Program, tensors: Sequence[Any], size: int, consts: list[Any], effects: Any,
        tracker: StorageTracker, two_sizes: bool,
    ) -> None:  # fmt: skip
        self.strict = True
        self.program = program
        self.consts = consts
        self.states = []
        self.size = size
        self.effects = effects
        self.tracker, self.two_sizes = tracker, two_sizes
        self.env = {x.number: item for x, item in zip(program.inputs, tensors, strict=True)}

    def places(self, n: int) -> Any:
        every = microbatches(n, self.size)
        small = self.size // 2
        if self.two_sizes and 2 * self.size + small <= n:
            between = self.size + small
            every = [(0, self.size), (self.size, between), (between, between + self.size)]
        elif len(every) > 3:
            every = [*every[:2], every[-1]]
        return _Phases(self.tracker, every)


class _Phases(list[tuple[int, int]]):
    """Microbatches that say in the tracker's timeline which of them is at work."""

    def __init__(self, tracker: StorageTracker, places: list[tuple[int, int]]) -> None:
        super().__init__(places)
        self.tracker = tracker

    def __iter__(self) -> Iterator[tuple[int, int]]:
        self.tracker.passes += 1
        for number in range(len(self)):
            self.tracker.phase = 3 * self.tracker.passes + number
            yield self[number]
        self.tracker.phase = OUTSIDE


class _Dry:
    """Stands for random state and effects; a write runs once for each call, as really."""

    def __init__(self, done: Iterable[int]) -> None:
        self.done = set(done)

    def run(self, call: int, *rest: Any) -> Any:
        if len(rest) == 4 and isinstance(rest[0], int):
            _, function, args, kwargs = rest
            return function(*args, **kwargs)
        function, *args = rest
        first = call not in self.done
        self.done.add(call)
        return function(*args, first=first)


def estimate(
    program: Program, forms: Sequence[InputForm], consts: list[Any], size: int, purpose: str,
    delivered: bool = False, writes: Writes = NO_WRITES, scratch: bool = True,
    two_sizes: bool = False,
    parts: int = 1,
) -> Estimate:  # fmt: skip
    """The peak of a run in microbatches of ``size``; N or more is the whole minibatch.

    ``purpose`` is "backward" from the first root, or "value" or "graph" of all roots, with the
    backward that may follow. ``delivered``: gradients are computed in full before any is
    handed over, which a split always does and devices that can run out of memory need.
    ``scratch``: whether the memory that kernels take counts. ``two_sizes``: the second of three
    microbatches has half the size, so that what is live at other sizes can be told (`Lines`).
    ``parts``: of a stage, that are computed again in the backward.
    """
    with LOCK, quiet_fakes(), fakes(), torch.enable_grad():
        tensors = [_fake(form) for form in forms]
        workspaces = KernelScratch() if scratch else None
        tracker = StorageTracker(workspaces=workspaces, results=real_results, record_timeline=True)
        tracker.phase = OUTSIDE
        tracker.register([x for x in tensors if isinstance(x, Tensor)])
        with tracker:
            seed = None
            if purpose == "backward":
                shape, dtype, device = program.root_metas[0]
                seed = torch.ones(shape, dtype=dtype, device=device)
            kept = [tensors[k].detach().clone() for k in writes.kept]
            effects: Any = _Dry(writes.done)
            leaves = [x for x in tensors if isinstance(x, Tensor) and x.requires_grad]
            if size >= program.n:
                inputs = [x.slice(0, x.n) if isinstance(x, RowSource) else x for x in tensors]
                roots = list(program.whole(program.n, consts, effects, effects, *inputs))
                del inputs
            else:
                run = _DryExecution(program, tensors, size, consts, effects, tracker, two_sizes)
                run.parts = parts
                roots = run.run(grad=purpose != "value", gradient=seed)
                del run
                delivered = True
            forward = len(tracker.timeline)
            if seed is not None and delivered and roots[0].requires_grad:
                # All gradients first, then their delivery.
                found = torch.autograd.grad(roots[0], leaves, seed, allow_unused=True)
                del kept, found
            else:
                del kept
                _differentiate(roots, seed)
        most = max(tracker.peak_bytes, tracker.allocator_peak_bytes)
        if scratch and program.random:
            most += _random_state_bytes(program, size)
        calls = tracker.peak_calls()[:8]
        return Estimate(tracker.peak_bytes, most, calls, tuple(tracker.timeline), forward)


def _random_state_bytes(program: Program, size: int) -> int:
    """Bytes of the random states that are kept to draw the same numbers in later passes."""
    if size >= program.n:
        draws = sum(info.random for info in program.calls)
    else:
        draws = sum(
            len(microbatches(step.n, size)) if step.step.kind != "global" else 1
            for step in program.steps
            if step.step.random
        )
    return int(draws) * round_to_block(int(torch.get_rng_state().nbytes))


def _differentiate(roots: list[Tensor], seed: Tensor | None) -> None:
    """The backward that follows: from the first root with a ``seed``, else from all."""
    wanted = [root for root in roots if root.requires_grad]
    if seed is not None:
        wanted = wanted[:1] if roots[0].requires_grad else []
    if wanted:
        seeds = [seed] if seed is not None else [torch.ones_like(root) for root in wanted]
        torch.autograd.backward(wanted, seeds)


def _fake(form: InputForm) -> Any:
    if form.rows is not None:
        return _FakeRows(form)
    x = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=form.device)
    if form.requires_grad:
        x.requires_grad_()
        if form.has_grad:
            x.grad = torch.empty_like(x)
    return x
