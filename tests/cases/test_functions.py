"""Custom backwards, custom operators, hooks, and captured tensors with a graph of their own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

import koila_rl
from koila_rl.errors import UnsplitWarning
from tests.helpers import allow_unsplit, check

N = 10
SIZES = [1, 3, N]


class StraightThrough(Function):
    """Round forward, let the gradient through unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class SavesItsInput(Function):
    """A cube whose backward reads what the forward saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return factor * x**3, x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return 5 * ctx.factor * x**2 * gradient, None


class DividesBySize(Function):
    """A backward that divides by the number of samples it sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x / x.shape[0]


class SeparateContext(Function):
    """The newer form, with ``setup_context`` apart from ``forward``."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.abs()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * gradient * ctx.saved_tensors[0]


bound_apply = StraightThrough.apply


FUNCTIONS: dict[str, Any] = {
    "apply": lambda y: StraightThrough.apply(y),
    "apply bound at import": lambda y: bound_apply(y),
    "saved input": lambda y: SavesItsInput.apply(y, 0.5)[0],
    "two outputs": lambda y: sum(SavesItsInput.apply(y, 2.0)),
    "divides by size": lambda y: DividesBySize.apply(y),
    "separate context": lambda y: SeparateContext.apply(y),
    "within sums": lambda y: DividesBySize.apply(y - y.mean(0)) * y.mean(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_backward_of_a_function_is_its_own(name: str) -> None:
    def program(module: Any, x: Tensor) -> Tensor:
        return (FUNCTIONS[name](3 * module(x)) * x[:, :2]).mean()

    check(program, (torch.randn(N, 3, requires_grad=True),), nn.Linear(3, 2), sizes=SIZES)


@pytest.fixture
def unknown_operator() -> Iterator[Any]:
    with torch.library._scoped_library("koila_rl_tests", "FRAGMENT"):

        @torch.library.custom_op("koila_rl_tests::centred", mutates_args=())
        def centred(x: Tensor) -> Tensor:
            return x - x.mean(0)

        @centred.register_fake
        def _(x: Tensor) -> Tensor:
            return torch.empty_like(x)

        centred.register_autograd(lambda ctx, gradient: gradient - gradient.mean(0))
        yield centred


def test_an_operator_without_a_rule_runs_whole_and_is_named(unknown_operator: Any) -> None:
    def program(module: Any, x: Tensor) -> Tensor:
        return unknown_operator(module(x)).pow(3).mean()

    outcomes = check(program, (torch.randn(N, 3),), nn.Linear(3, 2), sizes=SIZES)
    assert any("centred" in name for name in outcomes[3].unsplit)


def test_an_unsplit_call_is_told_once_a_program(unknown_operator: Any) -> None:
    layer = nn.Linear(3, 5)
    with warnings.catch_warnings(record=True) as caught, koila_rl.limits(microbatch=3):
        warnings.simplefilter("always")
        for _ in range(3):
            unknown_operator(layer(koila_rl.lazy(torch.randn(N, 3)))).pow(3).mean().backward()
    told = [w for w in caught if issubclass(w.category, UnsplitWarning)]
    assert len(told) == 1
    assert "centred" in str(told[0].message)
    plan = koila_rl.last_plan()
    assert plan is not None
    assert any("centred" in name for name in plan.unsplit)
    detail = str(plan.unsplit_details[0])
    assert "centred" in detail
    assert "test_functions.py" in detail


def test_batch_norm_in_training_names_its_remedy() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    x = torch.randn(N, 3)
    with warnings.catch_warnings(), koila_rl.limits(microbatch=3):
        warnings.simplefilter("ignore", UnsplitWarning)
        module(koila_rl.lazy(x)).pow(3).mean().backward()
    plan = koila_rl.last_plan()
    assert plan is not None
    assert plan.unsplit == () or "GroupNorm" in str(plan.unsplit_details)


def captured_programs() -> dict[str, Any]:
    def deviation(module: Any, x: Tensor) -> Tensor:
        return (module.layer(x) / module.log_std.exp()).pow(2).mean() + module.log_std.sum()

    def temperature(module: Any, x: Tensor) -> Tensor:
        eta = F.softplus(module.log_std[0])
        return eta * (module.layer(x) / eta).exp().mean().log() + eta * 0.1

    def shared(module: Any, x: Tensor) -> Tensor:
        scale = module.log_std.exp()
        return (module.layer(x) * scale).mean() + (module.layer(x).pow(2) * scale).mean() * scale[0]

    return {"deviation": deviation, "temperature": temperature, "shared": shared}


class WithDeviation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.log_std = nn.Parameter(torch.tensor([0.3, -0.2]))


@pytest.mark.parametrize("name", captured_programs())
def test_captured_tensors_with_a_graph_of_their_own(name: str) -> None:
    check(captured_programs()[name], (torch.randn(N, 3),), WithDeviation(), splits=True)


@pytest.mark.parametrize(
    "norm", [nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.weight_norm]
)
def test_parametrised_weights(norm: Any) -> None:
    def program(module: Any, x: Tensor) -> Tensor:
        return module(x).pow(2).mean()

    torch.manual_seed(0)
    check(program, (torch.randn(N, 3),), norm(nn.Linear(3, 2)), splits=True)


@pytest.mark.parametrize("microbatch", SIZES)
def test_the_graph_of_a_captured_tensor_gets_its_gradient_once(microbatch: int) -> None:
    log_std = torch.zeros(2, requires_grad=True)
    std = log_std.exp()
    calls: list[Tensor] = []
    std.register_hook(calls.append)
    with koila_rl.limits(microbatch=microbatch):
        (koila_rl.lazy(torch.ones(N, 2)) * std).mean().backward()
    assert len(calls) == 1
    torch.testing.assert_close(log_std.grad, torch.full((2,), 0.5), rtol=0, atol=1e-14)


def hooked(microbatch: int | None) -> dict[str, list[Tensor]]:
    """What each kind of hook sees in a backward over a wrapped minibatch."""
    torch.manual_seed(0)
    seen: dict[str, list[Tensor]] = {"parameter": [], "accumulated": [], "output": [], "module": []}
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(N, 3)
    parameter = module[0].weight
    parameter.register_hook(lambda g: seen["parameter"].append(g.clone()))
    parameter.register_post_accumulate_grad_hook(
        lambda p: seen["accumulated"].append(p.grad.clone())
    )
    module[2].register_full_backward_hook(lambda m, i, o: seen["module"].append(o[0]))
    with koila_rl.limits(microbatch=microbatch), allow_unsplit():
        y = module(koila_rl.lazy(x) if microbatch else x)
        y.register_hook(lambda g: seen["output"].append(g))
        y.pow(2).mean().backward()
        return {k: [koila_rl.materialize(g) for g in v] for k, v in seen.items()}


@pytest.mark.parametrize("microbatch", SIZES)
def test_hooks_fire_once_with_the_whole_gradient(microbatch: int) -> None:
    expected, got = hooked(None), hooked(microbatch)
    for name, gradients in expected.items():
        assert len(gradients) == 1
        assert len(got[name]) == 1, name
        torch.testing.assert_close(got[name][0], gradients[0], rtol=0, atol=1e-13)


@pytest.mark.parametrize("microbatch", SIZES)
def test_a_hook_may_change_a_gradient(microbatch: int) -> None:
    def gradient(size: int | None) -> Tensor:
        torch.manual_seed(0)
        layer, x = nn.Linear(3, 2), torch.randn(N, 3)
        with koila_rl.limits(microbatch=size), allow_unsplit():
            y = layer(koila_rl.lazy(x) if size else x)
            y.register_hook(lambda g: g.clamp(-0.02, 0.02))
            y.pow(2).sum().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad

    torch.testing.assert_close(gradient(microbatch), gradient(None), rtol=0, atol=1e-13)


def test_forward_hooks_are_recorded_with_the_module() -> None:
    def program(module: Any, x: Tensor) -> Tensor:
        handle = module.register_forward_hook(lambda m, i, o: o * 2)
        loss: Tensor = module(x).pow(2).mean()
        handle.remove()
        return loss

    check(program, (torch.randn(N, 3),), nn.Linear(3, 2), splits=True)
