"""Choose the microbatch size of a program: whole if it fits, else as many equal parts as needed."""

from __future__ import annotations

from typing import Any

from koila_rl.engine.program import Bound
from koila_rl.memory.limits import current_limits
from koila_rl.memory.plan import Pass, Plan, Unsplit

__all__ = ["choose"]


def choose(bound: Bound, purpose: str) -> Plan:
    """The plan of a bound program under the limits in force."""
    program = bound.program
    limits = current_limits()
    n = program.n
    size = n
    if limits.microbatch is not None and n > 1:
        size = min(n, limits.microbatch)
    count = -(-n // size) if n else 1
    split = count > 1
    details = unsplit_details(bound) if split else ()
    return Plan(
        batch_size=n,
        passes=(Pass(size, count, 0),),
        budget_bytes=None,
        live_bytes=0,
        unsplit=tuple(dict.fromkeys(detail.name for detail in details)),
        unsplit_details=details,
    )


def unsplit_details(bound: Bound) -> tuple[Unsplit, ...]:
    """The calls that run on the whole minibatch."""
    found = []
    for number in bound.program.unsplit:
        step: Any = bound.program.steps[number]
        call = bound.calls[step.call]
        where = f"{call.where[0]}:{call.where[1]}" if call.where else ""
        found.append(Unsplit(call.info.name, where, "needs the whole minibatch",
                             "its operands are held whole"))  # fmt: skip
    return tuple(found)
