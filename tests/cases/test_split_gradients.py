"""Losses whose gradients naive accumulation over microbatches gets wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler

import koila_rl
from tests.helpers import allow_unsplit, check


def close(got: Tensor | None, wanted: Any, atol: float = 1e-12) -> None:
    assert got is not None
    torch.testing.assert_close(got, torch.as_tensor(wanted, dtype=got.dtype), rtol=0, atol=atol)


def test_a_short_last_microbatch_weighs_what_its_samples_weigh() -> None:
    w = torch.tensor(1.0, requires_grad=True)
    with koila_rl.limits(microbatch=2):
        (w * koila_rl.lazy(torch.arange(1.0, 6.0))).mean().backward()
    close(w.grad, 3.0)


def test_mean_over_tokens_of_completions_of_different_length() -> None:
    advantage = torch.tensor([[1.0, 0, 0], [-1, -1, -1]])
    mask = torch.tensor([[1.0, 0, 0], [1, 1, 1]])
    w = torch.tensor(0.0, requires_grad=True)
    with koila_rl.limits(microbatch=1):
        a, m = koila_rl.lazy(advantage, mask)
        loss = -(a * w.sigmoid() * m).sum() / m.sum()
        loss.backward()
    assert loss.item() == pytest.approx(0.25, abs=1e-12)
    close(w.grad, 0.125)


def test_cross_entropy_with_weighted_labels() -> None:
    z = torch.zeros(4, 2, requires_grad=True)
    with koila_rl.limits(microbatch=2):
        logits, labels = koila_rl.lazy(z, torch.tensor([0, 0, 0, 1]))
        F.cross_entropy(logits, labels, weight=torch.tensor([1.0, 3.0])).backward()
    assert z.grad is not None
    close(z.grad[0], [-1 / 12, 1 / 12])
    close(z.grad[3], [0.25, -0.25])


def test_cross_entropy_with_a_microbatch_of_ignored_labels() -> None:
    z = torch.zeros(4, 2, requires_grad=True)
    with koila_rl.limits(microbatch=2):
        logits, labels = koila_rl.lazy(z, torch.tensor([-100, -100, 1, 0]))
        loss = F.cross_entropy(logits, labels)
        loss.backward()
    assert loss.item() == pytest.approx(math.log(2), abs=1e-12)
    close(z.grad, [[0.0, 0.0], [0.0, 0.0], [0.25, -0.25], [-0.25, 0.25]])


@pytest.mark.parametrize("microbatch", [1, 2, 3, 4])
def test_advantages_normalised_over_the_minibatch(microbatch: int) -> None:
    ratio = torch.ones(4, requires_grad=True)
    with koila_rl.limits(microbatch=microbatch), allow_unsplit():
        a, r = koila_rl.lazy(torch.tensor([1.0, 2, 3, 10]), ratio)
        normalised = (a - a.mean()) / (a.std() + 1e-8)
        (-normalised * r).mean().backward()
        values = koila_rl.materialize(normalised)
    close(values, [-0.7348469, -0.4898979, -0.2449490, 1.4696938], atol=1e-6)
    assert ratio.grad is not None
    close(ratio.grad, -values / 4)


def test_batch_norm_counts_the_minibatch_once() -> None:
    x = torch.tensor([[0.0], [2], [4], [6]])
    norm = nn.BatchNorm1d(1)
    with koila_rl.limits(microbatch=2), allow_unsplit():
        norm(koila_rl.lazy(x)).pow(2).mean().backward()
    assert norm.running_mean is not None
    assert norm.running_var is not None
    close(norm.running_mean, [0.3])
    close(norm.running_var, [0.9 + 0.1 * 20 / 3])
    assert norm.num_batches_tracked is not None
    assert norm.num_batches_tracked.item() == 1

    def program(module: Any, batch: Tensor) -> Tensor:
        return module(batch).pow(2).mean() + module(2 * batch)[:, 0].sin().mean()

    check(program, (x,), nn.BatchNorm1d(1), magnitude=10.0)


def test_grad_scaler() -> None:
    p = nn.Parameter(torch.tensor(1.0, dtype=torch.float32))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = GradScaler("cpu", init_scale=8)
    with koila_rl.limits(microbatch=1):
        loss = (p * koila_rl.lazy(torch.tensor([1.0, 3.0], dtype=torch.float32))).mean()
        scaler.scale(loss).backward()
    close(p.grad, 16.0)
    scaler.unscale_(optimizer)
    close(p.grad, 2.0)
    scaler.step(optimizer)
    scaler.update()
    close(p.detach(), -1.0)


@pytest.mark.parametrize("keepdim", [False, True])
def test_dueling_head(keepdim: bool) -> None:
    module = nn.ModuleDict({"value": nn.Linear(3, 1), "advantage": nn.Linear(3, 4)})

    def program(module: Any, x: Tensor) -> Tensor:
        v, a = module["value"](x), module["advantage"](x)
        mean = a.mean(1, keepdim=True) if keepdim else a.mean()
        return (v + a - mean).pow(2).mean()

    check(program, (torch.randn(7, 3),), module, splits=True)


@pytest.mark.parametrize("microbatch", [1, 5, 12])
@pytest.mark.parametrize("passes", [1, 2])
def test_dropout_has_one_mask_a_program(microbatch: int, passes: int) -> None:
    def run() -> tuple[Tensor, Tensor, float]:
        torch.manual_seed(3)
        x = torch.full((12, 4), 2.0, requires_grad=True)
        with koila_rl.limits(microbatch=microbatch):
            y = F.dropout(koila_rl.lazy(x), 0.5)
            loss = y.sum() if passes == 1 else (y.mean() ** 2 + y.pow(2).mean()) * y.mean()
            before = loss.item() if passes == 2 else 0.0
            loss.backward()
            values = koila_rl.materialize(y).detach()
            assert passes == 1 or loss.item() == before
        assert x.grad is not None
        return values, x.grad, loss.item()

    values, gradient, loss = run()
    assert set(values.unique().tolist()) == {0.0, 4.0}
    leaf = values.clone().requires_grad_()
    again = leaf.sum() if passes == 1 else (leaf.mean() ** 2 + leaf.pow(2).mean()) * leaf.mean()
    again.backward()
    assert leaf.grad is not None
    close(gradient, leaf.grad * (values != 0) * 2)
    assert loss == pytest.approx(again.item(), rel=1e-12)
    assert torch.equal(gradient, run()[1])


def test_dropout_unsplit_draws_eager_numbers() -> None:
    x = torch.ones(50, 4)
    torch.manual_seed(7)
    expected = F.dropout(x, 0.3)
    after = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(koila_rl.materialize(F.dropout(koila_rl.lazy(x), 0.3)), expected)
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize("kind", ["smoothed", "probabilities", "both", "smoothed and weighted"])
def test_cross_entropy_that_divides_by_the_size_inside(kind: str) -> None:
    labels = torch.randint(0, 4, (10,))
    probabilities = torch.randn(10, 4).softmax(-1)
    weight = torch.tensor([1.0, 2, 3, 4]) if "weighted" in kind else None
    smoothing = 0.0 if kind == "probabilities" else 0.1

    def program(module: Any, z: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(z, target, weight=weight, label_smoothing=smoothing)

    target = labels if kind.startswith("smoothed") else probabilities
    check(program, (torch.randn(10, 4, requires_grad=True), target), sizes=(1, 3, 10))


@pytest.mark.parametrize("size", [1, 2, 7, 10, 11])
def test_numbers_that_divide_by_the_size(size: int) -> None:
    module = nn.Linear(3, 2)

    def program(module: Any, x: Tensor) -> Tensor:
        total = module(x).pow(2).sum()
        return total / x.shape[0] + total / len(x) + total / x.size(0) + total / (x.numel() // 3)

    check(program, (torch.randn(size, 3),), module, splits=True)


@pytest.mark.parametrize("size", [3, 4, 7])
def test_literals_that_equal_the_size(size: int) -> None:
    module = nn.Linear(4, size)

    def program(module: Any, x: Tensor) -> tuple[Tensor, ...]:
        y = module(x)
        rows = y.view(size, size).reshape(size, 1, size).expand(size, 2, size)
        fixed = y.unsqueeze(1).repeat(1, size, 1).sum((1, 2)) / size
        return rows.pow(2).mean() + fixed.mean() + (torch.zeros(size) + fixed).sum(), fixed

    check(program, (torch.randn(size, 4),), module)


PROGRAMS: dict[str, Any] = {
    "features normalised": lambda m, x: m((x - x.mean(0)) / x.std(0)).pow(2).mean(),
    "hidden normalised": lambda m, x: ((m(x) - m(x).mean(0)) / m(x).std(0)).pow(3).mean(),
    "contrastive": lambda m, x: F.cross_entropy(
        F.normalize(m(x), dim=1) @ F.normalize(m(x + 0.1), dim=1).T, torch.arange(9)
    ),
    "largest": lambda m, x: m(x).max(),
    "largest of each column": lambda m, x: m(x).max(0).values.sum(),
    "root of a mean": lambda m, x: m(x).pow(2).mean().sqrt(),
    "ratio of sums": lambda m, x: m(x).pow(2).sum() / m(x).abs().sum(),
    "product of sums": lambda m, x: m(x).mean() * m(x).pow(2).mean(),
    "softmax over the minibatch": lambda m, x: (m(x).softmax(0) * x[:, :2]).sum(),
    "sorted": lambda m, x: (m(x).sort(0).values * torch.arange(9.0).unsqueeze(1)).mean(),
    "covariance": lambda m, x: (m(x).T @ m(x) / (len(x) - 1)).det(),
    "levels": lambda m, x: (m(x) * (m(x) * m(x).mean().exp()).mean().exp()).mean().exp(),
    "median": lambda m, x: (m(x)[:, 0] - m(x)[:, 0].median()).abs().mean(),
    "log of a mean of exp": lambda m, x: m(x).logsumexp(0).sum() - math.log(9),
    "cumulative": lambda m, x: m(x).cumsum(0).pow(2).mean(),
    "flipped": lambda m, x: (m(x).flip(0) * m(x)).mean(),
    "neighbours": lambda m, x: (m(x)[1:] - m(x)[:-1]).pow(2).mean(),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_through_cuts(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 3, requires_grad=True)
    check(PROGRAMS[name], (x,), nn.Linear(3, 2), magnitude=1.0)
