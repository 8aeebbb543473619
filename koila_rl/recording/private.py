"""The private torch interfaces of the whole project, so that a new torch breaks one file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch._C._autograd import (
    _disable_profiler_legacy,
    _enable_profiler_legacy,
    _profiler_enabled,
)
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch._library.custom_ops import OPDEFS
from torch._library.simple_registry import singleton as _library_entries
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "allocator_record",
    "autograd_included",
    "backward_node",
    "compiled_allocations",
    "differentiating",
    "dispatch_modes",
    "has_fake_kernel",
    "profiler_enabled",
    "with_modes",
    "without_modes",
]

profiler_enabled = _profiler_enabled
without_modes = _disable_current_modes
dispatch_modes = _get_current_dispatch_mode_stack


@contextmanager
def with_modes(modes: Sequence[TorchDispatchMode]) -> Iterator[None]:
    """The dispatch modes of another thread, without their own beginnings and ends."""
    for mode in modes:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()


def allocator_record(run: Callable[[], object]) -> Iterator[tuple[str, int]]:
    """What PyTorch's CPU allocator did while ``run`` ran in this thread, in order.

    Yields ``("", nbytes)`` for an allocation and ``("", -nbytes)`` for a free, and around those
    that an operator made ``("push:" + name, 0)`` and ``("pop", 0)``.
    """
    # Not torch.profiler, which reads the same record but writes to stderr at each start.
    options = (False, True, False, False, False, _ExperimentalConfig())  # only memory
    config = ProfilerConfig(ProfilerState.CPU, *options)
    _enable_profiler_legacy(config)
    try:
        run()
    finally:
        threads = _disable_profiler_legacy()
    for event in (event for thread in threads for event in thread):
        kind = str(event.kind())
        if kind == "memory_alloc":
            yield "", event.cpu_memory_usage()
        elif kind in ("push", "pop"):
            yield "pop" if kind == "pop" else f"push:{event.name()}", 0


def compiled_allocations() -> Iterator[tuple[ModuleType, str]]:
    """Where code that inductor compiled, or will compile, looks up the functions that allocate.

    They go past the dispatcher. Yields modules and names in them.
    """
    cache = sys.modules.get("torch._inductor.codecache")  # importing it takes a second
    for device in ("cpu", "cuda"):
        yield torch._C._dynamo.guards, f"_empty_strided_{device}"
        if cache is not None:
            for module in cache.PyCodeCache.modules:
                yield module, f"empty_strided_{device}"


def autograd_included() -> Any:
    """Context manager: autograd takes part again, inside a ``__torch_dispatch__``."""
    core = torch._C
    excluded = core._dispatch_tls_local_exclude_set()
    for name in _AUTOGRAD_KEYS:
        excluded = excluded.remove(getattr(core.DispatchKey, name))
    return core._ForceDispatchKeyGuard(core._dispatch_tls_local_include_set(), excluded)


_AUTOGRAD_KEYS = [name for name in ("AutogradFunctionality", "AutogradOther", "AutogradCPU",
                                    "AutogradCUDA", "ADInplaceOrView")
                  if hasattr(torch._C.DispatchKey, name)]  # fmt: skip


def differentiating() -> bool:
    """Whether a functorch transform that differentiates is active."""
    functorch = torch._C._functorch
    stack = functorch.get_interpreter_stack() or []
    return any(x.key() != functorch.TransformType.Vmap for x in stack)


def backward_node() -> int | None:
    """Number of the node whose backward runs in this thread now; ``None`` outside of one."""
    if torch._C._current_graph_task_id() == -1:
        return None
    node: Any = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def has_fake_kernel(func: Any) -> bool:
    """Whether an operator can run on fake tensors."""
    name = func._schema.name
    definition = OPDEFS.get(name)
    if definition is not None:
        return definition._abstract_fn is not None
    for qualified in (name, func.name()):
        entry = _library_entries.get(qualified)
        if entry is not None and entry.fake_impl.kernel is not None:
            return True
    keys = ("Meta", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in keys)
