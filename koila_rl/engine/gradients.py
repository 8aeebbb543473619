"""Run the stages of a program in microbatches, and join them to PyTorch's autograd.

Each stage is one `torch.autograd.Function` whose inputs are the tensors from outside that
require gradients and the whole values that cross into the stage. Its backward replays the
stage microbatch by microbatch on aliases of those tensors, where gradients add up, and hands
over the sums; PyTorch's own engine delivers them. So hooks fire once, ``.grad`` is untouched
until everything has succeeded, and ``retain_graph``, ``inputs`` and the errors of a second
backward are PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from koila_rl.engine.compiled import compiled_body
from koila_rl.engine.offload import offloaded
from koila_rl.engine.program import Bound, Program, Stage
from koila_rl.engine.replay import Effects, Randomness
from koila_rl.engine.rows import RowSource, real_inputs
from koila_rl.engine.segments import OFFLOADED, in_parts
from koila_rl.engine.totals import Totals
from koila_rl.engine.turns import pause
from koila_rl.recording.layouts import join_into, slice_rows

__all__ = ["Execution", "RowSource", "microbatches", "real_inputs", "turns"]


def microbatches(n: int, size: int) -> list[tuple[int, int]]:
    """Start and stop of each microbatch; the last may be smaller."""
    return [(start, min(start + size, n)) for start in range(0, n, size)]


def turns(program: Program, size: int) -> int:
    """How often a backward in microbatches of ``size`` may pause."""
    total = 0
    for stage in (stage for level in program.stages for stage in level):
        if stage.differentiable:
            passes = 1 if set(program.fused or ()) & set(stage.outputs) else 2
            total += passes * len(microbatches(stage.n, size))
    return total


class Execution:
    """One run of a bound program, split into microbatches of the given size."""

    # On fake tensors nothing can be compared.
    dry = False
    # Parts of a stage of which nothing is kept for the backward; 1 keeps all, as usual, and
    # `OFFLOADED` keeps it on the host.
    parts = 1
    # Whether the code of the main microbatch size may be compiled.
    compiled = False

    def __init__(
        self, bound: Bound, size: int, strict: bool = True, inputs: Sequence[Any] | None = None,
        parts: int = 1, compiled: bool = False,
    ) -> None:  # fmt: skip
        # A strict run may be gone through backward once, like any graph of PyTorch.
        self.strict = strict
        self.parts = parts
        self.compiled = compiled
        self.program = bound.program
        self.consts = bound.consts
        self.states = [call.state for call in bound.calls]
        self.size = size
        self.effects = Effects(self.states)
        self.env: dict[int, Any] = {}
        values = inputs if inputs is not None else real_inputs(bound)
        for x, value in zip(self.program.inputs, values, strict=True):
            self.env[x.number] = value

    def run(self, grad: bool, gradient: Tensor | None = None) -> list[Tensor]:
        """Run all levels and return the roots; with ``grad`` they carry graphs.

        With ``gradient``, that of the target, the last stage runs forward and backward in one
        pass where its sums enter the target linearly.
        """
        program = self.program
        for level in range(program.schedule.last + 1):
            self.run_global(level, grad)
            for stage in program.stages[level]:
                known = None
                if grad and gradient is not None and self.is_fused(stage):
                    known = self.known_gradients(gradient)
                self.run_stage(stage, grad, known)
            self.drop(level)
        return [self.whole(v) for v in program.roots]

    def is_fused(self, stage: Stage) -> bool:
        fused = self.program.fused
        return bool(fused) and bool(set(fused or ()) & set(stage.outputs))

    def known_gradients(self, gradient: Tensor) -> dict[int, Tensor]:
        """Gradients of the last stage's sums, which do not depend on the values of the sums."""
        tail = self.program.tail
        assert tail is not None
        # Zeros in the place of what the last stage will make.
        zeros = {
            v: torch.zeros(shape, dtype=dtype, device=device)
            for v, (shape, dtype, device) in self.program.fused_metas.items()
            if v not in self.env
        }
        sums = {v: zeros[v].requires_grad_() for v in self.program.fused or ()}
        inputs = [zeros[v] if v in zeros else self.whole(v) for v in tail.inputs]
        with torch.enable_grad():
            (target,) = tail.body(0, self.consts, self.randomness(0, -1), self.effects, *inputs)
            if not target.requires_grad:
                return {}
            found = torch.autograd.grad(target, list(sums.values()), gradient, allow_unused=True)
        return {v: g for v, g in zip(sums, found, strict=True) if g is not None}

    def places(self, n: int) -> list[tuple[int, int]]:
        """The microbatches of a stage of n samples."""
        return microbatches(n, self.size)

    def randomness(self, start: int, stop: int) -> Any:
        return self.effects if self.dry else Randomness(self.states, start, stop)

    def drop(self, level: int) -> None:
        """Forget values that no later level needs."""
        for v in self.program.drops[level]:
            self.env.pop(v, None)

    def run_global(self, level: int, grad: bool) -> None:
        steps = self.program.globals_[level]
        if not steps:
            return
        body = self.program.global_bodies[level]
        made = {v for s in steps for v in s.outputs}
        inputs = sorted({v for s in steps for v, _ in s.operands} - made)
        values = [self.whole(v) for v in inputs]
        with torch.set_grad_enabled(grad):
            results = body(0, self.consts, self.randomness(0, -level - 1), self.effects, *values)
        self.env.update(zip(sorted(made), results, strict=True))

    def whole(self, v: int) -> Any:
        value = self.env[v]
        if isinstance(value, RowSource):
            value = self.env[v] = value.slice(0, value.n)
        return value

    def run_stage(self, stage: Stage, grad: bool, known: dict[int, Tensor] | None = None) -> None:
        """Run one stage; ``known`` gradients of its sums let forward and backward be one pass."""
        run = StageRun(self, stage)
        if grad and run.differentiable:
            outputs: Any = _apply_stage(run, known, *run.inputs)
        else:
            with torch.no_grad():
                outputs = run.forward()
        for v, out in zip(stage.outputs, outputs, strict=True):
            reduction = stage.reductions.get(v)
            if reduction is not None and reduction.combine is not None:
                with torch.set_grad_enabled(grad):
                    out = reduction.combine(out)
            self.env[v] = out


