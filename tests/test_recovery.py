"""An out-of-memory error at any call of an update: it restarts smaller and ends as undisturbed."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import koila_rl
from koila_rl.recovery import is_out_of_memory
from tests.helpers import is_real

N = 8


class FailAt(TorchDispatchMode):
    """Raise an out-of-memory error at one call on real tensors, once."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.calls, self.failed = at, 0, False
        self.made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A detach allocates nothing.
        allocates = func is not torch.ops.aten.detach.default
        counted = allocates and any(map(is_real, tree_leaves((args, kwargs))))
        if counted and not self.failed and self.calls == self.at:
            self.failed = True
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        self.calls += counted
        out = func(*args, **(kwargs or {}))
        if counted and not self.failed:
            self.made += [weakref.ref(x) for x in tree_leaves(out) if isinstance(x, Tensor)]
        return out


class WithNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).pow(2).mean()


class Cuts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y = (y - y.mean(0)) / y.std(0)
        return F.softmax(y, 0).pow(2).sum().sqrt() + y.amax()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh().pow(2).mean()


def state(module: nn.Module) -> list[Tensor]:
    """Gradients, buffers and the state of the generator."""
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    assert grads
    return [*grads, *module.buffers(), torch.get_rng_state()]


def update(module: nn.Module, x: Tensor, microbatch: int, mode: FailAt | None) -> list[Tensor]:
    torch.manual_seed(1)
    with koila_rl.limits(microbatch=microbatch):
        loss = module(koila_rl.lazy(x))
        if mode is None:
            loss.backward()
        else:
            with mode:
                loss.backward()
    return state(module)


@pytest.mark.parametrize("build", [Plain, WithNorm, Cuts])
@pytest.mark.filterwarnings("ignore::koila_rl.UnsplitWarning")
def test_an_error_at_any_call_changes_nothing(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    original, x = build().double(), torch.randn(N, 3, dtype=torch.float64)
    expected = update(copy.deepcopy(original), x, 2, None)
    counter = FailAt(-1)
    update(copy.deepcopy(original), x, 4, counter)
    assert counter.calls > 10
    recovered = 0
    for at in range(counter.calls):
        module, mode = copy.deepcopy(original), FailAt(at)
        got = update(module, x, 4, mode)
        plan = koila_rl.last_plan()
        assert plan is not None
        assert plan.retries == 1
        assert plan.microbatch_size == 2
        for mine, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
        recovered += 1
    assert recovered == counter.calls


def test_other_errors_pass_through_and_change_nothing() -> None:
    layer = nn.Linear(3, 4)

    class Broken(FailAt):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.tanh.default and is_real(args[0]):
                raise RuntimeError("something else")
            return func(*args, **(kwargs or {}))

    with koila_rl.limits(microbatch=4):
        loss = layer(koila_rl.lazy(torch.randn(N, 3))).tanh().sum()
        with Broken(0), pytest.raises(RuntimeError, match="something else"):
            loss.backward()
    assert layer.weight.grad is None


def test_one_sample_that_fails_is_told() -> None:
    layer = nn.Linear(3, 4)

    class Full(FailAt):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.tanh.default and is_real(args[0]):
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return func(*args, **(kwargs or {}))

    with koila_rl.limits(microbatch=4):
        loss = layer(koila_rl.lazy(torch.randn(N, 3))).tanh().sum()
        with Full(0), pytest.raises(koila_rl.InsufficientMemoryError, match="1 of 8") as caught:
            loss.backward()
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert layer.weight.grad is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("shape mismatch"), False),
        (koila_rl.InsufficientMemoryError("out of memory"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_count(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
