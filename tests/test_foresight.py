"""A loss that is read and then gone through backward runs the network once, split too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import koila_rl
from koila_rl.errors import StaleValueError
from tests.helpers import ForwardCounter

N = 23


def network() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 3, dtype=torch.float64)


def loss_of(module: nn.Linear, x: Tensor) -> Tensor:
    return module(x).tanh().square().mean()


def updates(
    number: int, backward: Callable[[Tensor], None], microbatch: int | None
) -> tuple[list[int], list[float], Tensor]:
    """Rows forward in each update, the losses, and the parameters after all."""
    module, rows, losses = network(), [], []
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(number):
        x = torch.randn(N, 5, dtype=torch.float64)
        if microbatch is not None:
            x = koila_rl.lazy(x)
        with koila_rl.limits(microbatch=microbatch), ForwardCounter(module) as counter:
            loss = loss_of(module, x)
            losses.append(loss.item())
            optimizer.zero_grad()
            backward(loss)
            assert losses[-1] == loss.item()
        optimizer.step()
        rows.append(counter.rows)
    return rows, losses, torch.cat([p.detach().flatten() for p in module.parameters()])


WAYS: dict[str, Callable[[Tensor], None]] = {
    "plain": lambda loss: loss.backward(),
    "given": lambda loss: loss.backward(torch.tensor(2.0, dtype=torch.float64)),
    "retained": lambda loss: (loss.backward(retain_graph=True), loss.backward())[0],
    "scaled": lambda loss: (loss * 3).backward(),
}


@pytest.mark.parametrize("way", list(WAYS))
def test_gradients_are_those_of_eager(way: str) -> None:
    torch.manual_seed(1)
    _, losses, wanted = updates(4, WAYS[way], None)
    torch.manual_seed(1)
    rows, found, parameters = updates(4, WAYS[way], 7)
    assert found == pytest.approx(losses, rel=1e-12)
    torch.testing.assert_close(parameters, wanted, rtol=0, atol=1e-12)
    if way == "plain":
        assert rows[2:] == [N, N]


def test_a_loss_that_is_only_read_costs_one_backward_in_vain() -> None:
    module = network()
    x = torch.randn(N, 5, dtype=torch.float64)
    with koila_rl.limits(microbatch=7):
        for backward in (True, True, True, False, False, False):
            module.zero_grad()
            loss = loss_of(module, koila_rl.lazy(x))
            loss.item()
            if backward:
                loss.backward()
        assert module.weight.grad is None
        with ForwardCounter(module) as counter:
            loss = loss_of(module, koila_rl.lazy(x))
            loss.item()
            loss.backward()
        assert counter.rows == 2 * N


def test_a_weight_that_changed_in_between_is_told() -> None:
    module = network()
    x = torch.randn(N, 5, dtype=torch.float64)
    with koila_rl.limits(microbatch=7):
        for change in (False, False, True):
            loss = loss_of(module, koila_rl.lazy(x))
            loss.item()
            if change:
                with torch.no_grad():
                    module.weight.add_(1)
                with pytest.raises(StaleValueError):
                    loss.backward()
            else:
                loss.backward()


@pytest.mark.parametrize("microbatch", [5, N])
def test_a_loss_read_under_inference_mode_keeps_its_graph(microbatch: int) -> None:
    module, x = network(), torch.randn(N, 5, dtype=torch.float64)
    loss_of(module, x).backward()
    wanted = [p.grad for p in module.parameters()]
    for _ in range(4):
        module.zero_grad()
        with koila_rl.limits(microbatch=microbatch):
            loss = loss_of(module, koila_rl.lazy(x))
            with torch.inference_mode():
                loss.item()
            loss.backward()
        got = [p.grad for p in module.parameters()]
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_a_loss_is_read_where_its_backward_does_not_fit() -> None:
    module = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 1)).double()
    x = torch.randn(N, 5, dtype=torch.float64)
    wanted = module(x).square().mean().item()
    for memory in ("1MiB", "1MiB", "1MiB", "4KiB"):
        with koila_rl.limits(memory=memory, microbatch=5 if memory == "1MiB" else None):
            loss = module(koila_rl.lazy(x)).square().mean()
            assert loss.item() == pytest.approx(wanted, abs=1e-12)
            if memory == "1MiB":
                module.zero_grad()
                loss.backward()


@pytest.mark.parametrize("microbatch", [5, N])
def test_a_validation_that_failed_fails_again(microbatch: int) -> None:
    module = network()
    with koila_rl.limits(microbatch=microbatch):
        logits = module(koila_rl.lazy(torch.full((N, 5), torch.nan, dtype=torch.float64)))
        # Asked for by name: some libraries switch it off for the whole process when imported.
        policy = torch.distributions.Categorical(logits=logits, validate_args=True)
        loss = policy.entropy().mean()
        for again in (torch.Tensor.item, torch.Tensor.item, torch.Tensor.backward):
            with pytest.raises(ValueError, match="constraint"):
                again(loss)
    assert module.weight.grad is None
