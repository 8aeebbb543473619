"""Run a call on fake tensors and write down the aten operators it consists of."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from koila_rl.recording.private import FakeTensorMode, TorchDispatchMode

__all__ = ["LOCK", "OpRecord", "Trace", "copied", "fake_like", "fakes", "trace"]

# Fake tensor modes are not thread-safe; one mode and one lock serve the process.
LOCK = threading.RLock()


@functools.cache
def fakes() -> FakeTensorMode:
    """The one fake tensor mode; making it imports torch._dynamo, so not before it is needed."""
    return FakeTensorMode(allow_non_fake_inputs=True)


# Left by autograd's bookkeeping or queries; they compute nothing.
_SILENT = {"prim::device", "prim::layout", "aten::_local_scalar_dense_"}


@dataclass(slots=True)
class OpRecord:
    """One aten call: the operator, its arguments and results as fake tensors."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any

    @property
    def outs(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves(self.out) if isinstance(leaf, Tensor)]


@dataclass(slots=True)
class Trace:
    """The operators of one call and what the call returned."""

    records: list[OpRecord]
    out: Any


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records: list[OpRecord] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        before = self.keep_shape(args[0]) if torch.Tag.inplace_view in func.tags else None
        out = func(*args, **kwargs)
        if before is not None:
            args = (before, *args[1:])
        if func._schema.name not in _SILENT:
            self.records.append(OpRecord(func, args, kwargs, out))
        return out

    def keep_shape(self, x: Tensor) -> Tensor | None:
        """Before ``squeeze_`` and its like: earlier records go on with the shape as it was."""
        if not any(x is out for record in self.records for out in record.outs):
            return None
        before: Tensor = torch.ops.aten.alias.default(x)
        if x.requires_grad:
            before.requires_grad_()

        def old(leaf: Any) -> Any:
            return before if leaf is x else leaf

        for record in self.records:
            record.args, record.kwargs, record.out = tree_map(
                old, (record.args, record.kwargs, record.out)
            )
        return before


def trace(call: Callable[[], Any]) -> Trace:
    """Run ``call``, whose tensors are fake, and record its operators."""
    recorder = _Recorder()
    with fakes(), recorder:
        out = call()
    return Trace(recorder.records, out)


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """A failed trial on fake tensors is an answer here, not an error worth a log line."""
    import logging

    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    grad = torch.is_grad_enabled()
    try:
        # Where inference is on, some calls do not decompose, and would count as unknown.
        with torch.inference_mode(False), torch.set_grad_enabled(grad):
            yield
    finally:
        log.disabled = before


def fake_like(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
) -> Tensor:
    with fakes():
        fake = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return fake.requires_grad_() if requires_grad else fake


def copied(fake: Tensor) -> Tensor:
    with fakes(), torch.enable_grad():
        return fake.clone()
