"""A picture of a plan: bytes over the program, the budget, and the calls at the peak."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from koila_rl.memory.budget import format_bytes

if TYPE_CHECKING:
    from koila_rl.memory.plan import Plan

__all__ = ["draw"]

_NAMED_CALLS = 5


def draw(plan: Plan, path: Path) -> Path:
    """Write a PNG, or whatever else the path's ending asks of matplotlib."""
    from matplotlib.figure import Figure

    estimate = plan.trace()
    mib = [(x.live_bytes / 2**20, (x.live_bytes + x.scratch_bytes) / 2**20)
           for x in estimate.timeline]  # fmt: skip
    live, taken = [x for x, _ in mib], [y for _, y in mib]
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(taken, color="tab:orange", linewidth=0.8, label="with scratch memory of kernels")
    axes.fill_between(range(len(live)), live, color="tab:blue", alpha=0.6, label="tensors")
    if plan.budget_bytes is not None:
        budget = plan.budget_bytes / 2**20
        label = f"budget {format_bytes(plan.budget_bytes)}"
        if taken and budget > 5 * max(taken):
            axes.plot([], [], color="tab:red", linestyle="--", label=f"{label} (far above)")
        else:
            axes.axhline(budget, color="tab:red", linestyle="--", label=label)
    if taken:
        place = taken.index(max(taken))
        calls = "\n".join(map(str, estimate.calls[:_NAMED_CALLS]))
        axes.annotate(
            f"peak {format_bytes(plan.peak_bytes)}\n{calls}",
            (place, taken[place]), xytext=(0.02, 0.97), textcoords="axes fraction",
            va="top", fontsize=8, arrowprops={"arrowstyle": "->", "color": "gray"},
        )  # fmt: skip
    if plan.split and estimate.forward < len(live):
        axes.axvline(estimate.forward, color="gray", linewidth=0.5)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    which = "; the first two microbatches and the last stand for all" if plan.split else ""
    axes.set_xlabel(f"storages made, in program order{which}")
    axes.set_ylabel("MiB above what is resident")
    axes.set_title(plan.summary(), fontsize=10)
    axes.legend(loc="upper right", fontsize=8)
    figure.savefig(path, dpi=130)
    return path
