"""`LazyTensor`: a tensor whose value is a recorded program.

Calls that touch one arrive in ``__torch_function__`` and are recorded; under an active
functorch transform they arrive in ``__torch_dispatch__``, as aten operators, and are recorded
there. What a lazy tensor does when asked for a value is the business of its `Runtime`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from koila_rl.recording.private import autograd_included, differentiating
from koila_rl.recording.steps import functional
from koila_rl.recording.values import Node

__all__ = ["HANDLERS", "RECORDER", "LazyTensor", "Runtime", "new_wrapper", "untouched"]

new_wrapper: Any = Tensor._make_wrapper_subclass

Handler = Callable[[tuple[Any, ...], dict[str, Any]], Any]
HANDLERS: dict[Any, Handler] = {}

untouched = torch._C.DisableTorchFunctionSubclass


class _Recorder:
    """What records calls; filled in by the modules that can, which need this one."""

    repeat: Callable[[Any, tuple[Any, ...], Any], Any]
    record: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


RECORDER = _Recorder()


class _Transforms(threading.local):
    """Whether ``torch.func.grad`` or its like is at work in this thread."""

    differentiate = False


_transforms = _Transforms()


class Runtime(Protocol):
    """What a lazy tensor asks of the rest of the library."""

    def value(self, node: Node) -> Tensor: ...

    def attached(self, node: Node) -> Tensor: ...

    def backward(
        self, node: Node, gradient: Any, retain_graph: Any, create_graph: bool, inputs: Any
    ) -> None: ...

    def backward_many(self, roots: Any, grads: Any, *args: Any, **options: Any) -> None: ...

    def gradients(self, outputs: Any, inputs: Any, options: Any) -> Any: ...

    def hook(self, tensor: LazyTensor, hook: Any) -> Any: ...

    def retain(self, tensor: LazyTensor) -> None: ...

    def leaf(self, node: Node, flag: bool) -> Node: ...

    def track(self, tensor: LazyTensor) -> None: ...

    def defer_check(self, tensor: LazyTensor, message: str) -> None: ...

    def checks(self) -> Sequence[tuple[Node, str]]: ...

    def eager(self, name: str) -> None: ...


class Group:
    """Lazy tensors that share storage: the base and its views, each with its chain of views."""

    __slots__ = ("base", "members")

    def __init__(self, base: Node) -> None:
        self.base = base
        self.members: list[weakref.ref[LazyTensor]] = []

    def join(self, tensor: LazyTensor, chain: tuple[Any, ...]) -> None:
        tensor._group, tensor._chain = self, chain
        self.members.append(weakref.ref(tensor))

    def live(self) -> list[LazyTensor]:
        alive = [(ref, ref()) for ref in self.members]
        self.members = [ref for ref, tensor in alive if tensor is not None]
        return [tensor for _, tensor in alive if tensor is not None]


class LazyTensor(Tensor):
    """A recorded value: shape, type and device of the whole minibatch, and no data."""

    _node: Node
    _runtime: Runtime
    _group: Group | None = None
    _chain: tuple[Any, ...] = ()

    @staticmethod
    def __new__(cls, node: Node, runtime: Runtime) -> LazyTensor:
        meta = node.meta
        self: LazyTensor = new_wrapper(
            cls, meta.shape, strides=meta.stride, dtype=meta.dtype, device=meta.device
        )
        self._node = node
        self._runtime = runtime
        return self

    def __init__(self, node: Node, runtime: Runtime) -> None:
        pass

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        known = RECORDER.repeat(func, args, kwargs)
        if known is not None:
            return known
        handler = HANDLERS.get(func)
        if handler is not None:
            return handler(args, kwargs or {})
        if torch._C._are_functorch_transforms_active():
            # Let the transform act first; its operators arrive in __torch_dispatch__.
            before = _transforms.differentiate
            _transforms.differentiate = before or differentiating()
            try:
                with untouched():
                    return func(*args, **(kwargs or {}))
            finally:
                _transforms.differentiate = before
        return RECORDER.record(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        record = RECORDER.record
        # Autograd is switched off down here; unless a transform differentiates by itself, the
        # recorded call must know what it would do.
        with nullcontext() if _transforms.differentiate else autograd_included():
            if torch.Tag.inplace_view in func.tags:
                new = record(functional(func), args, kwargs or {})
                return args[0]._become(new, func, args, kwargs or {})
            return record(func, args, kwargs or {})

    def _become(self, view: LazyTensor, func: Any, args: Any, kwargs: Any) -> LazyTensor:
        """Take the place of a view of oneself: ``transpose_`` and its like."""
        self._node = view._node
        if view._group is not None:
            view._group.join(self, view._chain)
        with untouched(), torch._C._DisableTorchDispatch():
            func(*args, **kwargs)
        return self

    def __len__(self) -> int:
        if not self._node.meta.shape:
            raise TypeError("len() of a 0-d tensor")
        return self._node.meta.shape[0]

    def __hash__(self) -> int:
        return id(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._runtime.value(self._node).clone().__reduce_ex__(protocol)

    def __copy__(self) -> LazyTensor:
        with torch.no_grad():
            same: LazyTensor = RECORDER.record(torch.Tensor.view_as, (self, self), {})
        return same

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        found = memo.get(id(self))
        if found is None:
            if self._node.meta.requires_grad and not self.is_leaf:
                raise RuntimeError(
                    "Only Tensors created explicitly by the user (graph leaves) support the "
                    "deepcopy protocol at the moment. Use x.detach() or x.clone() first."
                )
            found = memo[id(self)] = self._runtime.value(self._node).clone()
        copy: Tensor = found
        return copy
