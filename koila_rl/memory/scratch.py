"""Scratch memory of CPU kernels: what a call takes beyond its results while it runs.

No storage shows it, so kernels are asked: a call like the one at hand runs once under the
allocator's own record, with few samples, and the figures are kept for the process. Only kernels
that take much are asked; casts are known without asking.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from koila_rl.memory.storages import tensors_in
from koila_rl.recording.private import allocator_record, profiler_enabled

__all__ = ["KernelScratch", "scratch_bytes"]

aten: Any = torch.ops.aten

_LAYER: Any = getattr(aten, "mkldnn_rnn_layer", None)
_LAYER_BACKWARD: Any = getattr(aten, "mkldnn_rnn_layer_backward", None)

# Where samples lie in the arguments: argument and dimension.
_SAMPLES: dict[Any, tuple[tuple[int, int], ...]] = {
    aten.convolution.default: ((0, 0),),
    aten.convolution_backward.default: ((0, 0), (1, 0)),
    aten._scaled_dot_product_flash_attention_for_cpu.default: ((0, 0), (1, 0), (2, 0)),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: tuple(
        (k, 0) for k in range(6)
    ),
    aten.gelu_backward.default: ((0, 0), (1, 0)),
}
if _LAYER is not None:
    _SAMPLES[_LAYER.default] = ((0, 1), (5, 0), (6, 0))
    _SAMPLES[_LAYER_BACKWARD.default] = (
        (0, 1), (5, 0), (6, 0), (7, 1), (8, 0), (9, 0), (10, 1), (11, 0), (12, 0),
    )  # fmt: skip

MOST_SAMPLES = 16
# A call is asked with fewer samples where its arguments are larger than this.
MOST_BYTES = 32 << 20

# By call without its samples, and number of samples.
_MEASURED: dict[Any, dict[int, int]] = {}


class KernelScratch:
    """Scratch memory of the calls that a ``StorageTracker`` sees on fake CPU tensors."""

    def of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
        """Bytes that the call takes beyond its results; zero for kernels that are not asked."""
        places = _SAMPLES.get(func)
        if places is None:
            return _cast_bytes(func, args, out)
        first = args[0]
        if not isinstance(first, Tensor) or first.device.type != "cpu":
            return 0
        if kwargs or profiler_enabled():
            return 0
        count = first.shape[places[0][1]]
        if count == 0:
            return 0
        places = tuple((k, dim) for k, dim in places if isinstance(args[k], Tensor))
        known = _MEASURED.setdefault(_key(func, args, places), {})
        sizes = _sizes(count, args)
        for size in sizes:
            if size not in known:
                known[size] = _measure(func, args, places, size)
        return _on_the_line(count, [(size, known[size]) for size in sizes])


def scratch_bytes(call: Callable[[], Any]) -> int:
    """Most bytes that the CPU's allocator gave out in ``call`` beyond what it returns."""
    kept: list[Any] = []
    total = peak = 0
    for _, nbytes in allocator_record(lambda: kept.append(call())):
        total += nbytes
        peak = max(peak, total)
    return peak - total


def _key(func: Any, args: tuple[Any, ...], places: tuple[tuple[int, int], ...]) -> Any:
    """The call without its number of samples."""
    sampled = dict(places)
    form: list[Any] = [func, torch.get_num_threads()]
    for k, x in enumerate(args):
        if isinstance(x, Tensor):
            shape = [-1 if sampled.get(k) == d else size for d, size in enumerate(x.shape)]
            form.append((tuple(shape), x.dtype, _order(x)))
        else:
            form.append(repr(x))
    return tuple(form)


def _order(x: Tensor) -> tuple[int, ...]:
    """Dimensions from the outermost in memory to the innermost."""
    return tuple(sorted(range(x.ndim), key=lambda d: (-x.stride()[d], d)))


def _sizes(count: int, args: tuple[Any, ...]) -> tuple[int, ...]:
    """The numbers of samples to ask with: the call's own if it is small, else two to extend."""
    nbytes = sum(x.numel() * x.element_size() for x in tensors_in(*args))
    most = MOST_SAMPLES
    while most > 4 and nbytes * most > MOST_BYTES * count:
        most //= 2
    return (count,) if count <= most else (most // 2, most)


def _on_the_line(count: int, known: list[tuple[int, int]]) -> int:
    (few, low), (many, high) = known[0], known[-1]
    if few == many:
        return low
    return max(0, round(high + (high - low) / (many - few) * (count - many)))


def _measure(
    func: Any, args: tuple[Any, ...], places: tuple[tuple[int, int], ...], size: int
) -> int:
    sampled = dict(places)
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        real = [
            _zeros(x, sampled.get(k), size) if isinstance(x, Tensor) else x
            for k, x in enumerate(args)
        ]
        if _LAYER is not None and func is _LAYER_BACKWARD.default:
            real[-1] = _workspace(real)
        if _LAYER is None or func is not _LAYER.default:
            func(*real)  # libraries set themselves up
            return scratch_bytes(lambda: func(*real))
        with torch.enable_grad():
            return scratch_bytes(lambda: func(*real))


def _zeros(x: Tensor, dim: int | None, size: int) -> Tensor:
    shape = list(x.shape)
    if dim is not None:
        shape[dim] = size
    order = _order(x)
    return torch.empty_permuted(shape, order, dtype=x.dtype).zero_()


def _workspace(args: list[Any]) -> Tensor:
    """What the forward of a recurrent layer hands to its backward."""
    (reverse, mode, hidden, layers, biases, train, bidirectional, sizes, first) = args[13:22]
    with torch.enable_grad():
        out: tuple[Tensor, ...] = _LAYER.default(
            *args[:7], reverse, sizes, mode, hidden, layers, biases, bidirectional, first, train
        )
    return out[3]


def _cast_bytes(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """A pointwise kernel copies operands of other types than it computes in."""
    if not isinstance(out, Tensor) or torch.Tag.pointwise not in getattr(func, "tags", ()):
        return 0
    operands = [x for x in args if isinstance(x, Tensor) and x.ndim]
    if len({x.dtype for x in (*operands, out)}) < 2 or "where" in func._schema.name:
        return 0
    kind = out.dtype
    if kind is torch.bool:
        kind = operands[0].dtype
        for x in operands[1:]:
            kind = torch.promote_types(kind, x.dtype)
    return sum(math.prod(x.shape) * kind.itemsize for x in operands if x.dtype != kind)
