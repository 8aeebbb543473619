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

from koila_rl.recording.propagate import EFFECTS
from koila_rl.recording.recorder import record
from koila_rl.recording.tensor import LazyTensor

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
        return record(torch.batch_norm, (x, weight, bias, mean, var, False, momentum, eps,
                                         torch.backends.cudnn.enabled), {})  # fmt: skip
    if x.numel() == x.shape[1]:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size "
                         f"{tuple(x.shape)}")  # fmt: skip
    if isinstance(mean, LazyTensor) or isinstance(var, LazyTensor):
        return _with_lazy_statistics(x, mean, var, weight, bias, momentum, eps)
    return record(TRAINING, (x, mean, var, weight, bias, momentum, eps), {})


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
        momentum: float, eps: float,
    ) -> Tensor:  # fmt: skip
        dims = [d for d in range(x.ndim) if d != 1]
        shape = [1] * x.ndim
        shape[1] = x.shape[1]
        count = x.numel() // x.shape[1]
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        mean = wide.mean(dims, keepdim=True)
        deviation = wide - mean
        variance = (deviation * deviation).mean(dims, keepdim=True)
        if running_mean is not None:
            update_statistics(mean, variance, running_mean, running_var, momentum, count)
        out = deviation * torch.rsqrt(variance + eps)
        if weight is not None:
            out = out * weight.view(shape)
        if bias is not None:
            out = out + bias.view(shape)
        return out.to(x.dtype)

    def whole(
        self, x: Tensor, running_mean: Any, running_var: Any, weight: Any, bias: Any,
        momentum: float, eps: float, *, first: bool,
    ) -> Tensor:  # fmt: skip
        if not first and running_mean is not None:
            running_mean, running_var = running_mean.clone(), running_var.clone()
        return F.batch_norm(x, running_mean, running_var, weight, bias, True, momentum, eps)


TRAINING = TrainingBatchNorm()

_LIBRARY = torch.library.Library("koila_rl", "DEF")
_LIBRARY.define(
    "update_statistics(Tensor mean, Tensor variance, Tensor running_mean, Tensor running_var, "
    "float momentum, float correction) -> Tensor"
)


def _update(
    mean: Tensor, variance: Tensor, running_mean: Tensor, running_var: Tensor,
    momentum: float, correction: float, first: bool,
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
    momentum: float, count: int,
) -> None:  # fmt: skip
    """Mark the place of the update; the operator itself does nothing."""
    correction = count / max(count - 1, 1)
    _OPERATOR(mean.detach(), variance.detach(), running_mean, running_var, momentum, correction)
