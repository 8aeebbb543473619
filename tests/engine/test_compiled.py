"""``limits(compile=True)``: replays compiled after fifty runs, exact, or left as they are."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import koila_rl
from koila_rl import ConfigurationError
from koila_rl.engine import binding, compiled, recognition
from koila_rl.memory.limits import current_limits
from tests.helpers import allow_unsplit, assert_close

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]

N = 12
RUNS = 3


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile after a few runs, whether it pays or not, without a C++ compiler."""
    monkeypatch.setattr(compiled, "REPEATS", RUNS)
    monkeypatch.setattr(compiled, "_slower", lambda plain, fast: "")
    monkeypatch.setattr(compiled, "_told", set())
    original = torch.compile

    def without_inductor(function: Any, **options: Any) -> Any:
        options.pop("options", None)
        return original(function, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", without_inductor)
    # What other tests ran often is known as compiled.
    binding._PROGRAMS.clear()
    recognition.forget()
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Runs:
    """Counts the runs of compiled code."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.started = 0, 0
        begin = compiled.Compiled.begin

        def watched(replay: Any, c: Any, inputs: Any) -> None:
            self.started += 1
            begin(replay, c, inputs)
            fast = replay.fast
            if fast is not None:

                def counted(*args: Any) -> Any:
                    self.count += 1
                    return fast(*args)

                replay.fast = counted

        monkeypatch.setattr(compiled.Compiled, "begin", watched)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(monkeypatch)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def squares(module: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = module(x)
    return (y - y.mean(0)).pow(2).mean() + 0.3 * y.abs().mean()


def train(
    loss: Callable[[Any, Tensor], Tensor], updates: int, lazy: bool, size: int | None = None,
    module: nn.Module | None = None, n: int = N, each: Callable[[Tensor], Any] = lambda loss: None,
) -> tuple[nn.Module, list[Tensor]]:  # fmt: skip
    """Some updates of SGD; the module and the losses."""
    module = network() if module is None else copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found = []
    for k in range(updates):
        x = torch.randn(n, 3, generator=torch.Generator().manual_seed(k))
        optimizer.zero_grad()
        with koila_rl.limits(microbatch=size, compile=lazy), allow_unsplit():
            value = loss(module, koila_rl.lazy(x) if lazy else x)
            each(value)
            value.backward()
            found.append(koila_rl.materialize(value).detach())
        optimizer.step()
    return module, found


def assert_same_training(got: Any, expected: Any) -> None:
    for a, b in zip(got[1], expected[1], strict=True):
        assert_close(a, b)
    for p, q in zip(got[0].parameters(), expected[0].parameters(), strict=True):
        assert_close(p, q)


@pytest.mark.slow
@pytest.mark.parametrize("size", [None, 4, 5])
def test_training_goes_on_as_it_was(runs: Runs, size: int | None) -> None:
    got = train(squares, 10, True, size)
    assert_same_training(got, train(squares, 10, False))
    assert runs.count
    # Each run holds as many replays of the main size, in the two passes over it.
    per_run = 1 if size is None else N // size
    assert runs.count % per_run == 0
    if size is None:
        assert runs.count == 10 - RUNS - 1


def test_off_by_default(runs: Runs) -> None:
    assert not current_limits().compile
    module, x = network(), torch.randn(N, 3)
    for _ in range(2 * RUNS):
        squares(module, koila_rl.lazy(x)).backward()
    assert runs.started == 0


@pytest.mark.slow
def test_values_that_are_read_first(runs: Runs) -> None:
    got = train(squares, 9, True, each=lambda loss: loss.item())
    assert_same_training(got, train(squares, 9, False))
    assert runs.count


@pytest.mark.slow
def test_a_graph_that_is_kept_and_second_derivatives(runs: Runs) -> None:
    module = network()
    x = torch.randn(N, 3)
    expected = torch.autograd.grad(squares(module, x), list(module.parameters()))
    for _ in range(2 * RUNS):
        module.zero_grad()
        with koila_rl.limits(compile=True):
            loss = squares(module, koila_rl.lazy(x))
            loss.item()
            loss.backward(retain_graph=True)
            loss.backward()
        for p, gradient in zip(module.parameters(), expected, strict=True):
            assert p.grad is not None
            assert_close(p.grad, 2 * gradient)
    assert runs.count

    def penalty(loss: Tensor) -> Tensor:
        grads = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
        total: Tensor = sum((g.pow(2).sum() for g in grads), torch.zeros(()))
        return total

    wanted = torch.autograd.grad(penalty(squares(module, x)), list(module.parameters()))
    with koila_rl.limits(compile=True):
        loss = squares(module, koila_rl.lazy(x))
        loss.item()
        found = torch.autograd.grad(penalty(loss), list(module.parameters()))
    for a, b in zip(found, wanted, strict=True):
        assert_close(a, b)


@pytest.mark.slow
def test_a_constant_that_changes(runs: Runs) -> None:
    state = {"k": 0}

    def annealed(module: nn.Module, x: Tensor) -> Tensor:
        state["k"] += 1
        return (module(x) * (1.0 - 0.05 * (state["k"] % 20))).clamp(-0.7, 0.9).pow(2).mean()

    got = train(annealed, 20, True)
    assert_same_training(got, train(annealed, 20, False))


def test_other_constants_run_as_they_were(runs: Runs) -> None:
    places = itertools.count()

    def alternating(module: nn.Module, x: Tensor) -> Tensor:
        bound = (0.5, 0.25)[next(places) % 2]
        return (module(x) * bound).clamp(-bound, bound).pow(2).mean()

    got = train(alternating, 12, True)
    assert_same_training(got, train(alternating, 12, False))
    # Compiled with the constants of the run after the first ones, and run with no others.
    assert runs.count == (12 - RUNS - 1) // 2


def dropout(module: nn.Module, x: Tensor) -> Tensor:
    return torch.dropout(module(x), 0.5, True).pow(2).mean()


def cast(module: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x)
    return y.float().pow(2).mean()


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.layer(x))
        return y


REFUSED: dict[str, tuple[Any, nn.Module, str]] = {
    "random": (dropout, network(), "dropout draws random numbers"),
    "autocast": (cast, network(), "runs under autocast"),
    "statistics": (lambda m, x: m(x).pow(3).mean(), Normalised(), "writes to a buffer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_told_once(runs: Runs, name: str) -> None:
    loss, module, message = REFUSED[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(loss, 2 * RUNS + 2, True, module=module)
    told = [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
    assert runs.started == 0
    assert len(told) == 1
    assert message in told[0]


def broken(*args: Any, **kwargs: Any) -> Any:
    raise OSError("no compiler here")


def wrong(function: Any, **options: Any) -> Any:
    return lambda c, *inputs: tuple(1.001 * x for x in function(c, *inputs))


@pytest.mark.parametrize(("instead", "message"), [(broken, "no compiler"), (wrong, "differ by")])
def test_what_goes_wrong_leaves_it_as_it_was(
    monkeypatch: pytest.MonkeyPatch, runs: Runs, instead: Any, message: str
) -> None:
    monkeypatch.setattr(torch, "compile", instead)
    with pytest.warns(RuntimeWarning, match=message) as caught:
        got = train(squares, 2 * RUNS + 2, True)
    assert_same_training(got, train(squares, 2 * RUNS + 2, False))
    assert runs.started == 1
    assert len([w for w in caught if issubclass(w.category, RuntimeWarning)]) == 1


def test_an_error_while_it_runs_leaves_it_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"all": 0}

    def failing(function: Any, **options: Any) -> Any:
        def run(c: Any, *inputs: Any) -> Any:
            calls["all"] += 1
            if calls["all"] == 3:
                raise ValueError("broke later")
            return function(c, *inputs)

        return run

    monkeypatch.setattr(torch, "compile", failing)
    with pytest.warns(RuntimeWarning, match="ValueError: broke later"):
        got = train(squares, 3 * RUNS, True)
    assert_same_training(got, train(squares, 3 * RUNS, False))
    assert calls["all"] == 3


def test_code_that_does_not_pay_is_not_used(monkeypatch: pytest.MonkeyPatch, runs: Runs) -> None:
    monkeypatch.setattr(compiled, "_slower", lambda plain, fast: "it took 2 ms compiled")
    with pytest.warns(RuntimeWarning, match="stays uncompiled: it took 2 ms compiled"):
        train(squares, 2 * RUNS + 2, True)
    assert (runs.started, runs.count) == (1, 0)


@pytest.mark.parametrize(("plain", "fast", "message"), [(1, 2, "2000.00 ms compiled"), (2, 1, "")])
def test_what_pays(monkeypatch: pytest.MonkeyPatch, plain: int, fast: int, message: str) -> None:
    monkeypatch.undo()
    clock = itertools.accumulate(itertools.cycle([0, plain, 0, fast]))
    monkeypatch.setattr(compiled.time, "perf_counter", lambda: next(clock))
    found = compiled._slower(lambda: None, lambda: None)
    assert message in found
    assert bool(found) == bool(message)


@pytest.mark.parametrize("value", [1, "yes"])
def test_bad_setting(value: Any) -> None:
    with (
        pytest.raises(ConfigurationError, match="compile must be True or False"),
        koila_rl.limits(compile=value),
    ):
        pass
