"""Calls that bypass ``__torch_function__``, patched in one reversible place.

`torch.autograd.Function.apply` hands its tensors to C++ unseen, and a lazy tensor among them
would silently run on nothing. It is replaced for every caller, a bound ``apply`` taken at import
too. `torch.autograd.backward` asks no tensor either.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import function as function_module
from torch.autograd.graph import Node as GradientNode
from torch.nn.modules._functions import BackwardHookFunction
from torch.nn.modules._functions import SyncBatchNorm as SynchronisedNorm
from torch.utils._pytree import tree_leaves

from koila_rl.errors import UnsupportedError
from koila_rl.recording.private import FakeTensor
from koila_rl.recording.recorder import record
from koila_rl.recording.tensor import LazyTensor

__all__ = ["FunctionCall", "guard_sharded", "install", "uninstall"]

_attribute = torch.autograd.Function.__dict__["apply"]
_original_backward = torch.autograd.backward
# Up to 2.13 ``apply`` is Python, and swapping its code covers an ``apply`` bound before too.
_in_python = isinstance(_attribute, classmethod)
_original_code: Any = _attribute.__func__.__code__ if _in_python else None
_written_apply: Any


class _Replacement:
    def apply(cls, *args, **kwargs):  # type: ignore[no-untyped-def]  # noqa: N805
        _ = __class__  # type: ignore[name-defined]
        return _koila_rl_apply(cls, args, kwargs)  # type: ignore[name-defined]  # noqa: F821


if _in_python:
    _function: Any = _attribute.__func__
    _written_apply = types.FunctionType(
        _function.__code__, _function.__globals__, "apply", _function.__defaults__,
        _function.__closure__,
    )  # fmt: skip
else:

    def _written_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return _attribute.__get__(None, cls)(*args, **kwargs)


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


class DataParallelSink(FunctionCall):
    """What DistributedDataParallel puts behind a module's outputs: it hands them through.

    Its backward must be part of the backward that reaches the parameters, ``outer``, since it
    prepares the reduction there.
    """

    mixes = cheap = outer = True

    def __call__(self, module: Any, *tensors: Any, **kwargs: Any) -> Any:
        parallel = module()
        real = not any(isinstance(x, FakeTensor) for x in tensors)
        searches = parallel.find_unused_parameters and not parallel.static_graph
        synchronises = torch.is_grad_enabled() and parallel.require_backward_grad_sync
        if real and searches and synchronises:
            # At record time there was no graph in which to look for unused parameters.
            parallel.reducer.prepare_for_backward([x for x in tensors if isinstance(x, Tensor)])
        return super().__call__(module, *tensors, **kwargs)


@functools.cache
def _call_of(cls: Any) -> FunctionCall:
    return DataParallelSink(cls) if cls.__name__ == "_DDPSink" else FunctionCall(cls)


def _dispatch(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not any(isinstance(x, LazyTensor) for x in (*args, *kwargs.values())):
        return _written_apply(cls, *args, **kwargs)
    if cls is BackwardHookFunction:
        return _module_hook_point(args)
    if cls.__name__ == "CheckpointFunction":
        # Recomputing is what a microbatch does anyway: record the function itself.
        run, _preserve, *rest = args
        return run(*rest)
    if cls is SynchronisedNorm:
        raise UnsupportedError(
            "SyncBatchNorm adds up statistics of all processes inside its forward, and no process "
            "waits for the microbatches of another. Use BatchNorm, whose statistics are those of "
            "a process's own minibatch, or GroupNorm, which splits; or compute this layer's input "
            "first, with koila_rl.materialize(x)"
        )
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


def _refuse_bound_before(cls: Any) -> None:
    """An ``apply`` in C++ that was bound before the patch would meet lazy tensors unseen."""
    forward = cls.__dict__["forward"]
    written = getattr(forward, "__func__", forward)
    if hasattr(written, "_koila_rl_original"):
        return

    @functools.wraps(written)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, LazyTensor) for x in (*args, *kwargs.values())):
            raise UnsupportedError(
                f"{cls.__name__}.apply was bound before koila_rl was imported, so it cannot be "
                f"recorded; import koila_rl first, or call {cls.__name__}.apply(...) by name"
            )
        return written(*args, **kwargs)

    guarded._koila_rl_original = written  # type: ignore[attr-defined]
    cls.forward = staticmethod(guarded)


# Where the forward of a module sharded by FSDP2 begins.
_SHARDED = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


def guard_sharded() -> None:
    """Refuse lazy arguments of sharded modules by name, once there may be such modules."""
    module: Any = sys.modules.get(_SHARDED)
    if module is None:
        return
    original = module.FSDPParamGroup.pre_forward
    if hasattr(original, "_koila_rl_original"):
        return

    @functools.wraps(original)
    def pre_forward(group: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, LazyTensor) for x in tree_leaves((args, kwargs))):
            raise UnsupportedError(
                "FSDP2 frees the gathered parameters after each forward, so calls that are "
                "recorded with them cannot run later. koila_rl.opaque(module) runs the module at "
                "once, on the whole minibatch; DistributedDataParallel splits"
            )
        return original(group, *args, **kwargs)

    pre_forward._koila_rl_original = original  # type: ignore[attr-defined]
    module.FSDPParamGroup.pre_forward = pre_forward


def _known_functions(cls: Any) -> list[Any]:
    """Users' functions that exist already."""
    found = []
    for child in cls.__subclasses__():
        found += _known_functions(child)
        if "forward" in child.__dict__ and not child.__module__.startswith(("torch.", "koila_rl.")):
            found.append(child)
    return found


def install() -> None:
    """Patch the entry points; harmless if done already."""
    function: Any = torch.autograd.Function
    if _in_python:
        function_module._koila_rl_apply = _dispatch  # type: ignore[attr-defined]
        _function.__code__ = _Replacement.apply.__code__
    else:
        function.apply = classmethod(lambda cls, *args, **kwargs: _dispatch(cls, args, kwargs))
        for known in _known_functions(function):
            _refuse_bound_before(known)
    torch.autograd.backward = _backward


def uninstall() -> None:
    """Put PyTorch's own code back."""
    function: Any = torch.autograd.Function
    if _in_python:
        _function.__code__ = _original_code
    else:
        function.apply = _attribute
        for known in _known_functions(function):
            original = getattr(known.forward, "_koila_rl_original", None)
            if original is not None:
                known.forward = staticmethod(original)
    torch.autograd.backward = _original_backward
    if _SHARDED in sys.modules:
        group: Any = sys.modules[_SHARDED].FSDPParamGroup
        group.pre_forward = getattr(group.pre_forward, "_koila_rl_original", group.pre_forward)
