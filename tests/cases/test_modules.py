"""Structures, batch dimensions, random row orders and modules met in real code."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import koila_rl
from koila_rl import BatchSizeError
from tests.helpers import allow_unsplit, assert_close, check, run

N = 7


@pytest.mark.parametrize("build", [lambda: nn.Conv1d(3, 4, 3), lambda: nn.Linear(5, 2)])
def test_forward_without_gradients(build: Any) -> None:
    def program(module: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            return module(x)

    outcomes = check(program, (torch.randn(N, 3, 5),), build(), backward=False, splits=True)
    assert all(not outcome.values[0].requires_grad for outcome in outcomes.values())


def test_forward_in_inference_mode() -> None:
    layer, x = nn.Linear(3, 2), torch.randn(N, 3)
    with koila_rl.limits(microbatch=2), torch.inference_mode():
        value = koila_rl.materialize(layer(koila_rl.lazy(x)))
    assert_close(value, layer(x))


class PackedGRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 5, batch_first=True)

    def forward(self, x: Tensor, lengths: Any) -> tuple[Tensor, Tensor, Tensor]:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output, last = self.gru(packed)
        padded, sizes = pad_packed_sequence(output, batch_first=True)
        return padded, last, sizes


@pytest.mark.parametrize("kind", ["list", "real tensor", "lazy tensor"])
def test_packed_sequences(kind: str) -> None:
    lengths = [6, 5, 2, 1]

    def program(module: Any, x: Tensor, wrapped: Tensor) -> tuple[Tensor, ...]:
        given = {"list": lengths, "real tensor": torch.tensor(lengths), "lazy tensor": wrapped}
        padded, last, sizes = module(x, given[kind])
        assert padded.shape == (4, 6, 5)
        return padded.pow(2).mean() + last.mean(), padded, last, sizes

    check(program, (torch.randn(4, 6, 3), torch.tensor(lengths)), PackedGRU(), sizes=(1, 2, 4))


@dataclass
class Sample:
    observation: Tensor
    extra: dict[str, list[Tensor]]
    label: str = "kept"


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def test_nested_structures_come_back_as_they_were() -> None:
    x, y, z = torch.randn(N, 2), torch.randn(N), torch.arange(N)
    nested = Sample(x, {"a": [y, z]})
    with koila_rl.limits(microbatch=3):
        found = koila_rl.lazy(nested)
        assert isinstance(found, Sample)
        assert found.label == "kept"
        assert isinstance(found.extra["a"], list)
        total = found.observation.sum(1) + found.extra["a"][0] * found.extra["a"][1]
        assert_close(koila_rl.materialize(total), x.sum(1) + y * z)
        back = koila_rl.materialize(found)
        assert isinstance(back, Sample)
        assert torch.equal(back.extra["a"][1], z)

        pair, ordered, (one, none) = koila_rl.lazy(Pair(x, y), OrderedDict(b=y, a=z), (x, None))
        assert isinstance(pair, Pair)
        assert list(ordered) == ["b", "a"]
        assert none is None
        assert_close(
            koila_rl.materialize(pair.first.sum(1) + ordered["b"] + one[:, 0]),
            x.sum(1) + y + x[:, 0],
        )


def test_a_tensordict_is_indexed_and_passed_on() -> None:
    data = TensorDict({"x": torch.randn(N, 3), "next": {"x": torch.randn(N, 3)}}, [N])
    layer = nn.Linear(3, 2)
    expected = (layer(data["x"]) - layer(data["next", "x"])).pow(2).mean()
    with koila_rl.limits(microbatch=2):
        batch = koila_rl.lazy(data)
        assert batch.batch_size == torch.Size([N])
        batch["y"] = layer(batch["x"])
        following = batch["next"]
        following.set("y", layer(following["x"]))
        loss = (batch["y"] - batch["next", "y"]).pow(2).mean()
        assert_close(torch.tensor(loss.item()), expected.detach())


def test_sizes_that_differ_in_one_call_are_refused() -> None:
    with pytest.raises(BatchSizeError, match=r"7.*5|5.*7"):
        koila_rl.lazy(torch.randn(7, 2), torch.randn(5, 2))


@pytest.mark.parametrize("sizes", [(7, 5), (7, 7), (6, 3)])
def test_two_minibatches_in_one_loss(sizes: tuple[int, int]) -> None:
    layer = nn.Linear(3, 2)
    a, b = torch.randn(sizes[0], 3), torch.randn(sizes[1], 3)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        near = layer(x).pow(2).mean() + layer(y).abs().mean()
        return near + (layer(x).mean() - layer(y).mean()).pow(2)

    expected = loss(a, b)
    wanted = torch.autograd.grad(expected, list(layer.parameters()))
    for microbatch in (1, 2, 4, 7):
        layer.zero_grad()
        with koila_rl.limits(microbatch=microbatch), allow_unsplit():
            found = loss(koila_rl.lazy(a), koila_rl.lazy(b))
            found.backward()
        assert_close(torch.tensor(found.item()), expected)
        for p, gradient in zip(layer.parameters(), wanted, strict=True):
            assert p.grad is not None
            assert_close(p.grad, gradient)


def test_a_matrix_of_pairs_of_two_minibatches() -> None:
    layer = nn.Linear(3, 4)
    a, b = torch.randn(7, 3), torch.randn(5, 3)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return (layer(x) @ layer(y).T).softmax(-1).pow(2).mean()

    wanted = torch.autograd.grad(loss(a, b), list(layer.parameters()))
    with koila_rl.limits(microbatch=2), allow_unsplit():
        loss(koila_rl.lazy(a), koila_rl.lazy(b)).backward()
    for p, gradient in zip(layer.parameters(), wanted, strict=True):
        assert p.grad is not None
        assert_close(p.grad, gradient)


@pytest.mark.parametrize("dim", [1, 2, -1])
def test_any_dimension_may_be_the_batch(dim: int) -> None:
    x = torch.randn(3, N, N + 2) if dim == 1 else torch.randn(3, N + 2, N)

    def program(module: Any, x: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(x * module.weight.view(3, 1, 1))
        outer = (y.mean(dim) * y.sum(0).mean()).mean()
        return outer + y.std(0).mean() + y.pow(2).mean(), y

    module = nn.PReLU(3)
    check(program, (x,), module, dim=dim, sizes=(1, 3, N - 1), magnitude=1.0)


def test_time_and_batch_are_joined_and_parted() -> None:
    def program(module: Any, x: Tensor) -> tuple[Tensor, ...]:
        steps, size = x.shape[:2]
        features = module(x.flatten(0, 1)).view(steps, size, -1)
        again = module(x.reshape(-1, 3)).reshape(steps, size, 2)
        turned = module(x.transpose(0, 1).reshape(steps * size, 3)).view(size, steps, 2)
        return (features * again * turned.transpose(0, 1)).mean(), features, turned

    check(program, (torch.randn(4, N, 3),), nn.Linear(3, 2), dim=1, splits=True)


def test_two_minibatches_joined_for_one_forward() -> None:
    def program(module: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        first, second = module(torch.cat([x, y])).chunk(2)
        stacked = module(torch.stack([x, y], dim=1).flatten(0, 1)).view(-1, 2, 2)
        left, right = torch.split(module(torch.cat([x, y])), x.shape[0])
        return (first * second).mean() + stacked.pow(2).mean() + (left - right).mean(), first

    check(program, (torch.randn(N, 3), torch.randn(N, 3)), nn.Linear(3, 2))


def test_row_numbers_as_an_index() -> None:
    action = torch.randint(0, 2, (N,))

    def program(module: Any, x: Tensor, wrapped: Tensor) -> tuple[Tensor, ...]:
        q = module(x)
        a = q[torch.arange(N), action]
        b = q[torch.arange(x.shape[0]), wrapped]
        c = q[range(N), action.tolist()]
        return (a * b).mean() + c.mean(), a

    check(program, (torch.randn(N, 3), action), nn.Linear(3, 2))


def test_minibatch_drawn_from_the_wrapped_one() -> None:
    order = torch.randperm(N)

    def program(module: Any, x: Tensor) -> tuple[Tensor, ...]:
        y = module(x)
        kept = y[order[:4]]
        return kept.pow(2).mean() + y[::2].mean() + y[x[:, 0] > 0].sum(), kept

    check(program, (torch.randn(N, 3),), nn.Linear(3, 2))


def test_python_reads_force_values() -> None:
    x = torch.tensor([3.0, 1.0, 2.0])
    y = koila_rl.lazy(x) * 2
    assert y.tolist() == [6, 2, 4]
    assert [float(v) for v in y] == [6, 2, 4]
    assert y.numpy().sum() == 12
    assert int(y.max()) == 6
    assert bool((y > 0).all())
    assert f"{y.mean():.1f}" == "4.0"
    assert "6." in repr(y)
    assert len(y) == 3
    assert 6.0 in y
    assert math.isclose(y.sum(), 12)
    if y[0] > y[1]:
        y = y + 1
    assert y.tolist() == [7, 3, 5]


def test_data_dependent_shapes() -> None:
    def program(module: Any, x: Tensor) -> tuple[Tensor, ...]:
        y = module(x)
        kept = y[y[:, 0] > 0]
        places = torch.nonzero(y[:, 1] > 0)
        values, counts = torch.unique((y[:, 0] > 0).long(), return_counts=True)
        return kept.sum() / max(1, kept.shape[0]), kept, places, values, counts

    check(program, (torch.randn(N, 3),), nn.Linear(3, 2))


@pytest.mark.parametrize("variance", ["vector", "matrix"])
def test_a_loss_that_looks_at_values_inside(variance: str) -> None:
    def program(module: Any, x: Tensor, y: Tensor) -> Tensor:
        var = F.softplus(module(x)) + 0.1
        return F.gaussian_nll_loss(module(2 * x), y, var if variance == "matrix" else var[:, :1])

    check(program, (torch.randn(N, 3), torch.randn(N, 2)), nn.Linear(3, 2))


def test_second_derivatives_are_right_or_refused_by_name() -> None:
    def program(module: Any, x: Tensor) -> Tensor:
        value = module(x).tanh().sum()
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        return (gradient.norm(dim=1) - 1).pow(2).mean()

    x, layer = torch.randn(N, 3, requires_grad=True), nn.Linear(3, 1)
    try:
        run(program, (x,), layer, microbatch=3)
    except koila_rl.UnsupportedError as error:
        refusal = str(error)
    else:
        check(program, (x,), layer)
        return
    assert "double backward" in refusal or "create_graph" in refusal


def test_gradients_asked_for_by_name() -> None:
    layer = nn.Linear(3, 2)
    x = torch.randn(N, 3)
    wanted = torch.autograd.grad(layer(x).pow(2).mean(), [layer.weight])[0]
    with koila_rl.limits(microbatch=2):
        loss = layer(koila_rl.lazy(x)).pow(2).mean()
        (found,) = torch.autograd.grad(loss, [layer.weight])
        assert_close(found, wanted)
        assert layer.weight.grad is None
        other = layer(koila_rl.lazy(x)).pow(2).mean()
        other.backward(retain_graph=True)
        other.backward()
        assert layer.weight.grad is not None
        assert_close(layer.weight.grad, 2 * wanted)
        with pytest.raises(RuntimeError, match="second time"):
            other.backward()


def test_gradients_of_rows_given_by_the_caller() -> None:
    layer, x, weights = nn.Linear(3, 2), torch.randn(N, 3), torch.randn(N, 2)
    wanted = torch.autograd.grad(layer(x), list(layer.parameters()), weights)
    with koila_rl.limits(microbatch=2):
        layer(koila_rl.lazy(x)).backward(weights)
    for p, gradient in zip(layer.parameters(), wanted, strict=True):
        assert p.grad is not None
        assert_close(p.grad, gradient)


def test_an_ensemble_by_vmap() -> None:
    module = nn.ModuleList(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)) for _ in "ab")

    def program(module: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        parameters, buffers = torch.func.stack_module_state(list(module))

        def member(p: Any, b: Any, rows: Tensor) -> Tensor:
            return torch.func.functional_call(module[0], (p, b), (rows,))

        outputs = torch.func.vmap(member, in_dims=(0, 0, None))(parameters, buffers, x)
        loss = (outputs - y).pow(2).mean()
        grads = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True)
        return loss, outputs, *grads

    check(program, (torch.randn(N, 3), torch.randn(N, 1)), module, sizes=(1, 3, N), backward=False)


def test_gradients_of_single_samples_by_vmap() -> None:
    module = nn.Linear(3, 2)

    def program(module: Any, x: Tensor) -> Tensor:
        parameters = dict(module.named_parameters())

        def loss(p: Any, row: Tensor) -> Tensor:
            return torch.func.functional_call(module, p, (row,)).pow(2).sum()

        grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
        return grads["weight"].flatten(1).norm(dim=1).mean()

    check(program, (torch.randn(N, 3),), module, sizes=(1, 3, N), backward=False)
