"""Choose the microbatch size of a program: whole if it fits, else as many equal parts as needed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from koila_rl.engine.program import Bound, Program
from koila_rl.engine.segments import OFFLOADED, most_parts
from koila_rl.errors import UnsupportedError
from koila_rl.memory.budget import active_device, budget_bytes, format_bytes, may_offload
from koila_rl.memory.estimate import Estimate, estimate
from koila_rl.memory.explain import insufficient, unsplit_details
from koila_rl.memory.forms import NO_WRITES, InputForm, Writes, input_forms, writes_of
from koila_rl.memory.limits import current_limits
from koila_rl.memory.lines import Lines
from koila_rl.memory.plan import Pass, Plan
from koila_rl.recording.values import Captured

__all__ = ["choose", "device_of"]

# Traces and plans of one program.
MOST_KEPT = 64


@dataclass(frozen=True, slots=True)
class _Peaks:
    """Peaks of one program by microbatch size, traced once each. Holds none of its tensors."""

    program: Program
    consts: list[Any]
    forms: tuple[InputForm, ...]
    purpose: str
    writes: Writes
    # Whether gradients are computed in full before any is handed over, also of a whole minibatch.
    delivered: bool
    # Whether the memory that kernels take counts.
    scratch: bool

    def at(self, size: int, two_sizes: bool = False, parts: int = 1) -> Estimate:
        size = min(size, max(self.program.n, 1))
        known = self.program.plans
        key = ("peak", self.forms, self.purpose, self.writes, self.delivered, self.scratch, size,
               two_sizes, parts)  # fmt: skip
        found: Estimate | None = known.get(key)
        if found is None:
            found = known[key] = estimate(
                self.program, self.forms, self.consts, size, self.purpose, self.delivered,
                self.writes, self.scratch, two_sizes, parts,
            )  # fmt: skip
        return found

    def bound(self) -> int:
        """Bytes that no run can pass: all that is computed forward, and backward as much twice."""
        computed: int = sum(info.traffic for info in self.program.calls)
        return 4 * (computed + sum(_bytes(form) for form in self.forms))


@dataclass(frozen=True, slots=True)
class _Known:
    """A plan and the budgets that lead to the same choice."""

    plan: Plan
    least: float
    below: float
    # Whether it fits many times over.
    roomy: bool = False

    def under(self, budget: int) -> Plan | None:
        if not self.least <= budget < self.below:
            return None
        same = self.plan.budget_bytes == budget
        return self.plan if same else replace(self.plan, budget_bytes=budget)


def choose(bound: Bound, purpose: str, whole: bool = False) -> Plan:
    """The plan of a bound program under the limits in force; ``whole`` forbids a split.

    Raises:
        InsufficientMemoryError: not even one sample fits; nothing has run.
        UnsupportedError: the program's tensors lie on two devices.
    """
    program, limits = bound.program, current_limits()
    device = program.plans.get("device")
    if device is None:
        device = program.plans["device"] = device_of(form.device for form in input_forms(bound))
    budget = _budget(limits.memory, device)
    simulated = active_device.get() is not None
    fixed = ("chosen", purpose, limits.microbatch, whole, simulated)
    # Where a program fits many times over, nothing of what differs between updates matters.
    found = _recalled(program, fixed, budget)
    if found is not None:
        return found
    key = (*fixed, _state(bound))
    found = _recalled(program, key, budget)
    if found is not None:
        return found
    if len(program.plans) > MOST_KEPT:
        # Budgets that change all the time would fill the memory with what was planned for them.
        program.plans.clear()
    peaks = _Peaks(
        program, bound.consts, input_forms(bound), purpose, _writes(bound),
        simulated or device.type != "cpu", device.type == "cpu" and not simulated,
    )  # fmt: skip
    made = _chosen(bound, peaks, budget, limits.microbatch, whole)
    program.plans[fixed if made.roomy else key] = made
    plan: Plan = made.plan
    return plan


def _recalled(program: Program, key: Any, budget: int) -> Plan | None:
    known: _Known | None = program.plans.get(key)
    return known.under(budget) if known is not None else None


def _state(bound: Bound) -> tuple[Any, ...]:
    """What may differ between two recordings of one program, as far as memory goes."""
    state: list[Any] = []
    for x in bound.tensors:
        if type(x) is Captured:
            tensor = x.tensor
            state.append(x.requires_grad and tensor.is_leaf and tensor.grad is not None)
        elif x.attached is not None:
            tensor = x.attached
            state.append(tensor.requires_grad and tensor.is_leaf and tensor.grad is not None)
        else:
            data, rows = x.call.data, x.call.rows
            state.append(
                (rows.raw_bytes, rows.prefetch is not None) if data is None
                else data.requires_grad and data.is_leaf and data.grad is not None
            )  # fmt: skip
    if _has_effects(bound.program):
        state.append(_writes(bound))
    return tuple(state)


def _has_effects(program: Program) -> bool:
    found = program.plans.get("effects")
    if found is None:
        found = program.plans["effects"] = any(info.effect for info in program.calls)
    return bool(found)


def _writes(bound: Bound) -> Writes:
    return writes_of(bound) if _has_effects(bound.program) else NO_WRITES


def device_of(devices: Iterable[torch.device]) -> torch.device:
    """The device whose memory a program takes: its accelerator, if it has one.

    Raises:
        UnsupportedError: there are two.
    """
    found = list(dict.fromkeys(device for device in devices if device.type != "cpu"))
    if len(found) > 1:
        raise UnsupportedError(
            f"tensors of one program lie on {found[0]} and {found[1]}; an update is planned for "
            "the memory of one device. Move them to one, or split the program with .detach()"
        )
    return found[0] if found else torch.device("cpu")


_free: dict[Any, tuple[float, int]] = {}


def _budget(memory: Any, device: torch.device) -> int:
    """The budget; what the host has free is asked for at most once a second."""
    if device.type != "cpu" or active_device.get() is not None:
        return budget_bytes(memory, device)
    now = time.monotonic()
    known = _free.get(memory)
    if known is None or now - known[0] > 1.0:
        known = _free[memory] = (now, budget_bytes(memory, device))
    return known[1]


def _chosen(
    bound: Bound, peaks: _Peaks, budget: int, microbatch: int | None, whole: bool
) -> _Known:
    n = max(peaks.program.n, 1)
    if whole:
        return _Known(_plan(bound, peaks, n, budget, "", n), 0, math.inf)
    if microbatch is not None and n > 1:
        size = min(n, microbatch)
        reason = "limits(microbatch) says so"
        return _Known(_plan(bound, peaks, size, budget, reason, size), 0, math.inf)
    most = 2 * peaks.bound()
    if most <= budget:
        return _Known(_plan(bound, peaks, n, budget, "", n), most, math.inf, roomy=True)
    all_at_once = peaks.at(n)
    needed = all_at_once.allocator_bytes
    if needed <= budget:
        return _Known(_plan(bound, peaks, n, budget, "", n), needed, math.inf)
    if n == 1 or not any(bound.program.stages):
        raise insufficient(all_at_once, budget, n, bound)
    fit, size, parts = _fit(bound, peaks, n, budget, all_at_once)
    reason = f"the whole minibatch needs {format_bytes(needed)}"
    plan = _plan(bound, peaks, size, budget, reason, fit, parts)
    # One sample more may fit into a little more.
    least = peaks.at(size, parts=parts).allocator_bytes
    return _Known(plan, least, budget + max(1, budget // 128))


def _fit(bound: Bound, peaks: _Peaks, n: int, budget: int, whole: Estimate) -> tuple[int, int, int]:
    """The largest size that fits, as far as lines tell, and one that a trace found to fit.

    Also the number of parts to compute one sample in; 1 where that need not be.
    """
    lines = _lines(peaks, n, budget, whole)
    fit = lines.largest(n, budget) if lines is not None else _nearest(peaks, n, budget, whole)
    while True:
        if fit < 1:
            one = peaks.at(1)
            if one.allocator_bytes > budget:
                parts = _in_parts(bound, peaks, budget)
                if parts is None:
                    raise insufficient(one, budget, 1, bound, whole)
                return 1, 1, parts
            fit = 1
        size = _friendly(fit, n)
        needed = peaks.at(size).allocator_bytes
        if needed <= budget:
            return fit, size, 1
        # Blocks were rounded otherwise than in the trace, or a kernel was chosen by size.
        fit = min(size - 1, int(size * budget / needed))


def _in_parts(bound: Bound, peaks: _Peaks, budget: int) -> int | None:
    """The fewest parts, computed again in the backward, in which one sample fits.

    `OFFLOADED` where none do but saved tensors can go to the host; None if nothing helps.
    """
    if peaks.purpose == "value":
        return None
    before = peaks.at(1).allocator_bytes
    parts, most = 2, most_parts(bound.program)
    while parts <= most:
        needed = peaks.at(1, parts=parts).allocator_bytes
        if needed <= budget:
            return parts
        if needed > before:
            # What crosses between ever more parts has become the larger share.
            break
        before = needed
        parts *= 2
    if not may_offload(bound.roots[0].meta.device):
        return None
    return OFFLOADED if peaks.at(1, parts=OFFLOADED).allocator_bytes <= budget else None


def _lines(peaks: _Peaks, n: int, budget: int, whole: Estimate) -> Lines | None:
    """Lines from a trace near the size that may fit; None for a few samples."""
    if n < 12:
        return None
    guess = int(n * budget / max(whole.allocator_bytes, 1))
    guess = max(4, min(guess, n // 3))
    # The same sizes for similar budgets.
    many = 1 << (guess.bit_length() - 1)
    return Lines.of(many // 2, many, peaks.at(many, two_sizes=True))


def _nearest(peaks: _Peaks, n: int, budget: int, whole: Estimate) -> int:
    """The largest size that fits, found by halving; 0 if none does."""
    low, high = 0, n
    while high - low > 1:
        middle = (low + high) // 2
        if peaks.at(middle).allocator_bytes <= budget:
            low = middle
        else:
            high = middle
    return low


def _friendly(fit: int, n: int) -> int:
    """A size of even parts that devices like, where that costs no further microbatch."""
    count = -(-n // fit)
    even = -(-n // count)
    power = 1 << (fit.bit_length() - 1)
    if power >= even:
        return power
    eight = -(-even // 8) * 8
    return eight if eight <= fit else even


def _plan(
    bound: Bound, peaks: _Peaks, size: int, budget: int, reason: str, fit: int, parts: int = 1
) -> Plan:
    program = bound.program
    n = max(program.n, 1)
    count = -(-n // size)

    def trace() -> Estimate:
        return peaks.at(size, parts=parts)

    details = unsplit_details(bound) if count > 1 else ()
    passes = [Pass(size, count, trace=trace)]
    backward = peaks.purpose == "backward" and count > 1
    if backward and (not program.fused or program.schedule.last > 1):
        names = ("earlier stages", "forward and backward") if program.fused else (
            "forward", "backward")  # fmt: skip
        passes = [Pass(size, count, name, trace) for name in names]
    elif peaks.purpose == "value" and count > 1:
        passes = [Pass(size, count, "forward", trace)]
    resident = sum(_bytes(form) for form in peaks.forms if form.rows is None)
    return Plan(
        batch_size=n,
        passes=tuple(passes),
        budget_bytes=budget,
        trace=trace,
        resident_bytes=resident,
        unsplit=tuple(dict.fromkeys(detail.name for detail in details)),
        unsplit_details=details,
        limited_by=reason if count > 1 else "",
        fit=fit,
        parts=parts,
    )


def _bytes(form: InputForm) -> int:
    count = form.dtype.itemsize
    for size in form.shape:
        count *= size
    return count