class StageRun:
    """A stage with its inputs: slices them, runs the code, adds up results and gradients."""

    def __init__(self, execution: Execution, stage: Stage) -> None:
        self.stage = stage
        # Not the execution itself: its values must not live as long as the graph.
        self.consts = execution.consts
        self.states = execution.states
        self.effects = execution.effects
        self.places = execution.places(stage.n)
        self.strict, self.dry, self.parts = execution.strict, execution.dry, execution.parts
        # The program and the size of its main microbatch, where those are to be compiled.
        self.compiled = (execution.program, execution.size) if execution.compiled else None
        env = execution.env
        self.rows = [(env[v], layout, prefix) for v, layout, prefix in stage.rows]
        self.wholes = [execution.whole(v) for v in stage.whole]
        grads = any(s.requires_grad for s in stage.steps)
        self.row_inputs = [
            k for k, (x, _, _) in enumerate(self.rows)
            if grads and isinstance(x, Tensor) and x.requires_grad
        ]  # fmt: skip
        self.whole_inputs = [k for k, x in enumerate(self.wholes) if grads and x.requires_grad]
        self.inputs = [self.rows[k][0] for k in self.row_inputs]
        self.inputs += [self.wholes[k] for k in self.whole_inputs]
        self.early = [
            x for x, layout, prefix in self.rows
            if isinstance(x, RowSource) and x.prefetch and x.n == stage.n and x.layout == layout
            and not prefix
        ] if len(self.places) > 1 else []  # fmt: skip
        self.wanted = [stage.requires_grad.get(v, False) for v in stage.outputs]
        self.differentiable = bool(self.inputs) and any(self.wanted)

    def detach(self) -> None:
        """Forget the graphs of the inputs; autograd keeps them for us."""
        self.rows = [(x.detach() if isinstance(x, Tensor) else x, layout, prefix)
                     for x, layout, prefix in self.rows]  # fmt: skip
        self.wholes = [x.detach() for x in self.wholes]
        self.inputs = []

    def slices(self, start: int, stop: int) -> list[Any]:
        n = self.stage.n
        found = []
        for x, layout, prefix in self.rows:
            if isinstance(x, RowSource):
                if x.n == n and x.layout == layout and not prefix:
                    found.append(x.slice(start, stop))
                    continue
                x = x.slice(0, x.n)
            if prefix:
                found.append(slice_rows(x, layout, n, 0, stop - start))
            else:
                found.append(slice_rows(x, layout, n, start, stop))
        if self.early and stop < n:
            for source in self.early:
                source.fetch(stop, min(2 * stop - start, n))
        return found

    def steps(self) -> Iterator[tuple[int, int]]:
        """The microbatches; what was read ahead for one that never came is let go."""
        try:
            for place in self.places:
                if self.differentiable and not self.dry:
                    # The others read a few columns.
                    pause()
                yield place
        finally:
            for x in self.early:
                x.drop()

    def body(self, start: int, stop: int, rows: Sequence[Any], wholes: Sequence[Any]) -> Any:
        randomness = self.effects if self.dry else Randomness(self.states, start, stop)
        code, keeping = self.stage.body, nullcontext()
        if self.parts != 1 and torch.is_grad_enabled():
            if self.parts == OFFLOADED:
                keeping = offloaded()
            else:
                code = in_parts(self.stage, self.parts)
        elif self.compiled is not None and self.compiled[1] == stop - start and self.differentiable:
            place = (self.stage.level, self.stage.n)
            code = compiled_body(self.compiled[0], code, place, stop - start, len(self.places))
        with keeping:
            return code(stop - start, self.consts, randomness, self.effects, *rows, *wholes)

    def forward(self) -> tuple[Tensor, ...]:
        """All microbatches without gradients."""
        total = Totals(self.stage)
        with torch.no_grad():
            for start, stop in self.steps():
                total.add(
                    self.body(start, stop, self.slices(start, stop), self.wholes), start, stop
                )
            return total.finish()

    def backward(
        self, grads: Sequence[Tensor | None], total: Totals | None = None
    ) -> list[Tensor | None]:
        """Gradients of the inputs, given those of the outputs; adds up outputs on the way."""
        wholes = list(self.wholes)
        aliases = []
        for k in self.whole_inputs:
            wholes[k] = self.wholes[k].detach().requires_grad_()
            aliases.append(wholes[k])
        buffers: list[Tensor | None] = [None] * len(self.row_inputs)
        for number, (start, stop) in enumerate(self.steps()):
            rows = self.slices(start, stop)
            leaves = []
            for k in self.row_inputs:
                rows[k] = rows[k].detach().requires_grad_()
                leaves.append(rows[k])
            with torch.enable_grad():
                outs = self.body(start, stop, rows, wholes)
                del rows
                if total is not None:
                    total.add([x.detach() for x in outs], start, stop)
                self.propagate(outs, grads, number, start, stop, [*aliases, *leaves])
            del outs
            self.collect(leaves, buffers, start, stop)
        return [*buffers, *(alias.grad for alias in aliases)]

    def propagate(
        self, outs: Sequence[Tensor], grads: Sequence[Tensor | None], number: int,
        start: int, stop: int, leaves: list[Tensor],
    ) -> None:  # fmt: skip
        roots, seeds = [], []
        for v, out, grad in zip(self.stage.outputs, outs, grads, strict=True):
            if grad is None or not out.requires_grad:
                continue
            if v not in self.stage.layouts and v not in self.stage.reductions:
                continue
            roots.append(out)
            seeds.append(self.seed(v, grad, number, start, stop, out))
        if roots:
            torch.autograd.backward(roots, seeds, inputs=leaves)

    def seed(self, v: int, grad: Tensor, number: int, start: int, stop: int, out: Tensor) -> Tensor:
        """The part of an output's gradient that belongs to one microbatch."""
        reduction = self.stage.reductions.get(v)
        if reduction is None:
            return slice_rows(grad, self.stage.layouts[v], self.stage.n, start, stop)
        if reduction.combine is not None:
            return grad[number]
        return grad * ((stop - start) / self.stage.n) if reduction.weight == "mean" else grad

    def collect(
        self, leaves: list[Tensor], buffers: list[Tensor | None], start: int, stop: int
    ) -> None:
        """Put the gradients of row inputs to their places in whole gradients."""
        for number, (k, leaf) in enumerate(zip(self.row_inputs, leaves, strict=True)):
            x, layout, _ = self.rows[k]
            grad, leaf.grad = leaf.grad, None
            if grad is None:
                continue
            whole = buffers[number]
            if whole is None:
                whole = buffers[number] = torch.zeros_like(x)
            join_into(whole, grad, layout, self.stage.n, start, stop)


