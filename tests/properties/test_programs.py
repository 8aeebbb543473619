"""Random programs: eager against lazy, for several microbatch sizes and batch dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import koila_rl
from koila_rl.errors import StaleValueError
from tests.helpers import Outcome, assert_same, largest_entry, run
from tests.properties.calls import CALLS, Write

N = 5
SIZES = (1, 2, 4)

Step = tuple[str, int, int, int]

steps = st.lists(
    st.tuples(
        st.sampled_from(sorted(CALLS)),
        st.integers(0, 20),
        st.integers(0, 20),
        st.integers(0, 3),
    ),
    min_size=2,
    max_size=9,
)


class Weights(nn.Module):
    """A layer whose output opens the program, so that a gradient flows through all of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.randn(3))
        self.shift = nn.Parameter(torch.randn(3))


def interpret(program: list[Step], dim: int) -> Callable[..., tuple[Tensor, ...]]:
    """A function of a module and a minibatch that carries out ``program``.

    Operands are picked from the values made so far, the newest first. Which calls apply is
    decided by shapes alone, so eager and lazy runs carry out the same ones.
    """

    def carry_out(module: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        shape = (3,) if dim == 0 else (3, 1)
        values = [y * 1.5, x * module.scale.view(shape) + module.shift.view(shape)]
        for name, first, second, k in program:
            a, b = values[-1 - first % len(values)], values[-1 - second % len(values)]
            call = CALLS[name]
            if isinstance(call, Write):
                call.apply(a, b, k)
            elif (value := call(a, b, k)) is not None and value.numel() <= 400:
                values.append(value)
        terms = [(0.3 * value.sin()).mean() * (i + 1) for i, value in enumerate(values)]
        loss = torch.stack(terms).sum() if dim else sum(terms[1:], terms[0])
        return (loss, *values)

    return carry_out


def minibatch(dim: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 3, generator=generator)
    y = torch.randn(N, generator=generator)
    return (x, y.unsqueeze(1)) if dim == 0 else (x.T.contiguous(), y.unsqueeze(0))


def largest(outcome: Outcome) -> float:
    tensors = [*outcome.values, *outcome.gradients.values()]
    return max(map(largest_entry, tensors))


def is_finite(outcome: Outcome) -> bool:
    tensors = [*outcome.values, *outcome.gradients.values()]
    return all(bool(t.isfinite().all()) for t in tensors if t is not None)


def eager_outcome(program: Callable[..., Any], batch: tuple[Tensor, ...]) -> Outcome | None:
    """Eager's outcome; None for a program that eager refuses or that magnifies rounding."""
    nudged_batch = tuple(t.double() * (1 + 1e-14) for t in batch)
    try:
        expected = run(program, batch, Weights())
        nudged = run(program, nudged_batch, Weights())
    except (RuntimeError, IndexError, UserWarning):
        # A warning as well: of writes to what is expanded, which PyTorch is about to refuse.
        return None
    if not is_finite(expected) or largest(expected) > 1e3:
        return None
    try:
        # A nudge of some fifty roundings may move the outcome by as much, not by a thousand.
        assert_same(nudged, expected, "nudged", magnitude=max(1.0, largest(expected)))
    except AssertionError:
        return None
    return expected


def judge(program: list[Step], dim: int) -> bool:
    """Hold ``program`` against eager; False where eager has no outcome to hold it against."""
    carry_out, batch = interpret(program, dim), minibatch(dim)
    expected = eager_outcome(carry_out, batch)
    if expected is None:
        return False
    writes = any(isinstance(CALLS[name], Write) for name, *_ in program)
    for size in SIZES:
        try:
            got = run(carry_out, batch, Weights(), microbatch=size, dim=dim)
        except StaleValueError:
            # A call whose size depends on values gives a real tensor. Writing to it makes what
            # was recorded from it stale, which is refused by name.
            assert writes
            return False
        assert_same(got, expected, f"microbatch {size}", magnitude=max(1.0, largest(expected)))
    return True


QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much]


@pytest.mark.parametrize("dim", [0, 1])
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=QUIET)
@given(program=steps)
def test_a_random_program_is_as_eager(dim: int, program: list[Step]) -> None:
    assume(judge(program, dim))


@pytest.mark.slow
@pytest.mark.parametrize("dim", [0, 1])
@settings(max_examples=1500, deadline=None, suppress_health_check=QUIET)
@given(program=steps)
def test_many_random_programs_are_as_eager(dim: int, program: list[Step]) -> None:
    assume(judge(program, dim))


@pytest.mark.parametrize("name", sorted(CALLS))
def test_each_call_alone_is_as_eager(name: str) -> None:
    for k in (0, 1):
        program: list[Step] = [("affine", 0, 0, 0), (name, 0, 0, k), ("affine", 0, 0, 1)]
        assert judge(program, 0), "eager has no outcome"


def test_the_judge_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(koila_rl, "lazy", lambda value, batch=0: value[:-1])
    with pytest.raises(AssertionError, match="microbatch"):
        judge([("sum", 0, 0, 0)], 0)
