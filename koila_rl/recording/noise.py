"""Noise whose numbers depend on a shape alone is drawn when it is asked for.

So it is eager's noise, from the same place in the generator's sequence, whatever runs when and in
whatever microbatches. The whole minibatch's noise is then in memory; where that would be much,
the call is recorded and draws at the run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import is_tensor_like

from koila_rl.recording.recorder import record
from koila_rl.recording.tensor import HANDLERS, LazyTensor, untouched

__all__: list[str] = []

# Bytes a sample that whole noise may take.
_LIMIT = 1024


def _is_small(like: Any, others: Any) -> bool:
    if not isinstance(like, LazyTensor) or any(map(is_tensor_like, others)):
        return False
    meta = like._node.meta
    return bool(meta.nbytes <= _LIMIT * max(meta.n, 1))


def _blank(like: LazyTensor) -> Tensor:
    meta = like._node.meta
    return torch.empty(meta.shape, dtype=meta.dtype, device=meta.device)


def _in_place(function: Any) -> Any:
    def fill(args: Any, kwargs: Any) -> Any:
        target = args[0]
        if not _is_small(target, (*args[1:], *kwargs.values())):
            return record(function, args, kwargs)
        with untouched(), torch.no_grad():
            noise = function(_blank(target), *args[1:], **kwargs)
        return record(Tensor.copy_, (target, noise), {})

    return fill


def _like(function: Any) -> Any:
    def draw(args: Any, kwargs: Any) -> Any:
        if not _is_small(args[0], (*args[1:], *kwargs.values())):
            return record(function, args, kwargs)
        with untouched():
            return function(_blank(args[0]), *args[1:], **kwargs)

    return draw


for _name in ("normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "geometric_",
              "bernoulli_", "random_"):  # fmt: skip
    HANDLERS[getattr(Tensor, _name)] = _in_place(getattr(Tensor, _name))
for _function in (torch.rand_like, torch.randn_like, torch.randint_like):
    HANDLERS[_function] = _like(_function)
