"""Programs belong to the thread that records them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import koila_rl
from tests.helpers import assert_close


def update(seed: int) -> tuple[list[Tensor], list[Tensor], int]:
    """Gradients of a split update, eager's, and the minibatch size of this thread's plan."""
    generator = torch.Generator().manual_seed(seed)
    size = 11 + seed
    x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
    layer = nn.Linear(4, 3, dtype=torch.float64)
    parameters = list(layer.parameters())
    expected = torch.autograd.grad(layer(x).tanh().pow(2).mean(), parameters)
    with koila_rl.limits(microbatch=2 + seed % 3):
        for _ in range(5):
            layer.zero_grad()
            loss = layer(koila_rl.lazy(x)).tanh().pow(2).mean()
            loss.item()
            loss.backward()
        plan = koila_rl.last_plan()
    assert plan is not None
    return [p.grad for p in parameters if p.grad is not None], list(expected), plan.batch_size


def test_updates_in_many_threads_at_once() -> None:
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(update, range(8)))
    for seed, (found, expected, size) in enumerate(results):
        assert size == 11 + seed
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            assert_close(mine, theirs)


def test_limits_hold_in_their_own_context() -> None:
    passes: list[int] = []

    def run() -> None:
        koila_rl.lazy(torch.ones(8)).sum().item()
        plan = koila_rl.last_plan()
        passes.append(0 if plan is None else max(p.microbatch_size for p in plan.passes))

    with koila_rl.limits(microbatch=2):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        run()
    assert passes == [8, 2]


def test_a_value_read_in_another_thread_is_right_or_refused() -> None:
    x = koila_rl.lazy(torch.arange(6.0))
    total = (x * 2).sum()

    def read() -> float | str:
        try:
            return total.item()
        except koila_rl.KoilaError as error:
            return str(error)

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(read).result()
    assert found == 30 or "thread" in str(found)
    assert total.item() == 30


def test_a_plan_belongs_to_its_thread() -> None:
    koila_rl.lazy(torch.ones(8)).sum().item()
    mine = koila_rl.last_plan()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(koila_rl.last_plan).result() is None
    assert koila_rl.last_plan() is mine


@pytest.mark.parametrize("microbatch", [2, 8])
def test_autograd_threads_deliver_the_sums(microbatch: int) -> None:
    layer = nn.Linear(2, 1)

    def backward() -> None:
        with koila_rl.limits(microbatch=microbatch):
            layer(koila_rl.lazy(torch.ones(8, 2))).mean().backward()

    threads = [threading.Thread(target=backward) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[3.0, 3.0]]
