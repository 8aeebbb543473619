"""What a program's inputs are when it runs: tensors, or rows that are read when they are needed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from koila_rl.engine.program import Bound
from koila_rl.recording.values import Captured, Node, Source

__all__ = ["RowSource", "real_inputs"]


class RowSource:
    """Rows that are read from storage when a microbatch runs, or a little before."""

    def __init__(self, node: Node) -> None:
        source = node.call
        assert isinstance(source, Source)
        assert source.rows is not None
        self.rows = source.rows
        self.prefetch: Any = source.rows.prefetch
        self.ahead: Any = None
        self.n, self.layout = node.meta.n, node.meta.layout

    def slice(self, start: int, stop: int) -> Tensor:
        ahead, self.ahead = self.ahead, None
        return self.rows.read(start, stop, ahead)

    def fetch(self, start: int, stop: int) -> None:
        """Begin to read the rows that `slice` will be asked for next."""
        self.ahead = self.prefetch(start, stop)

    def drop(self) -> None:
        """Let rows go that were read ahead and will not be asked for."""
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            ahead.drop()


def real_inputs(bound: Bound) -> list[Any]:
    """The tensors behind a program's inputs; `RowSource` for rows that are read on demand."""
    return [_real(item) for item in bound.tensors]


def _real(item: Any) -> Any:
    if isinstance(item, Captured):
        return item.as_recorded()
    if item.attached is not None:
        return item.attached
    source = item.call
    assert isinstance(source, Source)
    if source.data is None:
        return RowSource(item)
    frozen = source.data.requires_grad and not item.meta.requires_grad
    return source.data.detach() if frozen else source.data
