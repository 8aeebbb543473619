"""`koila_rl.opaque`: one recorded call, split where that is seen to be right."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

import koila_rl
from koila_rl import ConfigurationError, UnsplitWarning, UnsupportedError, opaque
from tests.helpers import allow_unsplit, assert_close, check, run

N = 10
SIZES = [1, 3, N]


class Divides(Function):
    """The identity with a backward that divides by the number of samples it sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.shape[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(1, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x.unsqueeze(-1))[0][:, -1]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.second(self.first(x).tanh())
        return {"scaled": y * self.scale, "plain": y}


NETWORKS: dict[str, Any] = {
    "perceptron": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
    "layer norm": lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU()),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.ReLU(), nn.Flatten()
    ),
    "recurrent": Recurrent,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_module_splits_and_its_parameters_have_gradients(name: str) -> None:
    def program(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = module(x)
        return y.pow(2).mean(), y

    x = torch.randn(N, 3, requires_grad=True)
    check(program, (x,), opaque(NETWORKS[name]()), sizes=SIZES, splits=True)


def test_tied_weights_buffers_and_several_results() -> None:
    def program(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        found = module(x)
        return (found["scaled"] * found["plain"]).mean(), found["scaled"]

    check(program, (torch.randn(N, 3),), opaque(Tied()), sizes=SIZES, splits=True)


def test_it_is_one_call_and_a_repeat_is_recognised() -> None:
    from koila_rl.recording.recorder import analyses

    module = opaque(NETWORKS["perceptron"]())
    counts = []
    for _ in range(3):
        y = module(koila_rl.lazy(torch.randn(N, 3)))
        assert isinstance(y, koila_rl.LazyTensor)
        (source,) = [x for x in y._node.call.inputs if hasattr(x, "call")]
        assert not hasattr(source.call, "inputs")
        y.mean().backward()
        counts.append(analyses())
    assert counts[1] == counts[2]


def test_a_function_a_decorator_and_a_method() -> None:
    @opaque
    def product(x: Tensor, w: Tensor, *, by: float = 1.0) -> Tensor:
        """Rows times weights."""
        return (x @ w.T).relu() * by

    assert product.__doc__ == "Rows times weights."
    layer = nn.Linear(3, 2)
    x = torch.randn(N, 3)
    assert_close(product(x, layer.weight), (x @ layer.weight.T).relu())

    def by_function(module: Any, x: Tensor) -> Tensor:
        return product(x, module.weight, by=0.5).pow(2).mean() + product(x, module.weight).mean()

    def by_method(module: Any, x: Tensor) -> Tensor:
        loss: Tensor = opaque(module.forward)(x).pow(2).mean()
        return loss

    check(by_function, (x,), layer, sizes=SIZES, splits=True)
    check(by_method, (x,), layer, sizes=SIZES, splits=True)


def mixing_forward(x: Tensor) -> Tensor:
    return x - x.mean(0)


def mixing_backward(x: Tensor) -> Tensor:
    y: Tensor = Divides.apply(x)
    return y


def by_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy() ** 2)


@pytest.mark.parametrize("function", [mixing_forward, mixing_backward, by_numpy])
def test_what_mixes_or_cannot_be_analysed_runs_whole_and_is_named(function: Any) -> None:
    wrapped = opaque(function)

    def program(module: Any, x: Tensor) -> Tensor:
        y = module(x)
        return (wrapped(y) * y).pow(2).mean()

    found = check(program, (torch.randn(N, 3),), nn.Linear(3, 2), sizes=SIZES)
    assert function.__name__ in found[3].unsplit


def test_a_mean_inside_is_one_sum() -> None:
    @opaque
    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return (x - y).pow(2).mean()

    def program(module: Any, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(module(x), y)

    batch = (torch.randn(N, 3), torch.randn(N, 2))
    check(program, batch, nn.Linear(3, 2), sizes=SIZES, splits=True)


def test_parameters_that_are_not_arguments_are_refused() -> None:
    layer = nn.Linear(3, 2)

    @opaque
    def hidden(x: Tensor) -> Tensor:
        return layer(x)

    with pytest.raises(UnsupportedError, match=r"hidden uses tensors.*\(2, 3\).*wrap the module"):
        hidden(koila_rl.lazy(torch.randn(N, 3)))


def test_batch_norm_inside_is_as_eager() -> None:
    module = opaque(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()))

    def program(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = module(x)
        return y.pow(2).mean(), y

    check(program, (torch.randn(N, 3),), module, sizes=SIZES)
    module.eval()
    check(program, (torch.randn(N, 3),), module, sizes=SIZES, splits=True)


def test_the_mode_of_a_module_is_that_of_the_call() -> None:
    module = opaque(nn.Dropout(0.5))
    x = torch.ones(1000, 2)
    for _ in range(3):
        module.train()
        dropped = module(koila_rl.lazy(x))
        module.eval()
        kept = module(koila_rl.lazy(x))
        with koila_rl.limits(microbatch=300):
            assert 0.4 < (koila_rl.materialize(dropped) == 0).float().mean() < 0.6
            assert_close(koila_rl.materialize(kept), x)
        assert not module.module.training


def test_dropout_inside_is_drawn_once() -> None:
    module = opaque(nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.5)))
    with koila_rl.limits(microbatch=3):
        y = module(koila_rl.lazy(torch.ones(N, 3)))
        (gradient,) = torch.autograd.grad(y.sum(), [module.module[0].bias], retain_graph=True)
        value = koila_rl.materialize(y)
    assert_close(gradient, 2.0 * (value != 0).sum(0))


