"""Parts of a stage that are computed again in the backward, where one sample does not fit.

A stage of many steps is cut into parts of about equal bytes. A part keeps only what it was
given; its backward computes the rest again. With k parts, what lives at the worst moment is
what crosses the k - 1 cuts and the inside of one part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from koila_rl.engine.cuts import ProgramStep
from koila_rl.engine.program import Program, Stage
from koila_rl.engine.replay import Body, compile_stage

__all__ = ["OFFLOADED", "cut_points", "in_parts", "most_parts"]

# In the place of a number of parts: nothing is computed again, saved tensors lie on the host.
OFFLOADED = 0


def most_parts(program: Program) -> int:
    """Beyond this number nothing is gained: parts of a few steps."""
    stages = [stage for level in program.stages for stage in level if stage.differentiable]
    steps = max((len(stage.steps) for stage in stages), default=0)
    return 1 << max(0, steps // 2).bit_length() if steps >= 4 else 1


def in_parts(stage: Stage, parts: int) -> Body:
    """The code of a stage in (at most) so many parts; made once."""
    found = stage.bodies.get(parts)
    if found is None:
        names, offsets = stage.code
        cuts = cut_points(stage.steps, parts, stage.outputs)
        found = stage.bodies[parts] = compile_stage(
            stage.steps, [], stage.outputs, offsets, names, len(stage.rows), len(stage.whole), cuts
        )
    return found


def cut_points(steps: Sequence[ProgramStep], parts: int, outputs: Sequence[int]) -> list[int]:
    """Numbers of steps before which to cut: parts of about equal bytes, few bytes across."""
    sizes = [_nbytes(step) for step in steps]
    total = sum(sizes)
    if parts <= 1 or not total:
        return []
    before = [0]
    for size in sizes:
        before.append(before[-1] + size)
    crossing = _crossing(steps, outputs)
    cuts: list[int] = []
    for k in range(1, parts):
        target, margin = total * k / parts, total / (2 * parts)
        near = [i for i in range(1, len(steps)) if abs(before[i] - target) <= margin]
        near = near or [min(range(1, len(steps)), key=lambda i: abs(before[i] - target))]
        cuts.append(min(near, key=lambda i: (crossing[i], abs(before[i] - target))))
    return sorted(set(cuts))


def _crossing(steps: Sequence[ProgramStep], outputs: Sequence[int]) -> list[int]:
    """For each step, the bytes that were made before it and are used at it or later."""
    made = {v: (k, _nbytes(step)) for k, step in enumerate(steps) for v in step.outputs}
    last = {v: k for k, step in enumerate(steps) for v, _ in step.operands if v in made}
    last |= {v: len(steps) for v in outputs if v in made}
    change = [0] * (len(steps) + 2)
    for v, (k, size) in made.items():
        if v in last:
            change[k + 1] += size
            change[last[v] + 1] -= size
    crossing = []
    live = 0
    for k in range(len(steps)):
        live += change[k]
        crossing.append(live)
    return crossing


def _nbytes(step: ProgramStep) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype, _ in step.step.metas)
