"""Cut a recorded program where microbatches meet, and put its steps into stages.

A *cut* is a step whose result needs every sample: a sum over the batch, or a call that takes a
batched value whole. Stage s holds the steps that run microbatch by microbatch between the
cuts of level s and s + 1; global steps of level s run once, before stage s. Everything is
scheduled as late as its consumers allow, so that few values cross from one stage to the next
and a network that feeds only the loss runs in the last stage, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from koila_rl.recording.layouts import Layout
from koila_rl.recording.propagate import Step
from koila_rl.recording.rules import Use

__all__ = ["ProgramStep", "Schedule", "schedule"]

FAR = 1 << 30


@dataclass(slots=True)
class ProgramStep:
    """A step with program-wide value numbers, the call it belongs to, and its minibatch size."""

    step: Step
    operands: tuple[tuple[int, Use], ...]
    outputs: tuple[int, ...]
    call: int
    n: int
    grad: bool
    autocast: Any = None
    # The default type when the call was recorded, where its result depends on it.
    default: Any = None
    level: int = 0

    @property
    def requires_grad(self) -> bool:
        return any(self.step.requires_grad)


@dataclass(slots=True)
class Value:
    """How a value comes about: whole, or in rows of ``layout`` out of n samples."""

    layout: Layout | None
    n: int
    producer: int | None
    rows: bool
    source: bool = False


@dataclass(slots=True)
class Schedule:
    """Steps by stage, and which values must exist whole.

    ``joined`` are values produced in rows that some step, a later stage or the caller needs
    whole. ``last`` is the number of the final level.
    """

    steps: list[ProgramStep]
    values: dict[int, Value]
    joined: set[int]
    last: int
    mixing: list[int] = field(default_factory=list)

    def at(self, level: int, kind: str) -> list[ProgramStep]:
        wanted = ("global",) if kind == "global" else ("split", "reduce")
        return [s for s in self.steps if s.level == level and s.step.kind in wanted]


def direct(value: Value, use: Use, n: int) -> bool:
    """Whether a step can take the value row by row as it is produced."""
    return (
        value.rows
        and use.layout is not None
        and use.layout == value.layout
        and not use.row_index
        and value.n == n
    )


def schedule(
    steps: Sequence[ProgramStep],
    inputs: dict[int, Value],
    roots: Sequence[int],
    early: frozenset[int] = frozenset(),
    late: frozenset[int] = frozenset(),
) -> Schedule:
    """Assign levels. ``early`` steps finish one stage before ``late`` ones begin."""
    values = dict(inputs)
    for number, step in enumerate(steps):
        for output, layout in zip(step.outputs, step.step.layouts, strict=True):
            rows = step.step.kind == "split"
            values[output] = Value(layout, step.n, number, rows)
    asap = _earliest(steps, values, early, late)
    last = max(
        [_available(values[r], asap, steps) for r in roots] + [0],
    )
    _latest(steps, values, roots, asap, last, early)
    joined = {r for r in roots if values[r].rows}
    mixing = []
    for number, step in enumerate(steps):
        for v, use in step.operands:
            value = values[v]
            if not value.rows:
                continue
            if not direct(value, use, step.n):
                joined.add(v)
                if step.step.kind == "global" and number not in mixing:
                    mixing.append(number)
            elif value.producer is not None and steps[value.producer].level < step.level:
                joined.add(v)
    for number, step in enumerate(steps):
        sources = any(values[v].source and values[v].layout for v, _ in step.operands)
        if step.step.kind == "global" and number not in mixing and sources:
            mixing.append(number)
    # Steps that only hand a value through compute nothing on the whole minibatch.
    mixing = [k for k in mixing if not getattr(steps[k].step.func, "cheap", False)]
    return Schedule(list(steps), values, joined, last, mixing)


def _available(value: Value, level: Sequence[int], steps: Sequence[ProgramStep]) -> int:
    """The first level at which the value exists whole."""
    if value.producer is None:
        return 0
    produced = level[value.producer]
    return produced if steps[value.producer].step.kind == "global" else produced + 1


def _earliest(
    steps: Sequence[ProgramStep],
    values: dict[int, Value],
    early: frozenset[int],
    late: frozenset[int],
) -> list[int]:
    levels: list[int] = []
    barrier = 0
    for number, step in enumerate(steps):
        level = barrier if number in late else 0
        for v, use in step.operands:
            value = values[v]
            if direct(value, use, step.n) and value.producer is not None:
                level = max(level, levels[value.producer])
            else:
                level = max(level, _available(value, levels, steps))
        levels.append(level)
        if number in early:
            barrier = max(barrier, level + 1)
    if late and barrier:
        # An early step may come after a late one in program order.
        levels = _raise(steps, values, levels, late, barrier)
    return levels


def _raise(
    steps: Sequence[ProgramStep],
    values: dict[int, Value],
    levels: list[int],
    late: frozenset[int],
    barrier: int,
) -> list[int]:
    raised: list[int] = []
    for number, step in enumerate(steps):
        level = max(levels[number], barrier if number in late else 0)
        for v, use in step.operands:
            value = values[v]
            if value.producer is None:
                continue
            if direct(value, use, step.n):
                level = max(level, raised[value.producer])
            else:
                level = max(level, _available(value, raised, steps))
        raised.append(level)
    return raised


def _latest(
    steps: Sequence[ProgramStep],
    values: dict[int, Value],
    roots: Sequence[int],
    asap: list[int],
    last: int,
    early: frozenset[int],
) -> None:
    bound = [FAR] * len(steps)
    for r in roots:
        producer = values[r].producer
        if producer is not None:
            whole = steps[producer].step.kind == "global"
            bound[producer] = min(bound[producer], last if whole else last - 1)
    for number in reversed(range(len(steps))):
        step = steps[number]
        if number in early:
            bound[number] = min(bound[number], asap[number])
        level = bound[number] if bound[number] < FAR else asap[number]
        # Effects run as soon as they can: nobody waits for them.
        step.level = max(level, asap[number])
        for v, use in step.operands:
            value = values[v]
            if value.producer is None:
                continue
            whole = steps[value.producer].step.kind == "global"
            limit = step.level if whole or direct(value, use, step.n) else step.level - 1
            bound[value.producer] = min(bound[value.producer], limit)


def linear_in(steps: Sequence[ProgramStep], sums: set[int], root: int) -> bool:
    """Whether ``root`` is an affine function of ``sums`` through the global ``steps``.

    Then the gradient of each sum is known before its value is.
    """
    depends = set(sums)
    for step in steps:
        if not any(v in depends for v, _ in step.operands):
            continue
        ops = step.step.ops
        if not ops:
            return False
        names: dict[int, Any] = {k: v for k, (v, _) in enumerate(step.operands)}
        local = {k for k, v in names.items() if v in depends}
        base = set(local)
        for name, ins, outs in ops:
            hit = [k for k in ins if k in base]
            if not hit:
                continue
            if not _affine(name, ins, base):
                return False
            base.update(outs)
        for k, output in enumerate(step.outputs):
            if len(step.operands) + k in base:
                depends.add(output)
    return True


_AFFINE = {
    "add", "sub", "rsub", "neg", "sum", "mean", "view", "_unsafe_view", "reshape", "expand",
    "unsqueeze", "squeeze", "stack", "cat", "_to_copy", "clone", "alias", "select", "slice",
    "permute", "transpose", "t", "unbind", "lift_fresh", "detach_",
}  # fmt: skip


def _affine(name: str, ins: tuple[int, ...], depends: set[int]) -> bool:
    if name in _AFFINE:
        return True
    if name == "mul":
        return sum(k in depends for k in ins) == 1
    if name == "div":
        return ins[0] in depends and not any(k in depends for k in ins[1:])
    return False
