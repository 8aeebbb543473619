"""What a plan depends on beside the program: the form of its inputs, and what it writes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from koila_rl.engine.program import Bound
from koila_rl.recording.values import Call, Captured, Meta, Node, Source

__all__ = ["NO_WRITES", "InputForm", "Writes", "input_forms", "writes_of", "written_buffers"]


@dataclass(frozen=True, slots=True)
class InputForm:
    """What the estimate must know of one input."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    # A leaf whose gradient exists takes no new memory for it.
    has_grad: bool
    # Rows are read on demand along this dimension; None: the tensor is resident.
    rows: int | None
    # Bytes of a row before it is transformed, 0 where it is not.
    raw_bytes: int = 0
    # Whether the rows of the next microbatch are read while one computes.
    early: bool = False


def input_forms(bound: Bound) -> tuple[InputForm, ...]:
    return tuple(_form(item) for item in bound.tensors)


def _form(item: Any) -> InputForm:
    if isinstance(item, Captured):
        return _tensor_form(item.as_recorded())
    assert isinstance(item, Node)
    if item.attached is not None:
        return _tensor_form(item.attached)
    source = item.call
    assert isinstance(source, Source)
    if source.data is not None:
        return _tensor_form(source.data)
    meta: Meta = item.meta
    rows = source.rows
    assert rows is not None
    return InputForm(
        meta.shape, meta.stride, meta.dtype, meta.device, False, False, rows.dim, rows.raw_bytes,
        rows.prefetch is not None,
    )  # fmt: skip


def _tensor_form(x: Tensor) -> InputForm:
    has_grad = x.is_leaf and x.requires_grad and x.grad is not None
    return InputForm(
        tuple(x.shape), tuple(x.stride()), x.dtype, x.device, x.requires_grad, has_grad, None
    )


@dataclass(frozen=True, slots=True)
class Writes:
    """What a program writes to: the calls that have done so, the inputs kept for a new start."""

    done: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()


NO_WRITES = Writes()


def written_buffers(call: Call) -> list[Tensor]:
    """The buffers that a call may write to, which a new start must find unchanged."""
    return [x.tensor for x in call.inputs if isinstance(x, Captured) and not x.tensor.requires_grad]


def writes_of(bound: Bound) -> Writes:
    """Of a program with effects, before it runs."""
    done, kept = [], set()
    for number, call in enumerate(bound.calls):
        if not call.info.effect or call.state is None:
            continue
        if call.state.done:
            done.append(number)
        else:
            kept |= {id(x) for x in written_buffers(call)}
    return Writes(
        tuple(done),
        tuple(
            k
            for k, x in enumerate(bound.tensors)
            if isinstance(x, Captured) and id(x.tensor) in kept
        ),
    )
