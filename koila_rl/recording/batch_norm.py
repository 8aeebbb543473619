"""Batch normalisation in training: sums over the minibatch, and statistics updated once.

On the whole minibatch PyTorch's own kernel runs. Under a split the mean is one sum and the
variance, of deviations from the mean, another; both are exact for the minibatch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from koila_rl.recording import deferred
from koila_rl.recording.propagate import EFFECTS
from koila_rl.recording.recorder import record, record_plainly
from koila_rl.recording.tensor import LazyTensor
from koila_rl.recording.values import Call

__all__ = ["record_batch_norm"]


def _settings(
    input: Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> tuple[Any, ...]:  # fmt: skip
    return input, running_mean, running_var, weight, bias, training, momentum, eps


def record_batch_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record `torch.nn.functional.batch_norm`."""
    x, mean, var, weight, bias, training, momentum, eps = _settings(*args, **kwargs)
    if not training:
        if isinstance(x, LazyTensor):
            # A later update in training must not reach this call, whichever runs first.
            mean, var = (_kept(s, x) for s in (mean, var))
        return record(torch.batch_norm, (x, weight, bias, mean, var, False, momentum, eps,
                                         torch.backends.cudnn.enabled), {})  # fmt: skip
    if x.numel() == x.shape[1]:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size "
                         f"{tuple(x.shape)}")  # fmt: skip
    if isinstance(mean, LazyTensor) or isinstance(var, LazyTensor):
        return _with_lazy_statistics(x, mean, var, weight, bias, momentum, eps)
    if mean is None:
        return record_plainly(TRAINING, (x, None, None, weight, bias, momentum, eps, None), {})[0]
    # Updates of the same statistics keep their order.
    before = deferred.pending_write(mean, x._runtime) if isinstance(x, LazyTensor) else None
    out, written = record_plainly(TRAINING, (x, mean, var, weight, bias, momentum, eps, before), {})
    if isinstance(written, LazyTensor) and isinstance(written._node.call, Call):
        deferred.announce_write(mean, written._node.call)
        deferred.announce_write(var, written._node.call)
        if not torch.is_grad_enabled():
            # Statistics alone are wanted, it may be: no backward will run the program.
            written._runtime.value(written._node)
    return out


def _kept(statistics: Any, x: LazyTensor) -> Any:
    """Running statistics as they are now, or a read that waits for a pending update."""
    if not isinstance(statistics, Tensor) or isinstance(statistics, LazyTensor):
        return statistics
    waiting = deferred.pending_write(statistics, x._runtime) is not None
    return statistics if waiting else statistics.clone()


def _with_lazy_statistics(
    x: Any, mean: Any, var: Any, weight: Any, bias: Any, momentum: float, eps: float
) -> Any:
    """Statistics that are recorded values themselves: the call runs at once."""

    def real(value: Any) -> Any:
        return value._runtime.attached(value._node) if isinstance(value, LazyTensor) else value

    lazy = mean if isinstance(mean, LazyTensor) else var
    lazy._runtime.eager("batch_norm")
    new_mean, new_var = (None if s is None else real(s).detach().clone() for s in (mean, var))
    out = F.batch_norm(real(x), new_mean, new_var, real(weight), real(bias), True, momentum, eps)
    with torch.no_grad():
        mean.copy_(new_mean)
        var.copy_(new_var)
    return out


class TrainingBatchNorm:
    """The layer as sums and pointwise calls; ``whole`` is the kernel."""

    __name__ = "batch_norm"

    def __call__(
        self, x: Tensor, running_mean: Any, running_var: Any, weight: Any, bias: Any,
        momentum: float, eps: float, before: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        dims = [d for d in range(x.ndim) if d != 1]
        shape = [1] * x.ndim
        shape[1] = x.shape[1]
        count = x.numel() // x.shape[1]
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        mean = wide.mean(dims, keepdim=True)
        deviation = wide - mean
        variance = (deviation * deviation).mean(dims, keepdim=True)
        if running_mean is not None:
            written = update_statistics(
                mean, variance, running_mean, running_var, momentum, count, before
            )
        else:
            written = mean.new_zeros(())
        out = deviation * torch.rsqrt(variance + eps)
        if weight is not None:
            out = out * weight.view(shape)
        if bias is not None:
            out = out + bias.view(shape)
        return out.to(x.dtype), written

    def whole(
        self, x: Tensor, running_mean: Any, running_var: Any, weight: Any, bias: Any,
        momentum: float, eps: float, before: Any, *, first: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if not first and running_mean is not None:
            running_mean, running_var = running_mean.clone(), running_var.clone()
        out = F.batch_norm(x, running_mean, running_var, weight, bias, True, momentum, eps)
        return out, x.new_zeros(())


TRAINING = TrainingBatchNorm()

_LIBRARY = torch.library.Library("koila_rl", "DEF")
_LIBRARY.define(
    "update_statistics(Tensor mean, Tensor variance, Tensor running_mean, Tensor running_var, "
    "float momentum, float correction, Tensor? before) -> Tensor"
)


def _update(
    mean: Tensor, variance: Tensor, running_mean: Tensor, running_var: Tensor,
    momentum: float, correction: float, before: Any, first: bool,
) -> Tensor:  # fmt: skip
    if first:
        with torch.no_grad():
            running_mean.lerp_(mean.reshape(-1).to(running_mean.dtype), momentum)
            unbiased = variance.reshape(-1).to(running_var.dtype) * correction
            running_var.lerp_(unbiased, momentum)
    return mean.new_zeros(())


_LIBRARY.impl("update_statistics", lambda mean, *_: mean.new_zeros(()), "CompositeExplicitAutograd")
_OPERATOR = torch.ops.koila_rl.update_statistics.default


class UpdateStatistics:
    """The write to the running statistics, which the engine runs once."""

    effect = True

    def __call__(self, *args: Any, first: bool) -> Tensor:
        write: Callable[..., Tensor] = _update
        return write(*args, first)


EFFECTS[_OPERATOR] = UpdateStatistics()


def update_statistics(
    mean: Tensor, variance: Tensor, running_mean: Tensor, running_var: Tensor,
    momentum: float, count: int, before: Any,
) -> Tensor:  # fmt: skip
    """Mark the place of the update; the operator itself does nothing."""
    correction = count / max(count - 1, 1)
    token: Tensor = _OPERATOR(
        mean.detach(), variance.detach(), running_mean, running_var, momentum, correction, before
    )
    return token
