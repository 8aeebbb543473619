"""Noise whose numbers depend on a shape alone is drawn when it is asked for.

So it is eager's noise, from the same place in the generator's sequence, whatever runs when and in
whatever microbatches. The whole minibatch's noise is then in memory; where that would be much,
the call is recorded and draws at the run.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical
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


def _multinomial(args: Any, kwargs: Any) -> Any:
    """One draw a row is the argmax of the probabilities over exponential noise, as in PyTorch."""
    options = dict(zip(("input", "num_samples", "replacement"), args, strict=False)) | kwargs
    probs = options["input"]
    if (
        options.get("num_samples") != 1
        or options.get("out") is not None
        or not _is_small(probs, ())
    ):
        return record(torch.multinomial, args, kwargs)
    with untouched(), torch.no_grad():
        noise = _blank(probs).exponential_(1, generator=options.get("generator"))
    detached = probs.detach()
    if not _is_validated(sys._getframe(1)):
        valid = (detached >= 0) & (detached < float("inf"))
        message = "probability tensor contains either `inf`, `nan` or element < 0"
        probs._runtime.defer_check(valid, message)
    return record(torch.argmax, (detached / noise, -1, True), {})


def _is_validated(frame: Any) -> bool:
    """Whether the call comes from a distribution that checks what it is made of."""
    for _ in range(8):
        if frame is None:
            break
        if frame.f_code is Categorical.sample.__code__:
            return bool(frame.f_locals["self"]._validate_args)
        frame = frame.f_back
    return False


def _normal(args: Any, kwargs: Any) -> Any:
    """Standard noise, stretched and moved, as PyTorch's own kernel does it."""
    options = dict(zip(("mean", "std"), args, strict=False)) | kwargs
    mean, std = options.get("mean"), options.get("std")
    alike = isinstance(mean, Tensor) and isinstance(std, Tensor) and mean.shape == std.shape
    lazy = next((x for x in (mean, std) if isinstance(x, LazyTensor)), None)
    if not alike or lazy is None or len(args) > 2 or options.get("out") is not None:
        return record(torch.normal, args, kwargs)
    if not _is_small(lazy, ()):
        return record(torch.normal, args, kwargs)
    with untouched(), torch.no_grad():
        noise = _blank(lazy).normal_(generator=options.get("generator"))
    return (noise * std.detach()) + mean.detach()


HANDLERS[torch.multinomial] = HANDLERS[Tensor.multinomial] = _multinomial
HANDLERS[torch.normal] = _normal
for _name in ("normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "geometric_",
              "bernoulli_", "random_"):  # fmt: skip
    HANDLERS[getattr(Tensor, _name)] = _in_place(getattr(Tensor, _name))
for _function in (torch.rand_like, torch.randn_like, torch.randint_like):
    HANDLERS[_function] = _like(_function)
