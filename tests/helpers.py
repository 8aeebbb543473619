"""Judges that hold a recorded program against eager PyTorch on the whole minibatch."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import koila_rl
from koila_rl.errors import UnsplitWarning

Program = Callable[..., Any]
"""``program(module, *minibatch)`` returns the loss, or a tuple of the loss and other values."""

ROUNDING = 1e-12


@dataclass(frozen=True)
class Outcome:
    """What a program left behind: values, gradients, buffers and the calls that ran unsplit."""

    values: list[Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    unsplit: tuple[str, ...] = ()


def microbatch_sizes(size: int) -> list[int]:
    """The microbatch sizes worth trying for a minibatch of ``size`` samples."""
    return sorted({n for n in (1, 2, 3, 7, size - 1, size) if 1 <= n <= size})


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Make float64 the default dtype for a while."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def doubled(tree: Any) -> Any:
    """A copy of ``tree`` whose floating tensors are float64 leaves with storage of their own."""

    def copy_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        new = leaf.detach().clone()
        if new.is_floating_point():
            new = new.double().requires_grad_(leaf.requires_grad)
        return new

    return tree_map(copy_leaf, tree)


def check(
    program: Program,
    batch: Sequence[Any],
    module: nn.Module | None = None,
    *,
    sizes: Sequence[int] | None = None,
    dim: int = 0,
    backward: bool = True,
    splits: bool = False,
    magnitude: float = 0.0,
) -> dict[int, Outcome]:
    """Hold ``program`` on a wrapped minibatch against eager, once per microbatch size.

    Both run in float64 on copies of ``module`` and ``batch`` from the same seed. Values,
    gradients of parameters and of inputs that require one, and buffers must agree to
    1e-12 of the largest magnitude among them, or of ``magnitude`` where the terms of a sum
    cancel. ``splits`` asks that no call ran on the whole minibatch.
    """
    module = nn.Module() if module is None else module
    size = next(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)).shape[dim]
    expected = run(program, batch, module, backward=backward)
    outcomes = {}
    for microbatch in microbatch_sizes(size) if sizes is None else sizes:
        got = run(program, batch, module, microbatch=microbatch, dim=dim, backward=backward)
        assert_same(got, expected, f"microbatch {microbatch} of {size}", magnitude)
        if splits and microbatch < size:
            assert got.unsplit == (), f"microbatch {microbatch} of {size}: {got.unsplit}"
        outcomes[microbatch] = got
    return outcomes


def run(
    program: Program,
    batch: Sequence[Any],
    module: nn.Module,
    *,
    microbatch: int | None = None,
    dim: int = 0,
    backward: bool = True,
) -> Outcome:
    """Run ``program`` eagerly, or lazily where ``microbatch`` is given, on copies in float64."""
    module = copy.deepcopy(module).double()
    batch = doubled(tuple(batch))
    inputs = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    torch.manual_seed(0)
    with double_precision(), contextlib.ExitStack() as stack:
        if microbatch is not None:
            stack.enter_context(koila_rl.limits(microbatch=microbatch))
            stack.enter_context(allow_unsplit())
            batch = tuple(koila_rl.lazy(value, batch=dim) for value in batch)
        returned = program(module, *batch)
        values = list(returned) if isinstance(returned, tuple) else [returned]
        unsplit: list[str] = []
        if backward:
            values[0].backward()
            unsplit += unsplit_calls(microbatch)
        kept = [torch.as_tensor(koila_rl.materialize(value)) for value in values]
        unsplit += unsplit_calls(microbatch)
    gradients = {name: p.grad for name, p in module.named_parameters()}
    gradients |= {f"input {i}": leaf.grad for i, leaf in enumerate(inputs) if leaf.is_leaf}
    buffers = {name: b.clone() for name, b in module.named_buffers()}
    kept = [value.detach() for value in kept]
    return Outcome(kept, gradients, buffers, tuple(dict.fromkeys(unsplit)))


def unsplit_calls(microbatch: int | None) -> tuple[str, ...]:
    """The calls that the last run put on the whole minibatch."""
    plan = koila_rl.last_plan() if microbatch is not None else None
    return () if plan is None else tuple(plan.unsplit)


@contextlib.contextmanager
def allow_unsplit() -> Iterator[None]:
    """Silence the warning that some calls run on the whole minibatch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsplitWarning)
        yield