class StageFunction(torch.autograd.Function):
    """A stage as one node of PyTorch's graph."""

    @staticmethod
    def forward(ctx: Any, run: StageRun, known: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        if run.strict:
            ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        ctx.run, ctx.known, ctx.found = run, None, None
        run.detach()
        if known is None:
            outputs = run.forward()
        else:
            total = Totals(run.stage)
            ctx.known = [known.get(v) for v in run.stage.outputs]
            ctx.found = run.backward(ctx.known, total)
            outputs = total.finish()
        still = [x for x, wanted in zip(outputs, run.wanted, strict=True) if not wanted]
        ctx.mark_non_differentiable(*still)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        _ = ctx.saved_tensors  # PyTorch's own checks: changed in place, or freed already
        found = ctx.found
        if found is not None and (ctx.run.dry or _same(ctx.known, grads)):
            ctx.found = None
        else:
            found = ctx.run.backward(grads)
        return (None, None, *_hand_over(found))


# PyTorch's stubs leave ``apply`` untyped.
_apply_stage: Any = StageFunction.apply


def _hand_over(found: list[Any]) -> list[Any]:
    """Give the gradients away: with no other reference, autograd takes them without a copy."""
    given = list(found)
    found.clear()
    return given


def _same(known: Sequence[Tensor | None], grads: Sequence[Tensor | None]) -> bool:
    """Whether the gradients assumed in a fused pass are those that autograd delivers."""
    for assumed, delivered in zip(known, grads, strict=True):
        if delivered is None:
            if assumed is not None and bool((assumed != 0).any()):
                return False
        elif assumed is None or not torch.equal(assumed, delivered):
            return False
    return True
