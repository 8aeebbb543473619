"""When values are computed, how often, and what happens once something has changed."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

import koila_rl
from koila_rl import StaleValueError
from tests.helpers import CallCounter, ForwardCounter, check

N = 12


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def value_or_stale(value: Tensor) -> Tensor | None:
    try:
        return koila_rl.materialize(value).detach()
    except StaleValueError:
        return None


@pytest.mark.parametrize("microbatch", [None, 5])
def test_a_weight_changed_before_the_first_read(microbatch: int | None) -> None:
    policy, x, action = network(), torch.randn(N, 4), torch.randint(0, 3, (N,))
    expected = Categorical(logits=policy(x)).log_prob(action).detach()
    with koila_rl.limits(microbatch=microbatch):
        found = Categorical(logits=policy(koila_rl.lazy(x))).log_prob(action)
        with torch.no_grad():
            policy[0].weight.mul_(2)
        value = value_or_stale(found)
    assert value is None or torch.allclose(value, expected, rtol=0, atol=1e-13)


def test_a_stale_value_names_what_changed() -> None:
    policy, x = network(), torch.randn(N, 4)
    found = policy(koila_rl.lazy(x))
    with torch.no_grad():
        policy[0].weight.add_(1)
    with pytest.raises(StaleValueError, match=r"\(8, 4\)|8, 4|weight"):
        koila_rl.materialize(found)


def test_a_wrapped_source_changed_before_the_first_read() -> None:
    x = torch.randn(N, 4)
    doubled = koila_rl.lazy(x) * 2
    expected = x * 2
    x.zero_()
    value = value_or_stale(doubled)
    assert value is None or torch.equal(value, expected)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "fused Adam", "fused SGD"])
def test_an_optimizer_step_before_the_first_read(kind: str) -> None:
    policy, x = network(), torch.randn(N, 4)
    optimizer: torch.optim.Optimizer
    if kind.endswith("Adam"):
        optimizer = torch.optim.Adam(policy.parameters(), lr=0.1, fused=kind.startswith("fused"))
    else:
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1, fused=kind.startswith("fused"))
    expected = policy(x).detach()
    features = policy(koila_rl.lazy(x))
    policy(x).pow(2).mean().backward()
    optimizer.step()
    value = value_or_stale(features)
    assert value is None or torch.allclose(value, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("microbatch", [None, 5])
@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_keeps_its_value_through_the_step(microbatch: int | None, fused: bool) -> None:
    policy, x = network(), torch.randn(N, 4)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1, fused=fused)
    expected = policy(x).pow(2).mean().item()
    with koila_rl.limits(microbatch=microbatch), ForwardCounter(policy[0]) as counter:
        loss = policy(koila_rl.lazy(x)).pow(2).mean()
        before = loss.item()
        optimizer.zero_grad()
        loss.backward()
        during = loss.item()
        optimizer.step()
        assert loss.item() == during == before == pytest.approx(expected, rel=1e-12)
        assert float(loss.detach()) == before
    assert counter.rows <= (N if microbatch is None else 2 * N)


def test_the_first_ratio_of_an_update_is_one() -> None:
    policy, x, action = network(), torch.randn(N, 4), torch.randint(0, 3, (N,))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    with koila_rl.limits(microbatch=5):
        with torch.no_grad():
            old = Categorical(logits=policy(koila_rl.lazy(x))).log_prob(koila_rl.lazy(action))
        ratios = []
        for _ in range(2):
            new = Categorical(logits=policy(koila_rl.lazy(x))).log_prob(koila_rl.lazy(action))
            ratio = (new - old).exp()
            optimizer.zero_grad()
            (-ratio).mean().backward()
            ratios.append(koila_rl.materialize(ratio))
            optimizer.step()
    assert bool((ratios[0] == 1).all())
    assert not bool((ratios[1] == 1).any())


def test_distributions_check_their_arguments_without_running_the_network() -> None:
    policy, x, action = network(), torch.randn(N, 4), torch.randint(0, 3, (N,))
    with koila_rl.limits(microbatch=5), ForwardCounter(policy[0]) as counter:
        batch, chosen = koila_rl.lazy(x, action)
        distribution = Categorical(probs=policy(batch).softmax(-1))
        loss = -distribution.log_prob(chosen).mean() - distribution.entropy().mean()
        assert counter.rows == 0
        loss.backward()
    assert counter.rows == N


@pytest.mark.parametrize("microbatch", [1, 4])
def test_distributions_refuse_what_they_refuse_eagerly(microbatch: int) -> None:
    # Some libraries switch validation off for the whole process when they are imported.
    checked = functools.partial(Categorical, validate_args=True)
    below_zero = torch.tensor([[-1.0, 2.0, 0.5]] * 4)

    def normalised(probabilities: Tensor) -> Tensor:
        with koila_rl.limits(microbatch=microbatch):
            return koila_rl.materialize(checked(probs=koila_rl.lazy(probabilities)).probs)

    with pytest.raises(ValueError, match="probs"):
        normalised(below_zero)
    # All of one sign pass, since PyTorch normalises before it looks.
    assert torch.equal(normalised(-torch.ones(4, 3)), Categorical(-torch.ones(4, 3)).probs)
    layer = nn.Linear(3, 3)

    def update() -> None:
        logits = layer(koila_rl.lazy(torch.ones(4, 3)))
        checked(logits=logits).log_prob(koila_rl.lazy(torch.full((4,), 7))).mean().backward()

    with koila_rl.limits(microbatch=microbatch), pytest.raises(ValueError, match="value"):
        update()
    assert layer.weight.grad is None


def test_not_a_number_stays_where_eager_has_it() -> None:
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    with koila_rl.limits(microbatch=1):
        y = koila_rl.lazy(x)
        torch.where(y > 0, y.log(), 0).sum().backward()
    assert x.grad is not None
    assert x.grad.isnan().tolist() == [True, False]
    assert x.grad[1] == 1


def residual_chain(blocks: int, microbatch: int | None) -> int:
    layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(blocks)])
    with koila_rl.limits(microbatch=microbatch), CallCounter() as counter:
        x = koila_rl.lazy(torch.randn(N, 4))
        for layer in layers:
            x = x + torch.relu(layer(x)) + x
        x.mean().backward()
    return counter.calls


@pytest.mark.parametrize("microbatch", [None, 5])
def test_work_of_a_chain_of_residual_blocks_grows_linearly(microbatch: int | None) -> None:
    residual_chain(2, microbatch)
    assert residual_chain(24, microbatch) <= 2.2 * residual_chain(12, microbatch)


def test_a_long_chain_does_not_recurse() -> None:
    x = torch.ones(3, requires_grad=True)
    with koila_rl.limits(microbatch=1):
        y = koila_rl.lazy(x)
        for _ in range(2_000):
            y = y + 1
        y.mean().backward()
    assert y.tolist() == [2001.0] * 3
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full((3,), 1 / 3), rtol=0, atol=1e-15)


def moving_average(steps: int) -> tuple[Any, int]:
    layer = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    ema: Any = 0.0
    alive = 0
    for step in range(steps):
        if step == steps // 2:
            gc.collect()
            alive = len(gc.get_objects())
        loss = layer(koila_rl.lazy(torch.randn(N, 4))).pow(2).mean()
        ema = 0.99 * ema + loss.detach()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    gc.collect()
    return ema, len(gc.get_objects()) - alive


@pytest.mark.parametrize("steps", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_moving_average_of_losses_does_not_grow(steps: int) -> None:
    moving_average(100)
    ema, growth = moving_average(steps)
    assert float(ema) > 0
    assert growth < 100


def test_nothing_is_left_without_the_garbage_collector() -> None:
    policy = network()

    def update() -> list[weakref.ref[Any]]:
        x = torch.randn(N, 4)
        batch = koila_rl.lazy(x)
        hidden = policy(batch)
        loss = hidden.pow(2).mean()
        _ = loss.item()
        loss.backward()
        return [weakref.ref(value) for value in (x, batch, hidden, loss)]

    for microbatch in (None, 5):
        with koila_rl.limits(microbatch=microbatch):
            update()
            gc.collect()
            gc.disable()
            try:
                references = update()
            finally:
                gc.enable()
        assert [r() is None for r in references] == [True] * 4


def test_alternating_sizes_need_no_new_analysis(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    policy = network()
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
    dispatch, fakes = FakeTensorMode.__torch_dispatch__, [0]

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        fakes[0] += 1
        return dispatch(self, *args, **kwargs)

    monkeypatch.setattr(FakeTensorMode, "__torch_dispatch__", counting)

    def update(size: int, clip: float) -> None:
        x, action = koila_rl.lazy(torch.randn(size, 4), torch.randint(0, 3, (size,)))
        loss = -Categorical(logits=policy(x)).log_prob(action).clamp(-clip, clip).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    with koila_rl.limits(microbatch=16):
        update(256, 0.2)
        update(37, 0.2)
        assert fakes[0] > 0
        fakes[0] = 0
        for step in range(3):
            update(256, 0.2 - 0.01 * step)
            update(37, 0.2 - 0.01 * step)
    assert fakes[0] == 0


@pytest.mark.parametrize("size", [1, 17, 19, 20])
def test_minibatches_of_odd_sizes(size: int) -> None:
    def program(module: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(module(x).squeeze(), y.squeeze())

    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(program, (torch.randn(size, 4), torch.randn(size, 1)), module, sizes=(1, 16, 18))


@pytest.mark.parametrize("rows", [False, True], ids=["tensors", "rows"])
def test_losses_read_one_after_the_other_run_the_networks_once(
    monkeypatch: pytest.MonkeyPatch, rows: bool
) -> None:
    """As Stable-Baselines3 does for its log: each reading needs another column of the minibatch."""
    runs = []
    original = koila_rl.session.run_whole
    monkeypatch.setattr(
        "koila_rl.session.run_whole", lambda *a, **k: runs.append(1) or original(*a, **k)
    )
    network = torch.nn.Linear(3, 2).double()
    eager = copy.deepcopy(network)
    x = torch.randn(N, 3, dtype=torch.float64)
    advantage, returns, old = torch.randn(3, N, dtype=torch.float64)

    def loss(module: Any, columns: Any) -> tuple[Tensor, list[float]]:
        x, advantage, returns, old = columns
        out = module(x)
        ratio = (out[:, 0] - old).exp()
        policy_loss = -(advantage * ratio).mean()
        read = [policy_loss.item()]
        value_loss = torch.nn.functional.mse_loss(returns, out[:, 1])
        read.append(value_loss.item())
        read.append(((out[:, 0] - old) ** 2).mean().item())
        return policy_loss + value_loss, read

    columns = (x, advantage, returns, old)
    lazy = koila_rl.lazy(*columns)
    if rows:
        replay = koila_rl.ReplayBuffer(2 * N, seed=0)
        again = koila_rl.ReplayBuffer(2 * N, seed=0)
        stored = dict(zip("abcd", columns, strict=True))
        for buffer in (replay, again):
            buffer.extend(stored)
        lazy = tuple(map(replay.sample(N).get, "abcd"))
        columns = koila_rl.materialize(tuple(map(again.sample(N).get, "abcd")))
    mine, read = loss(network, lazy)
    mine.backward()
    theirs, expected = loss(eager, columns)
    theirs.backward()
    assert len(runs) == 1
    assert read == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(network.weight.grad, eager.weight.grad, rtol=0, atol=1e-12)


def test_a_column_beside_a_value_that_is_known_stays_lazy_where_it_would_grow() -> None:
    x = torch.randn(N, 3, dtype=torch.float64)
    column = torch.randn(N, dtype=torch.float64)
    lazy_x, lazy_column = koila_rl.lazy(x, column)
    total = lazy_x.sum(1)
    total.sum().item()
    assert isinstance(total + lazy_column, Tensor)
    outer = torch.outer(total, lazy_column)
    assert isinstance(outer, koila_rl.LazyTensor)
    pairs = total[:, None] - lazy_column[None, :]
    assert isinstance(pairs, koila_rl.LazyTensor)
    torch.testing.assert_close(
        koila_rl.materialize(pairs), x.sum(1)[:, None] - column[None, :], rtol=0, atol=1e-12
    )
