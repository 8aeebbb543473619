"""Build a program: steps with program-wide numbers, cut into stages, as code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from koila_rl.engine.cuts import ProgramStep, Schedule, Value, linear_in, schedule
from koila_rl.engine.program import Input, Program, Stage, Tail
from koila_rl.engine.replay import compile_stage, compile_whole
from koila_rl.recording.layouts import Layout
from koila_rl.recording.values import Call, Captured, Node

__all__ = ["build"]


def build(
    calls: list[Call],
    args: list[list[int]],
    numbers: dict[Any, int],
    tensors: list[Any],
    layouts: list[tuple[Layout | None, int, bool]],
    roots: list[int],
    aim: int,
) -> Program:
    inputs = [
        Input(number, layout, n, grad)
        for (number, _), (layout, n, grad) in zip(tensors, layouts, strict=True)
    ]
    values = {
        x.number: Value(x.layout, x.n, None, _is_source(node), _is_source(node))
        for x, (_, node) in zip(inputs, tensors, strict=True)
    }
    total = len(numbers)
    # A call may return one value twice, or an input as it came.
    renamed: dict[int, int] = {}
    steps: list[ProgramStep] = []
    for position, (call, ins) in enumerate(zip(calls, args, strict=True)):
        local = {k: renamed.get(v, v) for k, v in enumerate(ins)}
        for index, result in enumerate(call.info.results):
            own = numbers[(id(call), index)]
            if local.setdefault(result, own) != own:
                renamed[own] = local[result]
        for step in call.info.steps:
            for output in step.outputs:
                if output not in local:
                    local[output] = total
                    total += 1
            steps.append(
                ProgramStep(
                    step,
                    tuple((local[v], use) for v, use in step.operands),
                    tuple(local[v] for v in step.outputs),
                    position, step.n or call.info.n, call.grad, call.info.autocast,
                    call.info.default,
                )
            )  # fmt: skip
    written_roots, roots = roots, [renamed.get(v, v) for v in roots]
    aim = renamed.get(aim, aim)
    grads = {x.number: x.requires_grad for x in inputs}
    for made in steps:
        grads.update(zip(made.outputs, made.step.requires_grad, strict=True))
    plan = schedule(steps, values, roots)
    fused = None
    if aim >= 0 and grads.get(aim):
        plan, fused = _fuse(steps, values, roots, aim, grads, plan)
    return _assemble(
        calls, args, numbers, inputs, steps, plan, roots, aim, grads, fused, written_roots
    )


def _is_source(x: Node | Captured) -> bool:
    return isinstance(x, Node) and x.attached is None and x.meta.layout is not None


def _behind(steps: Sequence[ProgramStep], root: int) -> set[int]:
    """Numbers of the steps that a value depends on."""
    wanted, found = {root}, set()
    for number in reversed(range(len(steps))):
        if wanted & set(steps[number].outputs):
            found.add(number)
            wanted.update(v for v, _ in steps[number].operands)
    return found


def _fuse(
    steps: list[ProgramStep],
    values: dict[int, Value],
    roots: list[int],
    aim: int,
    grads: dict[int, bool],
    plan: Schedule,
) -> tuple[Schedule, tuple[int, ...] | None]:
    """Find the sums of the last stage whose gradients are known before their values."""
    needed = _behind(steps, aim)
    for _ in range(2):
        sums_of = [steps[k] for k in needed if steps[k].step.kind == "reduce"]
        last = max((s.level for s in sums_of if s.requires_grad), default=-1)
        inside = [k for k in needed if steps[k].level == last and steps[k].step.kind == "reduce"]
        if last < 0 or len({steps[k].n for k in inside if steps[k].requires_grad}) != 1:
            return plan, None
        late_joins = [
            v for v in plan.joined
            if grads.get(v) and (p := plan.values[v].producer) is not None and p in needed
            and steps[p].level == last
            and any(v == o and k in needed for k, s in enumerate(steps) for o, _ in s.operands
                    if not (s.level == last and s.step.kind != "global"))
        ]  # fmt: skip
        beyond = any(steps[k].level > last and steps[k].step.kind != "global" for k in needed)
        if late_joins or beyond:
            return plan, None
        sums = {v for k in inside for v in steps[k].outputs}
        reductions = [steps[k].step.reduction for k in inside if steps[k].requires_grad]
        if any(x is not None and x.combine is not None for x in reductions):
            return plan, None
        tail = [steps[k] for k in sorted(needed)
                if steps[k].step.kind == "global" and steps[k].level > last]  # fmt: skip
        # Whatever the last stage makes is unknown then: nothing may multiply it with a sum.
        unknown = {
            v for k in needed for v in steps[k].outputs
            if steps[k].level == last and steps[k].step.kind != "global"
        }  # fmt: skip
        if linear_in(tail, unknown, aim):
            return plan, tuple(sorted(v for v in sums if grads.get(v)))
        plain = frozenset(k for k in inside if not steps[k].requires_grad)
        late = frozenset(
            k for k, s in enumerate(steps)
            if s.level == last and s.step.kind == "reduce" and s.requires_grad
        )  # fmt: skip
        if not plain:
            return plan, None
        plan = schedule(steps, values, roots, early=plain, late=late)
    return plan, None


def _assemble(
    calls: list[Call],
    args: list[list[int]],
    numbers: dict[Any, int],
    inputs: list[Input],
    steps: list[ProgramStep],
    plan: Schedule,
    roots: list[int],
    aim: int,
    grads: dict[int, bool],
    fused: tuple[int, ...] | None,
    written_roots: list[int],
) -> Program:
    offsets = []
    total = 0
    for call in calls:
        offsets.append(total)
        total += len(call.consts)
    stages: list[list[Stage]] = []
    globals_: list[list[ProgramStep]] = []
    needed_later = _uses_outside(steps, plan, roots)
    for level in range(plan.last + 1):
        globals_.append(plan.at(level, "global"))
        own = plan.at(level, "stage")
        stages.append(
            [
                _stage(level, n, [s for s in own if s.n == n], plan, needed_later, grads, offsets)
                for n in sorted({s.n for s in own}, reverse=True)
            ]
        )
    outs = [[numbers[(id(call), k)] for k in range(len(call.info.metas))] for call in calls]
    whole = compile_whole(calls, args, outs, [x.number for x in inputs], written_roots, offsets)
    program = Program(
        inputs=inputs, calls=[call.info for call in calls], steps=steps, roots=roots,
        schedule=plan, stages=stages, globals_=globals_, whole=whole,
        n=max([call.info.n for call in calls if any(s.kind != "global" for s in call.info.steps)]
              + [x.n for x in inputs if x.layout is not None] + [0]),
        random=any(call.info.random for call in calls), requires_grad=grads, fused=fused,
        unsplit=tuple(plan.mixing),
    )  # fmt: skip
    program.global_bodies = [
        compile_stage(level_steps, _inputs_of(level_steps), _outputs_of(level_steps), offsets)
        for level_steps in globals_
    ]
    if fused is not None and aim >= 0:
        program.tail = _tail(program, aim, fused, offsets)
        program.fused_metas = {
            v: s.step.metas[k]
            for s in steps
            for k, v in enumerate(s.outputs)
            if v in fused or (v in program.tail.inputs and s.step.kind != "global")
        }
    program.drops = _drops(program)
    return program


def _inputs_of(steps: Sequence[ProgramStep]) -> list[int]:
    made = {v for s in steps for v in s.outputs}
    return sorted({v for s in steps for v, _ in s.operands} - made)


def _outputs_of(steps: Sequence[ProgramStep]) -> list[int]:
    return sorted({v for s in steps for v in s.outputs})


def _tail(program: Program, aim: int, fused: tuple[int, ...], offsets: list[int]) -> Tail:
    level = max(s.level for s in program.steps if set(s.outputs) & set(fused))
    needed = _behind(program.steps, aim)
    steps = [s for k, s in enumerate(program.steps)
             if k in needed and s.step.kind == "global" and s.level > level]  # fmt: skip
    inputs = _inputs_of(steps) if steps else [aim]
    return Tail(inputs, compile_stage(steps, inputs, [aim], offsets))


def _drops(program: Program) -> list[list[int]]:
    """For each level, the values whose last use it is."""
    last = {x.number: 0 for x in program.inputs}
    for step in program.steps:
        for v in (*step.outputs, *(v for v, _ in step.operands)):
            last[v] = max(last.get(v, 0), step.level)
    kept = set(program.roots)
    drops: list[list[int]] = [[] for _ in range(program.schedule.last + 1)]
    for v, level in last.items():
        if v not in kept and level < len(drops):
            drops[level].append(v)
    return drops


def _uses_outside(steps: Sequence[ProgramStep], plan: Schedule, roots: Sequence[int]) -> set[int]:
    """Values that somebody beyond their own stage needs."""
    needed = set(roots) | plan.joined
    for step in steps:
        for v, _ in step.operands:
            producer = plan.values[v].producer
            if producer is None:
                continue
            made = steps[producer]
            same = made.level == step.level and made.n == step.n
            if not (same and "global" not in (made.step.kind, step.step.kind)):
                needed.add(v)
    return needed


def _stage(
    level: int,
    n: int,
    steps: list[ProgramStep],
    plan: Schedule,
    needed: set[int],
    grads: dict[int, bool],
    offsets: list[int],
) -> Stage:
    made = {v for s in steps for v in s.outputs}
    rows: dict[tuple[int, Any], int] = {}
    whole: dict[int, int] = {}
    names: list[dict[int, Any]] = []
    for s in steps:
        naming: dict[int, Any] = {}
        for k, (v, use) in enumerate(s.operands):
            own = v in made and plan.values[v].rows
            if own and use.layout == plan.values[v].layout and not use.row_index:
                naming[k] = ("v", v)
            elif use.layout is not None:
                slot = (v, (use.layout, use.row_index))
                naming[k] = ("r", rows.setdefault(slot, len(rows)))
            else:
                naming[k] = ("w", whole.setdefault(v, len(whole)))
        names.append(naming)
    outputs = [v for s in steps for v in s.outputs if v in needed or s.step.kind == "reduce"]
    reductions = {v: s.step.reduction for s in steps if s.step.kind == "reduce" for v in s.outputs}
    layouts = {
        v: layout
        for s in steps
        for v, layout in zip(s.outputs, s.step.layouts, strict=True)
        if layout is not None
    }
    row_list = [(v, layout, prefix) for v, (layout, prefix) in rows]
    body = compile_stage(steps, [], outputs, offsets, names, len(rows), len(whole))
    return Stage(
        level, n, steps, row_list, list(whole), outputs, reductions, layouts, grads, body,
        (names, offsets),
    )  # fmt: skip
