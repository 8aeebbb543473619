"""A backward in slices ends as one that runs at once, and changes nothing before."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import koila_rl
from tests.test_recovery import Clipped, Cuts, FailAt, WithNorm

N = 8
BUILDS = [Clipped, WithNorm, Cuts]


def gradients(module: nn.Module) -> list[Tensor]:
    return [x for x in (*(p.grad for p in module.parameters()), *module.buffers()) if x is not None]


def minibatch() -> Tensor:
    torch.manual_seed(5)
    return torch.randn(N, 3, dtype=torch.float64)


def same(mine: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(mine) == len(theirs) > 0
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("microbatch", [1, 3, N])
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.filterwarnings("ignore::koila_rl.UnsplitWarning")
def test_slices_add_up_to_the_backward(build: Callable[[], nn.Module], microbatch: int) -> None:
    torch.manual_seed(0)
    module = build().double()
    twin = copy.deepcopy(module)
    with koila_rl.limits(microbatch=microbatch):
        torch.manual_seed(1)
        twin(koila_rl.lazy(minibatch())).backward()
        torch.manual_seed(1)
        loss = module(koila_rl.lazy(minibatch()))
        backward = koila_rl.start_backward(loss)
        planned, turns = backward.remaining, 0
        while not backward.done:
            assert all(p.grad is None for p in module.parameters())
            backward.advance()
            turns += 1
    same(gradients(module), gradients(twin))
    assert turns == planned >= -(-N // microbatch)
    assert backward.remaining == 0
    plan = koila_rl.last_plan()
    assert plan is not None
    assert plan.microbatch_size == microbatch
    assert isinstance(loss.item(), float)


@pytest.mark.parametrize("at_once", [1, 2, 5, 100])
def test_any_number_at_a_time(at_once: int) -> None:
    module = Clipped().double()
    twin = copy.deepcopy(module)
    with koila_rl.limits(microbatch=1):
        twin(koila_rl.lazy(minibatch())).backward()
        with koila_rl.start_backward(module(koila_rl.lazy(minibatch()))) as backward:
            backward.advance(at_once)
            assert backward.done == (at_once >= N)
    assert backward.done
    assert backward.advance()
    same(gradients(module), gradients(twin))


def test_hooks_fire_once_in_the_thread_of_the_caller() -> None:
    module = Clipped().double()
    threads = []
    module.policy.weight.register_hook(lambda grad: threads.append(threading.current_thread()))
    with koila_rl.limits(microbatch=2):
        koila_rl.start_backward(module(koila_rl.lazy(minibatch()))).finish()
    assert threads == [threading.current_thread()]


@pytest.mark.parametrize("after", [0, 1, 3])
def test_cancelled_it_has_never_been(after: int) -> None:
    torch.manual_seed(0)
    module = WithNorm().double()
    with koila_rl.limits(microbatch=2):
        loss = module(koila_rl.lazy(minibatch()))
        before = [x.clone() for x in module.buffers()]
        state = torch.get_rng_state()
        backward = koila_rl.start_backward(loss)
        if after:
            backward.advance(after)
        backward.cancel()
    assert all(p.grad is None for p in module.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    for mine, theirs in zip(module.buffers(), before, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    with pytest.raises(koila_rl.ConfigurationError, match="cancelled"):
        backward.advance()
    backward.cancel()
    assert "cancelled" in repr(backward)


def test_an_error_in_the_block_cancels() -> None:
    module = Clipped().double()
    with koila_rl.limits(microbatch=2):
        backward = koila_rl.start_backward(module(koila_rl.lazy(minibatch())))
        backward.advance()
    with pytest.raises(ZeroDivisionError), backward:
        raise ZeroDivisionError
    assert module.policy.weight.grad is None
    assert not backward.done


def test_dropped_it_ends_its_thread() -> None:
    module = Clipped().double()
    with koila_rl.limits(microbatch=2):
        backward = koila_rl.start_backward(module(koila_rl.lazy(minibatch())))
    backward.advance()
    ended, thread = weakref.ref(backward), backward._run.thread
    del backward
    gc.collect()
    assert ended() is None
    thread.join(5)
    assert not thread.is_alive()


def test_a_parameter_that_changes_in_between_is_refused() -> None:
    module = Clipped().double()
    with koila_rl.limits(microbatch=2):
        backward = koila_rl.start_backward(module(koila_rl.lazy(minibatch())))
        backward.advance()
        with torch.no_grad():
            module.value.weight.add_(1)
        with pytest.raises(koila_rl.StaleValueError, match=r"Parameter of shape \(1, 3\)"):
            backward.advance()
    assert module.policy.weight.grad is None


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.filterwarnings("ignore::koila_rl.UnsplitWarning")
def test_out_of_memory_in_a_slice_restarts_smaller(
    build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("koila_rl.session.remember_failure", lambda *args: None)
    torch.manual_seed(0)
    original = build().double()
    twin = copy.deepcopy(original)
    torch.manual_seed(1)
    with koila_rl.limits(microbatch=2):
        twin(koila_rl.lazy(minibatch())).backward()
    for at in range(0, 60, 7):
        module, mode = copy.deepcopy(original), FailAt(at)
        torch.manual_seed(1)
        with koila_rl.limits(microbatch=4):
            loss = module(koila_rl.lazy(minibatch()))
            with mode:
                backward = koila_rl.start_backward(loss)
                while not backward.done:
                    backward.advance()
        same(gradients(module), gradients(twin))
        assert backward.plan.retries == mode.failed
    assert mode.calls > 10


def test_other_errors_come_out_of_the_slice() -> None:
    module = Clipped().double()
    with koila_rl.limits(microbatch=2):
        loss = module(koila_rl.lazy(minibatch()))
        with FailAt(20, error=ArithmeticError), pytest.raises(ArithmeticError):
            koila_rl.start_backward(loss).finish()
    assert module.policy.weight.grad is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.zeros(3), "needs a recorded loss, got Tensor"),
        (lambda: 1.0, "got float"),
        (lambda: koila_rl.lazy(torch.zeros(3)).sum(), "does not require gradients"),
    ],
)
def test_what_cannot_be_started(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(koila_rl.ConfigurationError, match=message):
        koila_rl.start_backward(make())


@pytest.mark.parametrize("count", [0, -1, True, 1.5, "2"])
def test_what_cannot_be_advanced(count: Any) -> None:
    backward = koila_rl.start_backward(Clipped().double()(koila_rl.lazy(minibatch())))
    with pytest.raises(koila_rl.ConfigurationError, match="at least 1"):
        backward.advance(count)
    backward.finish()


def test_a_simulated_device_is_watched_in_slices_too() -> None:
    module = Clipped().double()
    x = torch.randn(4096, 3, dtype=torch.float64)
    with koila_rl.SimulatedDevice("400KiB") as device:
        with koila_rl.start_backward(module(koila_rl.lazy(x))) as backward:
            assert backward.remaining > 1
        assert 0 < device.peak_bytes <= 400 << 10


def test_a_value_that_is_known_keeps_its_gradient_between_slices() -> None:
    torch.manual_seed(0)
    read, other = nn.Linear(3, 1).double(), nn.Linear(3, 1).double()
    module = nn.ModuleList([read, other])
    twin = copy.deepcopy(module)
    known = twin[0](minibatch()).mean()
    (twin[1](minibatch()) * known.detach()).square().mean().backward()
    (known * 2).backward()
    with koila_rl.limits(microbatch=3):
        x = koila_rl.lazy(minibatch())
        known = read(x).mean()
        known.item()
        backward = koila_rl.start_backward((other(x) * known.detach()).square().mean())
        assert not backward.advance()
        meanwhile = known * 2
        backward.finish()
        meanwhile.backward()
    same(gradients(module), gradients(twin))


def test_the_backward_of_a_loss_runs_only_once_at_a_time() -> None:
    module = nn.Linear(3, 1).double()
    twin = copy.deepcopy(module)
    twin(minibatch()).square().mean().backward()
    with koila_rl.limits(microbatch=3):
        loss = module(koila_rl.lazy(minibatch())).square().mean()
        backward = koila_rl.start_backward(loss)
        for again in (koila_rl.start_backward, torch.Tensor.backward, torch.autograd.backward):
            with pytest.raises(koila_rl.ConfigurationError, match="already"):
                again(loss)
        backward.cancel()
        koila_rl.start_backward(loss).finish()
    same(gradients(module), gradients(twin))


@pytest.mark.parametrize("microbatch", [2, N])
def test_a_loss_that_was_read_may_go_backward_in_slices(microbatch: int) -> None:
    module = Clipped().double()
    twin = copy.deepcopy(module)
    twin(minibatch()).backward()
    with koila_rl.limits(microbatch=microbatch):
        loss = module(koila_rl.lazy(minibatch()))
        loss.item()
        with koila_rl.start_backward(loss) as backward:
            assert backward.remaining >= 1
            assert module.policy.weight.grad is None
        assert backward.done
        assert backward.plan.batch_size == N
    same(gradients(module), gradients(twin))


def test_a_loss_that_was_read_may_be_cancelled() -> None:
    module = Clipped().double()
    loss = module(koila_rl.lazy(minibatch()))
    loss.item()
    backward = koila_rl.start_backward(loss)
    backward.cancel()
    assert "cancelled" in repr(backward)
    assert module.policy.weight.grad is None
