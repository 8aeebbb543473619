"""An out-of-memory error at any call of an update: it restarts smaller and ends as undisturbed."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
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
    """Raise an out-of-memory error at one call on real tensors, once: before it or after."""

    def __init__(
        self, at: int, after: bool = False, error: type[BaseException] | None = None
    ) -> None:
        super().__init__()
        self.at, self.after, self.calls, self.failed = at, after, 0, False
        self.error = error or torch.OutOfMemoryError
        self.made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A detach allocates nothing.
        allocates = func is not torch.ops.aten.detach.default
        counted = allocates and any(map(is_real, tree_leaves((args, kwargs))))
        fails = counted and not self.failed and self.calls == self.at
        if fails and self.after:
            func(*args, **(kwargs or {}))
        if fails:
            self.failed = True
            raise self.error("CUDA out of memory. Tried to allocate 2.00 GiB.")
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


class Clipped(nn.Module):
    """PPO's loss: clipped ratio, value error, entropy; the advantages normalised inside."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = nn.Linear(3, 2), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.distributions.Categorical(logits=self.policy(x))
        ratio = (chosen.log_prob((x[:, 0] > 0).long()) + 0.7).exp()
        advantage = (x[:, 1] - x[:, 1].mean()) / (x[:, 1].std() + 1e-8)
        gain = torch.min(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)).mean()
        error = F.mse_loss(self.value(x).squeeze(-1), x[:, 2])
        return -gain + 0.5 * error - 0.01 * chosen.entropy().mean()


class Chain(nn.Module):
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


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every update fails anew."""
    monkeypatch.setattr("koila_rl.session.remember_failure", lambda *args: None)


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("after", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("build", [Clipped, WithNorm, Cuts])
@pytest.mark.filterwarnings("ignore::koila_rl.UnsplitWarning")
def test_an_error_at_any_call_changes_nothing(build: Callable[[], nn.Module], after: bool) -> None:
    torch.manual_seed(0)
    original, x = build().double(), torch.randn(N, 3, dtype=torch.float64)
    expected = update(copy.deepcopy(original), x, 2, None)
    counter = FailAt(-1)
    update(copy.deepcopy(original), x, 4, counter)
    assert counter.calls > 10
    for at in range(counter.calls):
        module, mode = copy.deepcopy(original), FailAt(at, after)
        got = update(module, x, 4, mode)
        plan = koila_rl.last_plan()
        assert plan is not None
        assert plan.retries == 1
        assert plan.microbatch_size == 2
        for mine, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def td_loss(q: nn.Module, target: nn.Module, batch: Any) -> Tensor:
    chosen = q(batch["observation"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        following = target(batch["next", "observation"]).amax(1)
        wanted = batch["next", "reward"] + 0.9 * following * ~batch["next", "terminated"]
    return F.smooth_l1_loss(chosen, wanted)


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("after", [False, True])
def test_an_error_while_rows_come_from_a_file(tmp_path: Path, after: bool) -> None:
    buffer = koila_rl.ReplayBuffer(32, storage=tmp_path / "replay", seed=0)
    for k in range(20):
        buffer.add(
            observation=torch.randn(3, dtype=torch.float64),
            action=k % 2,
            next={
                "observation": torch.randn(3, dtype=torch.float64),
                "reward": float(k),
                "terminated": k % 5 == 4,
            },
        )
    torch.manual_seed(0)
    q, target = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    minibatch = buffer.sample(N)

    def run(microbatch: int, mode: FailAt | None) -> Tensor:
        q.zero_grad()
        with koila_rl.limits(microbatch=microbatch):
            loss = td_loss(q, target, minibatch)
            with mode or nullcontext():
                loss.backward()
        assert q.weight.grad is not None
        return q.weight.grad.clone()

    expected = run(2, None)
    counter = FailAt(-1)
    run(4, counter)
    assert counter.calls > 10
    for at in range(counter.calls):
        torch.testing.assert_close(run(4, FailAt(at, after)), expected, rtol=0, atol=1e-12)
        plan = koila_rl.last_plan()
        assert plan is not None
        assert (plan.retries, plan.microbatch_size) == (1, 2)


@pytest.mark.parametrize("build", [Clipped, WithNorm, Cuts])
@pytest.mark.filterwarnings("ignore::koila_rl.UnsplitWarning")
def test_an_interrupt_at_any_call_changes_nothing(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module, x = build().double(), torch.randn(N, 3, dtype=torch.float64)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    counter = FailAt(-1)
    update(copy.deepcopy(module), x, 4, counter)

    def kept() -> list[Tensor]:
        # Counts of forwards are made when they are recorded.
        buffers = [x for x in module.buffers() if x.is_floating_point()]
        return [*buffers, *(p.grad for p in module.parameters() if p.grad is not None)]

    before = [x.clone() for x in kept()]
    for at in range(counter.calls):
        with pytest.raises(KeyboardInterrupt):
            update(module, x, 4, FailAt(at, error=KeyboardInterrupt))
        for mine, theirs in zip(kept(), before, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_a_size_that_failed_is_remembered_until_memory_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = 1 << 20
    monkeypatch.setattr("koila_rl.recovery.budget_bytes", lambda *args: free)
    module, x = Chain().double(), torch.randn(N, 3, dtype=torch.float64)

    def sizes(mode: FailAt | None) -> tuple[int, int]:
        update(module, x, 4, mode)
        plan = koila_rl.last_plan()
        assert plan is not None
        return plan.microbatch_size, plan.retries

    assert sizes(FailAt(3)) == (2, 1)
    assert sizes(None) == (2, 0)
    free = 1 << 30
    assert sizes(None) == (4, 0)
    free = 1 << 20
    assert sizes(None) == (4, 0)


@pytest.mark.parametrize("microbatch", [4, N])
def test_an_error_names_the_line_that_recorded_the_call(microbatch: int) -> None:
    layer = nn.Linear(3, 4)

    class Broken(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.tanh.default and is_real(args[0]):
                raise RuntimeError("something else")
            return func(*args, **(kwargs or {}))

    for _ in range(4):
        with koila_rl.limits(microbatch=microbatch):
            y = layer(koila_rl.lazy(torch.randn(N, 3)))
            line = sys._getframe().f_lineno + 1
            loss = y.tanh().sum()
            with Broken(), pytest.raises(RuntimeError, match="something else") as caught:
                loss.backward()
            assert caught.value.__notes__ == [f"tanh was recorded at {__file__}:{line}"]
            layer(koila_rl.lazy(torch.randn(N, 3))).tanh().sum().backward()


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
