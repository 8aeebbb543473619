"""Gathering rows of an array into a new tensor."""

from __future__ import annotations

import functools
import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from koila_rl.recording.private import dispatch_modes

__all__ = ["take"]

AnyArray: TypeAlias = "npt.NDArray[Any]"

# Smaller results are not worth the second call.
_SEEN_FROM = 4096


def take(
    array: AnyArray, index: npt.NDArray[np.integer], dtype: torch.dtype | None = None
) -> Tensor:
    """Rows ``index`` of an array as a new tensor, of ``dtype`` where NumPy only carries it."""
    shape = (*index.shape, *array.shape[1:])
    size = array.itemsize * math.prod(shape)
    if size >= _SEEN_FROM and dispatch_modes():
        # Memory that torch allocates is what a simulated device and the planner's checks see.
        taken = torch.empty(shape, dtype=_torch_dtype(array.dtype))
        array.take(index, axis=0, out=taken.numpy(), mode="clip")
    else:
        taken = torch.from_numpy(array.take(index, axis=0))
    return taken if dtype is None else taken.view(dtype)


@functools.cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
