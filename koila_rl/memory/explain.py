"""Say why a program does not fit, or what of it does not split."""

from __future__ import annotations

from typing import Any

from koila_rl.engine.program import Bound
from koila_rl.errors import InsufficientMemoryError
from koila_rl.memory.budget import format_bytes
from koila_rl.memory.estimate import Estimate
from koila_rl.memory.plan import Unsplit

__all__ = ["insufficient", "unsplit_details"]


def insufficient(
    found: Estimate, budget: int, size: int, bound: Bound, whole: Estimate | None = None
) -> InsufficientMemoryError:
    """The error where microbatches of ``size`` are the least that was tried.

    ``whole`` is the estimate of the whole minibatch, where a split was the alternative.
    """
    what = "one sample" if size == 1 else f"an update in microbatches of {size:,} samples"
    other = ""
    if whole is not None and whole.allocator_bytes > found.allocator_bytes:
        other = f", and the whole minibatch at once {format_bytes(whole.allocator_bytes)},"
    elif whole is not None:
        # Of few samples: what is held while microbatches add up is more than the samples take.
        other = f", and in microbatches {format_bytes(found.allocator_bytes)},"
        found, whole = whole, None
    if whole is None:
        what = "the whole minibatch"
    elif len(bound.program.stages) > 2:
        what = "an update in microbatches of one sample, with what is held between its stages,"
    scratch = ""
    if found.workspace_bytes:
        scratch = f" ({format_bytes(found.workspace_bytes)} of it scratch memory of kernels)"
    calls = ", ".join(map(str, found.calls[:4]))
    held = unsplit_details(bound)
    unsplit = ""
    if held:
        unsplit = " These calls need the whole minibatch: " + "; ".join(map(str, held[:3])) + "."
    return InsufficientMemoryError(
        f"{what} needs {format_bytes(found.allocator_bytes)}{scratch}{other} but the budget is "
        f"{format_bytes(budget)}; largest at the peak: {calls}.{unsplit} Nothing has run and no "
        "gradient has changed. Raise limits(memory=...), or make the network or the observation "
        "smaller."
    )


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
