"""Workspaces that recurrent kernels return: fake tensors make them empty, real ones are large.

oneDNN's recurrent layers hand a workspace from forward to backward as a result. Its size is the
kernel's own business, so the kernel is asked, once for each shape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from koila_rl.recording.private import FakeTensor, TorchDispatchMode

__all__ = ["RecurrentWorkspace"]

_LAYER: Any = getattr(torch.ops.aten, "mkldnn_rnn_layer", None)
_SIZES: dict[Any, int] = {}


class RecurrentWorkspace(TorchDispatchMode):
    """Give fake recurrent layers a workspace of the size that the real kernel returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if _LAYER is None or func is not _LAYER.default or not isinstance(args[0], FakeTensor):
            return out
        *results, workspace = out
        size = _workspace_bytes(args)
        if not size:
            return out
        return (*results, workspace.new_empty(size // max(workspace.element_size(), 1)))


def _workspace_bytes(args: tuple[Any, ...]) -> int:
    key = tuple(tuple(x.shape) if isinstance(x, Tensor) else str(x) for x in args)
    size = _SIZES.get(key)
    if size is None:
        # Without gradient mode the kernel keeps nothing for a backward.
        with torch._C._DisableTorchDispatch(), torch.enable_grad():
            real = [
                torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, Tensor) else x for x in args
            ]
            workspace = _LAYER.default(*real)[3]
            size = _SIZES[key] = 0 if workspace is None else int(workspace.nbytes)
    return size