def test_without_lazy_arguments_it_is_the_module_itself() -> None:
    network = NETWORKS["perceptron"]()
    module = opaque(network)
    x = torch.randn(N, 3)
    assert_close(module(x), network(x))
    assert opaque(module) is module
    assert [p is q for p, q in zip(module.parameters(), network.parameters(), strict=True)]
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.module[0].weight.zero_()
    with koila_rl.limits(microbatch=3):
        assert_close(koila_rl.materialize(module(koila_rl.lazy(x))), network(x))
        assert_close(koila_rl.materialize(twin(koila_rl.lazy(x))), twin(x))


def test_bad_arguments() -> None:
    with pytest.raises(ConfigurationError, match="function or a module, got int"):
        opaque(3)

    @opaque
    def reads(batch: OrderedDict[str, Tensor]) -> Tensor:
        return batch["x"] * 2

    x = koila_rl.lazy(torch.randn(N, 3))
    with pytest.raises(UnsupportedError, match="hidden in an argument of the opaque reads"):
        reads(OrderedDict(x=x))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), allow_unsplit():
        opaque(nn.Linear(4, 2))(x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_a_compiled_module_runs_compiled_and_splits() -> None:
    torch.compiler.reset()
    sizes: list[int] = []

    def backend(graph: Any, examples: Any) -> Any:
        def compiled(*args: Any) -> Any:
            sizes.extend({x.shape[0] for x in args if isinstance(x, Tensor) and x.ndim == 2})
            return graph(*args)

        return compiled

    network = NETWORKS["perceptron"]()
    module = opaque(torch.compile(network, backend=backend))

    def program(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = module(x)
        return y.pow(2).mean(), y

    x = torch.randn(N, 3)
    expected = run(program, (x,), opaque(network))
    network.double()
    with koila_rl.limits(microbatch=3), warnings.catch_warnings():
        warnings.simplefilter("error", UnsplitWarning)
        loss, y = program(module, koila_rl.lazy(x.double()))
        loss.backward()
    assert_close(koila_rl.materialize(y), expected.values[1])
    for name, parameter in network.named_parameters():
        assert_close(parameter.grad, expected.gradients[f"module.{name}"])
    assert 3 in sizes
    assert N not in sizes
    torch.compiler.reset()
