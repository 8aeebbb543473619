"""Where one sample does not fit, its stages run in parts that are computed again: exactly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import koila_rl
from koila_rl.engine.binding import bind
from koila_rl.engine.segments import cut_points, in_parts, most_parts
from tests.test_recovery import Clipped, Cuts, FailAt, WithNorm

N, WIDTH, ROWS = 3, 32, 256


class Deep(nn.Module):
    """Many layers whose activations are far larger than their weights."""

    def __init__(self, layers: int = 24) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1))
                for _ in range(layers)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).pow(2).mean()


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def samples() -> Tensor:
    torch.manual_seed(3)
    return torch.randn(N, ROWS, WIDTH, dtype=torch.float64)


def test_a_network_of_which_one_sample_does_not_fit_trains_in_a_quarter() -> None:
    torch.manual_seed(0)
    module = Deep(64).double()
    twin = copy.deepcopy(module)
    with koila_rl.limits(microbatch=1):
        torch.manual_seed(1)
        loss = module(koila_rl.lazy(samples()))
        plain = koila_rl.plan(loss).peak_bytes
        loss.backward()
    quarter = plain // 4
    with koila_rl.SimulatedDevice(quarter) as device:
        torch.manual_seed(1)
        loss = twin(koila_rl.lazy(samples()))
        planned = koila_rl.plan(loss)
        loss.backward()
    plan = koila_rl.last_plan()
    assert plan is not None
    assert planned.parts == plan.parts > 1
    assert plan.retries == 0
    assert plan.peak_bytes <= quarter
    assert device.peak_bytes <= quarter
    assert "computed again" in str(plan)
    for mine, theirs in zip(gradients(twin), gradients(module), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_saved_tensors_go_to_the_host_where_no_number_of_parts_fits() -> None:
    torch.manual_seed(0)
    module = Deep(12).double()
    twin = copy.deepcopy(module)
    with koila_rl.limits(microbatch=1):
        torch.manual_seed(1)
        module(koila_rl.lazy(samples())).backward()
    with koila_rl.SimulatedDevice("1MiB") as device:
        torch.manual_seed(1)
        loss = twin(koila_rl.lazy(samples()))
        assert koila_rl.plan(loss).parts == 0
        loss.backward()
    plan = koila_rl.last_plan()
    assert plan is not None
    assert (plan.parts, plan.retries) == (0, 0)
    assert device.peak_bytes <= 1 << 20
    assert "host memory" in str(plan)
    for mine, theirs in zip(gradients(twin), gradients(module), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_what_does_not_fit_at_all_is_told_before_anything_runs() -> None:
    module = Deep(12).double()
    with koila_rl.SimulatedDevice("256KiB"):
        loss = module(koila_rl.lazy(samples()))
        with pytest.raises(koila_rl.InsufficientMemoryError, match="one sample needs"):
            loss.backward()
    assert not gradients(module)


@pytest.mark.filterwarnings("ignore::koila_rl.UnsplitWarning")
@pytest.mark.parametrize("build", [Deep, Clipped, WithNorm, Cuts])
def test_one_sample_that_fails_runs_in_parts(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = build().double()
    twin = copy.deepcopy(module)
    x = samples() if build is Deep else torch.randn(N, 3, dtype=torch.float64)
    with koila_rl.limits(microbatch=1):
        torch.manual_seed(1)
        module(koila_rl.lazy(x)).backward()
        torch.manual_seed(1)
        loss = twin(koila_rl.lazy(x))
        with FailAt(6):
            loss.backward()
    plan = koila_rl.last_plan()
    assert plan is not None
    assert (plan.parts, plan.retries) == (2, 1)
    for mine, theirs in zip(gradients(twin), gradients(module), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    for mine, theirs in zip(twin.buffers(), module.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_parts_are_even_and_cut_where_little_crosses() -> None:
    module = Deep(8).double()
    loss: Any = module(koila_rl.lazy(samples()))
    program = bind([loss._node], loss._node).program
    (stage,) = (s for level in program.stages for s in level if s.differentiable)
    assert cut_points(stage.steps, 1, stage.outputs) == []
    for parts in (2, 4, 8):
        cuts = cut_points(stage.steps, parts, stage.outputs)
        lengths = [b - a for a, b in zip([0, *cuts], [*cuts, len(stage.steps)], strict=True)]
        assert len(lengths) == parts
        assert max(lengths) <= 2 * min(lengths) + 3
    assert most_parts(program) >= 8
    assert in_parts(stage, 4) is in_parts(stage, 4)
