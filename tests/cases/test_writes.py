"""In-place calls, views, ``out=``, and real tensors written from lazy ones."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila_rl
from tests.helpers import allow_unsplit, check

N = 7


def test_out_is_returned_itself() -> None:
    a, out = torch.arange(5.0), torch.empty(5)
    with koila_rl.limits(microbatch=2):
        returned = torch.add(koila_rl.lazy(a), 1, out=out)
    assert returned is out
    assert torch.equal(out, a + 1)


def test_a_view_sees_a_write_and_the_wrapped_tensor_does_not() -> None:
    original = torch.arange(6.0).reshape(3, 2)
    before = original.clone()
    with koila_rl.limits(microbatch=1), allow_unsplit():
        x = koila_rl.lazy(original)
        v = x[0]
        same = x.add_(1)
        assert same is x
        assert torch.equal(koila_rl.materialize(v), before[0] + 1)
        assert torch.equal(koila_rl.materialize(x), before + 1)
    assert torch.equal(original, before)


def test_a_write_to_a_view_reaches_its_base() -> None:
    def program(module: Any, x: Tensor) -> tuple[Tensor, ...]:
        y = module(x)
        column = y[:, 1]
        column.mul_(3)
        y[:, 0] = x[:, 2]
        y.t()[1].add_(1)
        return y.pow(2).mean(), y, column

    check(program, (torch.randn(N, 3, requires_grad=True),), nn.Linear(3, 2), splits=True)


def test_a_chain_of_writes_keeps_program_order() -> None:
    def program(module: Any, x: Tensor) -> tuple[Tensor, ...]:
        y = module(x).clone()
        early = y * 1
        y += 2
        y.clamp_(-1, 1)
        middle = y.sum(1)
        y.zero_()
        y.copy_(x[:, :2])
        return (early.pow(2).mean() + middle.mean() * y.mean()), early, middle, y

    check(program, (torch.randn(N, 3),), nn.Linear(3, 2), splits=True)


def test_a_row_written_with_a_literal_index() -> None:
    def program(module: Any, x: Tensor) -> tuple[Tensor, ...]:
        y = module(x) * 1
        y[2] = 5.0
        y[-1].mul_(2)
        return y.pow(2).mean(), y

    check(program, (torch.randn(N, 3),), nn.Linear(3, 2))


def test_rows_written_where_a_mask_holds() -> None:
    def program(module: Any, x: Tensor) -> tuple[Tensor, ...]:
        y = module(x) * 1
        y[x[:, 0] > 0] = 0.0
        y.masked_fill_(y > 0.5, 0.5)
        return y.pow(2).mean(), y

    check(program, (torch.randn(N, 3),), nn.Linear(3, 2))


@pytest.mark.parametrize("microbatch", [1, 3, N])
def test_values_stored_in_a_real_tensor(microbatch: int) -> None:
    x = torch.randn(N, 3)
    layer = nn.Linear(3, 1)
    values = torch.zeros(2, N)
    with koila_rl.limits(microbatch=microbatch), torch.no_grad():
        values[1] = layer(koila_rl.lazy(x)).squeeze(-1)
        values[0].copy_(koila_rl.lazy(x)[:, 0])
    assert type(values) is Tensor
    torch.testing.assert_close(values[1], layer(x).squeeze(-1).detach(), rtol=0, atol=1e-14)
    assert torch.equal(values[0], x[:, 0])


WRITES: dict[str, Any] = {
    "setitem": lambda out, y, i: out.__setitem__(i, y),
    "copy_": lambda out, y, i: out[:N].copy_(y),
    "index_add_": lambda out, y, i: out.index_add_(0, i, y),
    "index_copy_": lambda out, y, i: out.index_copy_(0, i, y),
    "scatter_add_": lambda out, y, i: out.scatter_add_(0, i[:, None].expand(-1, 2), y),
    "index_put_": lambda out, y, i: out.index_put_((i,), y, accumulate=True),
    "add_": lambda out, y, i: out[:N].add_(y),
}


@pytest.mark.parametrize("lazy_index", [False, True], ids=["real index", "lazy index"])
@pytest.mark.parametrize("name", WRITES)
def test_a_real_buffer_written_from_lazy_values(name: str, lazy_index: bool) -> None:
    index = torch.randperm(N + 2, generator=torch.Generator().manual_seed(0))[:N]

    def program(module: Any, x: Tensor, wrapped: Tensor) -> tuple[Tensor, ...]:
        out = torch.ones(N + 2, 2)
        WRITES[name](out, module(x), wrapped if lazy_index else index)
        return out.pow(2).mean(), out

    check(program, (torch.randn(N, 3, requires_grad=True), index), nn.Linear(3, 2))


def test_dispatch_of_samples_to_experts() -> None:
    def program(module: Any, x: Tensor) -> Tensor:
        scores, chosen = module[0](x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros(N, 2)
        for i, expert in enumerate(module[1:]):
            rows, slots = torch.where(chosen == i)
            out.index_add_(0, rows, expert(x[rows]) * scores[rows, slots, None])
        return out.pow(2).mean()

    module = nn.Sequential(nn.Linear(4, 3), *(nn.Linear(4, 2) for _ in range(3)))
    check(program, (torch.randn(N, 4),), module)


def test_categorical_projection_by_flat_offsets() -> None:
    atoms, support = 5, torch.linspace(-1, 1, 5)

    def program(module: Any, x: Tensor, reward: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            target = module(2 * x).softmax(-1)
            place = ((reward[:, None] + 0.9 * support).clamp(-1, 1) + 1) / 0.5
            low, high = place.floor().long(), place.ceil().long()
            low[(high > 0) & (low == high)] -= 1
            high[(low < atoms - 1) & (low == high)] += 1
            offset = torch.linspace(0, (N - 1) * atoms, N).long().unsqueeze(1).expand(N, atoms)
            m = torch.zeros(N, atoms)
            up, down = (target * (high - place)).view(-1), (target * (place - low)).view(-1)
            m.view(-1).index_add_(0, (low + offset).view(-1), up)
            m.view(-1).index_add_(0, (high + offset).view(-1), down)
        return -(m * module(x).log_softmax(-1)).sum(1).mean(), m

    check(program, (torch.randn(N, 3), torch.randn(N)), nn.Linear(3, atoms))


def test_categorical_projection_row_by_row() -> None:
    def program(module: Any, x: Tensor) -> tuple[Tensor, ...]:
        target = torch.zeros(N, 4)
        logits = module(x)
        low = logits.argmax(-1, keepdim=True)
        for i in range(x.size(0)):
            target[i].index_add_(0, low[i], x[i, :1].detach())
        return F.cross_entropy(logits, target.softmax(-1)), target

    check(program, (torch.randn(N, 3),), nn.Linear(3, 4))


@pytest.mark.parametrize("way", ["deepcopy", "copy", "pickle", "torch.save"])
def test_copies_of_a_lazy_tensor(way: str) -> None:
    original = torch.randn(N, 3)
    before = original.clone()

    def duplicate(value: Tensor) -> Any:
        if way == "deepcopy":
            return copy.deepcopy(value)
        if way == "copy":
            return copy.copy(value)
        if way == "pickle":
            return pickle.loads(pickle.dumps(value))
        file = io.BytesIO()
        torch.save(value, file)
        return torch.load(io.BytesIO(file.getvalue()), weights_only=False)

    with koila_rl.limits(microbatch=2):
        x = koila_rl.lazy(original)
        twice = duplicate(x)
        computed = duplicate(2 * x)
        assert torch.equal(koila_rl.materialize(twice), before)
        assert torch.equal(koila_rl.materialize(computed), 2 * before)
        if way != "copy":
            twice.zero_()
        assert torch.equal(koila_rl.materialize(x), before)
    assert torch.equal(original, before)


def test_a_container_of_lazy_tensors_is_copied() -> None:
    x = koila_rl.lazy(torch.arange(4.0))
    both = copy.deepcopy({"a": x, "b": [x + 1]})
    assert both["a"] is not x
    assert koila_rl.materialize(both["a"]).tolist() == [0, 1, 2, 3]
    assert koila_rl.materialize(both["b"][0]).tolist() == [1, 2, 3, 4]


def test_a_real_tensor_in_line_with_the_minibatch_is_whole_where_the_call_is() -> None:
    weights = torch.arange(1.0, N + 1)

    def program(module: Any, x: Tensor) -> tuple[Tensor, ...]:
        y = module(x)[:, 0]
        running = (y * weights).cumsum(0)
        order = torch.argsort(y.detach())
        return running.pow(2).mean() + (y[order] * weights).mean(), running, weights[order]

    check(program, (torch.randn(N, 3),), nn.Linear(3, 1))


SHORTER: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], object]]] = {
    "itself": (lambda y: y.narrow(0, 0, y.shape[0] - 1), lambda z: z.add_(z)),
    "assigned": (lambda y: y.narrow(0, 0, y.shape[0] - 1), lambda z: z[:, 0].fill_(3.0)),
    "reshaped": (
        lambda y: y.narrow(0, 0, y.shape[0] - 1),
        lambda z: z.reshape(z.shape[0], -1).mul_(2.0),
    ),
    "narrowed": (lambda y: y[1:], lambda z: z.narrow(0, 0, z.shape[0] - 1).fill_(3.0)),
    "half": (
        lambda y: y.narrow(0, 0, y.shape[0] // 2),
        lambda z: z.narrow(0, 0, z.shape[0] - 1).add_(1.0),
    ),
}


@pytest.mark.parametrize("microbatch", [None, 1, 4])
@pytest.mark.parametrize("name", SHORTER)
def test_a_write_to_a_view_of_another_number_of_rows(microbatch: int | None, name: str) -> None:
    """Also as the minibatch size changes, where analyses of the view are carried over."""
    view, write = SHORTER[name]

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2.0
        z = view(y)
        write(z)
        return y.sum(1), z.sum()

    for n in (7, 9, 12, 7, 9):
        x = torch.randn(n, 3, dtype=torch.float64)
        with koila_rl.limits(microbatch=microbatch), allow_unsplit():
            found = koila_rl.materialize(program(koila_rl.lazy(x)))
        torch.testing.assert_close(found, program(x), rtol=0, atol=1e-12)
