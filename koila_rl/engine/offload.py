"""Saved tensors kept in host memory between forward and backward: the last resort.

What a microbatch of one sample saves for its backward is copied to the host as it is saved and
back when the backward needs it, so little more is live on the device than one operator's
arguments and results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from koila_rl.recording.private import without_modes

__all__ = ["offloaded"]


def offloaded() -> Any:
    """Context for a forward: what it saves lies on the host until the backward."""
    return torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)


def _pack(x: Tensor) -> Any:
    if x.is_leaf and x.requires_grad:
        # Parameters are there anyway.
        return x
    # The host is not the device that is watched, also where both are the CPU's memory.
    with without_modes(), torch.no_grad():
        if x.device.type == "cpu":
            return x.device, x.clone()
        host = torch.empty_like(x, device="cpu", pin_memory=x.device.type == "cuda")
        return x.device, host.copy_(x)


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    device, host = packed
    back: Tensor = host.clone() if device.type == "cpu" else host.to(device, non_blocking=True)
    return back
