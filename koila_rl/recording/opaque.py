"""`opaque`: a function or module that is recorded as one call, whatever it does inside.

Compiled modules and kernels of one's own are called with real tensors when a microbatch runs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from koila_rl.errors import ConfigurationError, StaleValueError, UnsupportedError
from koila_rl.recording.private import FakeTensor
from koila_rl.recording.recorder import record
from koila_rl.recording.tensor import LazyTensor

__all__ = ["OpaqueModule", "opaque"]

M = TypeVar("M", bound=nn.Module)
F = TypeVar("F", bound=Callable[..., Any])


@overload
def opaque(function: M) -> OpaqueModule: ...
@overload
def opaque(function: F) -> F: ...


def opaque(function: Any) -> Any:
    """Record a call of ``function`` as one call, instead of the calls it makes inside.

    For what is fast only as a whole, as a module from `torch.compile`, and for what lazy tensors
    cannot go through, as a kernel of one's own. The function gets real tensors: of a microbatch,
    if its analysis on fake tensors shows that it keeps samples apart (backward included), else
    of the whole minibatch. In the latter case ``Plan.unsplit`` names it.

    Args:
        function: a module, a bound method of one, or a function of its tensor arguments.
            Parameters and buffers of the module take part in gradients; a function that uses
            others than its arguments is refused when called. What else it reads (attributes,
            globals) must not change between the call and the run.

    Returns:
        A module around the module, or a function; without lazy arguments they do what
        ``function`` does. Also a decorator.

    Raises:
        ConfigurationError: if ``function`` cannot be called.
    """
    if isinstance(function, OpaqueModule):
        return function
    if isinstance(function, nn.Module):
        return OpaqueModule(function)
    if not callable(function):
        raise ConfigurationError(
            f"opaque() needs a function or a module, got {type(function).__name__}"
        )
    owner = getattr(function, "__self__", None)
    call = OpaqueCall(function, owner if isinstance(owner, nn.Module) else None)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return call.record(args, kwargs)

    return wrapped


class OpaqueModule(nn.Module):
    """A module whose calls on lazy tensors are recorded as one; see `opaque`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._call = OpaqueCall(module, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call.record(args, kwargs)


class OpaqueCall:
    """What is recorded: a function of a module's state, the mode of its parts, and arguments."""

    opaque = True

    def __init__(self, function: Callable[..., Any], module: nn.Module | None) -> None:
        self.function, self.module = function, module
        origin = getattr(function, "_orig_mod", function)
        self.__name__ = getattr(origin, "__name__", type(origin).__name__)

    def __deepcopy__(self, memo: dict[int, Any]) -> OpaqueCall:
        # Nothing refers to the copy of a module before its copy is complete.
        module = memo.get(id(self.module), self.module)
        function: Any = self.function
        if function is self.module:
            function = module
        elif module is not self.module:
            function = getattr(module, function.__name__)
        return OpaqueCall(function, module)

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call now where nothing is lazy, else record."""
        lazy = sum(isinstance(x, LazyTensor) for x in tree_leaves((args, kwargs)))
        if not lazy:
            return self.function(*args, **kwargs)
        if lazy != _seen((args, kwargs)):
            raise UnsupportedError(
                f"a lazy tensor is hidden in an argument of the opaque {self.__name__}; pass it by "
                "itself or in a tuple, list or dict"
            )
        if self.module is None:
            return record(self, ((), (), *args), kwargs)
        if any(type(x).__name__ == "DTensor" for x in self.module.parameters()):
            # Hooks gather and scatter sharded parameters: as in eager, at once.
            like = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, LazyTensor))
            like._runtime.eager(self.__name__)
            return self.function(*_real(args), **_real(kwargs))
        modes = tuple(part.training for part in self.module.modules())
        state = tuple(held[name] for held, name in _state_of(self.module))
        return record(self, (modes, state, *args), kwargs)

    def __call__(self, modes: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        """Run on real tensors, or on fake ones for the analysis."""
        fake = any(isinstance(x, FakeTensor) for x in tree_leaves((state, args, kwargs)))
        with _uncompiled() if fake else nullcontext():
            if self.module is None:
                return self.function(*args, **kwargs)
            with _as_recorded(self.module, modes, state):
                return self.function(*args, **kwargs)


def _state_of(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Where parameters and buffers are held, tied ones in every place."""
    return [
        (held, name)
        for part in module.modules()
        for held in (part._parameters, part._buffers)
        for name, tensor in held.items()
        if tensor is not None
    ]


@contextmanager
def _as_recorded(
    module: nn.Module, modes: tuple[bool, ...], state: Sequence[Any]
) -> Iterator[None]:
    """The module with the state and the modes (training or evaluation) that a call recorded."""
    parts, places = list(module.modules()), _state_of(module)
    now = [part.training for part in parts], [held[name] for held, name in places]
    if len(places) != len(state):
        raise StaleValueError(
            f"{type(module).__name__} had {len(state)} parameters and buffers when its opaque call "
            f"was recorded and has {len(places)} now; read the value before the change"
        )
    try:
        _set(parts, modes, places, state)
        yield
    finally:
        _set(parts, now[0], places, now[1])


def _set(parts: Any, modes: Any, places: Any, state: Any) -> None:
    for part, training in zip(parts, modes, strict=True):
        if part.training is not training:
            part.training = training
    for (held, name), tensor in zip(places, state, strict=True):
        held[name] = tensor


def _uncompiled() -> Any:
    """Compiled code as it was written, since fake tensors are to show its operators."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def _real(tree: Any) -> Any:
    return tree_map(
        lambda x: x._runtime.attached(x._node) if isinstance(x, LazyTensor) else x, tree
    )


def _seen(tree: Any) -> int:
    """Lazy tensors where the recorder looks for them."""
    if isinstance(tree, LazyTensor):
        return 1
    if isinstance(tree, dict):
        return sum(map(_seen, tree.values())) if type(tree) is dict else 0
    return sum(map(_seen, tree)) if isinstance(tree, tuple | list) else 0
