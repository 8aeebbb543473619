"""Calls that bypass ``__torch_function__``, patched in one reversible place.

`torch.autograd.Function.apply` hands its tensors to C++ unseen, and a lazy tensor among them
would silently run on nothing. Its code object is swapped, so that every caller is covered, a
bound ``apply`` taken at import too. `torch.autograd.backward` asks no tensor either.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import function as function_module
from torch.autograd.graph import Node as GradientNode
from torch.nn.modules._functions import BackwardHookFunction

from koila_rl.recording.private import FakeTensor
from koila_rl.recording.recorder import record
from koila_rl.recording.tensor import LazyTensor

__all__ = ["FunctionCall", "install", "uninstall"]

_apply = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
_written_apply: Any = types.FunctionType(
    _apply.__code__, _apply.__globals__, "apply", _apply.__defaults__, _apply.__closure__
)
_original_code = _apply.__code__
_original_backward = torch.autograd.backward


class _Replacement:
    def apply(cls, *args, **kwargs):  # type: ignore[no-untyped-def]  # noqa: N805
        _ = __class__  # type: ignore[name-defined]
        return _koila_rl_apply(cls, args, kwargs)  # type: ignore[name-defined]  # noqa: F821


class FunctionCall:
    """A user's `torch.autograd.Function` as a recordable call.

    ``backward_too`` asks the analysis to look at the backward as well: one that mixes samples,
    or divides by the size it sees, runs on the whole minibatch.
    """

    backward_too = True

    def __init__(self, cls: Any) -> None:
        self.cls = cls
        self.__name__ = cls.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _written_apply(self.cls, *args, **kwargs)


@functools.cache
def _call_of(cls: Any) -> FunctionCall:
    return FunctionCall(cls)


def _dispatch(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not any(isinstance(x, LazyTensor) for x in (*args, *kwargs.values())):
        return _written_apply(cls, *args, **kwargs)
    if cls is BackwardHookFunction:
        return _module_hook_point(args)
    if cls.__name__ == "CheckpointFunction":
        # Recomputing is what a microbatch does anyway: record the function itself.
        run, _preserve, *rest = args
        return run(*rest)
    return record(_call_of(cls), args, kwargs)


class HookPoint:
    """Where a module's full backward hooks meet the gradient of the whole minibatch."""

    mixes = True
    # Its operands are not computed on, only handed through.
    cheap = True

    def __init__(self) -> None:
        self.hooks: list[tuple[str, Callable[..., Any]]] = []
        self.__name__ = "BackwardHookFunction"

    def name(self) -> str:
        return "BackwardHookFunctionBackward"

    def register_hook(self, hook: Callable[..., Any]) -> None:
        self.hooks.append(("register_hook", hook))

    def register_prehook(self, hook: Callable[..., Any]) -> None:
        self.hooks.append(("register_prehook", hook))

    def __call__(self, *tensors: Tensor) -> Any:
        outs = _written_apply(BackwardHookFunction, *tensors)
        node: GradientNode | None = next((x.grad_fn for x in outs if x.grad_fn is not None), None)
        if node is not None and not isinstance(tensors[0], FakeTensor):
            for kind, hook in self.hooks:
                getattr(node, kind)(hook)
        return outs


def _module_hook_point(args: tuple[Any, ...]) -> Any:
    point = HookPoint()
    outs = record(point, args, {})
    for x in outs:
        if isinstance(x, LazyTensor):
            x._recorded_function = point  # type: ignore[attr-defined]
    return outs


def _backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`torch.autograd.backward` with recorded values among the roots."""
    roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    lazy = next((x for x in roots if isinstance(x, LazyTensor)), None)
    if lazy is None:
        return _original_backward(tensors, grad_tensors, *args, **kwargs)
    grads = [grad_tensors] if isinstance(grad_tensors, Tensor) else grad_tensors
    return lazy._runtime.backward_many(roots, grads, *args, **kwargs)


def install() -> None:
    """Patch the entry points; harmless if done already."""
    function_module._koila_rl_apply = _dispatch  # type: ignore[attr-defined]
    _apply.__code__ = _Replacement.apply.__code__
    torch.autograd.backward = _backward


def uninstall() -> None:
    """Put PyTorch's own code back."""
    _apply.__code__ = _original_code
    torch.autograd.backward = _original_backward