def assert_same(got: Outcome, expected: Outcome, label: str, magnitude: float = 0.0) -> None:
    """Raise AssertionError unless both outcomes agree to rounding."""
    assert len(got.values) == len(expected.values), f"{label}: number of values"
    for i, (mine, theirs) in enumerate(zip(got.values, expected.values, strict=True)):
        assert_close(mine, theirs, f"{label}: value {i}", magnitude)
    largest = max((largest_entry(g) for g in expected.gradients.values()), default=0.0)
    assert got.gradients.keys() == expected.gradients.keys(), f"{label}: names of gradients"
    for name, theirs_or_none in expected.gradients.items():
        mine_or_none = got.gradients[name]
        where = f"{label}: gradient of {name}"
        assert (mine_or_none is None) == (theirs_or_none is None), f"{where} is {mine_or_none}"
        if mine_or_none is not None and theirs_or_none is not None:
            assert_close(mine_or_none, theirs_or_none, where, max(largest, magnitude))
    for name, theirs in expected.buffers.items():
        assert_close(got.buffers[name], theirs, f"{label}: buffer {name}", magnitude)


def assert_close(mine: Tensor, theirs: Tensor, label: str = "", magnitude: float = 0.0) -> None:
    """Raise AssertionError unless shapes, dtypes and, to rounding, entries agree."""
    scale = max(largest_entry(theirs), magnitude)
    exact = {torch.float64: ROUNDING, torch.float32: 1e-5}.get(theirs.dtype, 0.0)
    torch.testing.assert_close(
        mine.detach(),
        theirs.detach(),
        rtol=0.0,
        atol=exact * scale,
        equal_nan=True,
        msg=lambda text: f"{label}: {text}",
    )


def largest_entry(tensor: Tensor | None) -> float:
    """The largest finite magnitude in ``tensor``, 0 where there is none."""
    if tensor is None or not tensor.is_floating_point():
        return 0.0
    finite = tensor.detach()[tensor.detach().isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def is_real(tensor: Any) -> bool:
    """Whether ``tensor`` holds numbers: analysis on fake and meta tensors does not count."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.device.type != "meta"


class ForwardCounter(TorchDispatchMode):
    """Count the rows that go forward through a ``Linear`` with bias, analysis left out."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        assert layer.bias is not None, "backward passes of a layer without bias look alike"
        self._pointer = layer.weight.data_ptr()
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        forward = func is torch.ops.aten.addmm.default and all(map(is_real, args[:3]))
        if forward and args[2].data_ptr() == self._pointer:
            self.rows += args[1].shape[0]
        return func(*args, **(kwargs or {}))


class CallCounter(TorchDispatchMode):
    """Count the operators that run on numbers, analysis on fake tensors left out."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += any(map(is_real, tree_leaves((args, kwargs))))
        return func(*args, **(kwargs or {}))


@dataclass
class _Live:
    bytes: int = 0
    peak: int = 0
    references: dict[int, Any] = field(default_factory=dict)


class LiveStorages(TorchDispatchMode):
    """Follow the bytes of storages made while active; what was there before counts zero.

    Written apart from the library's own tracker, so that one can judge the other.
    """

    def __init__(self) -> None:
        super().__init__()
        self._live = _Live()

    @property
    def peak(self) -> int:
        """The most bytes that were live at once."""
        return self._live.peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            self._follow(leaf, resident=True)
        outputs = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(outputs):
            self._follow(leaf, resident=False)
        return outputs

    def _follow(self, tensor: Any, resident: bool) -> None:
        if not is_real(tensor):
            return
        storage = tensor.untyped_storage()
        key, live, size = id(storage), self._live, 0 if resident else storage.nbytes()
        if key in live.references:
            return

        def forget(_: Any) -> None:
            live.references.pop(key, None)
            live.bytes -= size

        live.references[key] = weakref.ref(storage, forget)
        live.bytes += size
        live.peak = max(live.peak, live.bytes)


def peak_bytes(
    program: Program,
    batch: Sequence[Any],
    module: nn.Module,
    microbatch: int | None,
    dim: int = 0,
) -> int:
    """Peak of live storages over the forward and backward of ``program``.

    With ``microbatch=None`` the program runs eagerly. A first run is not measured, so that
    planning and lazily made constants are left out.
    """

    def once() -> None:
        module.zero_grad()
        wrapped = batch
        with contextlib.ExitStack() as stack:
            if microbatch is not None:
                stack.enter_context(koila_rl.limits(microbatch=microbatch))
                wrapped = [koila_rl.lazy(value, batch=dim) for value in batch]
            returned = program(module, *wrapped)
            (returned[0] if isinstance(returned, tuple) else returned).backward()

    once()
    module.zero_grad()
    gc.collect()
    with LiveStorages() as tracker:
        once()
    return tracker.peak
