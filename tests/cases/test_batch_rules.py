"""Custom operators: with a rule they split exactly, without one they run whole and are named."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import koila_rl
from koila_rl import ConfigurationError, register_batch_rule
from koila_rl.recording import rules
from koila_rl.recording.recorder import forget_analyses
from tests.helpers import allow_unsplit, check

N = 10
SIZES = [1, 3, N]


@pytest.fixture
def ops() -> Iterator[Any]:
    """Operators of the namespace ``koila_rl_tests``, and no rule for any of them afterwards."""
    with torch.library._scoped_library("koila_rl_tests", "FRAGMENT"):
        yield SimpleNamespace(
            scale=_scale(), gram=_gram(), weighted=_weighted(), centred_backward=_centred_backward()
        )
    for name in [name for name in rules._RULES if name.startswith("koila_rl_tests::")]:
        del rules._RULES[name]
    forget_analyses()


def _scale() -> Any:
    """``x`` times a row of factors, and the signs of the result."""

    @torch.library.custom_op("koila_rl_tests::scale", mutates_args=())
    def scale(x: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
        return x * factors, (x * factors).sign()

    @scale.register_fake
    def _(x: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), torch.empty_like(x)

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        x, factors = ctx.saved_tensors
        return gradient * factors, (gradient * x).sum(0)

    scale.register_autograd(backward, setup_context=save)
    return scale


def _gram() -> Any:
    """``x.T @ x``, a sum over samples."""

    @torch.library.custom_op("koila_rl_tests::gram", mutates_args=())
    def gram(x: Tensor) -> Tensor:
        return x.T @ x

    @gram.register_fake
    def _(x: Tensor) -> Tensor:
        return x.new_empty(x.shape[1], x.shape[1])

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    gram.register_autograd(lambda ctx, g: ctx.saved_tensors[0] @ (g + g.T), setup_context=save)
    return gram


def _weighted() -> Any:
    """A list of tensors weighted with a number; no fake kernel and no gradient."""

    @torch.library.custom_op("koila_rl_tests::weighted", mutates_args=())
    def weighted(x: list[Tensor], by: float) -> Tensor:
        return torch.stack(x).sum(0) * by

    return weighted


def _centred_backward() -> Any:
    """The identity, with a backward that mixes samples."""

    @torch.library.custom_op("koila_rl_tests::centred_backward", mutates_args=())
    def centred_backward(x: Tensor) -> Tensor:
        return x.clone()

    @centred_backward.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    centred_backward.register_autograd(lambda ctx, gradient: gradient - gradient.mean(0))
    return centred_backward


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.factors = nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 3.0]))


def scaled(ops: Any, calls: list[Any] | None = None) -> Any:
    def program(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y, sign = ops.scale(module.layer(x), module.factors)
        return (y.pow(2) * sign).mean(), y

    return program


def test_without_a_rule_an_operator_is_named(ops: Any) -> None:
    found = check(scaled(ops), (torch.randn(N, 3),), Scaled(), sizes=SIZES)
    assert any("scale" in name for name in found[3].unsplit)


@pytest.mark.parametrize("given", ["function", "name", "packet", "overload"])
def test_with_a_rule_an_operator_splits(ops: Any, given: str) -> None:
    packet = torch.ops.koila_rl_tests.scale
    by = {"function": ops.scale, "name": "koila_rl_tests::scale", "packet": packet,
          "overload": packet.default}  # fmt: skip
    asked: list[Any] = []

    def rule(dims: Any, x: Tensor, factors: Tensor) -> tuple[int, int]:
        asked.append((dims, tuple(factors.shape)))
        return dims[0], dims[0]

    check(scaled(ops), (torch.randn(N, 3),), Scaled(), sizes=[3])
    register_batch_rule(by[given], rule)
    check(scaled(ops), (torch.randn(N, 3),), Scaled(), sizes=SIZES, splits=True)
    assert ((0, None), (4,)) in asked


def test_a_sum(ops: Any) -> None:
    def program(module: Any, x: Tensor) -> Tensor:
        loss: Tensor = ops.gram(module(x)).pow(2).mean()
        return loss

    register_batch_rule(ops.gram, lambda dims, x: "sum" if dims[0] == 0 else None)
    check(program, (torch.randn(N, 3),), nn.Linear(3, 2), sizes=SIZES, splits=True)


def test_a_rule_may_say_that_samples_mix(ops: Any) -> None:
    register_batch_rule(ops.scale, lambda dims, x, factors: None)
    found = check(scaled(ops), (torch.randn(N, 3),), Scaled(), sizes=SIZES)
    assert any("scale" in name for name in found[3].unsplit)


def test_rows_that_belong_to_the_samples_are_cut_along(ops: Any) -> None:
    factors = torch.randn(N, 4)

    def program(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y, sign = ops.scale(module.layer(x).detach(), factors)
        return (y.pow(2) * sign).mean() * module.factors.sum(), y

    register_batch_rule(ops.scale, lambda dims, x, factors: (dims[0], dims[0]))
    check(program, (torch.randn(N, 3),), Scaled(), sizes=SIZES, splits=True)


def test_a_backward_that_mixes_runs_whole_all_the_same(ops: Any) -> None:
    def program(module: Any, x: Tensor) -> Tensor:
        loss: Tensor = ops.centred_backward(module(x)).pow(3).mean()
        return loss

    register_batch_rule(ops.centred_backward, lambda dims, x: dims[0])
    found = check(program, (torch.randn(N, 3),), nn.Linear(3, 2), sizes=SIZES)
    assert any("centred_backward" in name for name in found[3].unsplit)


WRONG: dict[str, tuple[Any, str]] = {
    "another dimension": (lambda dims, x, factors: (1, 0), r"scale.*\(10, 4\).*for 10 samples"),
    "a sum": (lambda dims, x, factors: "sum", r"scale.*'sum'.*\(10, 4\)"),
    "too few": (lambda dims, x, factors: 0, r"scale.*returned 0 for 2 results"),
    "another word": (lambda dims, x, factors: "rows", r"scale.*'rows'.*'sum', 'mean'"),
    "another kind": (lambda dims, x, factors: (0.5, 0), r"scale.*0.5.*2 results"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_found_by_its_shapes(ops: Any, name: str) -> None:
    rule, message = WRONG[name]
    register_batch_rule(ops.scale, rule)
    module = Scaled()
    with koila_rl.limits(microbatch=3), pytest.raises(ConfigurationError, match=message):
        ops.scale(module.layer(koila_rl.lazy(torch.randn(N, 3))), module.factors)


def test_verify_finds_a_rule_that_is_wrong_in_its_values(ops: Any) -> None:
    with torch.library._scoped_library("koila_rl_tests", "FRAGMENT"):

        @torch.library.custom_op("koila_rl_tests::centred", mutates_args=())
        def centred(x: Tensor) -> Tensor:
            return x - x.mean(0)

        centred.register_fake(torch.empty_like)
        register_batch_rule(centred, lambda dims, x: dims[0])
        layer, x = nn.Linear(3, 2), torch.randn(N, 3)
        with koila_rl.limits(microbatch=3):
            loss = (layer(koila_rl.lazy(x)) * centred(koila_rl.lazy(x)[:, :2])).mean()
            assert koila_rl.verify(loss).worst > 0.01


def test_what_cannot_have_a_rule(ops: Any) -> None:
    def rule(dims: Any, *args: Any) -> int:
        return 0

    @torch.library.custom_op("koila_rl_tests::add_one", mutates_args=("x",))
    def add_one(x: Tensor) -> None:
        x.add_(1)

    bad: list[tuple[Any, str]] = [
        (ops.weighted, r"weighted has no fake kernel.*register_fake"),
        (add_one, r"add_one writes to its arguments"),
        ("koila_rl_tests::nothing", r"no operator koila_rl_tests::nothing"),
        ("scale", r"namespace::name"),
        (torch.add, r"namespace::name"),
        (None, r"namespace::name"),
    ]
    for op, message in bad:
        with pytest.raises(ConfigurationError, match=message):
            register_batch_rule(op, rule)
    with pytest.raises(ConfigurationError, match=r"scale is 3 but must be a function"):
        register_batch_rule(ops.scale, 3)  # type: ignore[arg-type]


def test_an_operator_without_a_fake_kernel_runs_whole_and_is_named(ops: Any) -> None:
    layer, x = nn.Linear(3, 2), torch.randn(N, 3)
    with koila_rl.limits(microbatch=3), allow_unsplit():
        y = koila_rl.lazy(x)
        w = ops.weighted([y, 2 * y], 0.5)
        loss = (layer(y) * w[:, :2]).mean()
        loss.backward()
    plan = koila_rl.last_plan()
    assert plan is not None
    assert any("weighted" in name for name in plan.unsplit)
    wanted = torch.autograd.grad((layer(x) * 1.5 * x[:, :2]).mean(), [layer.weight])[0]
    torch.testing.assert_close(layer.weight.grad, wanted, rtol=0, atol=1e-14)


def test_lists_of_tensors_have_tuples_of_dimensions(ops: Any) -> None:
    seen: list[Any] = []

    def rule(dims: Any, x: list[Tensor], by: float) -> int:
        seen.append((dims, by))
        return int(dims[0][0])

    ops.weighted.register_fake(lambda x, by: torch.empty_like(x[0]))
    register_batch_rule(ops.weighted, rule)
    x = torch.randn(N, 3)
    with koila_rl.limits(microbatch=3):
        y = koila_rl.lazy(x)
        found = koila_rl.materialize(ops.weighted([y, 2 * y], 0.5))
    torch.testing.assert_close(found, 1.5 * x, rtol=0, atol=1e-14)
    assert seen[0] == (((0, 0), None), 0.5)
