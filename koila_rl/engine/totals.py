"""Results of a stage, put together as its microbatches come in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from koila_rl.engine.program import Stage
from koila_rl.recording.layouts import Layout, join_into

__all__ = ["Totals"]


class Totals:
    """Outputs of a stage as microbatches come in: sums, stacked partials, joined rows."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.values: list[Any] = [None] * len(stage.outputs)
        self.size = 0

    def add(self, outs: Sequence[Tensor], start: int, stop: int) -> None:
        for k, (v, out) in enumerate(zip(self.stage.outputs, outs, strict=True)):
            reduction = self.stage.reductions.get(v)
            if reduction is None and v not in self.stage.layouts:
                self.values[k] = out  # the same for every microbatch, as an empty buffer
            elif reduction is None:
                self.values[k] = self.joined(self.values[k], out, v, start, stop)
            elif reduction.combine is not None:
                self.values[k] = self.stacked(self.values[k], out, start, stop)
            else:
                # A mean is the sum divided once: as exact as eager's, also in low precision.
                part = out * (stop - start) if reduction.weight == "mean" else out
                whole = self.values[k]
                self.values[k] = part.clone() if whole is None else whole.add_(part)

    def stacked(self, whole: Tensor | None, out: Tensor, start: int, stop: int) -> Tensor:
        """The partial results of all microbatches, one after the other in one tensor."""
        if whole is None:
            # The first one has the size of all but the last.
            self.size = stop - start
            whole = out.new_empty((-(-self.stage.n // self.size), *out.shape))
        whole[start // self.size] = out
        return whole

    def joined(self, whole: Tensor | None, out: Tensor, v: int, start: int, stop: int) -> Tensor:
        layout, n = self.stage.layouts[v], self.stage.n
        if stop - start == n:
            return out
        if whole is None:
            whole = _empty_whole(out, layout, n)
        join_into(whole, out, layout, n, start, stop)
        return whole

    def finish(self) -> tuple[Tensor, ...]:
        return tuple(
            self.finished(v, x) for v, x in zip(self.stage.outputs, self.values, strict=True)
        )

    def finished(self, v: int, x: Any) -> Tensor:
        reduction = self.stage.reductions.get(v)
        whole: Tensor = x
        return whole / self.stage.n if reduction and reduction.weight == "mean" else whole


def _empty_whole(rows: Tensor, layout: Layout, n: int) -> Tensor:
    """Room for all rows, in the memory order of one microbatch."""
    shape = list(rows.shape)
    shape[layout.dim] = layout.factor * n
    strides = rows.stride()
    order = sorted(range(rows.ndim), key=lambda d: (-strides[d], d))
    return torch.empty_permuted(shape, order, dtype=rows.dtype, device=rows.device)
