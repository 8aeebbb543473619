"""`Plan`: how a minibatch runs, in words and numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from koila_rl.memory.budget import format_bytes
from koila_rl.memory.estimate import Estimate

__all__ = ["Pass", "Plan", "Unsplit"]

# A prediction, made when first asked for.
Trace = Callable[[], Estimate]

_SHOWN_CALLS = 4


def nothing() -> Estimate:
    return Estimate()


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over a minibatch: ``count`` microbatches of ``microbatch_size`` samples.

    ``name`` is "forward", "backward", or "forward and backward" where one pass does both, after
    "earlier stages" whose sums it needs.
    """

    microbatch_size: int
    count: int
    name: str = "forward and backward"
    trace: Trace = field(default=nothing, repr=False, compare=False)

    @property
    def peak_bytes(self) -> int:
        """Most bytes taken at once in this pass, scratch memory included."""
        found = self.trace()
        if self.name == "forward and backward":
            return found.allocator_bytes
        return found.part_bytes(self.name)


@dataclass(frozen=True, slots=True)
class Unsplit:
    """A call that runs on the whole minibatch: where it was made, why, and what would help."""

    name: str
    where: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        return f"{self.name}{place} {self.reason}; {self.remedy}"


@dataclass(frozen=True)
class Plan:
    """How an update runs within its memory budget. All sizes in bytes.

    ``peak_bytes`` is ``live_bytes`` (tensors at the update's own worst moment, new gradients
    included) plus ``workspace_bytes`` (scratch memory of kernels); ``resident_bytes`` were
    there before. ``fit`` is the largest microbatch found to fit, which may be more than the
    even parts that run. ``unsplit`` names the calls that run on the whole minibatch.
    """

    batch_size: int
    passes: tuple[Pass, ...]
    budget_bytes: int | None
    trace: Trace = field(default=nothing, repr=False, compare=False)
    resident_bytes: int = 0
    unsplit: tuple[str, ...] = ()
    unsplit_details: tuple[Unsplit, ...] = ()
    limited_by: str = ""
    fit: int = 0
    # How often the device ran out of memory all the same and the run started again, smaller.
    retries: int = 0
    # Parts of a microbatch of one sample that are computed again in the backward; 0 where
    # instead what it saves lies in host memory meanwhile.
    parts: int = 1

    @property
    def live_bytes(self) -> int:
        """Predicted when asked for, unless the choice needed it: a minibatch that fits many
        times over is not traced before it runs.
        """
        return self.trace().peak_bytes

    @property
    def workspace_bytes(self) -> int:
        """What kernels take beyond tensors at the worst moment; zero where it is not known."""
        return self.trace().workspace_bytes

    @property
    def peak_bytes(self) -> int:
        return self.trace().allocator_bytes

    @property
    def microbatch_size(self) -> int:
        """Samples in a microbatch of the largest pass."""
        return self.passes[0].microbatch_size if self.passes else self.batch_size

    @property
    def split(self) -> bool:
        return any(item.count > 1 for item in self.passes)

    def summary(self) -> str:
        """One line: "minibatch 4,096 = 8 × 512; update 1.9 of 2.0 GiB, plus 0.6 resident"."""
        parts = [f"minibatch {self.batch_size:,}{self._division()}"]
        if self.peak_bytes:
            amount = format_bytes(self.peak_bytes)
            of = f" of {format_bytes(self.budget_bytes)}" if self.budget_bytes else ""
            parts.append(f"update {amount}{of}")
        line = "; ".join(parts)
        if self.resident_bytes:
            line += f", plus {format_bytes(self.resident_bytes)} resident"
        return line

    def _division(self) -> str:
        size, count = self.microbatch_size, self.passes[0].count if self.passes else 1
        rest = self.batch_size - size * (count - 1)
        if count == 1:
            return " whole"
        if rest == size:
            return f" = {count} × {size:,}"
        return f" = {count - 1} × {size:,} + {rest:,}"

    def __str__(self) -> str:
        rows = [
            (item.name, f"{item.count:,} × {item.microbatch_size:,}", format_bytes(item.peak_bytes))
            for item in self.passes
        ]
        lines = [self.summary(), *_table(("pass", "microbatches", "peak"), rows)]
        if self.peak_bytes:
            scratch = format_bytes(self.workspace_bytes)
            lines.append(f"  peak: tensors {format_bytes(self.live_bytes)}, kernels {scratch}")
            calls = self.trace().calls[:_SHOWN_CALLS]
            lines.append("  at the peak: " + ", ".join(map(str, calls)))
        if self.budget_bytes:
            lines.append(f"  budget: {format_bytes(self.budget_bytes)}")
        if self.parts > 1:
            lines.append(f"  in {self.parts} parts that are computed again in the backward")
        elif not self.parts:
            lines.append("  saved tensors in host memory between forward and backward")
        if self.split and self.limited_by:
            lines.append(f"  split because {self.limited_by}")
        if self.unsplit_details:
            lines.append("  on the whole minibatch:")
            lines += [f"    {detail}" for detail in self.unsplit_details]
        return "\n".join(lines)

    def figure(self, path: str | Path) -> Path:
        """Write a picture of the bytes over the program, with the budget and the largest calls.

        Returns the path. Needs matplotlib.
        """
        # Only here, since nothing else in the engine needs matplotlib.
        from koila_rl.memory.figure import draw

        return draw(self, Path(path))


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of a table: the first column to the left, the others to the right."""
    columns = list(zip(head, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    return [
        "  " + "  ".join(
            cell.ljust(width) if k == 0 else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, *rows)
    ]  # fmt: skip
