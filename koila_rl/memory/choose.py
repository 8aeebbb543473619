"""Choose the microbatch size of a program: whole if it fits, else as many equal parts as needed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from koila_rl.engine.program import Bound, Program
from koila_rl.errors import InsufficientMemoryError
from koila_rl.memory.budget import active_device, budget_bytes, format_bytes
from koila_rl.memory.estimate import Estimate, InputForm, estimate, input_forms
from koila_rl.memory.limits import current_limits
from koila_rl.memory.plan import Pass, Plan, Unsplit

__all__ = ["choose"]

# More traces find a larger microbatch, by a few samples.
TRACES = 4


@dataclass(frozen=True, slots=True)
class _Peaks:
    """Peaks of one program by microbatch size, traced once each. Holds none of its tensors."""

    program: Program
    consts: list[Any]
    forms: tuple[InputForm, ...]
    purpose: str

    def at(self, size: int) -> Estimate:
        known = self.program.plans
        key = ("peak", self.forms, self.purpose, min(size, self.program.n))
        found: Estimate | None = known.get(key)
        if found is None:
            found = known[key] = estimate(
                self.program, self.forms, self.consts, size, self.purpose, 0
            )
        return found

    def bound(self) -> int:
        """Bytes that no run can pass: all that is computed forward, and backward as much twice."""
        computed: int = sum(info.traffic for info in self.program.calls)
        return 4 * (computed + sum(_bytes(form) for form in self.forms))


def choose(bound: Bound, purpose: str, whole: bool = False) -> Plan:
    """The plan of a bound program under the limits in force; ``whole`` forbids a split.

    Raises:
        InsufficientMemoryError: not even one sample fits; nothing has run.
    """
    program = bound.program
    limits = current_limits()
    roomy = program.plans.get(("roomy", purpose, limits.microbatch, limits.memory))
    if roomy is not None and not whole:
        device, plan = roomy
        if plan.budget_bytes == _budget(limits.memory, device):
            return plan
    forms = input_forms(bound)
    device = next((form.device for form in forms), torch.device("cpu"))
    budget = _budget(limits.memory, device)
    if whole:
        return _plan(
            bound,
            _Peaks(program, bound.consts, forms, purpose),
            max(program.n, 1),
            budget,
            "",
            purpose,
        )
    key = ("plan", forms, purpose, limits.microbatch, limits.memory)
    known: Plan | None = program.plans.get(key)
    if known is not None and known.budget_bytes == budget:
        return known
    peaks = _Peaks(program, bound.consts, forms, purpose)
    if limits.microbatch is not None and program.n > 1:
        size, reason = min(program.n, limits.microbatch), "limits(microbatch) says so"
    else:
        size, reason = _fit(peaks, program.n, budget, bound)
    plan = _plan(bound, peaks, size, budget, reason, purpose)
    program.plans[key] = plan
    if 2 * peaks.bound() <= budget:
        # Whatever gradients there are already: nothing else differs between updates.
        program.plans["roomy", purpose, limits.microbatch, limits.memory] = device, plan
    return plan


_free: tuple[float, int] = (0.0, 0)


def _budget(memory: Any, device: torch.device) -> int:
    """The budget; what the host has free is asked for at most once a second."""
    global _free
    if memory is None and device.type == "cpu" and active_device.get() is None:
        now = time.monotonic()
        if now - _free[0] > 1.0:
            _free = (now, budget_bytes(None, device))
        return _free[1]
    return budget_bytes(memory, device)


def _fit(peaks: _Peaks, n: int, budget: int, bound: Bound) -> tuple[int, str]:
    """The microbatch size: N if it fits, else even parts of the largest size found to fit."""
    if 2 * peaks.bound() <= budget:
        return max(n, 1), ""
    whole = peaks.at(max(n, 1))
    if whole.peak_bytes <= budget:
        return max(n, 1), ""
    reason = f"the whole minibatch needs {format_bytes(whole.peak_bytes)}"
    if n <= 1 or not any(bound.program.stages):
        raise _insufficient(whole, budget, max(n, 1), bound)
    one = peaks.at(1)
    if one.peak_bytes > budget:
        raise _insufficient(one, budget, n, bound)
    low, high = (1, one.peak_bytes), (n, whole.peak_bytes)
    for trial in range(TRACES):
        if trial >= TRACES - 2 and low[0] > 1:
            break
        # The peak is the largest of several lines, so it lies below the chord: what the chord
        # proposes fits.
        slope = (high[1] - low[1]) / (high[0] - low[0])
        size = min(high[0] - 1, low[0] + int((budget - low[1]) / slope)) if slope > 0 else low[0]
        if size <= low[0]:
            break
        found = (size, peaks.at(size).peak_bytes)
        if found[1] <= budget:
            low = found
        else:
            high = found
    return _friendly(low[0], n), reason


def _friendly(fit: int, n: int) -> int:
    """A size of even parts that devices like, where that costs no further microbatch."""
    count = -(-n // fit)
    even = -(-n // count)
    power = 1 << (fit.bit_length() - 1)
    if power >= even:
        return power
    eight = -(-even // 8) * 8
    return eight if eight <= fit else even


def _insufficient(found: Estimate, budget: int, n: int, bound: Bound) -> InsufficientMemoryError:
    what = "one sample"
    if n == 1 or not any(bound.program.stages):
        what = "the whole minibatch"
    elif len(bound.program.stages) > 2:
        what = "an update in microbatches of one sample, with what is held between its stages,"
    calls = ", ".join(f"{call.name} {format_bytes(call.nbytes)}" for call in found.calls[:4])
    held = unsplit_details(bound)
    whole = ""
    if held:
        whole = " These calls need the whole minibatch: " + "; ".join(map(str, held[:3])) + "."
    return InsufficientMemoryError(
        f"{what} needs {format_bytes(found.peak_bytes)} but the budget is {format_bytes(budget)}; "
        f"largest at the peak: {calls}.{whole} Nothing has run and no gradient has changed. Raise "
        "limits(memory=...), or make the network or the observation smaller."
    )


def _plan(bound: Bound, peaks: _Peaks, size: int, budget: int, reason: str, purpose: str) -> Plan:
    program = bound.program
    n = max(program.n, 1)
    count = -(-n // size)

    def trace() -> int:
        return peaks.at(size).peak_bytes

    details = unsplit_details(bound) if count > 1 else ()
    passes = [Pass(size, count, trace)]
    if count > 1 and purpose == "backward" and (not program.fused or program.schedule.last > 1):
        passes.append(Pass(size, count, trace))
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
    )


def _bytes(form: InputForm) -> int:
    count = form.dtype.itemsize
    for size in form.shape:
        count *= size
    return count


def unsplit_details(bound: Bound) -> tuple[Unsplit, ...]:
    """The calls that run on the whole minibatch, each with where, why and what would help."""
    found = []
    for number in bound.program.unsplit:
        step: Any = bound.program.steps[number]
        call = bound.calls[step.call]
        where = f"{call.where[0]}:{call.where[1]}" if call.where else ""
        held = sum(
            meta.nbytes
            for x in call.inputs
            if (meta := getattr(x, "meta", None)) is not None and meta.layout is not None
        )
        found.append(
            Unsplit(
                call.info.name, where, f"needs the whole minibatch: {format_bytes(held)}",
                _REMEDIES.get(call.info.name, "an operation within each sample would split"),
            )
        )  # fmt: skip
    return tuple(found)


_REMEDIES = {
    "batch_norm": "GroupNorm splits",
    "sort": "sort before wrapping, or along another dimension",
    "median": "a mean splits",
    "quantile": "a mean and a variance split",
}
