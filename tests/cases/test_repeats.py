"""A program that differs from a known one in one respect is another."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import koila_rl
from tests.helpers import allow_unsplit, assert_close

N = 12

Wrap = Callable[[Tensor], Tensor]
Outcome = tuple[list[Tensor], list[Tensor]]
"""Values, the first of which is the loss if it is a scalar, and tensors that have gradients."""
Case = Callable[[bool, Wrap], Outcome]


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(N, *shape, generator=torch.Generator().manual_seed(seed))


def leaf(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__.replace("_", " ")] = function
    return function


@case
def strides_of_a_captured_tensor(other: bool, wrap: Wrap) -> Outcome:
    weight = leaf(3, 3)
    used = weight.t() if other else weight
    return [torch.matmul(wrap(rows(3)), used).pow(2).mean()], [weight]


@case
def shape_of_a_captured_tensor(other: bool, wrap: Wrap) -> Outcome:
    weight = leaf(3, 1) if other else leaf(3, 3)
    return [torch.mul(wrap(rows(3, 3)), weight).pow(2).mean()], [weight]


@case
def sizes_of_a_captured_tensor_of_the_same_strides(other: bool, wrap: Wrap) -> Outcome:
    weight = leaf(1, 3) if other else leaf(3, 3)
    y = torch.mul(wrap(rows(1, 3)), weight)
    return [y.pow(2).mean(), y], [weight]


@case
def strides_that_show_in_the_result(other: bool, wrap: Wrap) -> Outcome:
    weight = leaf(3, 3)
    y = torch.mul(wrap(rows(1, 1)), weight.t() if other else weight)
    return [y.pow(2).mean(), y], [weight]


@case
def a_lone_weight_that_wants_gradients(other: bool, wrap: Wrap) -> Outcome:
    weight = leaf(3).requires_grad_(other)
    y = torch.mul(wrap(rows(3)), weight)
    return [y.pow(2).mean(), y], [weight]


@case
def a_real_tensor_that_waits_for_a_write(other: bool, wrap: Wrap) -> Outcome:
    x, store = wrap(rows(3)), torch.ones(N, 3)
    if other:
        store.index_add_(0, torch.arange(N), x * 2)
    y = torch.add(x, store)
    return [y.pow(2).mean(), y], []


@case
def dtype_of_a_captured_tensor(other: bool, wrap: Wrap) -> Outcome:
    weight = leaf(3).float().detach() if other else leaf(3).detach()
    found = torch.mul(wrap(rows(3).float()), weight)
    return [found.sum(), found], []


@case
def a_captured_tensor_that_wants_gradients(other: bool, wrap: Wrap) -> Outcome:
    weight, bias = leaf(3), leaf(3, seed=1).requires_grad_(other)
    return [(torch.mul(wrap(rows(3)), weight) * bias).mean()], [weight, bias]


@case
def the_class_of_a_captured_tensor(other: bool, wrap: Wrap) -> Outcome:
    class Loud(Tensor):
        """A subclass with an addition of its own."""

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            plain = [x.as_subclass(Tensor) if type(x) is Loud else x for x in args]
            found = func(*plain, **(kwargs or {}))
            return found + 1 if func is torch.sub else found

    weight = leaf(3).detach()
    return [torch.sub(wrap(rows(3)), weight.as_subclass(Loud) if other else weight)], []


@case
def one_captured_tensor_or_two_that_are_equal(other: bool, wrap: Wrap) -> Outcome:
    first, second = leaf(3), leaf(3)
    twice = second if other else first
    return [torch.addcmul(wrap(rows(3)), first, twice).pow(2).mean()], [first, second]


@case
def weights_tied_or_untied(other: bool, wrap: Wrap) -> Outcome:
    first, second = leaf(3, 3), leaf(3, 3)
    hidden = torch.matmul(wrap(rows(3)), first).tanh()
    return [torch.matmul(hidden, second if other else first).pow(2).mean()], [first, second]


@case
def one_minibatch_or_two(other: bool, wrap: Wrap) -> Outcome:
    first, second = rows(3).requires_grad_(), rows(3).requires_grad_()
    a, b = wrap(first), wrap(second)
    return [torch.mul(a, b if other else a).pow(2).mean()], [first, second]


@case
def one_value_or_two(other: bool, wrap: Wrap) -> Outcome:
    weight = leaf(3)
    x = wrap(rows(3))
    a, b = x * weight, x * weight
    return [torch.mul(a, b if other else a).pow(2).mean()], [weight]


@case
def a_value_or_its_minibatch(other: bool, wrap: Wrap) -> Outcome:
    x = wrap(rows(3))
    return [torch.sub(x, (x * 1.5) if other else x).pow(2).mean()], []


def exponent(special: float) -> Case:
    def found(other: bool, wrap: Wrap) -> Outcome:
        weight = leaf(3)
        x = wrap(rows(3)) * weight
        norms = torch.linalg.vector_norm(x, special if other else 3.0, 1)
        return [norms.mean(), norms], [weight]

    return found


for number in (0.0, 1.0, 2.0, math.inf, -math.inf, -1.0):
    CASES[f"norm of order {number}"] = exponent(number)


@case
def a_factor_that_is_not_finite(other: bool, wrap: Wrap) -> Outcome:
    x = wrap(rows(3))
    return [x * (math.nan if other else 0.5)], []


@case
def an_integer_or_a_truth_value(other: bool, wrap: Wrap) -> Outcome:
    x = wrap(rows(3) > 0)
    return [torch.mul(x, 1 if other else True)], []


@case
def an_integer_or_a_float(other: bool, wrap: Wrap) -> Outcome:
    x = wrap((10 * rows(3)).long())
    return [torch.mul(x, 2 if other else 2.0)], []


@case
def another_dimension(other: bool, wrap: Wrap) -> Outcome:
    weight = leaf(3, 3)
    return [(wrap(rows(3, 3)) * weight).sum(2 if other else 1).pow(2).mean()], [weight]


@case
def another_name(other: bool, wrap: Wrap) -> Outcome:
    x = wrap(rows(3))
    return [torch.clamp(x, max=0.1) if other else torch.clamp(x, min=0.1)], []


@case
def one_argument_more(other: bool, wrap: Wrap) -> Outcome:
    x = wrap(rows(3))
    return [torch.add(x, 1, alpha=3) if other else torch.add(x, 1)], []


@case
def another_default_type(other: bool, wrap: Wrap) -> Outcome:
    x = wrap((10 * rows(3)).long())
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if other else torch.float64)
    try:
        y = torch.div(x, 3)
        koila_rl.materialize(y)
        return [y], []
    finally:
        torch.set_default_dtype(before)


@case
def the_order_of_two_writes(other: bool, wrap: Wrap) -> Outcome:
    weight = leaf(3)
    y = wrap(rows(3)) * weight
    y = y.add_(1).mul_(2) if other else y.mul_(2).add_(1)
    return [y.pow(2).mean()], [weight]


@case
def a_write_to_another_value(other: bool, wrap: Wrap) -> Outcome:
    weight = leaf(3)
    y = wrap(rows(3)) * weight
    z = y.clone() if other else y
    z.mul_(2)
    return [(y * z).mean()], [weight]


@case
def gradients_off_for_one_call(other: bool, wrap: Wrap) -> Outcome:
    weight = leaf(3)
    x = wrap(rows(3))
    with torch.set_grad_enabled(not other):
        scale = torch.mul(x, weight)
    return [(scale * x * weight).mean()], [weight]


@case
def detached(other: bool, wrap: Wrap) -> Outcome:
    weight = leaf(3)
    y = wrap(rows(3)) * weight
    return [(y * (y.detach() if other else y)).mean()], [weight]


@case
def dropout_on_or_off(other: bool, wrap: Wrap) -> Outcome:
    weight = leaf(3)
    return [F.dropout(wrap(rows(3)) * weight, 1.0, other).mean()], [weight]


@case
def under_autocast(other: bool, wrap: Wrap) -> Outcome:
    weight = leaf(3, 3).detach().float()
    with torch.autocast("cpu", torch.bfloat16, enabled=other):
        return [torch.matmul(wrap(rows(3).float()), weight).float()], []


@case
def under_a_transform(other: bool, wrap: Wrap) -> Outcome:
    weight = leaf(3).detach()

    def product(x: Tensor) -> Tensor:
        return torch.mul(x, weight)

    return [(torch.func.vmap(product) if other else product)(wrap(rows(3)))], []


@case
def a_value_read_in_between(other: bool, wrap: Wrap) -> Outcome:
    weight = leaf(3)
    y = wrap(rows(3)) * weight
    if other:
        assert isinstance(y.sum().item(), float)
    return [(y * y.tanh()).mean(), y], [weight]


@case
def another_shape_of_rows(other: bool, wrap: Wrap) -> Outcome:
    weight = leaf(1)
    y = wrap(rows(4) if other else rows(3)) * weight
    return [y.pow(2).mean(), y], [weight]


@case
def rows_that_want_gradients(other: bool, wrap: Wrap) -> Outcome:
    x = rows(3).requires_grad_(other)
    y = wrap(x) * 2
    return [y.pow(2).mean(), y], [x]


@case
def a_plain_number_or_the_size(other: bool, wrap: Wrap) -> Outcome:
    weight = leaf(N)
    x = wrap(rows(N))
    n = x.shape[1] if other else x.shape[0]
    return [(x * weight).sum(1).reshape(n, 1).mean()], [weight]


@case
def another_call_behind_the_same_end(other: bool, wrap: Wrap) -> Outcome:
    weight = leaf(3)
    y = wrap(rows(3)) * weight
    y = torch.sin(y) if other else torch.cos(y)
    return [y.pow(2).mean()], [weight]


@case
def operands_the_other_way_around(other: bool, wrap: Wrap) -> Outcome:
    weight = leaf(3)
    x = wrap(rows(3))
    a, b = torch.mul(x, weight), torch.mul(x, weight).sin()
    return [(torch.sub(b, a) if other else torch.sub(a, b)).pow(3).mean()], [weight]


def described(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), tuple(x.stride()), x.dtype, x.requires_grad


def outcome(case: Case, other: bool, wrap: Wrap) -> tuple[list[Any], list[Tensor | None]]:
    """How values are described before they are known; values, and gradients if there are any."""
    values, leaves = case(other, wrap)
    seen = [described(x) for x in values]
    if values[0].ndim == 0 and values[0].requires_grad:
        values[0].backward()
    found: list[Tensor | None] = [koila_rl.materialize(x).detach() for x in values]
    return seen, [*found, *(x.grad for x in leaves)]


def assert_as_eager(case: Case, other: bool) -> None:
    seen, expected = outcome(case, other, lambda x: x)
    described, got = outcome(case, other, koila_rl.lazy)
    assert described == seen
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert mine.dtype == theirs.dtype
            assert_close(mine, theirs, magnitude=1.0)


@pytest.mark.parametrize("microbatch", [None, 5])
@pytest.mark.parametrize("name", CASES)
def test_what_differs_in_one_respect_is_another_program(name: str, microbatch: int | None) -> None:
    with koila_rl.limits(microbatch=microbatch), allow_unsplit():
        for _ in range(4):
            assert_as_eager(CASES[name], other=False)
        # Met first where the other was expected, then well known, then the other again.
        for _ in range(4):
            assert_as_eager(CASES[name], other=True)
        for turn in range(4):
            assert_as_eager(CASES[name], other=bool(turn % 2))


def test_data_swapped_between_updates() -> None:
    weight = leaf(3)
    for seed in range(5):
        weight.data = torch.randn(3, generator=torch.Generator().manual_seed(seed))
        weight.grad = None
        (koila_rl.lazy(rows(3)) * weight).pow(2).mean().backward()
        expected = 2 * (rows(3).pow(2).mean(0) * weight.detach()) / 3
        assert weight.grad is not None
        assert_close(weight.grad, expected)


def test_other_threads_record_the_same() -> None:
    def work(found: list[BaseException]) -> None:
        # The default type is that of the process.
        try:
            for _ in range(5):
                for name in ("weights tied or untied", "the order of two writes"):
                    assert_as_eager(CASES[name], other=False)
                    assert_as_eager(CASES[name], other=True)
        except BaseException as error:
            found.append(error)

    failures: list[BaseException] = []
    threads = [threading.Thread(target=work, args=(failures,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    work(failures)
    for thread in threads:
        thread.join()
    assert failures == []
