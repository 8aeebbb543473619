"""Results of real kernels that fake tensors show too small.

Found by running PyTorch's operator database and modules beside their fakes and comparing the
bytes of every result: these are all. A loss over all elements keeps the memory of the loss of
each (its result was shrunk, its storage was not), bags of tokens keep one offset more than they
show, and recurrent layers of oneDNN return a workspace for the backward whose size is the
kernel's own business, so the kernel is asked, once for each shape.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from koila_rl.memory.storages import tensors_in

__all__ = ["real_results"]

aten: Any = torch.ops.aten

# With a reduction (the second last argument or a default), on every device.
_LOSSES = {
    aten.mse_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
}
_REDUCTION_MEAN = 1

_LAYER: Any = getattr(aten, "mkldnn_rnn_layer", None)
_LAYER_BACKWARD: Any = getattr(aten, "mkldnn_rnn_layer_backward", None)
_BAGS = (aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
_WORKSPACES: dict[Any, int] = {}


def real_results(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    """The results of a fake call with the storages that the real kernel's results have."""
    position = _LOSSES.get(func)
    if position is not None:
        return _as_loss(out, args, kwargs, position)
    if func in _BAGS and out[1].numel():
        return (out[0], _with_storage(out[1], out[1].numel() + 1), *out[2:])
    if _LAYER is not None and func is _LAYER.default:
        return _as_recurrent_layer(out, args)
    if _LAYER is not None and func is _LAYER_BACKWARD.default:
        return (*out[:4], torch.empty_like(out[4]), *out[5:])
    return out


def _with_storage(x: Tensor, count: int) -> Tensor:
    """A tensor like ``x`` at the start of a storage of ``count`` elements."""
    return x.new_empty(count).as_strided(x.shape, x.stride())


def _as_loss(out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], position: int) -> Tensor:
    reduction = kwargs.get("reduction", args[position] if len(args) > position else _REDUCTION_MEAN)
    if reduction == 0:
        return out
    shape = torch.broadcast_shapes(*(x.shape for x in tensors_in(*args[:2])))
    return _with_storage(out, max(1, math.prod(shape)))


def _as_recurrent_layer(out: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, ...]:
    *results, workspace = out
    size = _workspace_bytes(args) if torch.is_grad_enabled() else 0
    if not size:
        return out
    return (*results, workspace.new_empty(size // max(workspace.element_size(), 1)))


def _workspace_bytes(args: tuple[Any, ...]) -> int:
    key = tuple(tuple(x.shape) if isinstance(x, Tensor) else str(x) for x in args)
    size = _WORKSPACES.get(key)
    if size is None:
        # Without gradient mode the kernel keeps nothing for a backward.
        with torch._C._DisableTorchDispatch(), torch.enable_grad():
            real = [
                torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, Tensor) else x for x in args
            ]
            workspace = _LAYER.default(*real)[3]
            size = _WORKSPACES[key] = 0 if workspace is None else int(workspace.nbytes)
    return size
