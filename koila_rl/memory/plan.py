"""`Plan`: how a minibatch runs, in words and numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from koila_rl.memory.budget import format_bytes

__all__ = ["Pass", "Plan", "Unsplit"]

# A prediction in bytes, made when first asked for.
Trace = Callable[[], int]


def nothing() -> int:
    return 0


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over a minibatch: ``count`` microbatches of ``microbatch_size`` samples."""

    microbatch_size: int
    count: int
    trace: Trace = field(default=nothing, repr=False, compare=False)

    @property
    def peak_bytes(self) -> int:
        """Most bytes of live tensors at once."""
        return self.trace()


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
    there before. ``unsplit`` names the calls that run on the whole minibatch.
    """

    batch_size: int
    passes: tuple[Pass, ...]
    budget_bytes: int | None
    trace: Trace = field(default=nothing, repr=False, compare=False)
    workspace_bytes: int = 0
    resident_bytes: int = 0
    unsplit: tuple[str, ...] = ()
    unsplit_details: tuple[Unsplit, ...] = ()
    limited_by: str = ""
    # How often the device ran out of memory all the same and the run started again, smaller.
    retries: int = 0

    @property
    def live_bytes(self) -> int:
        """Predicted when asked for, unless the choice needed it: a minibatch that fits many
        times over is not traced before it runs.
        """
        return self.trace()

    @property
    def peak_bytes(self) -> int:
        return self.live_bytes + self.workspace_bytes

    @property
    def microbatch_size(self) -> int:
        """Samples in a microbatch of the largest pass."""
        return self.passes[0].microbatch_size if self.passes else self.batch_size

    @property
    def split(self) -> bool:
        return any(item.count > 1 for item in self.passes)

    def summary(self) -> str:
        """One line: "minibatch 4,096 = 8 × 512; update 1.9 of 2.0 GiB, plus 0.6 resident"."""
        size, count = self.microbatch_size, self.passes[0].count if self.passes else 1
        rest = self.batch_size - size * (count - 1)
        if count == 1:
            how = f"minibatch {self.batch_size:,} whole"
        elif rest == size:
            how = f"minibatch {self.batch_size:,} = {count} × {size:,}"
        else:
            how = f"minibatch {self.batch_size:,} = {count - 1} × {size:,} + {rest:,}"
        parts = [how]
        if self.live_bytes:
            amount = format_bytes(self.peak_bytes)
            of = f" of {format_bytes(self.budget_bytes)}" if self.budget_bytes else ""
            parts.append(f"update {amount}{of}")
        line = "; ".join(parts)
        if self.resident_bytes:
            line += f", plus {format_bytes(self.resident_bytes)} resident"
        return line

    def __str__(self) -> str:
        lines = [self.summary()]
        if self.split and self.limited_by:
            lines.append(f"  split because {self.limited_by}")
        if self.unsplit_details:
            lines.append("  on the whole minibatch:")
            lines += [f"    {detail}" for detail in self.unsplit_details]
        return "\n".join(lines)
