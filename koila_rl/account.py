"""What the updates of a run took beside what was planned, for its log and its table."""

from __future__ import annotations

import torch
from torch import nn

from koila_rl.memory.budget import active_device, format_bytes
from koila_rl.memory.plan import Plan
from koila_rl.memory.simulated import SimulatedDevice

__all__ = ["UpdateAccount"]


class UpdateAccount:
    """Counts microbatches, retries, memory and hidden time of updates, reported one by one.

    Measured is the most memory taken at once since the report before, beyond what was there then:
    by CUDA's allocator, or by a `SimulatedDevice` that is active; elsewhere nothing counts it.
    Gradients of ``network`` that an update replaces do not count as having been there.
    """

    def __init__(self, device: torch.device, network: nn.Module) -> None:
        self._device, self._network = device, network
        self._planned = self._measured = self._microbatches = 0
        self._retries = 0
        self._seconds = self._hidden = 0.0
        self._resident = 0
        self._restart()

    def add(self, metrics: dict[str, float], plan: Plan | None) -> dict[str, float]:
        """What the log says of memory in an update with these metrics and this last plan."""
        self._retries += int(metrics.get("memory/retries", 0))
        seconds = metrics.get("time/update_seconds", 0.0)
        self._seconds += seconds
        self._hidden += seconds * metrics.get("time/hidden_update_share", 0.0)
        found: dict[str, float] = {}
        if plan is not None:
            self._microbatches = plan.passes[0].count if plan.passes else 1
            self._planned = max(self._planned, plan.peak_bytes)
            found["memory/microbatches"] = float(self._microbatches)
            found["memory/planned_peak_bytes"] = float(plan.peak_bytes)
        measured = self._read()
        if measured is not None:
            self._measured = max(self._measured, measured)
            found["memory/measured_peak_bytes"] = float(measured)
        self._restart()
        return found

    def rows(self) -> list[tuple[str, str]]:
        """Rows of the table at the end of the run; sizes are the largest of all updates."""
        measured = "not measured" if self._read() is None else format_bytes(self._measured)
        hidden = self._hidden / self._seconds if self._seconds else 0.0
        return [
            ("peak of an update", f"planned {format_bytes(self._planned)}, measured: {measured}"),
            ("microbatches", f"{self._microbatches} a minibatch, {self._retries} retries"),
            ("updates", f"{self._seconds:.1f} s, {hidden:.0%} of it beside the environment"),
        ]

    def _read(self) -> int | None:
        simulated = active_device.get()
        if isinstance(simulated, SimulatedDevice):
            return simulated.section_peak_bytes - self._resident
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._resident
        return None

    def _restart(self) -> None:
        simulated = active_device.get()
        gradients = sum(p.grad.nbytes for p in self._network.parameters() if p.grad is not None)
        if isinstance(simulated, SimulatedDevice):
            simulated.start_section()
            self._resident = simulated.live_bytes - gradients
        elif self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._resident = torch.cuda.memory_allocated(self._device) - gradients
